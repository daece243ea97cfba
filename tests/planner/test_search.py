"""One worker, data parallelism or a pipeline: the choice, its promise and its refusals."""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from drawn import runtime_costs
from every_plan import exhaustive
from exactly import best_plans
from hypothesis import example, given, strategies as st

import pipedream as pd
from pipedream.core.errors import PlanError
from pipedream.core.model.graph import Layer, LayerGraph
from pipedream.core.model.profile import LayerProfile, Profile
from pipedream.core.plan.choices import Choices
from pipedream.planner import SHAPES, PlanSearch, SearchSpace, search
from tests.planner.planned import search_plan

LAYER = LayerProfile(1.0, 2.0, output_bytes=10, parameter_bytes=1000, activation_bytes=100)
EIGHT = Profile.of_chain((LAYER,) * 8)
SHORT = Profile.of_chain(tuple(LayerProfile(1.0, 1.0, *row) for row in [(20, 50, 0), (20, 50, 10), (1, 50, 10)]))


@st.composite
def chains(draw: st.DrawFn) -> Profile:
    cost, size = st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0]), st.integers(0, 20)
    launch = st.sampled_from(draw(st.sampled_from([[0.0], [0.0, 0.5, 4.0]])))
    layer = st.builds(LayerProfile, cost, cost, size, size, size, forward_launch_s=launch, backward_launch_s=launch)
    layers = draw(st.lists(layer, min_size=1, max_size=7))
    return Profile.of_chain(
        tuple(layers),
        update_s=(update_s := draw(cost)),
        update_fixed_s=update_s * draw(st.sampled_from([0.0, 0.5, 1.0])),
        optimizer_bytes=draw(size),
        loss_s=draw(cost),
        runtime=draw(runtime_costs(1.0)),
    )


@given(
    chains(),
    st.integers(1, 5),
    st.sampled_from([0.1, 1.0, 10.0, 1e9]),
    st.sampled_from([0.0, 0.2]),
    st.one_of(st.none(), st.integers(20, 300)),
    st.integers(1, 3),
)
def test_takes_the_fastest_of_all(
    profile: Profile, workers: int, bandwidth: float, latency: float, memory: int | None, microbatches: int
) -> None:
    cluster = pd.Cluster.flat(workers, bandwidth, latency, memory)
    space = SearchSpace.of(profile, cluster, microbatches=microbatches)
    least, best = best_plans(space)
    if best is None:
        with pytest.raises(PlanError, match="at depth noam stage" if least else "the least that any of them needs"):
            search_plan(profile, cluster, microbatches=microbatches)
        return
    if best != least:  # a search does not know which messages are in the way
        return
    planned = search_plan(profile, cluster, microbatches=microbatches)
    assert (planned.stages, planned.in_flight, planned.depth_mode) == (best.stages, best.in_flight, "noam")
    assert pd.Plan.from_json(planned.to_json()) == planned
    assert "\n" not in planned.note


