"""Thousands of random programs: none stands still, leaves an op out or does it twice, or holds a version too many.

With one to three replicas at each of three stages every method is proved: no draw can miss one.
"""

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import product

import pytest
from drawn import STRAIGHT, laid_out, runs, straight
from hypothesis import given, settings, strategies as st
from marks import long, slow
from programs import program_of

import pipedream as pd
from pipedream.extensions.torch_csv.notation import from_torch_csv, write as to_torch_csv
from pipedream.simulator import Costs, Stragglers, simulate


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
            text = to_torch_csv(schedule)
            schedule = from_torch_csv(text, name=schedule.name, plan=plan)
        slow_ranks = st.dictionaries(st.integers(0, placement.workers - 1), st.floats(1.0, 4.0), max_size=1)
        stragglers = Stragglers(data.draw(st.sampled_from([0.0, 0.5])), data.draw(slow_ranks), data.draw(st.integers()))
        program, total = pd.lower(schedule), -(-total // m) * m
        proof, timeline = pd.verify(program), simulate(program, seconds, total, stragglers)
        done, updates = Counter(span.kind for span in timeline.work()), schedule.updates.per_update
        replicas = zip(updates, schedule.placement.ranks, strict=True)
        assert done.pop("U") == sum(-(-total // count) * len(ranks) for count, ranks in replicas)
        assert set(done.values()) == {total * len(plan.stages)}
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
