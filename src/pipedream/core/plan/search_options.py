"""The options of planning that a search of stages needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What a search may choose: fields of `PlanRequest`."""

    shape: str | tuple[int, ...]
    microbatches: int | None
    in_flight: str | tuple[int, ...]
    update_delay: int
    all_workers: bool
    recompute: str
