"""RoundPipe: its closed forms against a loop over slots, what travels, and programs that break its rules."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, groupby, pairwise

import pytest
from hypothesis import assume, given, strategies as st
from marks import few
from programs import with_rank

import pipedream as pd
from pipedream.core.plan.stage import TiedWeights
from pipedream.core.schedule import moves, update_policy
from pipedream.core.units import format_bytes
from pipedream.extensions.host_weights.roundpipe import _choose_slots, homes, roundpipe
from pipedream.simulator import costs, simulate
from pipedream.workflows import check as checks, prepare


def plan_of(p: int, stages: int, f: float = 1.0, b: float = 2.0, transfer_s: float = 0.0) -> pd.Plan:
    return pd.Plan.uniform(stages, f, b, transfer_s, order=homes(p, stages))


Slot = tuple[float, float]
"""Seconds of a microbatch before it needs the slot before (a repeated forward), and after."""


def slots_of(forwards: list[float], stages: int, f: float, b: float) -> list[Slot]:
    """Returns slots with these seconds of forwards, then that of the last stage, then backwards."""
    return [*((0.0, seconds) for seconds in forwards), (0.0, f + b), *[(f, b)] * (stages - 1)]


@st.composite
def sizes(draw: st.DrawFn, max_workers: int = 6) -> tuple[int, int, int]:
    p = draw(st.integers(1, max_workers))
    return p, draw(st.integers(p, 3 * p + 2)), draw(st.integers(1, 3 * p + 2))


@given(sizes(), st.integers(1, 4), st.floats(0.1, 4.0), st.floats(0.0, 6.0), st.integers(1, 3))
def test_slots_go_round_the_workers(size: tuple[int, int, int], forwards: int, f: float, b: float, n: int) -> None:
    p, stages, m = size
    schedule = roundpipe(plan_of(p, stages, f, b), m, forwards=forwards)
    timeline = simulate(pd.lower(schedule), costs(schedule.plan), n * m)
    coarse = [f * len(range(first, min(first + forwards, stages - 1))) for first in range(0, stages - 1, forwards)]
    slots = slots_of(coarse, stages, f, b)
    assert timeline.makespan_s == pytest.approx(n * dispatched_on([[j % p for j in range(len(slots))]], slots, m))
    if forwards == 1 and b >= f:
        assert timeline.makespan_s == pytest.approx(schedule.claims.makespan_s(p, m, n, f, b, 0.0))


def dispatched_on(workers: list[list[int]], slots: list[Slot], m: int) -> float:
    """Returns the seconds of minibatches, each with its slots on these workers, of which none waits for another.

    A microbatch starts in a slot when the worker is free; what follows `early` also needs the previous slot.
    """
    free, ends = [0.0] * (1 + max(map(max, workers))), [0.0] * m
    for row in workers:
        ends = [0.0] * m
        for worker, (early, seconds) in zip(row, slots, strict=True):
            for k in range(m):
                free[worker] = ends[k] = max(free[worker] + early, ends[k]) + seconds
    return max(ends)


@few
@given(sizes(4), st.integers(1, 9))
def test_without_a_flush_slots_go_on_from_the_next_worker(size: tuple[int, int, int], n: int) -> None:
    p, stages, m = size
    schedule = roundpipe(plan_of(p, stages), m, forwards=0, delay=1)
    forward = [row[0] for row in schedule.placement.forwards]
    slots = [list(group) for _, group in groupby(range(stages - 1), key=lambda s: forward[s])]
    count = len(slots) + stages
    workers = [[(slot - len(slots)) % p for slot in range(n * count)][i * count :][:count] for i in range(n)]
    for i, row in enumerate(workers):
        for s in range(stages - 1):
            assert schedule.placement.rank_of(s, i * m, forward=True) == row[[s in slot for slot in slots].index(True)]
        for s in range(stages):
            assert schedule.placement.rank_of(s, (i + 1) * m - 1) == row[count - 1 - s]
    seconds = slots_of([float(len(slot)) for slot in slots], stages, 1.0, 2.0)
    program = pd.lower(schedule)
    proof = pd.verify(program)
    assert set(proof.staleness) == {1}
    if p > 1 and m >= p:
        timeline = simulate(program, costs(schedule.plan), n * m)
        assert timeline.makespan_s == pytest.approx(dispatched_on(workers, seconds, m))
    assert program.from_json(program.to_json()) == program
    long = simulate(program, costs(schedule.plan), 3 * len(schedule.placement.forwards[0]) * m)
    assert long.peak_versions == proof.peak_versions
    pd.verify(pd.lower(pd.schedules.evaluation(schedule.plan, schedule.placement)))


@few
@given(sizes(4))
def test_updates_of_tied_weights_wait_for_the_turns_of_all_stages_of_their_rank(size: tuple[int, int, int]) -> None:
    p, stages, m = size
    assume(stages > 1)
    plan = replace(plan_of(p, stages), tied_weights=(TiedWeights(("w",), (0, stages - 1), 8),))
    program = pd.lower(roundpipe(plan, m, delay=1).with_tied_weights())
    pd.verify(program)
    ends: dict[tuple[int, int], float] = {}
    updates = []
    for span in simulate(program, costs(plan), 4 * m).spans:
        if span.kind == "B":
            key = program.placement.ranks[span.stage][0], span.index // m + 1
            ends[key] = max(ends.get(key, 0.0), span.end_s)
        elif span.kind == "U":
            updates.append(span)
    holders = {program.placement.ranks[stage][0] for stage in (0, stages - 1)}
    for span in updates:
        assert span.rank not in holders or span.start_s >= ends[span.rank, span.index] - 1e-9


@given(sizes(), st.lists(st.integers(1, 9), min_size=20, max_size=20), st.booleans())
def test_slots_of_forwards_by_the_seconds(size: tuple[int, int, int], times: list[int], continued: bool) -> None:
    """The longest slot is as short as it can be for so many, and no other number of slots takes less time."""
    p, stages, m = size
    assume(1 < stages <= 8)
    plan = plan_of(p, stages)
    rows = zip(plan.stages, times, times[8:], strict=False)
    plan = replace(plan, stages=tuple(replace(row, forward_s=float(f), backward_s=float(b)) for row, f, b in rows))
    last, head = stages - 1, plan.stages[-1]
    backwards = [
        (0.0, head.forward_s + head.backward_s),
        *((row.forward_s, row.backward_s) for row in reversed(plan.stages[:-1])),
    ]

    def divide(ends: tuple[int, ...]) -> list[float]:
        bounds = zip((0, *ends), (*ends, last), strict=True)
        return [sum(row.forward_s for row in plan.stages[begin:end]) for begin, end in bounds]

    def seconds(ends: tuple[int, ...]) -> float:
        slots = [*((0.0, forward_s) for forward_s in divide(ends)), *backwards]

        def dispatch(n: int) -> float:
            workers = [worker % p for worker in range(n * len(slots))]
            return dispatched_on([workers[i * len(slots) :][: len(slots)] for i in range(n)], slots, m)

        return dispatch(2 * p) - dispatch(p) if continued else dispatch(1)

    chosen = tuple(slot.stop for slot in _choose_slots(plan, m, continued=continued))
    assert chosen[-1] == last
    fewest = max(0, 2 * p - 3 - stages) if continued else 0
    for count in range(fewest, last):
        divisions = list(combinations(range(1, last), count))
        least = min(max(divide(ends)) for ends in divisions)
        assert seconds(chosen[:-1]) <= max(seconds(ends) for ends in divisions if max(divide(ends)) == least) + 1e-9
        assert count != len(chosen) - 1 or max(divide(chosen[:-1])) == least


@given(sizes(), st.integers(1, 4))
def test_the_proof_counts_guests(size: tuple[int, int, int], forwards: int) -> None:
    """Beside its own a worker has the weights of one slot; where each forward is a slot, of one stage."""
    p, stages, m = size
    schedule = roundpipe(plan_of(p, stages), m, forwards=forwards)
    program = pd.lower(schedule)
    proof, placement = pd.verify(program), schedule.placement
    assert simulate(program, costs(schedule.plan), 2 * m).peak_versions == proof.peak_versions
    for rank in range(p):
        copies = proof.peak_versions[rank] - len(placement.stage_replicas(rank))
        assert (copies > 0) == (len(placement.passes_on_copies(rank, forward=True)) > 0)
        assert copies <= min(forwards, len(placement.passes_on_copies(rank, forward=True)))
    if forwards == 1:
        claims = schedule.claims
        assert proof.peak_in_flight == tuple(claims.in_flight(p, m, rank) for rank in range(p))
        assert proof.peak_versions == tuple(claims.versions(p, m, rank) for rank in range(p))
    pd.verify(pd.lower(pd.schedules.evaluation(schedule.plan, placement)))


@pytest.mark.parametrize("workers", [2, 4])
def test_passes_that_read_what_a_thread_still_writes_are_refused(workers: int) -> None:
    """Each update is joined on its rank, before what reads its weights, its gradients or its state."""
    program = pd.lower(roundpipe(plan_of(workers, 5), workers, delay=1))
    for rank, text in enumerate(program.ranks):
        joins = [item for item in text.period if item.kind is moves.JOIN_UPDATE]
        assert {join.channel for join in joins} == {s for s, _ in program.placement.stage_replicas(rank)}
        for join in joins:
            at = text.period.index(join)
            readers = [i for i in range(at, len(text.period)) if isinstance(text.period[i], pd.schedules.Op)]
            if not readers:  # the first of the next period
                continue
            reader = readers[0]
            late = (*text.period[:at], *text.period[at + 1 : reader + 1], join, *text.period[reader + 1 :])
            with pytest.raises(pd.errors.ScheduleError, match=rf"a thread makes {join.channel}U\d+, and no"):
                pd.verify(with_rank(program, rank, period=late))
        never = {part: tuple(i for i in getattr(text, part) if i not in joins) for part in ("warmup", "period")}
        with pytest.raises(pd.errors.ScheduleError, match=r"a thread makes \dU\d+, and no"):
            pd.verify(with_rank(program, rank, **never))


@few
@given(sizes(), st.integers(1, 4), st.floats(0.1, 30.0))
def test_updates_on_hosts_of_gpus_take_no_time_of_passes(size: tuple[int, int, int], n: int, update_s: float) -> None:
    """A worker's updates follow each other, and each stage's has ended before the stage's next one begins."""
    p, stages, m = size
    schedule = roundpipe(plan_of(p, stages), m, delay=1)
    program, free = pd.lower(schedule), costs(schedule.plan)
    busy, gpu = replace(free, update_s=(update_s,) * stages), {"runtime": replace(free.runtime, overlap_device=True)}
    on_gpus = simulate(program, replace(busy, **gpu), n * m)
    without = simulate(program, replace(free, **gpu), n * m).makespan_s
    most = -(-stages // p)  # stages of a worker
    inline_s = simulate(program, busy, n * m).makespan_s
    assert max(without, n * most * update_s) <= on_gpus.makespan_s <= inline_s + 1e-9
    if most * update_s <= m:  # less than the passes of a minibatch
        assert on_gpus.makespan_s <= without + most * update_s + 1e-9
    steps = [span for span in on_gpus.spans if span.kind == "step"]
    assert len(steps) == n * stages
    for rank in range(p):
        mine = sorted((span.start_s, span.end_s) for span in steps if span.rank == rank)
        assert all(end_s <= start_s + 1e-9 for (_, end_s), (start_s, _) in pairwise(mine))
    made_s = {(span.stage, span.index): span.end_s for span in steps}
    for span in on_gpus.work():
        update = {"F": span.index // m, "U": span.index}.get(span.kind, 0) - 1  # the one that it waits for
        assert span.kind != "U" or span.start_s == span.end_s
        assert update < 1 or span.start_s >= made_s[span.stage, update] - 1e-9


def test_an_update_of_tied_weights_that_waits_for_a_turn_behind_another_one() -> None:
    """Rank 0 makes its updates before the backwards of its turn at stage 0, whose home sums with it."""
    plan = replace(plan_of(2, 4), tied_weights=(TiedWeights(("w",), (0, 3), 8),))
    schedule = roundpipe(plan, 2, delay=1).with_tied_weights()
    pd.verify(pd.lower(schedule))

    def order(rank: int) -> Iterator[pd.schedules.Op]:
        late: list[pd.schedules.Op] = []
        for op in schedule.order(rank):
            if rank == 0 and op.kind is pd.schedules.Kind.BACKWARD and op.stage == 0:
                late.append(op)
                continue
            yield op
            if op.kind is pd.schedules.Kind.UPDATE and op.stage == 1:
                yield from late
                late.clear()

    with pytest.raises(pd.errors.DeadlockError, match=r"rank 1 waits at instruction \d+, \^U0:2, for 0B2"):
        pd.verify(pd.lower(replace(schedule, order=order)))


def test_a_program_is_read_again_as_it_was() -> None:
    program = pd.lower(roundpipe(plan_of(4, 7), 4, forwards=3))
    again = pd.Program.from_json(program.to_json())
    assert again == program
    assert again.placement.shares_weights
    with pytest.raises(pd.errors.ArtifactError, match="round"):
        pd.Program.from_json(program.to_json().replace('"turn"', '"round"'))
    homes_of_two = ((0,), (1,))
    for forwards, words in (
        (((0,),), "one home and ranks for its forwards and its backwards"),
        (((0,), (2,)), "ranks 0 to 1, found"),
        (((0, 1), (1,)), "all stages have as many turns"),
    ):
        with pytest.raises(ValueError, match=words):
            pd.schedules.Placement(homes_of_two, forwards, homes_of_two)


build = partial(pd.schedules.build, "roundpipe")
APART = replace(plan_of(3, 3), cluster=pd.Cluster((pd.Level(2, 1e9), pd.Level(2, 1e8))))
OPTIONS = r"at least 1 stage, .* the delay is 0 or 1; found forwards=.*delay="
LONG = r"turns of 1025 microbatches: .* repeats after 4100; .* fewer microbatches"
PHASES = prepare.read_run_phases(None, None, "roundpipe/3:4,1f1b/3")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: build(pd.Plan.uniform(3)), r"round robin from the last one on.*name the workers \(2, 1, 0\)"),
        (lambda: build(pd.Plan.uniform(2, replicas=(2, 1))), "without replicas; found plan 2-1"),
        (lambda: build(APART), "memory of one machine, but workers 2 and 1 of the cluster are on diff"),
        (lambda: roundpipe(plan_of(2, 2), forwards=-1), OPTIONS),
        (lambda: roundpipe(plan_of(2, 2), delay=2), OPTIONS),
        (lambda: build(plan_of(2, 4).choosing(activations="host")), "'host', but its backwards recompute, which"),
        (lambda: pd.lower(roundpipe(plan_of(4, 4), 1025, delay=1)), LONG),
        (lambda: prepare.prepare(plan_of(3, 3), PHASES, update_policy.Policy()), "their stages live on other ranks"),
    ],
)
def test_what_is_not_laid_out_is_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(pd.errors.ScheduleError, match=words):
        call()