@given(chains(), st.integers(2, 6), st.sampled_from([0.1, 1.0, 10.0]), st.integers(20, 200))
def test_never_loses_to_replicas_alike_where_memory_is_short(
    profile: Profile, workers: int, bandwidth: float, memory: int
) -> None:
    cluster = pd.Cluster.flat(workers, bandwidth, 0.0, memory)
    for stages in (count for count in range(2, workers + 1) if workers % count == 0 and count <= len(profile.layers)):
        try:
            equal = search_plan(profile, cluster, shape=(workers // stages,) * stages)
        except PlanError:
            continue
        assert search_plan(profile, cluster).slowest_stage_s <= equal.slowest_stage_s * (1 + 1e-9)
    try:
        whole = search_plan(profile, cluster, all_workers=True)
    except PlanError:
        return
    assert whole.workers == workers


@given(
    chains(),
    st.integers(2, 5),
    st.sampled_from([0.1, 1.0, 10.0]),
    st.one_of(st.none(), st.integers(20, 300)),
    st.sampled_from(["never", "auto", "always"]),
    st.booleans(),
)
@example(SHORT, 4, 10.0, 375, "never", True)  # messages do not fit at first
def test_searches_that_share_tables_find_what_each_finds_alone(
    profile: Profile, workers: int, bandwidth: float, memory: int | None, recompute: str, all_workers: bool
) -> None:
    """Whatever was searched before: other shapes, slower links, and with memory kept free for messages."""
    cluster = pd.Cluster.flat(workers, bandwidth, 0.2, memory)

    def make() -> PlanSearch:
        return PlanSearch.of(
            profile, cluster, choices=Choices(recompute=recompute), all_workers=all_workers, update_delay=1
        )

    def find(search: PlanSearch, shape: Any, link_factor: float) -> pd.Plan | str:
        try:
            return search.best(shape, link_factor=link_factor)
        except PlanError as error:
            return str(error)

    shared, unnamed = make(), replace(make(), describes_alternatives=False)
    for shape in ("any", "pipeline", (1, 1), (workers,), "straight"):
        for link_factor in (1.0, 4.0):
            alone = find(make(), shape, link_factor)
            assert find(shared, shape, link_factor) == alone
            without = find(unnamed, shape, link_factor)
            assert without == (replace(alone, note=without.note) if isinstance(without, pd.Plan) else alone)


def ignore_rival(spare_memory: Callable[..., Any], *args: Any, rival_s: float = 0.0) -> Any:
    return spare_memory(*args)


@given(
    chains(), st.integers(2, 6), st.sampled_from([0.1, 1.0, 10.0]), st.one_of(st.none(), st.integers(20, 300)),
    st.sampled_from([1.0, 4.0]),
)  # fmt: skip
@example(SHORT, 4, 10.0, 375, 1.0)  # messages do not fit at first
def test_what_cannot_win_is_left_out(
    profile: Profile, workers: int, bandwidth: float, memory: int | None, link_factor: float
) -> None:
    """The same plan with all searches that keep memory free; and under its own seconds as a limit."""
    searches = PlanSearch.of(profile, pd.Cluster.flat(workers, bandwidth, 0.2, memory))

    try:
        plan = searches.best("any", link_factor=link_factor)
    except PlanError:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_spare_memory", partial(ignore_rival, search._spare_memory))
        assert searches.best("any", link_factor=link_factor) == plan
    assert searches.best("any", link_factor=link_factor, limit_s=plan.slowest_stage_s) == plan
    limit_s = plan.slowest_stage_s * (1 - 1e-6)
    assert searches.best("any", link_factor=link_factor, limit_s=limit_s).slowest_stage_s >= limit_s


@pytest.mark.parametrize(
    ("workers", "memory", "rows"),
    [
        (3, 248, [(20, 50, 10), (20, 50, 0)]),
        (3, 225, [(20, 50, 0), (100, 50, 0)]),
        (4, 375, [(20, 50, 0), (20, 50, 10), (1, 50, 10)]),
    ],
)
def test_no_worker_is_left_out_where_memory_is_short(
    workers: int, memory: int, rows: list[tuple[int, int, int]]
) -> None:
    """A straight pipeline of fewer stages than workers fits, and is taken only if workers may be idle."""
    profile = Profile.of_chain(tuple(LayerProfile(1.0, 1.0, *row) for row in rows))
    cluster = pd.Cluster.flat(workers, 1e3, memory_bytes=memory)
    assert search_plan(profile, cluster).workers < workers
    with suppress(PlanError):
        assert search_plan(profile, cluster, all_workers=True).workers == workers


def test_slow_links_make_a_pipeline_and_fast_ones_data_parallelism() -> None:
    slow = search_plan(EIGHT, pd.Cluster.flat(4, 100.0))
    assert slow.config == "1-1-1-1"
    assert slow.in_flight == (4, 3, 2, 1)
    assert slow.slowest_stage_s == 6.0
    assert slow.note == (
        "fastest predicted among one worker, data parallelism and pipelines of 2 to 4 stages; data "
        "parallelism on 4 workers is predicted at 36.0 s per minibatch; one worker is predicted at 24.0 s per minibatch"
    )
    uneven = Profile.of_chain((LAYER,) * 7)
    fast = search_plan(uneven, pd.Cluster.flat(4, 1e9))
    assert fast.config == "4"
    assert fast.in_flight == (1,)
    assert fast.note.endswith(
        "; one worker is predicted at 21.0 s per minibatch; the pipeline 1-3 is predicted at 6.00 s per minibatch; "
        "a straight pipeline of 4 stages is predicted at 6.00 s per minibatch"
    )


def test_a_model_that_cannot_be_cut() -> None:
    graph = LayerGraph.chain((Layer("a", "L"), Layer("b", "L")), ties=((0, 1),))
    profile = Profile("tied", graph, (LAYER,) * 2, batch=1)
    for shape in ("any", "pipeline"):
        best = search_plan(profile, pd.Cluster.flat(2), shape=shape)
        assert (best.config, len(best.stages)) == ("2", 1)
        assert best.note == (
            "the model cannot be cut; fastest of its plans of one stage; one worker is predicted at 6.00 s per "
            f"minibatch; {profile.ties_in_words()}"
        )
    with pytest.raises(PlanError, match="2 layers can be cut at 0 places"):
        search_plan(profile, pd.Cluster.flat(2), shape="straight")


def test_kinds_can_be_forced() -> None:
    cluster = pd.Cluster.flat(4, 1e9)
    pipeline = search_plan(EIGHT, cluster, shape="straight")
    assert pipeline.config == "1-1-1-1"
    assert pipeline.note == (
        "optimal among straight pipelines of 4 stages; data parallelism on 4 workers is predicted at 6.00 s per "
        "minibatch"
    )
    parallel = search_plan(EIGHT, pd.Cluster.flat(4, 100.0), shape="data-parallel")
    assert parallel.config == "4"
    assert parallel.note == "data parallelism was asked for; one worker is predicted at 24.0 s per minibatch"
    assert search_plan(EIGHT, pd.Cluster.flat(1), shape="pipeline").config == "1"
    assert search_plan(EIGHT, pd.Cluster.flat(2), shape="pipeline").config == "1-1"


@pytest.mark.parametrize("shape", ["3-1", (3, 1), [3, 1]])
def test_counts_can_be_forced(shape: Any) -> None:
    cluster = pd.Cluster.flat(5, 1e9)
    forced = search_plan(EIGHT, cluster, shape=shape)
    space = SearchSpace.of(EIGHT, cluster)
    best = exhaustive(space, lambda plan: plan.replicas == (3, 1))
    assert (forced.config, forced.stages) == ("3-1", space.with_bytes(best).stages)
    assert forced.note.startswith("optimal among plans 3-1; data parallelism on 5 workers is predicted at ")
    assert search_plan(EIGHT, cluster, shape="4").config == "4"


@pytest.mark.parametrize("shape", ["any", "pipeline"])
def test_no_worker_is_left_without_work_if_asked(shape: str) -> None:
    thin = Profile.of_chain((LayerProfile(1.0, 1.0, 1, 3 * 10**6),) * 2)  # sums cost more than replicas save
    cluster = pd.Cluster.flat(3, 1e6)
    assert search_plan(thin, cluster, shape=shape).workers == 2
    assert search_plan(thin, cluster, shape=shape, all_workers=True).workers == 3


@pytest.mark.parametrize("shape", [*SHAPES, "2-1"])
def test_a_lag_is_for_replicated_stages_of_pipelines(shape: str) -> None:
    best = search_plan(EIGHT, pd.Cluster.flat(3, 1e9), shape=shape, update_delay=1)
    many = len(best.stages) > 1
    assert best.update_delay == tuple(int(many and stage.replicas > 1) for stage in best.stages)
    assert pd.Plan.from_json(best.to_json()) == best
    without = search_plan(EIGHT, pd.Cluster.flat(3, 1e9), shape=shape)
    assert without.update_delay == (0,) * len(without.stages)
    for stage, update_delay, before in zip(best.stages, best.update_delay, without.stages, strict=True):
        assert stage.memory.stash_bytes == before.memory.stash_bytes + update_delay * stage.parameter_bytes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shape": "triangle"}, "unknown shape 'triangle'; give any, pipeline, straight, data-parallel, or the rep"),
        ({"shape": "1-0"}, "unknown shape '1-0'"),
        ({"shape": ()}, r"unknown shape \(\)"),
        (
            {"shape": "4-1"},
            "a plan 4-1 was asked for: it takes 5 workers, the cluster has 4; ask for fewer or give more",
        ),
        ({"shape": (1,) * 9}, "a straight pipeline of 9 stages was asked for: it takes 9 workers, the cluster has 4"),
        ({"update_delay": 2}, "update delay 2 was asked for; give 0 .* or 1"),
    ],
)
def test_refuses_shapes_and_lags(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        search_plan(EIGHT, pd.Cluster.flat(4), **options)


def test_memory_drives_from_data_parallelism_to_a_pipeline() -> None:
    cluster = pd.Cluster.flat(4, 1e9, memory_bytes=15_000)
    best = search_plan(EIGHT, cluster, versions=lambda in_flight, update_delay: 1)
    assert best.config == "1-1-1-1"
    assert "data parallelism on 4 workers does not fit the memory" in best.note
    with pytest.raises(PlanError, match=r"none of the data-parallel plans fits: .* 23\.1 kB .* a worker has 15\.0 kB"):
        search_plan(EIGHT, cluster, versions=lambda in_flight, update_delay: 1, shape="data-parallel")


def test_says_the_least_need_when_nothing_fits() -> None:
    says = (
        r"none of the plans \(one worker, data parallelism and pipelines of 2 to 4 stages\) fits: .*"
        r"\((\d+) bytes\), a worker has 100 B; give more memory"
    )
    with pytest.raises(PlanError, match=says) as caught:
        search_plan(EIGHT, pd.Cluster.flat(4, memory_bytes=100))
    least, enough = map(int, re.findall(r"\((\d+) bytes\)", str(caught.value)))
    assert least <= enough <= 1.01 * least
    assert search_plan(EIGHT, pd.Cluster.flat(4, memory_bytes=enough)).workers >= 1
    with pytest.raises(PlanError, match="none of the plans"):
        search_plan(EIGHT, pd.Cluster.flat(4, memory_bytes=least - 1))


def test_more_stages_than_a_chain_of_cuts_has() -> None:
    """Two layers side by side have two cuts, of which no pipeline uses both."""
    graph = LayerGraph((Layer("a", "Linear"), Layer("b", "Linear")), ())
    profile = Profile("net", graph, (LayerProfile(1.0, 1.0, 1, 1),) * 2, batch=1)
    assert search_plan(profile, pd.Cluster.flat(2), shape="straight").config == "1-1"
    with pytest.raises(PlanError, match="cannot be cut into that many stages"):
        search_plan(profile, pd.Cluster.flat(3), shape="straight")
