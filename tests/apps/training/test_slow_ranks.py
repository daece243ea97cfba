"""When a run says that a rank computes for longer than was profiled."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from pipedream.apps.training.slow_ranks import SlowRanks


@pytest.mark.parametrize(
    ("slow_s", "drains_every", "line_count"),
    [([(0.0, 1000.0)], 0, 1), ([(100.0, 120.0)], 0, 0), ([(0.0, 40.0), (60.0, 100.0)], 0, 2), ([(0.0, 1e3)], 3, 0)],
)
def test_a_rank_is_slow_after_three_slow_intervals(
    slow_s: list[tuple[float, float]], drains_every: int, line_count: int
) -> None:
    """Two ranks of a tenth of a second's computing in a minibatch of a quarter; one takes twice that for some time."""
    now_s, drains = 0.0, list[int]()

    def status() -> dict[int, dict[str, float]]:
        is_slow = any(begin < now_s <= end for begin, end in slow_s)
        return {0: {"busy_share": 0.4}, 1: {"busy_share": 0.8 if is_slow else 0.4}}

    console = Console(file=io.StringIO(), width=300)
    pipeline: Any = SimpleNamespace(status=status, drains=drains)
    ranks = SlowRanks(pipeline, (0.1, 0.1), console, lambda: now_s)
    for number in range(800):
        now_s += 0.25
        if drains_every and number % drains_every == 0:
            drains.append(number)
        ranks.finish_minibatch(number + 1)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines == lines[:1] * line_count
    assert all("rank 1 computes for 200 ms in a minibatch, 2.0 times as long as profiled" in line for line in lines)
