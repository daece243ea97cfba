"""A plan's depth against the memory of a worker."""

import pytest
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.core.plan import depth
from pipedream.planner import SearchSpace, manual_plan
from pipedream.planner.tables.search_space import apply_depth
from tests.planner.planned import search_plan

FOUR = pd.Profile.of_chain((pd.LayerProfile(1.0, 2.0, 300, 1000, 100),) * 4)


def test_depth_is_applied_and_memory_checked_again() -> None:
    roomy = search_plan(FOUR, pd.Cluster.flat(4, 100.0), shape="straight", in_flight="full")
    # The period is 6 s, of 300 bytes in and 300 out; messages queue at the ports of the stages in the middle.
    assert (roomy.depth_mode, roomy.in_flight) == ("full", (10, 7, 4, 1))
    # Versions, and activations of all but the one whose gradients have taken their place; three messages posted.
    assert roomy.stages[0].peak_bytes == 11 * 1000 + 9 * 100 + 3 * 300
    tight = pd.Cluster.flat(4, 100.0, memory_bytes=8_000)
    says = r"at depth full stage 0 .* holds 10 in flight and needs 12\.8 kB, .* 8\.00 kB; ask for --in-flight auto"
    with pytest.raises(pd.PipelineError, match=says):
        search_plan(FOUR, tight, shape="straight", in_flight="full")
    by_count = search_plan(FOUR, tight, shape="straight", in_flight=(2, 2, 1, 1))
    assert (by_count.depth_mode, by_count.in_flight) == ("hand", (2, 2, 1, 1))
    assert by_count.stages == manual_plan(FOUR, tight, (1, 2, 3), in_flight=(2, 2, 1, 1)).stages
    # A version and activations are 1100 bytes for each in flight, beside gradients and messages.
    assert search_plan(FOUR, tight, shape="straight", in_flight="auto").in_flight == (5, 3, 2, 1)
    least = max(stage.peak_bytes for stage in search_plan(FOUR, pd.Cluster.flat(4, 100.0), shape="straight").stages)
    exact, short = (pd.Cluster.flat(4, 100.0, memory_bytes=memory) for memory in (least, least - 1))
    assert search_plan(FOUR, exact, shape="straight", in_flight="auto").in_flight == (4, 3, 2, 1)
    with pytest.raises(pd.PipelineError, match="none of the straight pipelines of 4 stages fits"):
        search_plan(FOUR, short, shape="straight", in_flight="auto")
    assert manual_plan(FOUR, short, (1, 2, 3), in_flight=(3, 2, 2, 1)).depth_mode == "hand"


SIZES = st.integers(0, 9)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40), SIZES, SIZES), min_size=1, max_size=4),
    st.integers(1, 300),
    st.integers(0, 1),
)
def test_auto_is_legal_and_as_deep_as_fits(rows: list[tuple[int, ...]], limit: int, delay: int) -> None:
    counts = tuple(count for count, *_ in rows)
    profile = pd.Profile.of_chain(tuple(pd.LayerProfile(1.0 * count, 2.0, *sizes) for count, *sizes in rows))
    space = SearchSpace.of(profile, pd.Cluster.flat(sum(counts), 10.0, 0.0, limit), update_delay=delay)
    base = space.build_plan(tuple(range(1, len(counts))), counts)
    try:
        low = apply_depth(space, base, "noam")
    except pd.errors.PlanError:
        with pytest.raises(pd.PipelineError, match="at depth noam stage"):
            apply_depth(space, base, "auto")
        return
    deep, full = apply_depth(space, base, "auto"), base.with_depth("full")
    assert all(a <= b <= c for a, b, c in zip(low.in_flight, deep.in_flight, full.in_flight, strict=True))
    depth.check_in_flight(deep.in_flight, counts, deep.update_delay)
    assert max(stage.peak_bytes for stage in deep.stages) <= limit
    try:
        assert apply_depth(space, base, "full").in_flight == deep.in_flight, "full fits"
    except pd.errors.PlanError:
        assert deep.in_flight != full.in_flight