@pytest.mark.slow
def test_a_plan_says_what_is_done_twice_and_counts_guests() -> None:
    profile = pd.Profile.of_chain((pd.LayerProfile(1.0, 2.0, 800, 10),) * 8, batch=16)
    free = pd.plan(profile, pd.Cluster.flat(4), schedule="roundpipe")
    assert [stage.recompute for stage in free.stages] == [True] * 7 + [False]
    assert free.microbatches == 16
    assert free.period_s == pytest.approx(8.0, rel=1e-3)  # 1 + 3 seconds of each of two stages
    peaks = simulate(pd.lower(pd.schedules.build("roundpipe", free, 16)), costs(free, split=16), 16).peak_bytes
    assert max(peaks) == max(free.worker_bytes.values()), "with weights that are copied, and inputs that wait"
    fits = pd.plan(profile, pd.Cluster.flat(4, memory_bytes=max(peaks)), schedule="roundpipe")
    assert replace(fits, cluster=free.cluster) == free
    with pytest.raises(pd.errors.PlanError, match=r"worker 2 needs up to .* for the passes of the stages 1, 5"):
        pd.plan(profile, pd.Cluster.flat(4, memory_bytes=max(peaks) - 1), schedule="roundpipe")
    short = replace(free, cluster=pd.Cluster.flat(4, memory_bytes=max(peaks) - 1))
    assert short.first_stage_over_memory == 1
    for measured in (None, profile):
        checks.check_plan(fits, profile=measured)
        with pytest.raises(pd.errors.PlanError, match="for the passes of the stages"):
            checks.check_plan(short, profile=measured)


