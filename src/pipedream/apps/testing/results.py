"""What a training gives, and whether two give the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Trained:
    """Results of a run; they can travel between processes. The last ones only a pipeline has.

    Attributes:
        losses, weights, rates: by minibatch; of a pipeline whose loop was left, without what was in flight.
        state: the model's, at the end; ema: the same of the averages over time.
        optimizer: parameter -> its state, such as `exp_avg`.
        evaluated: minibatches at a drain -> mean loss over the test data.
        drains: minibatches at each drain, the last one at the end; at: the same -> the model's state.
        skipped: for each stage the updates that were skipped.
        position: epochs, and minibatches of the next one.
        phases: phase -> range of its minibatches.
        left_at: minibatches at which the loop was left.
        staleness: stage -> what its gradients had; by_phase: the same for each phase.
        peak_versions: rank -> most versions of weights at once.
        sent_bytes: rank -> bytes of its messages.
        watched: what `watch` returned, at each evaluation and at the end.
    """

    losses: dict[int, float] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    ema: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, dict[str, Any]] = field(default_factory=dict)
    evaluated: dict[int, float] = field(default_factory=dict)
    drains: list[int] = field(default_factory=list)
    at: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    skipped: tuple[int, ...] = ()
    position: tuple[int, int] = (0, 0)
    phases: dict[int, tuple[int, int]] = field(default_factory=dict)
    left_at: int | None = None
    staleness: dict[int, set[int]] = field(default_factory=dict)
    by_phase: dict[int, dict[int, set[int]]] = field(default_factory=dict)
    peak_versions: dict[int, int] = field(default_factory=dict)
    sent_bytes: dict[int, int] = field(default_factory=dict)
    watched: list[Any] = field(default_factory=list)


def assert_equal(actual: Trained, expected: Trained, bound: float = 0.0) -> None:
    """Checks that two runs gave the same, in what both have: losses, weights, evaluations, statistics, averages.

    Args:
        bound: greatest distance, as a share of the norm that is expected; 0 asks for the same bits.

    Raises:
        AssertionError: names the first difference.
    """
    for number, loss in actual.losses.items():
        _assert_near(f"the loss of minibatch {number}", loss, expected.losses[number], bound)
        weights = actual.weights[number], expected.weights[number]
        assert weights[0] == weights[1], f"the loss weight of minibatch {number} is {weights[0]}, not {weights[1]}"
    missing = expected.losses.keys() - actual.losses.keys()
    assert not missing or actual.left_at is not None, f"minibatches {sorted(missing)} have no loss"
    assert actual.drains == expected.drains, f"drains at {actual.drains}, not at {expected.drains}"
    for number in actual.evaluated.keys() & expected.evaluated.keys():
        _assert_near(f"the evaluation at {number}", actual.evaluated[number], expected.evaluated[number], bound)
    assert_near(actual.state, expected.state, bound)
    if expected.ema and actual.ema:
        assert_near({name: actual.ema[name] for name in expected.ema}, expected.ema, bound, "the average of ")
    for name in actual.optimizer.keys() & expected.optimizer.keys():
        ours, theirs = (
            {key: value for key, value in run.optimizer[name].items() if isinstance(value, Tensor)}
            for run in (actual, expected)
        )
        common = ours.keys() & theirs.keys()
        assert_near({k: ours[k] for k in common}, {k: theirs[k] for k in common}, bound, f"the optimizer's {name}.")


def assert_near(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], bound: float = 0.0, of: str = "") -> None:
    """Checks that each tensor lies within `bound` times the norm of the expected one; whole numbers are equal."""
    differing = actual.keys() ^ expected.keys()
    assert not differing, f"only one of both has {', '.join(sorted(differing))}"
    for name, tensor in expected.items():
        other = actual[name]
        assert other.dtype == tensor.dtype, f"{of}{name} is of {other.dtype}, not {tensor.dtype}"
        if not bound or not tensor.is_floating_point():
            assert torch.equal(other, tensor), f"{of}{name} is not the same: {other}, not {tensor}"
            continue
        distance, size = (other.double() - tensor.double()).norm(), tensor.double().norm()
        assert distance <= bound * size, f"{of}{name} is {distance / size:.3g} of its norm away"


def _assert_near(what: str, actual: float, expected: float, bound: float) -> None:
    is_near = abs(actual - expected) <= bound * max(abs(expected), 1.0) or str(actual) == str(expected)  # nan
    assert is_near, f"{what} is {actual}, not {expected}"
