"""Offloaded activations: no more than must be, counted by plan and simulation, and named in a refusal."""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import pytest
from hypothesis import example, given, strategies as st
from marks import few

import pipedream as pd
from pipedream.core.units import format_bytes

LAYER = pd.LayerProfile(1.0, 2.0, 1000, 10_000, activation_bytes=100_000, temporary_bytes=2000)
CHAIN = pd.Profile.of_chain((LAYER,) * 4, batch=8, optimizer_bytes=80_000)


def plan_of(memory_bytes: int | None, rate: float | None = None, profile: pd.Profile = CHAIN, **how: Any) -> pd.Plan:
    """`rate`: of copies, by default such that passes hide them."""
    cluster = replace(pd.Cluster.flat(4, memory_bytes=memory_bytes), host_bytes_per_s=rate)
    cluster = how.pop("cluster", cluster)
    return pd.plan(profile, cluster, **{"shape": "straight", "activations": "host"} | how)


NEEDS = [stage.peak_bytes for stage in plan_of(None).stages]
LIMIT = NEEDS[0] - 150_000
FULL, SPLIT = {"schedule": "pipedream"}, {"schedule": "1f1b", "microbatches": 4}


@given(share=st.floats(0.3, 1.0), how=st.sampled_from([FULL, SPLIT, SPLIT | {"schedule": "pipedream_2bw"}]))
def test_a_stage_offloads_only_if_it_does_not_fit(share: float, how: dict[str, Any]) -> None:
    free = plan_of(None, activations="", **how)
    limit = int(share * max(stage.peak_bytes for stage in free.stages))
    try:
        plan = plan_of(limit, **how)
    except pd.errors.PlanError:
        return
    for stage, before in zip(plan.stages, free.stages, strict=True):
        assert stage.peak_bytes <= limit
        assert stage.offload == (before.peak_bytes > limit)
        assert stage.offload or stage.peak_bytes == before.peak_bytes
    for stage, simulated_bytes in zip(plan.stages, pd.simulate(plan, minibatches=20).peak_bytes, strict=True):
        assert simulated_bytes <= stage.peak_bytes


def test_passes_hide_the_copies_or_the_plan_is_refused() -> None:
    """Passes of 1 and 2 s may take 5% longer: a copy 1.15 s."""
    fast = plan_of(LIMIT, 1e9)
    assert [stage.offload for stage in fast.stages] == [need > LIMIT for need in NEEDS] == [True, True, False, False]
    assert (fast.stages[0].forward_s, fast.stages[0].backward_s) == (1.0, 2.0)
    slow = plan_of(LIMIT, 100_000 / 1.149)
    assert [stage.offload for stage in slow.stages] == [stage.offload for stage in fast.stages]
    assert (slow.stages[0].forward_s, slow.stages[0].backward_s) == (pytest.approx(1.149), 2.0)
    assert slow.stages[3].forward_s == 1.0, "it keeps its activations"
    assert pd.simulate(slow, minibatches=20).makespan_s > pd.simulate(fast, minibatches=20).makespan_s + 2
    with pytest.raises(pd.errors.ShortageError, match="offloading would make its passes over 5% longer at") as refusal:
        plan_of(LIMIT, 100_000 / 1.151)
    assert "150 kB are missing: with the same cuts --recompute auto saves 296 kB" in str(refusal.value)


