"""Live progress in a terminal or a notebook; elsewhere a line per epoch."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from pipedream.core.progress import is_live
from pipedream.core.units import format_bytes
from pipedream.pipeline import Pipeline
from pipedream.runtime.comm.process_group import make_on_rank_0
from pipedream.runtime.results.results import Done

_EVERY_S = 0.5


class Progress:
    """Shows minibatches per second, loss, and each stage's busy share and peak memory.

    Every rank makes one; rank 0 shows it, if its console can draw it (`is_live`).
    """

    def __init__(self, console: Console, workers: int, rank: int) -> None:
        self._console = console
        self._workers = workers
        shows = is_live(console) and not console.quiet
        self._is_shown = bool(make_on_rank_0(lambda: "shown" if shows else "", rank))
        self._live = Live(console=console, auto_refresh=False, transient=True) if shows else None
        self._shown_s = 0.0
        self._shown_number = 0
        self._rate = 0.0
        self._epoch_s = 0.0
        self._epoch_number = -1

    def show(self, done: Done, pipeline: Pipeline) -> None:
        """Draws the table twice a second. Every rank calls it, to send its busy share if the table is shown."""
        now = time.perf_counter()
        if self._epoch_number < 0:
            self._epoch_s, self._epoch_number = now, done.number
        if not self._is_shown:
            return
        if now - self._shown_s < _EVERY_S:
            return
        if self._shown_s:
            self._rate = (done.number - self._shown_number) / (now - self._shown_s)
        self._shown_s, self._shown_number = now, done.number
        status = pipeline.status()
        if self._live is None:
            return
        table = Table(box=None, pad_edge=False)
        for name in ("rank", "busy", "process peak"):
            table.add_column(name, justify="right")
        for rank in range(self._workers):
            row = status.get(rank)
            share = row["busy_share"] if row else 0.0
            table.add_row(str(rank), f"{share:.0%}", format_bytes(row["peak_bytes"]) if row else "-")
        table.title = (
            f"epoch {done.epoch + 1}  minibatch {done.number + 1}  {self._rate:.1f} minibatches/s  "
            f"loss {done.loss:.4f}  rate {done.rate:.3g}"
        )
        table.title_justify = "left"
        self._live.update(table, refresh=True)

    def epoch(self, done: Done, result: dict[str, float]) -> None:
        now = time.perf_counter()
        rate = (done.number - self._epoch_number) / (now - self._epoch_s) if now > self._epoch_s else 0.0
        self._epoch_s, self._epoch_number = now, done.number
        results = "  ".join(f"test {name} {value:.4f}" for name, value in result.items())
        self._console.print(
            f"epoch {done.epoch + 1:>3}  minibatch {done.number + 1:>6}  {rate:>7.1f} minibatches/s  "
            f"loss {done.loss:.4f}  {results}"
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)
