"""Drawn by hypothesis: registered methods on plans of any replicas, depth and update delay, with any costs; meshes.

Drawn by a `random.Random`: profiles that know a rank of some meshes, and clusters for them.
"""

import random
from dataclasses import replace

from hypothesis import strategies as st

import pipedream as pd
from pipedream.core.hardware.cluster import Workers
from pipedream.core.model import profile, runtime_costs as additions
from pipedream.extensions.host_weights.roundpipe import dispatched, homes, roundpipe
from pipedream.simulator import Costs

WHOLE = (  # methods that do not split a minibatch
    "pipedream", "pipedream_vertical_sync", "pipelined_backprop", "pb_lwp", "spectrain", "spectrain_v2", "pipeoptim",
)  # fmt: skip
ACCUMULATED = "paci[backward_rule=stash]"
NO_UPDATE_DELAY = (
    "pipedream_2bw", "pipemare", "xpipe", "paci", ACCUMULATED, "timeprest", "v_timeprest", "timeprest_interpolated",
)  # fmt: skip

SECONDS = st.one_of(st.just(0.0), st.just(1.0), st.floats(0.1, 5.0))


STRAIGHT = sorted({*pd.schedules.SCHEDULES, ACCUMULATED} - set(pd.schedules.STAGE_ORDERS))
"""The methods of one stage a worker."""


