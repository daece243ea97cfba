"""Values of targets that a loss written by hand leaves out are found before they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pipedream.runtime.results.left_out import find_left_out
from pipedream.runtime.results.losses import Loss


def nll(output: Tensor, labels: Tensor) -> Tensor:
    return -output.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def padded(output: Tensor, labels: Tensor) -> Tensor:
    pad = labels.eq(-100)
    return nll(output, labels).masked_fill(pad, 0.0).sum() / (~pad).sum()


def hidden(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (nll(output, batch["y"]) * batch["mask"]).sum() / batch["mask"].sum()


def exact(output: Tensor, labels: Tensor) -> Tensor:
    return nll(output, labels).mean()


def added(output: Tensor, labels: Tensor) -> Tensor:
    return nll(output, labels).sum()


LABELS = torch.arange(1, 13).view(2, 6)
MASKED = {"y": LABELS, "mask": torch.ones(2, 6)}
CASES: list[tuple[Callable[..., Tensor], Any, set[tuple[int, int]]]] = [
    (padded, LABELS, {(0, -100)}),
    (hidden, MASKED, {(1, value) for value in (0, -100, 255)}),
    (exact, LABELS, set()),
    (added, LABELS, set()),
]


@pytest.mark.parametrize(("loss", "targets", "expected"), CASES)
def test_what_a_loss_leaves_out(loss: Callable[..., Tensor], targets: Any, expected: set[tuple[int, int]]) -> None:
    output = torch.randn(2, 6, 14)
    left_out = find_left_out(loss, output, targets, 2)
    assert {(each.leaf, each.value) for each in left_out} == expected
    assert {each.share for each in left_out} <= {0.0}


@pytest.mark.parametrize("samples", [1, 2])
def test_a_part_with_another_share_of_it_is_refused(samples: int) -> None:
    loss, output, labels = Loss(padded), torch.randn(samples, 6, 14), LABELS[:samples]
    for minibatch in range(2):
        value, weight, is_sum = loss(output, labels, samples, 0.5, minibatch)
        assert (weight, is_sum) == (samples, False)
        torch.testing.assert_close(value, exact(output, labels))
    shorter = labels.clone()
    shorter[0, 4:] = -100
    with pytest.raises(ValueError, match=r"leaves out targets that are -100, and there are .* give weight="):
        loss(output, shorter, samples, 0.5, 2)
    assert loss(output, shorter, samples, 1.0)[1] == samples, "an evaluation, or a minibatch that is not split"
