"""What ports carry: against counting minibatch by minibatch."""

from collections import defaultdict
from math import lcm
from typing import Any

import pytest
from drawn import clusters
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.core.plan.cost import SumLink, ports_s

SIZES = st.lists(st.integers(0, 9), min_size=3, max_size=3)


@st.composite
def stages_somewhere(draw: st.DrawFn) -> tuple[pd.Cluster, list[tuple[int, ...]]]:
    """Draws one to three stages on workers of a cluster, in any order."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    cluster = draw(clusters(sum(counts)))
    order = iter(draw(st.permutations(range(cluster.workers))))
    return cluster, [tuple(next(order) for _ in range(count)) for count in counts]


def counted(
    cluster: pd.Cluster, stage_workers: list[tuple[int, ...]], sent: list[int], summed: list[int]
) -> dict[tuple[int, int], float]:
    """Sends each minibatch of a cycle from replica to replica, and each direction of each port its bytes."""
    cycle = lcm(*map(len, stage_workers))
    out: defaultdict[tuple[int, int], float] = defaultdict(float)
    into: defaultdict[tuple[int, int], float] = defaultdict(float)
    for k in range(cycle):
        for senders, receivers, size in zip(stage_workers, stage_workers[1:], sent, strict=False):
            for a, b in (
                (senders[k % len(senders)], receivers[k % len(receivers)]),
                (receivers[k % len(receivers)], senders[k % len(senders)]),
            ):
                for level in range(cluster.reach(a, b) + 1):
                    out[level, cluster.component(level, a)] += size / cycle
                    into[level, cluster.component(level, b)] += size / cycle
    for workers, size in zip(stage_workers, summed, strict=False):
        factor = 2.0 if cluster.all_reduce == "tree" else 2 * (len(workers) - 1) / len(workers)
        for level in range(len(cluster.levels)):
            inside = {cluster.component(level, worker) for worker in workers}
            for component in inside if len(inside) > 1 else ():
                for way in (out, into):
                    way[level, component] += factor * size / len(workers)
    seconds = {}
    for place in {*out, *into}:
        row = cluster.levels[place[0]]
        receives = row.receive_bytes_per_s or row.bandwidth_bytes_per_s
        seconds[place] = max(out[place] / row.bandwidth_bytes_per_s, into[place] / receives)
    return seconds


@given(stages_somewhere(), SIZES, SIZES)
def test_equals_counting_minibatch_by_minibatch(drawn: Any, sent: list[int], summed: list[int]) -> None:
    cluster, stage_workers = drawn
    predicted = ports_s(cluster, stage_workers, sent[: len(stage_workers)], summed[: len(stage_workers)])
    expected = counted(cluster, stage_workers, sent, summed)
    assert {place: s for place, s in predicted.items() if s} == pytest.approx({p: s for p, s in expected.items() if s})


def test_seconds_of_an_all_reduce() -> None:
    """A ring of 4 makes 6 steps of a quarter of the bytes; a tree goes two levels up and down with all of them."""
    assert SumLink(10.0, 0.5).all_reduce_s(100.0, 4) == pytest.approx(6 * (0.5 + 2.5))
    assert SumLink(10.0, 0.5, "tree").all_reduce_s(100.0, 4) == pytest.approx(2 * (2 * 0.5 + 10.0))
    assert SumLink(10.0, 0.5).all_reduce_s(100.0, 1) == 0.0


@pytest.mark.parametrize(("device", "latency_s"), [("cpu", 1.0), ("V100", 0.5)])
def test_a_step_of_a_sum_between_cpus_takes_two_latencies(device: str, latency_s: float) -> None:
    """gloo: the receiver's notice, then the data; measured in benchmarks/prediction."""
    cluster = pd.Cluster.flat(4, 10.0, 0.5, device=device)
    assert cluster.sum_link(0) == (10.0, latency_s)
    assert cluster.link(0) == (10.0, 0.5)
