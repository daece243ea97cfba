"""The Timeline: what ran when, simulated or measured, in seconds from the start of the run.

A rank computes in spans ``F``, ``B``, ``I``, ``W`` and ``U``, and waits in ``wait``; ``send`` is a message in transit,
at its sender, and ``step`` an update that a host thread makes during the passes, begun in ``U``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pipedream.core.artifact import Artifact
from pipedream.core.tabular import Tabular
from pipedream.core.units import format_seconds

WORK = ("F", "B", "I", "W", "U")
"""Spans in which a rank computes."""


class Span(NamedTuple):
    """One piece of a timeline.

    Attributes:
        stage: for a send, the sender's.
        index: microbatch or update.
    """

    rank: int
    kind: str
    stage: int
    index: int  # type: ignore[assignment]  # a field, not the method of tuples
    start_s: float
    end_s: float


class GradientVersions(NamedTuple):
    """The versions at which a gradient was computed, and the one that its update started from."""

    stage: int
    microbatch: int
    forward_version: int
    backward_version: int
    applied_to: int

    @property
    def staleness(self) -> int:
        """In updates."""
        return self.applied_to - self.forward_version


@dataclass(frozen=True, repr=False)
class Timeline(Tabular, Artifact):
    """Spans of a run, over all ranks.

    Attributes:
        name: name of the schedule.
        source: 'simulated' or 'measured'.
        spans: sorted by rank and start.
        microbatches: in the whole run.
        minibatch_microbatches: m, in one minibatch.
        batch: samples in a minibatch.
        gradient_versions: one for each gradient; () if unknown.
        peak_bytes: peak of tensors, for each rank; () if unknown.
        peak_versions: most weight versions that exist at once, for each rank; () if unknown.
        reserved_bytes: for each rank, bytes that its allocator (GPU) or process (CPU) reserved for these; if measured.
        shares_memory: the ranks were workers of one process, whose bytes each of them reports.
        memory: for each rank, bytes at the start and the most during each of its ops; () if unknown.
    """

    FORMAT = 1

    name: str
    source: str
    workers: int
    spans: tuple[Span, ...]
    microbatches: int
    minibatch_microbatches: int = 1
    batch: int = 1
    gradient_versions: tuple[GradientVersions, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    peak_versions: tuple[int, ...] = ()
    reserved_bytes: tuple[int, ...] = ()
    shares_memory: bool = False
    memory: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        work = self.work()
        busy_s = sum(span.end_s - span.start_s for span in work)
        share = busy_s / (self.workers * self.makespan_s) if self.makespan_s else 0.0
        return (
            f"Timeline of {self.name}, {self.source}: {self.workers} workers, {self.microbatches} microbatches, "
            f"{len(work)} ops in {format_seconds(self.makespan_s)}, workers busy {share:.1%} of it"
        )

    @property
    def makespan_s(self) -> float:
        if not self.spans:
            return 0.0
        return max(span.end_s for span in self.spans) - min(span.start_s for span in self.spans)

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.rank == rank)

    def work(self) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.kind in WORK)

    def between(self, start_s: float, end_s: float) -> Timeline:
        """Returns the spans that touch a window of time."""
        spans = tuple(span for span in self.spans if span.end_s > start_s and span.start_s < end_s)
        return replace(self, spans=spans, memory=())

    def versions_read(self) -> Callable[[Span], int | None]:
        """Returns the function from a pass to the weight version that it read; None if unknown."""
        by_microbatch = {(read.stage, read.microbatch): read for read in self.gradient_versions}

        def version(span: Span) -> int | None:
            read = by_microbatch.get((span.stage, span.index)) if span.kind in ("F", "B", "I", "W") else None
            return None if read is None else read.forward_version if span.kind == "F" else read.backward_version

        return version

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each span; passes also have the weight version that they read, if known."""
        version = self.versions_read()
        return [span._asdict() | {"version": version(span)} for span in self.spans]

    def svg(
        self,
        *,
        title: str = "",
        width_px: float = 960,
        start_s: float | None = None,
        end_s: float | None = None,
        versions: bool = False,
    ) -> str:
        """Returns the picture as SVG text; `pipedream.apps.report.save_picture` writes it as a file, also PDF or PNG.

        Args:
            start_s, end_s: the part to show; None: from the start, to the end.
            versions: show the weight versions that passes read, if they are known.
        """
        text: str = (
            type(self)
            .drawing()
            .timeline_svg(self, title=title, width_px=width_px, start_s=start_s, end_s=end_s, versions=versions)
        )
        return text
