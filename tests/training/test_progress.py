"""Live progress: what is computed for it, and when."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from pipedream.runtime.results.results import Done
from pipedream.training import loop


class _Pipeline:
    def __init__(self) -> None:
        self.computed = 0

    def status(self) -> dict[int, dict[str, float]]:
        self.computed += 1
        return {0: {"busy_share": 0.5, "peak_bytes": 1e6}}


@pytest.mark.parametrize(
    ("rank", "rank_0_shows", "computed"), [(0, True, 1), (1, True, 1), (1, False, 0), (0, False, 0)]
)
def test_status_is_computed_only_if_it_is_shown(
    monkeypatch: pytest.MonkeyPatch, rank: int, rank_0_shows: bool, computed: int
) -> None:
    def make_on_rank_0(make: Any, rank: int) -> str:
        return str(make()) if rank == 0 else "shown" * rank_0_shows

    monkeypatch.setattr(loop, "make_on_rank_0", make_on_rank_0)
    console = Console(file=io.StringIO(), force_terminal=rank_0_shows, quiet=rank != 0)
    pipeline: Any = _Pipeline()
    with loop.Progress(console, 2, rank) as shown:
        shown.show(Done(0, 0, False, 0.5, 8.0, 8, 0.1), pipeline)
    assert pipeline.computed == computed
