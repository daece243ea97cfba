"""The arithmetic of depth, weights and updates, against the papers' own equations."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from math import ceil, inf, lcm, nan
from typing import Any

import pytest
from drawn import straight
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.core.plan import depth
from pipedream.schedules import DoubleBuffer, Flush, Stash, UpdateRule, VerticalSync, WeightPrediction, build, kit

replica_counts = st.lists(st.integers(1, 6), min_size=1, max_size=6).map(tuple)


def delays(draw: Callable[..., int], replicas: tuple[int, ...]) -> tuple[int, ...]:
    """Draws an update delay for each stage that may have one."""
    return tuple(draw(st.integers(0, 1)) if r > 1 and len(replicas) > 1 else 0 for r in replicas)


@given(replica_counts)
def test_noam_is_the_papers_and_full_is_as_deep(replicas: tuple[int, ...]) -> None:
    """NOAM = ceil(workers / replicas of the input stage); the output stage holds one."""
    counts, deep = depth.noam(replicas), depth.full(replicas, (0.0,) * (len(replicas) - 1))
    assert counts[0] == ceil(Fraction(sum(replicas), replicas[0]))
    assert counts[-1] == 1
    assert all(d >= n for d, n in zip(deep, counts, strict=True))
    assert deep == counts or max(replicas) > 1, "without messages and replicas they are one"
    for accepted in (counts, deep):
        depth.check_in_flight(accepted, replicas)


@given(replica_counts, st.data())
def test_legal_is_the_least_that_is_accepted(replicas: tuple[int, ...], data: st.DataObject) -> None:
    counts = tuple(data.draw(st.integers(1, 6)) for _ in replicas)
    update_delay = delays(data.draw, replicas)
    legal = depth.raise_to_legal(counts, replicas, update_delay)
    assert all(f >= c for f, c in zip(legal, counts, strict=True))
    for s in range(len(replicas)):
        if legal[s] > counts[s]:
            with pytest.raises(pd.PipelineError, match="would do"):
                depth.check_in_flight((*legal[:s], legal[s] - 1, *legal[s + 1 :]), replicas, update_delay)
    full = depth.full(replicas, (1.5,) * (len(replicas) - 1), update_delay)
    for accepted in (legal, full, depth.noam(replicas, update_delay)):
        depth.check_in_flight(accepted, replicas, update_delay)


@given(replica_counts, st.data())
def test_fitted_counts_lie_between_and_add_only_upstream(replicas: tuple[int, ...], data: st.DataObject) -> None:
    update_delay, slots = delays(data.draw, replicas), tuple(data.draw(st.floats(0, 4)) for _ in replicas[1:])
    low, high = depth.noam(replicas, update_delay), depth.full(replicas, slots, update_delay)
    most = tuple(data.draw(st.integers(a, b + 2)) for a, b in zip(low, high, strict=True))
    counts = depth.fit_counts(low, high, most, replicas)
    assert all(a <= b <= min(c, d) for a, b, c, d in zip(low, counts, high, most, strict=True))
    depth.check_in_flight(counts, replicas, update_delay)
    assert depth.fit_counts(low, high, high, replicas) == high, "where all fits it is full"


@given(st.integers(1, 64), st.integers(0, 1000), st.integers(0, 9))
def test_a_flush_reads_the_newest_and_a_double_buffer_the_one_before(m: int, k: int, stage: int) -> None:
    """2BW: w(t+1) = w(t) - lr grad f(w(t-1)); microbatch k reads max(floor(k/m) - 1, 0)."""
    for rule, late in ((Flush(m), 0), (DoubleBuffer(m), 1)):
        assert rule.forward_version(stage, k) == rule.backward_version(stage, k) == max(k // m - late, 0)
        assert (rule.versions(stage), rule.staleness(stage)) == (1 + late, late)


@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_equations_of_the_papers(p: int) -> None:
    """w(t+1) = w(t) - lr grad f(w_0(t-p+1), ..., w_{p-1}(t)): update t + 1 is minibatch t, in steady state.

    With vertical sync: w(t+1) = w(t) - lr grad f(w_0(t-p+1), ..., w_{p-1}(t-p+1)).
    """
    stash, vertical = (build(name, pd.Plan.uniform(p)).weights for name in ("pipedream", "vertical_sync"))
    for t in range(p - 1, 3 * p + 5):
        assert [stash.forward_version(s, t) for s in range(p)] == [t - p + 1 + s for s in range(p)]
        assert {vertical.forward_version(s, t) for s in range(p)} == {t - p + 1}
    assert [stash.staleness(s) for s in range(p)] == [p - 1 - s for s in range(p)]
    assert [stash.versions(s) for s in range(p)] == [p - s for s in range(p)]
    assert {(vertical.staleness(s), vertical.versions(s)) for s in range(p)} == {(p - 1, p)}


@given(replica_counts, st.integers(0, 2000))
def test_vertical_sync_of_replicas_is_one_count_of_minibatches(replicas: tuple[int, ...], k: int) -> None:
    """n = L floor(r_0 v_0 / L), v_0 = max(0, k // r_0 - W_0); stage s reads version n / r_s."""
    warmup = tuple(count - 1 for count in depth.noam(replicas))
    rule = VerticalSync(warmup, replicas, (0,) * len(replicas))
    cycle = lcm(*replicas)
    tag = cycle * (replicas[0] * max(0, k // replicas[0] - warmup[0]) // cycle)
    assert [rule.forward_version(s, k) * r for s, r in enumerate(replicas)] == [tag] * len(replicas)


@given(replica_counts, st.data())
def test_readable_versions_are_those_of_all_forwards_to_come(replicas: tuple[int, ...], data: st.DataObject) -> None:
    warmup, none = tuple(count - 1 for count in depth.noam(replicas)), (0,) * len(replicas)
    rules = (Stash(warmup, replicas, none), VerticalSync(warmup, replicas, none), DoubleBuffer(5), Flush(5))
    stage, rule = data.draw(st.integers(0, len(replicas) - 1)), data.draw(st.sampled_from(rules))
    step, first, newest = replicas[stage], data.draw(st.integers(0, 40)), data.draw(st.integers(0, 12))
    for total in (None, data.draw(st.integers(0, 60))):
        coming = range(first, 2000 if total is None else total, step)
        expected = {rule.forward_version(stage, k) for k in coming} & set(range(newest + 1))
        assert rule.readable(stage, first, newest, step=step, total=total) == expected


@given(st.integers(1, 20), st.integers(0, 200))
def test_members_of_updates_part_all_microbatches(count: int, total: int) -> None:
    rule = UpdateRule((count,))
    members = [list(rule.members(0, n, total)) for n in range(1, rule.updates(0, total) + 1)]
    assert [k for update in members for k in update] == list(range(total))
    assert all(members)
    assert all(rule.update_of(0, k) == n for n, update in enumerate(members, 1) for k in update)
    assert all(len(update) == count for update in members[:-1])


@given(straight())
def test_the_mean_delay_is_that_of_the_settled_microbatches(schedule: pd.Schedule) -> None:
    """Of any method: what T1 divides a rate by, and what the proof prints."""
    rule, updates, plan, cycle = schedule.weights, schedule.updates, schedule.plan, schedule.cycle
    warm = max((n + late) * r for n, late, r in zip(plan.in_flight, plan.update_delay, plan.replicas, strict=True))
    first = -(-4 * warm // cycle) * cycle
    for s in range(len(plan.stages)):
        late = [updates.update_of(s, k) - 1 - rule.forward_version(s, k) for k in range(first, first + cycle)]
        assert rule.mean_staleness(s) == pytest.approx(sum(late) / cycle)
        assert rule.staleness(s) == max(late)


LATEST = kit.Latest((1, 0), (1, 1), (0, 0), (1, 1))
AHEAD, BACK = WeightPrediction("velocity", (1.0, 0.0)), WeightPrediction("average", (-1.0, 0.0))


@pytest.mark.parametrize(
    ("changes", "buffers"),
    [
        ({}, [0, 0]),
        ({"forward_prediction": AHEAD}, [1, 0]),
        ({"forward_prediction": replace(AHEAD, by="difference")}, [2, 0]),
        ({"forward_prediction": AHEAD, "backward_prediction": BACK}, [2, 0]),
        ({"forward_prediction": AHEAD, "backward_rule": "stash"}, [0, 0]),
    ],
)
def test_buffers_of_predictions(changes: dict[str, Any], buffers: list[int]) -> None:
    """A written view puts the weights aside; a difference and an average are kept; velocity is the optimizer's."""
    assert [replace(LATEST, **changes).buffers(s) for s in (0, 1)] == buffers


TWO, THREE, STALE = pd.Plan.uniform(2), pd.Plan.uniform(3), "has flushes=True, but .* makes gradients stale"
ONE_EACH = "each argument needs one number per stage"
TWO_BW, BETWEEN = build("pipedream_2bw", TWO, 2), build("timeprest_interpolated", TWO, 2).weights


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: depth.check_in_flight((1,), (1, 1)), "are for 1 stages, the plan has 2"),
        (lambda: depth.check_in_flight((1, 0), (1, 1)), r"must be between 1 and 10000, found \(1, 0\)"),
        (lambda: depth.check_in_flight((1, 2), (1, 1)), "would wait for 1 warm-up minibatches, .* sends only 0"),
        (lambda: depth.check_in_flight((3, 3), (1, 2)), "stage 1 would wait for 4 .* stage 0 sends only 2"),
        (lambda: replace(LATEST, backward_rule="mixed"), "a backward rule is stash, recompute, graph"),
        (lambda: replace(LATEST, backward_rule="stash", backward_prediction=BACK), "each backward reads what its own"),
        (lambda: replace(LATEST, backward_rule="stash", per_update=(2, 2), shares_prediction=2), "the rule 'stash'"),
        (lambda: replace(LATEST, warmup=(1,)), ONE_EACH),
        (lambda: replace(LATEST, forward_prediction=WeightPrediction("velocity", (1.0,))), ONE_EACH),
        (lambda: replace(LATEST, per_update=(1, 0)), "an update holds a microbatch of each replica"),
        (lambda: replace(LATEST, shares_prediction=2), "shared by the .* microbatches of an update, not 2"),
        (
            lambda: replace(LATEST, forward_prediction=replace(BACK, horizons=(1.0, 1.0)), backward_prediction=BACK),
            "only one of the two predictions",
        ),
        (lambda: WeightPrediction("momentum", (1.0,)), "velocity, difference or average"),
        (lambda: WeightPrediction("velocity", (inf,)), "a finite horizon for each stage"),
        (lambda: WeightPrediction("average", (1.0,), 1.0), "between 0 and 1"),
        (lambda: replace(build("pipedream", THREE), flushes=True), STALE),
        (  # the rate would be twice the user's
            lambda: replace(TWO_BW, updates=UpdateRule((2, 2), mean_of_rounds=True)),
            r"averages rounds.* hold \(2, 2\) microbatches for \(1, 1\) replicas",
        ),
        (lambda: replace(BETWEEN, replicas=(3, 1)), "an update holds a microbatch of each replica, found 2"),
        (lambda: replace(BETWEEN, warmup=(1, 2)), r"no stage may have more warm-up .*, found \[1, 2\]"),
        (lambda: replace(BETWEEN, backward_rule="stash"), "a backward rule is recompute, graph, found 'stash'"),
        *((lambda x=x: replace(BETWEEN, share=x), "old weights must be between 0 and 1") for x in (-0.1, 1.5, nan)),
    ],
)
def test_what_does_not_go_together_is_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises((ValueError, pd.PipelineError), match=words):
        call()
