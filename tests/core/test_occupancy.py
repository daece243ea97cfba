"""What a stage holds, read off schedules: the papers' closed forms, the proof, and the bytes of a simulated run."""

from dataclasses import replace
from itertools import accumulate

import pytest
from drawn import laid_out, straight
from hypothesis import given, strategies as st
from marks import thinned

import pipedream as pd
from pipedream import planner, schedules
from pipedream.core.schedule.occupancy import count_most_in_flight, occupancy
from pipedream.core.schedule.op import Kind, Op, find_last_kind
from pipedream.workflows.methods import occupancy_of

METHODS = sorted(
    name
    for name in schedules.SCHEDULES
    if name not in schedules.STAGE_ORDERS
    and schedules.build(name, pd.Plan.uniform(2)).weights.name not in ("latest", "stamped", "interpolated")
)
"""Those of one stage a worker whose weights are stored; views and graphs are counted in simulator/test_memory."""

OWN_DEPTH = ["timeprest", "timeprest_interpolated"]
"""Methods with several versions and a depth of their own: one stage alone does not determine its occupancy."""


@given(straight().filter(lambda built: built.name in METHODS + OWN_DEPTH))
def test_it_is_what_the_proof_finds(built: pd.Schedule) -> None:
    proof = pd.verify(pd.lower(built))
    for s, stage_occupancy in enumerate(occupancy(built)):
        ranks = built.placement.ranks[s]
        assert stage_occupancy.in_flight == max(proof.peak_in_flight[rank] for rank in ranks)
        assert stage_occupancy.versions - built.weights.buffers(s) >= max(proof.peak_versions[rank] for rank in ranks)


@given(st.one_of(straight(), laid_out()), st.integers(0, 6))
def test_the_folded_count_is_that_of_the_walk(built: pd.Schedule, total: int) -> None:
    program, last_kind = pd.lower(built), find_last_kind(built.kinds)
    length = total or 4 * program.cycle + 4 * sum(program.plan.in_flight) * program.placement.cycle
    for stage, most in enumerate(count_most_in_flight(program, total or None)):
        ops = (op for op in program.instructions(program.placement.ranks[stage][0], length) if isinstance(op, Op))
        counts = accumulate((op.kind is Kind.FORWARD) - (op.kind is last_kind) for op in ops if op.stage == stage)
        assert program.placement.runs_backward_elsewhere(stage) or most == max(counts, default=0)


LAYER = pd.LayerProfile(1.0, 2.0, output_bytes=960, parameter_bytes=70, activation_bytes=4800)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("shape", ["2", "1-1-1", "2-1", "1-2"])
def test_the_planned_peak_is_the_simulated_one(name: str, shape: str) -> None:
    plan = pd.plan(pd.Profile.of_chain((LAYER,) * 4, batch=8), pd.Cluster.flat(3), schedule=name, shape=shape)
    flushes = schedules.build(name, plan).flushes
    timeline = pd.simulate(plan, schedule=name, minibatches=1 if flushes else -(-24 // plan.microbatches))
    assert timeline.peak_bytes
    for s, stage in enumerate(plan.stages):
        assert stage.peak_bytes == max(timeline.peak_bytes[rank] for rank in plan.placement.ranks[s])


@pytest.mark.parametrize("name", thinned([*schedules.SCHEDULES, "roundpipe[delay=1]", "paci[backward_rule=stash]"]))
def test_the_planned_peak_is_no_less_than_the_simulated_one(name: str) -> None:
    """Of several stages a worker, of weights that ranks share, and of one version without a flush."""
    layers = [replace(LAYER, parameter_bytes=70 * (i % 3), temporary_bytes=500 * (i % 2)) for i in range(6)]
    profile = pd.Profile.of_chain(tuple(layers), batch=16, optimizer_bytes=300)
    has_layout = schedules.stage_order_of(name) is not None
    for in_flight in ("noam",) if has_layout else ("noam", "full"):
        shape, cluster = "any" if has_layout else "straight", pd.Cluster.flat(2 if has_layout else 3, 1e4)
        plan = pd.plan(profile, cluster, schedule=name, in_flight=in_flight, shape=shape)
        peaks = pd.simulate(plan, minibatches=20).peak_bytes
        rows = zip(sorted(set(plan.worker_order)) or range(cluster.workers), peaks, strict=True)
        assert all(plan.worker_bytes[worker] >= peak for worker, peak in rows), (peaks, plan.worker_bytes)


@given(st.data())
def test_a_search_never_counts_more_than_the_whole_plan_holds(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(METHODS))
    counts = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    m = data.draw(st.integers(1, 12))
    profile = pd.Profile.of_chain((LAYER,) * len(counts), batch=data.draw(st.integers(m, 20)))
    again = data.draw(st.booleans())
    how = {"occupancy": occupancy_of(name, m), "microbatches": m, "update_delay": data.draw(st.integers(0, 1))}
    space = planner.SearchSpace.of(profile, pd.Cluster.flat(sum(counts)), **how)
    plan = space.with_bytes(space.build_plan(tuple(range(1, len(counts))), counts, recompute=(again,) * len(counts)))
    rows = zip(space.ends(plan), plan.stages, plan.in_flight, plan.update_delay, strict=True)
    for (first, last), stage, count, late in rows:
        if (first, last) == (0, len(counts)):
            continue  # of one stage there is nothing to guess
        need = space.need_bytes(first, last, count, late, again, stage.replicas)
        assert need <= stage.peak_bytes, (name, counts, m, stage)
