"""PipeDream-2BW's planner by hand: its seconds, its choice of w, d and microbatches, its memory."""

from dataclasses import replace

import pytest

import pipedream as pd
from pipedream.extensions.two_bw.strategy import two_bw_s

LAYER = pd.LayerProfile(1.0, 2.0, output_bytes=80, parameter_bytes=60, activation_bytes=800)
CHAIN = pd.Profile.of_chain((LAYER,) * 4, batch=16)


def test_the_papers_seconds_by_hand() -> None:
    """Two stages of two replicas, 8 microbatches, links of 10 bytes/s.

    A microbatch: 2 layers (1 + 2) / 8 = 0.75 s, one message each way to a stage at the end: 80 / 8 / 10 = 1 s. A sum of
    120 bytes over two replicas takes 2 (1/2) 120 / 10 = 12 s, shared by m(b) = 4 microbatches: 3 s. So t = 3 s, and a
    minibatch takes t m(b) = 12 s; at 100 bytes/s t = 0.75 + 0.1 and 3.4 s.
    """
    for rate, seconds in ((10.0, 12.0), (100.0, 4 * 0.85)):
        assert two_bw_s(pd.plan(CHAIN, pd.Cluster.flat(4, rate), shape="2-2"), 8) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("rate", "parameter_bytes", "config"), [(1e9, 60, "4"), (20.0, 60, "2-2"), (20.0, 600, "1-1-1-1")]
)
def test_links_and_weights_decide_between_replicas_and_stages(rate: float, parameter_bytes: int, config: str) -> None:
    """At 20 bytes/s a minibatch takes 11 s in four stages, max(5, 6) s in two of two replicas, 18 s in four replicas;
    with ten times the weights 11, 60 and 180 s."""
    profile = pd.Profile.of_chain((replace(LAYER, parameter_bytes=parameter_bytes),) * 4, batch=16)
    cluster = pd.Cluster.flat(4, rate)
    plan = pd.plan(profile, cluster, strategy="2bw")
    assert (plan.config, plan.schedule) == (config, "pipedream_2bw")
    plans = {shape: pd.plan(profile, cluster, shape=shape) for shape in ("4", "2-2", "1-1-1-1")}
    ways = {shape: min(two_bw_s(base, m) for m in (4, 8, 16)) for shape, base in plans.items()}
    assert min(ways, key=lambda shape: ways[shape]) == config
    assert two_bw_s(plan, plan.microbatches) == ways[config]
    if rate == 20.0:
        sums = parameter_bytes / 10
        assert ways == pytest.approx({"1-1-1-1": 11, "2-2": max(5, sums), "4": max(3, 3 * sums)})


def test_each_replica_has_as_many_microbatches_as_there_are_stages() -> None:
    plan = pd.plan(CHAIN, pd.Cluster.flat(4, 20.0), strategy="2bw")
    assert plan.microbatches // plan.replicas[0] >= len(plan.stages)
    assert pd.simulate(plan).makespan_s > 0, "the method works with it"
    with pytest.raises(pd.errors.PlanError, match="ask for a multiple of the workers"):
        pd.plan(CHAIN, pd.Cluster.flat(4), strategy="2bw", microbatches=3)


def test_memory_is_two_versions_and_what_is_in_flight() -> None:
    """Two stages, each 2 |W| / d + gradients = 360; the first holds two microbatches of 1600 / m. Three messages of
    80 / m are behind it; before the other two, and three gradients on their way."""
    plan = pd.plan(CHAIN, pd.Cluster.flat(2, 20.0), strategy="2bw", microbatches=4)
    assert plan.config == "1-1"
    assert [stage.peak_bytes for stage in plan.stages] == [360 + 2 * 400 + 3 * 20, 360 + 400 + 5 * 20]
    tight = pd.Cluster.flat(2, 20.0, memory_bytes=360 + 2 * 200 + 3 * 10)
    assert pd.plan(CHAIN, tight, strategy="2bw").microbatches == 8
    with pytest.raises(pd.PipelineError, match="no plan of PipeDream-2BW's planner fits"):
        pd.plan(CHAIN, pd.Cluster.flat(2, 20.0, memory_bytes=400), strategy="2bw")


def test_recomputation_costs_a_third_where_a_backward_takes_two_forwards() -> None:
    """c_extra = 4/3; only inputs are kept, which lets a plan fit that did not."""

    def planned(recompute: str, memory_bytes: int | None = None) -> pd.Plan:
        cluster = pd.Cluster.flat(2, 20.0 if memory_bytes else 1e9, memory_bytes=memory_bytes)
        return pd.plan(CHAIN, cluster, strategy="2bw", microbatches=4, recompute=recompute)

    seconds = [two_bw_s(planned(recompute), 4) for recompute in ("always", "never")]
    assert seconds[0] / seconds[1] == pytest.approx(4 / 3)
    assert not any(stage.recompute for stage in planned("auto").stages)
    assert all(stage.recompute for stage in planned("auto", 1000).stages)


def test_counts_of_stages_that_a_graph_cannot_have_are_skipped() -> None:
    """Two layers side by side allow at most two stages, though they have three cuts and an end."""
    graph = pd.LayerGraph((pd.Layer("a", "Linear"), pd.Layer("b", "Linear")), ())
    profile = pd.Profile("net", graph, (LAYER,) * 2, batch=12)
    assert len(pd.plan(profile, pd.Cluster.flat(3, 1e9), strategy="2bw").stages) == 1