@few
@given(
    rows=st.lists(st.tuples(st.integers(1, 8), st.sampled_from([0, 1, 5, 20, 60])), min_size=3, max_size=5),
    rate=st.floats(2e3, 4e4),
    share=st.floats(0.3, 0.95),
    stages=st.integers(2, 3),
    how=st.sampled_from([FULL, SPLIT]),
)
@example(rows=[(4, 5), (6, 1), (8, 60)], rate=3600.0, share=0.436, stages=2, how=SPLIT)
def test_a_plan_is_found_where_a_cut_hides_its_copies(
    rows: list[tuple[int, int]], rate: float, share: float, stages: int, how: dict[str, Any]
) -> None:
    """As fast as the best of all cuts, but for the copies, which the search does not see."""
    layers = (pd.LayerProfile(float(s), 2.0 * s, 10, 100, activation_bytes=1000 * size) for s, size in rows)
    profile, cuts = pd.Profile.of_chain(tuple(layers), batch=8), [*combinations(range(1, len(rows)), stages - 1)]
    planned = partial(plan_of, None, profile=profile, **how)
    free = [planned(cluster=pd.Cluster.flat(stages), shape="any", cuts=cut, activations="") for cut in cuts]
    most = max(stage.peak_bytes for plan in free for stage in plan.stages)
    cluster = replace(pd.Cluster.flat(stages, memory_bytes=int(share * most)), host_bytes_per_s=rate)
    periods = []
    for cut in cuts:
        with suppress(pd.errors.PlanError):
            periods.append(planned(cluster=cluster, shape="any", cuts=cut).slowest_stage_s)
    if not periods:
        with pytest.raises(pd.errors.ShortageError):
            planned(cluster=cluster)
        return
    plan = planned(cluster=cluster)
    assert plan.first_stage_over_memory is None
    assert plan.slowest_stage_s <= 1.05 * min(periods)


def test_a_plan_keeps_the_place_and_not_the_clusters() -> None:
    plan = plan_of(LIMIT)
    assert pd.Plan.from_json(plan.to_json()) == plan
    assert plan.choices.activations == "host"
    assert "activations in the memory of the machine: stage 0 " in str(plan)


def test_recomputation_and_offloading_exclude_each_other() -> None:
    with pytest.raises(pd.errors.PlanError, match="a stage that recomputes keeps nothing but its input"):
        plan_of(None, recompute="always")
    moved = plan_of(None).choosing(activations="host")
    assert all(stage.offload for stage in moved.stages)
    with pytest.raises(ValueError, match="has no activations to offload"):
        replace(moved.stages[0], recompute=True)


GPU_CHAIN = replace(CHAIN, device="A100-80GB", runtime=replace(CHAIN.runtime, overlap_device=True))


def plan_on_gpus(memory_bytes: int | None, host_bytes: int | None = None, **request: Any) -> pd.Plan:
    cluster = pd.Cluster.flat(request.pop("workers", 4), memory_bytes=memory_bytes, device="A100-80GB")
    cluster = replace(cluster, host_bytes=host_bytes, host_bytes_per_s=1e9)
    return pd.plan(GPU_CHAIN, cluster, **{"schedule": "1f1b", "shape": "straight"} | request)


@pytest.mark.parametrize(
    "request_", [{}, FULL, {"microbatches": 1}, {"schedule": "v_half", "shape": "any", "workers": 2}, {"cuts": (1,)}]
)
def test_a_refusal_says_what_choices_save(request_: dict[str, Any]) -> None:
    """As much as planning with them finds on the fullest worker."""
    free = plan_on_gpus(None, **request_).worker_bytes
    fullest = max(free, key=free.__getitem__)
    need_bytes = free[fullest]
    with pytest.raises(pd.errors.ShortageError) as refusal:
        plan_on_gpus(need_bytes - 1, **request_)
    savings = refusal.value.savings
    assert savings
    assert refusal.value.missing_bytes == 1
    for option, saved_bytes in savings.items():
        name, value = option.removeprefix("--").replace("-", "_").split()
        plan = plan_on_gpus(need_bytes - 1, **request_, **{name: value})
        assert plan.worker_bytes[fullest] == need_bytes - saved_bytes, option
        assert f"{option} saves {format_bytes(saved_bytes)}" in str(refusal.value)
    with pytest.raises(pd.errors.ShortageError) as refusal:
        plan_on_gpus(need_bytes - 1, 1, **request_)
    assert set(refusal.value.savings) == set(savings) - {"--activations host", "--optimizer-state host"}


def test_a_refusal_leaves_out_what_the_method_or_another_option_excludes() -> None:
    """PACI's backward does not recompute; without GPUs there is no other memory."""
    need_bytes = max(plan_of(None, activations="", schedule="paci").worker_bytes.values())
    with pytest.raises(pd.errors.ShortageError) as refusal:
        plan_of(need_bytes - 1, activations="", schedule="paci")
    assert "saves" not in str(refusal.value)
