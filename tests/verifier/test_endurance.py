"""Thousands of random programs: none stands still, leaves an op out or does it twice, or reads a version amiss.

What is checked is read off the simulated spans by rules of this file's own, not by those that the proof uses. With one
to three replicas at each of three stages every method is proved: no draw can miss one.
"""

import random
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product

import pytest

import pipedream as pd
from pipedream.core.errors import ScheduleError
from pipedream.core.hardware.cluster import Cluster, Level
from pipedream.core.plan import depth
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.timeline import Span, Timeline
from pipedream.experimental.roundpipe import dispatched
from pipedream.schedules import SCHEDULES, STAGE_ORDERS, build, from_torch_csv, properties_of, to_torch_csv, uniform
from pipedream.schedules.kit.method import looped, mirrored
from pipedream.simulator import Costs, Stragglers, simulate
from pipedream.verifier import verify

PROGRAMS = 10_000
_TINY = 1e-9


def drawn_plan(rng: random.Random, name: str) -> pd.Plan:
    """Returns a plan of any size for a method: stages that share workers where it has such, else replicas and lags."""
    layout = STAGE_ORDERS.get(name)
    if layout is not None:
        workers = rng.choice([2, 4, 6] if layout is mirrored else range(1, 6))
        return uniform(name, workers, chunks=rng.randint(1, 3) if layout in (looped, dispatched) else None)
    replicas = tuple(rng.randint(1, 3) if rng.random() < 0.5 else 1 for _ in range(rng.randint(1, 4)))
    update_delay = tuple(rng.randint(0, 1) if count > 1 and len(replicas) > 1 else 0 for count in replicas)
    update_delay = (0,) * len(replicas) if name == "pipedream_2bw" else update_delay
    least = depth.noam(replicas, update_delay)
    in_flight = least if rng.random() < 0.5 else tuple(rng.randint(1, 4) for _ in replicas)
    plan = pd.Plan.uniform(len(replicas), replicas=replicas)
    return replace(plan, in_flight=depth.raise_to_legal(in_flight, replicas, update_delay), update_delay=update_delay)


def drawn_schedule(rng: random.Random, name: str) -> pd.Schedule:
    """Returns a method's schedule; now and then as it comes back from a file in PyTorch's notation."""
    while True:
        plan = drawn_plan(rng, name)
        # Of several stages a worker some methods fill both directions first, and take m in units of the workers.
        most = 2 * plan.workers + 1 if name in STAGE_ORDERS else 8
        try:
            schedule = build(name, plan, rng.choice([None, *range(1, most + 1)]))
        except ScheduleError:
            continue
        stays = not any(map(schedule.placement.runs_backward_elsewhere, range(len(plan.stages))))
        if schedule.flushes and stays and max(plan.replicas) == 1 and rng.random() < 0.2:
            return from_torch_csv(to_torch_csv(schedule), name=name, plan=plan)
        return schedule


def drawn_costs(rng: random.Random, schedule: pd.Schedule) -> Costs:
    """Returns seconds and bytes of any kind, and links on which a message may take longer than all else."""
    count, workers = len(schedule.plan.stages), schedule.placement.workers

    def vector(most: float = 3.0) -> tuple[float, ...]:
        return tuple(rng.choice([0.0, 1.0, rng.uniform(0.01, most)]) for _ in range(count))

    backward_s = vector()
    return Costs(
        forward_s=vector(),
        backward_s=backward_s,
        weight_s=tuple(seconds * rng.random() for seconds in backward_s),
        update_s=vector(1.0),
        sync_s=vector(2.0),
        output_bytes=vector(20.0),
        cluster=Cluster((Level(workers, rng.choice([1.0, 10.0, 1e9]), rng.choice([0.0, 0.0, 5.0])),)),
        input_bytes=rng.choice([0.0, 4.0]),
        sum_bytes=vector(),
        weight_bytes=vector(20.0),
    )


def check(schedule: pd.Schedule, timeline: Timeline, total: int) -> None:
    """Checks each op of a simulated run: there once, on its rank, alone there, behind what it needs."""
    placement, weights, per_update = schedule.placement, schedule.weights, schedule.updates.per_update
    last, letters = placement.stages - 1, [kind.value for kind in schedule.kinds]
    back, gives = ("I", "W") if "I" in letters else ("B", "B")
    done: dict[tuple[str, int, int, int], Span] = {}
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
            needs += [
                ("I", stage, k, rank) if kind == "W" else ("F", stage, k, placement.rank_of(stage, k, forward=True))
            ]
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


def endure(programs: int, seed: int) -> None:
    rng = random.Random(seed)
    names = sorted(SCHEDULES)
    for number in range(programs):
        schedule = drawn_schedule(rng, names[number % len(names)])
        program = lower(schedule)
        proof = verify(program)
        m = schedule.microbatches
        total = m * rng.randint(1, max(1, 16 // m))
        jitter = rng.choice([0.0, 0.5])
        slow = {rng.randrange(schedule.placement.workers): rng.uniform(1.0, 4.0)} if rng.random() < 0.3 else {}
        timeline = simulate(program, drawn_costs(rng, schedule), total, Stragglers(jitter, slow, number))
        check(schedule, timeline, total)
        for rank, count in enumerate(timeline.peak_versions):
            assert count <= proof.peak_versions[rank]


def test_a_depth_that_rests_on_a_lag() -> None:
    """Found by one of ten thousand: ZB-H2 doubles a depth that is legal only because a stage lags."""
    plan = replace(pd.Plan.uniform(4, replicas=(1, 1, 2, 1)), in_flight=(3, 2, 1, 2), update_delay=(0, 0, 1, 0))
    for name in ("1f1b", "zb_h1", "zb_h2"):
        verify(lower(build(name, plan, 4)))


@pytest.mark.slow
def test_random_programs_endure() -> None:
    endure(len(SCHEDULES), 1)


@pytest.mark.long
def test_ten_thousand_random_programs_endure() -> None:
    endure(PROGRAMS, 2)


REPLICAS = tuple(product((1, 2, 3), repeat=3))


@pytest.mark.parametrize(
    ("depth", "workers"),
    [
        ("noam", 4),
        pytest.param("noam", 9, marks=pytest.mark.long),
        pytest.param("full", 6, marks=pytest.mark.slow),
        pytest.param("full", 9, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - set(STAGE_ORDERS)))
def test_all_replica_counts(name: str, depth: str, workers: int) -> None:
    """With m = 7, which no number of replicas but one divides, where the method takes it."""
    properties, proved = properties_of(name), set()
    expected = {replicas for replicas in REPLICAS if sum(replicas) <= workers}
    for replicas in expected:
        plan = pd.Plan.uniform(3, replicas=replicas).with_depth(depth)
        for m in (7, None) if properties.splits_minibatch else (None,):
            with suppress(ScheduleError):
                verify(lower(build(name, plan, m)))
                proved.add(replicas)
                break
    assert proved == expected if properties.replicates_stages else proved
