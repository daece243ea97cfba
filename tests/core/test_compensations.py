"""Compensations as nouns: texts, JSON, and what goes together."""

import json
from contextlib import nullcontext
from dataclasses import fields
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

import pipedream as pd
from pipedream.core.schedule.delay_compensation import Compensation, compensations
from pipedream.extensions.compensations import basis_rotation, gap_aware, t1
from pipedream.extensions.compensations.error_feedback import ErrorFeedback
from pipedream.extensions.compensations.velocity import (
    Generalised,
    Nesterov,
    OfVelocity,
    SpikeCompensation,
    VelocityPrediction,
)

numbers = st.floats(0, 1e6)
words = ("uniform", "by_delay"), ("two_sided", "one_sided"), ("second_moment", "first_moment")
anything = st.one_of(
    st.builds(Generalised, numbers),
    st.just(Nesterov()),
    st.builds(SpikeCompensation, st.none() | st.integers(0, 99)),
    st.builds(VelocityPrediction, st.none() | numbers),
    st.builds(ErrorFeedback, st.none() | numbers),
    st.builds(t1.LearningRateRescheduling, st.integers(1, 10**9)),
    st.builds(gap_aware.GapAware, st.floats(0, 1, exclude_max=True)),
    st.builds(basis_rotation.BasisRotation, st.integers(1, 99), *map(st.sampled_from, words)),
)


@given(anything)
def test_text_and_json_give_it_back(compensation: Compensation) -> None:
    assert Compensation.of_text(str(compensation)) == compensation
    assert Compensation.decoded(json.loads(json.dumps(compensation.encoded())), "here") == compensation
    assert compensations([compensation, str(compensation)]) == (compensation, compensation)
    assert compensations(compensation) == compensations(str(compensation)) == (compensation,)


def test_texts() -> None:
    one_sided = basis_rotation.BasisRotation(5, geometry="one_sided", estimate="first_moment")
    written = [*map(str, (SpikeCompensation(), SpikeCompensation(3), Nesterov(), ErrorFeedback(0.5), one_sided))]
    assert written == ["spike", "spike:3", "nesterov", "error_feedback:0.5", "basis_rotation:5:one_sided:first_moment"]
    assert Compensation.of_text("Error-Feedback:2") == ErrorFeedback(2.0)
    assert Compensation.of_text("basis_rotation:one_sided:5") == basis_rotation.BasisRotation(5, geometry="one_sided")
    assert compensations(()) == ()


NONSENSE = {SpikeCompensation: -1, VelocityPrediction: -0.1, ErrorFeedback: float("inf"), Generalised: float("nan")}
NONSENSE |= {t1.LearningRateRescheduling: 0, gap_aware.GapAware: 1.0, basis_rotation.BasisRotation: 0}
DAMAGED: list[dict[str, Any]] = [
    *({}, {"compensation": "spyke"}, {"compensation": "spike"}, {"compensation": "nesterov", "delay": 1}),
    basis_rotation.BasisRotation().encoded() | {"estimate": "third_moment"},
]


@pytest.mark.parametrize(("kind", "number"), NONSENSE.items())
def test_numbers_without_a_sense_are_refused(kind: Any, number: Any) -> None:
    with pytest.raises(ValueError, match="found"):
        kind(number)
    first, *others = fields(kind)
    with pytest.raises(pd.errors.ArtifactError, match="here"):
        Compensation.decoded(
            {"compensation": kind.name, first.name: number} | {f.name: f.default for f in others}, "here"
        )


@pytest.mark.parametrize("value", DAMAGED)
def test_damaged_json_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(pd.errors.ArtifactError, match="here"):
        Compensation.decoded(value, "here")
    with pytest.raises(ValueError, match="geometry is one of two_sided, one_sided, found 'both'"):
        basis_rotation.BasisRotation(geometry="both")  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 31), min_size=1, max_size=32), st.integers(1, 50))
@example([0, 0, 0, 0, 0, 0, 0, 13, 31, 31, 31, 31, 31, 31, 31], 15)
def test_bases_by_delay_are_as_many_as_uniform_ones(delays: list[int], every: int) -> None:
    rotation = basis_rotation.BasisRotation(every, "by_delay")
    rules = [rotation.at_stage(stage, delays) for stage in range(len(delays))]
    assert all(
        basis_rotation.BasisRotation(every).at_stage(stage, delays).every == every for stage in range(len(delays))
    )
    assert all(
        a.every <= b.every
        for a, x in zip(rules, delays, strict=True)
        for b, y in zip(rules, delays, strict=True)
        if x >= y
    )
    # Rounding to whole updates changes an interval by at most a half.
    total = every * sum(delay + 1 for delay in delays)
    whole = [Fraction(total, len(delays) * (late + 1)) for late in delays]
    assert sum(1 / interval for interval in whole) == Fraction(len(delays), every)
    assert all(rule.every == max(1, round(interval)) for rule, interval in zip(rules, whole, strict=True))


