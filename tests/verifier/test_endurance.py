"""Thousands of random programs: none stands still, leaves an op out or does it twice, or reads a version amiss.

What is checked is read off the simulated spans by rules of this file's own, not by those that the proof uses. With one
to three replicas at each of three stages every method is proved: no draw can miss one.
"""

from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
from drawn import STRAIGHT, laid_out, runs, straight
from hypothesis import given, settings, strategies as st
from marks import long, slow
from programs import program_of

import pipedream as pd
from pipedream.simulator import Costs, Stragglers, simulate

_TINY = 1e-9


def check(schedule: pd.Schedule, timeline: pd.Timeline, total: int) -> None:
    """Checks each op of a simulated run: there once, on its rank, alone there, behind what it needs."""
    placement, weights, per_update = schedule.placement, schedule.weights, schedule.updates.per_update
    last, letters = placement.stages - 1, [kind.value for kind in schedule.kinds]
    back, gives = ("I", "W") if "I" in letters else ("B", "B")
    done: dict[tuple[str, int, int, int], Any] = {}
    for rank in range(placement.workers):
        mine = [span for span in timeline.work() if span.rank == rank]
        mine.sort(key=lambda span: (span.start_s, span.end_s))
        for before, after in pairwise(mine):
            assert before.end_s <= after.start_s + _TINY, "a rank does one thing at a time"
        for span in mine:
            key = (span.kind, span.stage, span.index, rank)
            assert key not in done, f"{key} twice"
            done[key] = span
    expected = set()
    for stage, row in enumerate(placement.ranks):
        for k in range(total):
            expected |= {(letter, stage, k, row[k % len(row)]) for letter in letters if letter != "F"}
            expected |= {("F", stage, k, placement.rank_of(stage, k, forward=True))}
        expected |= {("U", stage, n + 1, rank) for n in range(-(-total // per_update[stage])) for rank in row}
    assert set(done) == expected
    gradients: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for (kind, stage, k, rank), span in done.items():
        if kind == "U":
            continue
        needs = []
        if kind == "F":
            version = weights.forward_version(stage, k)
            needs += [("F", stage - 1, k, placement.rank_of(stage - 1, k, forward=True))] if stage else []
            home = placement.rank_of(stage, k)
            needs += [("U", stage, version, home)] if version else []
            assert 0 <= version <= k // per_update[stage]
        else:
            forwards_at = placement.rank_of(stage, k, forward=True)
            needs += [("I", stage, k, rank) if kind == "W" else ("F", stage, k, forwards_at)]
            needs += [(back, stage + 1, k, placement.rank_of(stage + 1, k))] if stage < last and kind == back else []
        for need in needs:
            assert done[need].end_s <= span.start_s + _TINY, f"{stage}{kind}{k} before {need}"
        if kind == gives:
            gradients[stage, k // per_update[stage] + 1, rank].append(span.end_s)
    for (kind, stage, n, rank), span in done.items():
        if kind == "U":
            assert max(gradients[stage, n, rank], default=0.0) <= span.start_s + _TINY
            assert min(gradients[stage, n + 1, rank], default=span.end_s) >= span.start_s - _TINY, "another's gradient"
    for rank in range(placement.workers):
        versions = sum(weights.versions(stage) for stage, _ in placement.stage_replicas(rank))
        assert timeline.peak_versions[rank] <= versions + min(1, len(placement.passes_on_copies(rank, forward=True)))
    for tag in timeline.gradient_versions:
        assert tag.applied_to == tag.microbatch // per_update[tag.stage]
        assert tag.forward_version == weights.forward_version(tag.stage, tag.microbatch)


@pytest.mark.parametrize("programs", [slow(50), long(10_000)])
def test_random_programs_endure(programs: int) -> None:
    """Some as they come back from a file in PyTorch's notation; with ranks that are slow, and ops that jitter."""

    @settings(max_examples=programs)
    @given(runs(st.one_of(straight(), laid_out(most=6))), st.data())
    def endure(run: tuple[pd.Schedule, Costs, int], data: st.DataObject) -> None:
        schedule, seconds, total = run
        plan, placement, m = schedule.plan, schedule.placement, schedule.microbatches
        stays = not any(map(placement.runs_backward_elsewhere, range(len(plan.stages))))
        if schedule.flushes and stays and max(plan.replicas) == 1 and data.draw(st.booleans()):
            text = pd.schedules.to_torch_csv(schedule)
            schedule = pd.schedules.from_torch_csv(text, name=schedule.name, plan=plan)
        slow_ranks = st.dictionaries(st.integers(0, placement.workers - 1), st.floats(1.0, 4.0), max_size=1)
        stragglers = Stragglers(data.draw(st.sampled_from([0.0, 0.5])), data.draw(slow_ranks), data.draw(st.integers()))
        program, total = pd.lower(schedule), -(-total // m) * m
        seconds = replace(seconds, recompute_s=(0.0,) * len(plan.stages))  # it begins before its gradient arrives
        proof, timeline = pd.verify(program), simulate(program, seconds, total, stragglers)
        check(schedule, timeline, total)
        assert all(map(int.__le__, timeline.peak_versions, proof.peak_versions))

    endure()


def test_a_depth_that_rests_on_a_lag() -> None:
    """Found by one of ten thousand: ZB-H2 doubles a depth that is legal only because a stage lags."""
    plan = replace(pd.Plan.uniform(4, replicas=(1, 1, 2, 1)), in_flight=(3, 2, 1, 2), update_delay=(0, 0, 1, 0))
    for name in ("1f1b", "zb_h1", "zb_h2"):
        pd.verify(program_of(name, plan, 4))


REPLICAS = tuple(product((1, 2, 3), repeat=3))


@pytest.mark.parametrize(("depth", "workers"), [("noam", 4), long("noam", 9), slow("full", 6), long("full", 9)])
@pytest.mark.parametrize("name", [name for name in STRAIGHT if "[" not in name])
def test_all_replica_counts(name: str, depth: str, workers: int) -> None:
    """With m = 7, which no number of replicas but one divides, where the method takes it."""
    properties, proved = pd.schedules.properties_of(name), set()
    expected = {replicas for replicas in REPLICAS if sum(replicas) <= workers}
    for replicas in expected:
        plan = pd.Plan.uniform(3, replicas=replicas).with_depth(depth)
        for m in (7, None) if properties.splits_minibatch else (None,):
            with suppress(pd.errors.ScheduleError):
                pd.verify(program_of(name, plan, m))
                proved.add(replicas)
                break
    assert proved == expected if properties.replicates_stages else proved