@st.composite
def laid_out(draw: st.DrawFn, most: int = 4) -> pd.Schedule:
    """Draws a registered method whose workers have several stages, on up to `most` workers, of any m that it takes."""
    name = draw(st.sampled_from(sorted(pd.schedules.STAGE_ORDERS)))
    step = 2 if pd.schedules.STAGE_ORDERS[name].replicas > 1 else 1
    workers = step * draw(st.integers(1, most // step))
    chunks = draw(st.integers(1, 3)) if pd.schedules.STAGE_ORDERS[name] in (pd.schedules.looped, dispatched) else None
    if name == "roundpipe":  # of any number of stages
        plan = pd.Plan.uniform(stages := draw(st.integers(workers, 3 * workers)), order=homes(workers, stages))
        return roundpipe(plan, draw(st.integers(1, 3 * workers)))
    plan = pd.schedules.uniform(name, workers, chunks=chunks)
    unit = workers * (2 if name in ("chimera_doubled", "dualpipev") else 1)
    m = draw(st.integers(1, 3 * unit))
    try:
        return pd.schedules.build(name, plan, m)
    except pd.errors.ScheduleError:  # it takes them in such units, or needs one at least
        return pd.schedules.build(name, plan, max(m - m % unit, unit))


def schedules() -> st.SearchStrategy[pd.Schedule]:
    """Draws a registered method on a plan that it can work with."""
    return st.one_of(straight(), straight(), laid_out())


@st.composite
def straight(draw: st.DrawFn) -> pd.Schedule:
    """Draws a method with one stage per worker, on any replicated plan of any legal depth and update delay."""
    replicas = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    update_delay = tuple(draw(st.integers(0, 1)) if count > 1 and len(replicas) > 1 else 0 for count in replicas)
    name = draw(st.sampled_from(STRAIGHT))
    if name in NO_UPDATE_DELAY:
        update_delay = (0,) * len(replicas)  # it does not update delay
    in_flight = pd.schedules.raise_to_legal(tuple(draw(st.integers(1, 5)) for _ in replicas), replicas, update_delay)
    rows = tuple(pd.Stage(s, s + 1, count) for s, count in enumerate(replicas))
    plan = pd.Plan(rows, in_flight, pd.Cluster.flat(sum(replicas)), update_delay, unit="microbatch")
    if name == "pipedream_2bw":
        least = max(max(number - 1, 1) * count for number, count in zip(in_flight, replicas, strict=True))
        return pd.schedules.build(name, plan, least + draw(st.integers(0, 3)))
    try:
        return pd.schedules.build(name, plan, None if name in WHOLE else draw(st.integers(max(replicas), 7)))
    except pd.errors.ScheduleError:  # it needs more microbatches for these replicas
        return pd.schedules.build(name, plan)


@st.composite
def clusters(draw: st.DrawFn, workers: int) -> pd.Cluster:
    """Draws a cluster of at least so many workers: of one to three levels, even or not, with links and speeds alike or
    not."""
    machines = draw(st.lists(st.integers(1, max(1, workers)), min_size=1, max_size=4))
    machines[0] += max(0, workers - sum(machines))
    rate = st.sampled_from([1.0, 1.0, 0.5, 3.0])
    levels = [pd.Level(max(machines), draw(rate), sizes=tuple(machines))]
    if len(machines) == 1:
        levels = [pd.Level(machines[0], 1.0)]
    elif len(machines) == 4 and draw(st.booleans()):
        levels += [pd.Level(2, draw(rate)), pd.Level(2, draw(rate))]
    else:
        levels += [pd.Level(len(machines), draw(rate))]
    latencies, receiving = st.sampled_from([0.0, 0.0, 0.5]), st.sampled_from([None, None, 0.25, 2.0])
    levels = [replace(level, latency_s=draw(latencies), receive_bytes_per_s=draw(receiving)) for level in levels]
    kinds: tuple[Workers, ...] = ()
    if draw(st.booleans()):
        kinds = tuple(Workers(1, speed=draw(st.sampled_from([1.0, 0.5, 1.7]))) for _ in range(sum(machines)))
    return pd.Cluster(tuple(levels), kinds=kinds, all_reduce=draw(st.sampled_from(["ring", "tree"])))


def runtime_costs(most: float = 5.0) -> st.SearchStrategy[additions.RuntimeCosts]:
    """Draws what the runtime adds, on a CPU or a GPU: often nothing, otherwise of the order of `most` seconds."""
    some = st.sampled_from([0.0, 0.02 * most, 0.1 * most, most])
    return st.one_of(
        st.just(additions.RuntimeCosts()),
        st.builds(additions.RuntimeCosts, some, some, some.map(lambda s: s / 10), some, some, st.booleans()),
    )


@st.composite
def some_costs(draw: st.DrawFn, stages: int, workers: int) -> Costs:
    rows = st.lists(SECONDS, min_size=stages, max_size=stages).map(tuple)
    names = ("forward_s", "backward_s", "update_s", "sync_s", "output_bytes", "sum_bytes", "weight_bytes")
    columns, cluster = {name: draw(rows) for name in names}, draw(clusters(workers))
    backward_s = columns["backward_s"]
    return Costs(
        **columns,
        weight_s=tuple(seconds / 2 for seconds in backward_s),
        recompute_s=tuple(seconds * draw(st.sampled_from([0.0, 0.25, 0.5])) for seconds in backward_s),
        cluster=cluster,
        workers=tuple(draw(st.permutations(range(cluster.workers)))[:workers]),
        input_bytes=draw(SECONDS),
        runtime=draw(runtime_costs()),
    )


@st.composite
def runs(draw: st.DrawFn, of: st.SearchStrategy[pd.Schedule] | None = None) -> tuple[pd.Schedule, Costs, int]:
    """Draws a schedule, by default of any registered method, with costs and a number of microbatches."""
    schedule = draw(schedules() if of is None else of)
    costs = draw(some_costs(len(schedule.plan.stages), schedule.placement.workers))
    if schedule.weights.backward_rule == "graph":  # goes through the forward's own activations
        costs = replace(costs, recompute_s=(0.0,) * len(schedule.plan.stages))
    pairs = zip(schedule.plan.stages, costs.recompute_s, strict=True)
    stages = tuple(replace(stage, recompute=stage.recompute or again_s > 0) for stage, again_s in pairs)
    return replace(schedule, plan=replace(schedule.plan, stages=stages)), costs, draw(st.integers(1, 15))


_SIZES = (1, 2, 3)
MESHES = st.sampled_from(["", *(f"m0:{n}" for n in _SIZES), *(f"m0:{n},m1:{k}" for n in _SIZES for k in _SIZES)])
MESHES = MESHES.map(pd.Mesh)


def placements(draw: st.DrawFn, mesh: pd.Mesh, dimensions: int) -> tuple[int | None, ...]:
    """No dimension of the tensor is cut twice."""
    return tuple(draw(st.permutations([*range(dimensions), None, None]))[: len(mesh.dimensions)])


_MESHES = ("model:2", "data:2", "model:4", "data:2,model:2")


def meshed_profile(draw: random.Random, most: int = 4) -> pd.Profile:
    """A chain, with one rank of some meshes whose shares are random: less work, and collectives."""
    count, choose = draw.randint(1, most), draw.choice

    def layer(share: float) -> pd.LayerProfile:
        seconds = choose([0.0, 1.0, 2.0, 3.0]) * share, choose([0.0, 1.0, 4.0, 7.0]) * share
        sizes = int(choose([0, 4, 16, 36]) * share), int(choose([0, 4, 12, 32]) * share)
        output_bytes = choose([0, 4, 8, 16]) // choose([1, 2])
        return pd.LayerProfile(*seconds, output_bytes, *sizes, temporary_bytes=choose([0, 2, 8]))

    def some(mesh: pd.Mesh) -> tuple[profile.Collective, ...]:
        over = [name for name in mesh.dimensions if draw.random() < 0.5]
        kinds, sizes = ["all-reduce", "all-gather"], [1, 4, 16]
        return tuple(
            profile.Collective(choose(kinds), name, choose([1, 2]), choose(sizes), choose([True, False]))
            for name in over
        )

    def update(**columns: list[float]) -> dict[str, float]:
        return {name: choose(values) for name, values in columns.items()}

    whole = tuple(layer(1.0) for _ in range(count))

    def rank(text: str) -> profile.RankProfile:
        mesh = pd.Mesh(text)
        layers = tuple(layer(choose([1.0, 1.5]) / mesh.size) for _ in range(count))
        if draw.random() < 0.2:  # cuts nothing, so that a single rank beats it
            none = ((),) * count
            return profile.RankProfile(text, "", whole, none, none, update_s=2.5, optimizer_bytes=20, loss_s=1)
        forwards, backwards = (tuple(some(mesh) for _ in layers) for _ in range(2))
        more = update(update_s=[0.0, 1.0], optimizer_bytes=[0, 7], copy_s=[0.0, 1.0], loss_s=[0.0, 1.0])
        return profile.RankProfile(text, "batch:data,d_ff:model", layers, forwards, backwards, some(mesh), **more)

    return pd.Profile.of_chain(
        whole,
        batch=4,
        input_shapes=((choose([0, 1, 4]),),),
        runtime=additions.RuntimeCosts(0.1, 0.2, choose([0.0, 0.1]), 0.1)
        if draw.random() < 0.3
        else additions.RuntimeCosts(),
        ranks=tuple(rank(text) for text in draw.sample(_MESHES, draw.randint(1, 3))),
        **update(update_s=[0.0, 1.0, 2.5], copy_s=[0.0, 1.0], optimizer_bytes=[0, 7, 20], loss_s=[0.0, 1.0]),
    )


def meshed_cluster(draw: random.Random, *, limited: bool, levels: int) -> pd.Cluster:
    inner, latency_s = draw.choice([1.0, 4.0, 100.0]), draw.choice([0.0, 0.0, 0.5])
    memory = draw.choice([30, 60, 100, 160]) if limited else None
    if levels == 1:
        return pd.Cluster.flat(draw.choice([2, 3, 4]), inner, latency_s, memory)
    return pd.Cluster((pd.Level(2, inner, latency_s), pd.Level(2, inner / draw.choice([2, 8]), latency_s)), memory)