@given(st.lists(st.integers(1, 20_000), max_size=3))
def test_sides_that_are_rotated(shape: list[int]) -> None:
    two_sided, one_sided = (
        basis_rotation.BasisRotation(geometry=kind).kept_shapes(shape) for kind in ("two_sided", "one_sided")
    )  # type: ignore[arg-type]
    if len(shape) < 2:
        assert two_sided == one_sided == {}
        return
    rows, columns = shape[0], int(np.prod(shape[1:]))
    assert two_sided == {side: (2, n, n) for side, n in (("left", rows), ("right", columns)) if n <= 10_000}
    shorter = "left" if rows < columns else "right"
    assert one_sided == {side: shapes for side, shapes in two_sided.items() if side == shorter}
    first_moment = basis_rotation.BasisRotation(estimate="first_moment").kept_shapes(shape)
    assert first_moment == {side: (1, n, n) for side, (_, n, _) in two_sided.items()}


@given(st.builds(Generalised, st.floats(0, 20)) | st.builds(SpikeCompensation) | st.just(Nesterov()), st.data())
def test_a_gradient_moves_the_weights_as_far_in_all(kind: OfVelocity, data: st.DataObject) -> None:
    momentum, late = data.draw(st.floats(0.1, 0.99)), data.draw(st.integers(0, 20))
    a, b = kind.coefficients(momentum, late)
    assert a / (1 - momentum) + b == pytest.approx(1 / (1 - momentum), rel=1e-9)
    assert kind.horizon_at(momentum, late) == pytest.approx(momentum * b)


def test_a_method_says_whether_it_compensates() -> None:
    for name, method in pd.schedules.METHODS.items():
        schedule = pd.schedules.build(name, pd.schedules.uniform(name, 2))
        assert method.compensates == bool(schedule.updates.compensation), name


STANDS_ON = {
    "nesterov_async": ("pipedream", Nesterov()),
    "ftpipe_msnag": ("pipedream", SpikeCompensation()),
    "ftpipe_ga": ("pipedream", gap_aware.GapAware()),
    "pipedream_lr": ("pipedream", t1.LearningRateRescheduling(7000)),
    "one_step_ef": ("pipedream_2bw", ErrorFeedback(1.0)),
    "basis_rotation": ("pipedream", basis_rotation.BasisRotation()),
    "pb_lwp_sc": ("pb_lwp", SpikeCompensation()),
}


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", pd.schedules.COMPENSATED)
def test_named_methods_stand_on_others(name: str, stages: int) -> None:
    base, compensation = STANDS_ON[name]
    schedule, plain = (pd.schedules.build(which, pd.Plan.uniform(stages)) for which in (name, base))
    assert schedule.updates.compensation == (compensation,)
    ours, other = (pd.simulate(s.plan, schedule=s, minibatches=6 * stages) for s in (schedule, plain))
    assert ours.spans == other.spans
    late, in_flight = schedule.claims.staleness, schedule.claims.in_flight
    for s in range(stages):
        assert pd.metrics.staleness(ours, s) == schedule.weights.staleness(s) == late(stages, 6 * stages, s)
        assert pd.metrics.in_flight(ours, s) == in_flight(stages, 6 * stages, s)


@pytest.mark.parametrize(
    ("name", "replicas", "words"),
    [
        ("paci[backward_rule=graph]", (1, 1), "under the backward rule 'graph' there are none"),
        # They ended in a KeyError at the first late update, and so did the kept prediction, gone when the update comes.
        ("pipelined_backprop[backward_rule=recompute]", (1, 1), "rule 'recompute' takes it at the newest"),
        ("timeprest[backward_rule=recompute]", (1, 1), "the backward rule 'recompute' takes it at the newest"),
        ("spectrain_v2", (1, 1, 1), "forwards read predictions, which are gone"),
        ("paci[backward_rule=stash]", (1, 1), "microbatches of one update read different versions"),
        # The tag of vertical sync changes within a round of a stage with more replicas than the input stage.
        ("pipedream_vertical_sync", (2, 3), "different versions"),
        # All microbatches of a double-buffered update, and of a round of replicas, read one version.
        ("pipedream_2bw", (1, 1, 1), ""),
        ("pipedream", (3, 2), ""),
    ],
)
def test_gap_aware_needs_one_version_that_was_read(name: str, replicas: tuple[int, ...], words: str) -> None:
    plan = pd.Plan.uniform(len(replicas), replicas=replicas)
    schedule = pd.schedules.build(name, plan, 2 if name.startswith("paci") else None)
    with pytest.raises(pd.errors.ScheduleError, match=words) if words else nullcontext():
        schedule.with_compensation("gap_aware")
    if name.startswith("paci"):
        schedule.with_compensation("spike")  # needs none
