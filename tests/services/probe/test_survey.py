"""From measured links to a cluster: levels from machines, ports from fans, kinds from speeds."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.services.probe.survey import Fan, Link, MeasuredWorker, Sum, Survey, machines_of, slope

WORKER = MeasuredWorker("one", "cpu: a", 0.01, 8_000_000_000)
BETWEEN, BACK = Link(0, 0, 1, 1e-4, 1e9, 5e8), Link(0, 1, 0, 1e-4, 9e8, 9e8)


def survey(machines: str, **more: Any) -> Survey:
    """Returns the survey of a worker on each of the machines, and of two links on each level."""
    links = tuple(Link(level, 0, 1, 1e-4 * (level + 1), rate, rate) for level, rate in ((0, 1e9), (1, 1e8)))
    return replace(Survey(tuple(replace(WORKER, machine=name) for name in machines), links), **more)


def of_workers(*changes: dict[str, Any]) -> pd.Cluster:
    workers = tuple(replace(WORKER, **change) for change in changes)
    return survey("a" * len(workers), workers=workers).cluster()


@given(rate=st.floats(1e5, 1e10), fixed_s=st.floats(0, 1e-3), noise=st.lists(st.floats(0, 1.0), min_size=2, max_size=2))
def test_slope_finds_the_rate_behind_fixed_costs_and_noise(rate: float, fixed_s: float, noise: list[float]) -> None:
    sizes = (rate * 0.01, rate * 0.04)
    rows = [[size / rate + fixed_s] * 3 + [size / rate + fixed_s + late for late in noise] for size in sizes]
    assert slope(sizes, rows) == pytest.approx(rate, rel=1e-6)
    assert slope((1e6, 4e6), [[0.05] * 5, [0.04] * 5]) == pytest.approx(1e8), "noise hides the difference"


def test_machines_are_neighbouring_ranks_and_each_level_has_a_link() -> None:
    assert machines_of("aabccc") == ((0, 1), (2,), (3, 4, 5))
    with pytest.raises(pd.PipelineError, match=r"rank 2 is on the machine of rank 0.*one after the other"):
        machines_of("aba")
    with pytest.raises(pd.PipelineError, match="no link of level 0"):
        survey("aa", links=()).cluster()


@pytest.mark.parametrize(
    ("machines", "levels"),
    [
        ("aaa", [(3, (), 1e9)]),
        ("abc", [(3, (), 1e9)]),
        ("aabb", [(2, (), 1e9), (2, (), 1e8)]),
        ("aaabcc", [(3, (3, 1, 2), 1e9), (3, (), 1e8)]),
    ],
)
def test_levels_follow_the_machines(machines: str, levels: list[tuple[Any, ...]]) -> None:
    cluster = survey(machines).cluster()
    assert [(level.width, level.sizes, level.bandwidth_bytes_per_s) for level in cluster.levels] == levels
    assert cluster.workers == len(machines)
    assert len(levels) == 1 or cluster.link(1) == (1e8, 2e-4)


@pytest.mark.parametrize(
    ("out", "into", "send", "receive"),
    [(1e9, 1e9, 1e9, None), (2.5e9, 1e9, 2.5e9, 1e9), (1e9, 2.5e9, 1e9, 2.5e9), (2.5e9, 2.5e9, 1e9, None)],
)
def test_fans_tell_which_port_limits_a_message(out: float, into: float, send: float, receive: float | None) -> None:
    fans = (Fan(0, True, (0, 1, 2), out), Fan(0, False, (0, 1, 2), into))
    sums = (Sum(0, (0, 1, 2), 1e-4, 6e8), Sum(0, (0, 1), 1e-4, 9e8))
    (level,) = survey("aaa", fans=fans, sums=sums).cluster().levels
    assert level.sum_bytes_per_s == 6e8, "the widest sum counts"
    assert (level.bandwidth_bytes_per_s, level.receive_bytes_per_s) == (send, receive)
    assert level.link_bytes_per_s == 1e9


@pytest.mark.parametrize(
    ("links", "rate"),
    [
        ([BETWEEN, BACK, Link(0, 1, 2, 3e-4, 8e8, 9e8)], 9e8),  # the middle one
        ([BETWEEN, Link(0, 1, 0, 1e-4, 1e9, 6e8)], 5.5e8),  # half duplex: each direction has what is left
        # Not half duplex: one of the unequal directions keeps its rate. Acknowledgements of the faster direction wait
        # in the queue of the slower one.
        ([Link(0, 0, 1, 1e-4, 2.4e7, 9e6), Link(0, 1, 0, 1e-4, 1e7, 9.8e6)], 1.7e7),
    ],
)
def test_links_count_in_the_middle_and_as_what_both_directions_leave(links: list[Link], rate: float) -> None:
    (level,) = survey("aaa", links=tuple(links)).cluster().levels
    assert level.bandwidth_bytes_per_s == pytest.approx(rate)
    assert level.latency_s == 1e-4, "of the least disturbed"


def test_workers_that_are_unlike_become_kinds() -> None:
    cluster = of_workers({}, {"work_s": 0.0105}, {"work_s": 0.02}, {"memory_bytes": 4_000_000_000})
    assert cluster.speeds == pytest.approx((1.0, 1.0, 0.01 / 0.02, 1.0))
    assert cluster.memories == (8_000_000_000,) * 3 + (4_000_000_000,)
    assert [(kind.count, kind.device) for kind in cluster.kinds] == [(2, "cpu: a"), (1, "cpu: a"), (1, "cpu: a")]
    alike = of_workers({}, {"work_s": 0.011, "memory_bytes": 7_800_000_000})
    assert (alike.kinds, alike.memory_bytes, alike.device) == ((), 7_800_000_000, "cpu: a")


def test_rates_are_those_of_the_slowest_if_all_were_measured() -> None:
    assert of_workers({"host_bytes_per_s": 2e10}, {}).host_bytes_per_s is None
    cluster = of_workers({"host_bytes_per_s": 2e10}, {"host_bytes_per_s": 1e10})
    assert cluster.host_bytes_per_s == 1e10
    assert "; memory of the host 10.0 GB/s" in str(cluster)