LIGHT = pd.LayerProfile(1.0, 2.0, output_bytes=16, activation_bytes=16, parameter_bytes=1000)
CPU = pd.Profile.of_chain((LIGHT,) * 24, batch=16, optimizer_bytes=48_000)
GPU = replace(CPU, runtime=replace(CPU.runtime, overlap_device=True))


def test_a_gpu_has_the_weights_of_one_slot_and_of_the_slot_before() -> None:
    """On 2 workers, the model's weights of 24 kB and 8 microbatches; the gradients of a slot are as large."""
    for chunks in (2, 4, 12):
        plan = pd.plan(GPU, pd.Cluster.flat(2), schedule="roundpipe", chunks=chunks)
        slot = 24_000 // (2 * chunks)
        peaks = simulate(pd.lower(pd.schedules.build("roundpipe", plan, 8)), costs(plan, split=8), 16).peak_bytes
        small = 24 * 8 * 16  # inputs and messages
        for peak_bytes in (*peaks, *plan.worker_bytes.values()):
            assert 3 * slot <= peak_bytes <= 3 * slot + small
        assert sum(stage.memory.host_bytes for stage in plan.stages) == 2 * 24_000 + 48_000
    assert max(pd.plan(CPU, pd.Cluster.flat(2), schedule="roundpipe", chunks=12).worker_bytes.values()) > 24_000
    with pytest.raises(pd.errors.PlanError, match=r"of worker [01] need up to 18.* use more stages .* \(--chunks\)"):
        pd.plan(GPU, pd.Cluster.flat(2, memory_bytes=10_000), schedule="roundpipe")
    pd.plan(GPU, pd.Cluster.flat(2, memory_bytes=10_000), schedule="roundpipe", chunks=12)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_machine_without_room_for_what_is_kept_there_is_refused(delay: int) -> None:
    """Weights of 24 kB, as much for gradients, twice that for the optimizer; with a delay a second version, and because
    the workers take turns a second set of gradients.
    """
    need, name = 96_000 + 48_000 * delay, f"roundpipe[delay={delay}]"
    enough = replace(pd.Cluster.flat(2), host_bytes=need)
    plan = pd.plan(GPU, enough, schedule=name)
    assert sum(stage.memory.host_bytes for stage in plan.stages) == need
    checks.check_plan(plan)
    short = replace(enough, host_bytes=need - 1)
    fits = "without delay\\) needs 96.0 kB, an" if delay else "free; an"
    sizes = [format_bytes(size) for size in (need, need - 48_000)]
    reason = f"need {sizes[0]}, 1.00 B more than .* {fits} optimizer without state needs {sizes[1]}"
    for check in (lambda: pd.plan(GPU, short, schedule=name), lambda: checks.check_plan(plan.on(short))):
        with pytest.raises(pd.errors.PlanError, match=reason):
            check()
    with pytest.raises(pd.errors.PlanError, match="nothing smaller fits: use a smaller model"):
        pd.plan(GPU, replace(enough, host_bytes=47_999), schedule=name)
    pd.plan(CPU, short, schedule=name)  # CPUs have their shares of the machine's memory
