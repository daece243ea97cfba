"""The rows of overlapping spans, and the part of a run to show."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipedream.core.schedule.timeline import WORK, Span, Timeline


@dataclass(frozen=True)
class Window:
    """A part of a run, in seconds since its start.

    Attributes:
        first, last: the microbatches first <= k < last whose forwards at the input stage begin in it.
    """

    first: int
    last: int
    start_s: float
    end_s: float


def assign_rows(spans: Sequence[Span]) -> list[int]:
    """Returns for each span (sorted by start) the lowest row in which it overlaps no earlier span."""
    ends: list[float] = []
    lanes: list[int] = []
    for span in spans:
        row = next((i for i, end in enumerate(ends) if end <= span.start_s), len(ends))
        if row == len(ends):
            ends.append(span.end_s)
        ends[row] = span.end_s
        lanes.append(row)
    return lanes


_BACKWARDS = ("B", "I", "W")
_AWAITED = {"F": "inputs", "B": "gradients", "I": "gradients", "W": "gradients", "U": "other ranks"}


def match_waits(timeline: Timeline) -> dict[Span, tuple[str, Span]]:
    """Returns what the rank waited for in each wait that an op follows ("" if unknown), and that op."""
    waits: dict[Span, tuple[str, Span]] = {}
    following: dict[int, Span] = {}
    for span in sorted(timeline.spans, key=lambda span: (span.start_s, span.kind != "wait"), reverse=True):
        if span.kind == "wait" and (op := following.get(span.rank)) is not None:
            is_for_op = op.kind == "U" or (op.stage, op.index) == (span.stage, span.index)
            waits[span] = _AWAITED[op.kind] if is_for_op else "", op
        elif span.kind in WORK:
            following[span.rank] = span
    return waits


def start_window(timeline: Timeline, count: int, begin: int | None = None) -> Window | None:
    """Returns the first `count` microbatches of a run; None without forwards, or where the first spans were dropped.

    Args:
        begin: the run's first microbatch, if known.
    """
    starts = _find_starts(timeline)
    passed = min((span.index for span in timeline.spans if span.kind in _BACKWARDS), default=0)
    if not starts or passed < min(starts) or begin not in (None, min(starts)):
        return None
    window = _make_window(timeline, starts, min(starts), count)
    return Window(window.first, window.last, min(span.start_s for span in timeline.spans), window.end_s)


def middle_window(timeline: Timeline, count: int) -> Window | None:
    """Returns the middle of a run without a drain, if that has twice `count` microbatches."""
    starts = _find_starts(timeline)
    first, length = min(starts, default=0), max(starts, default=-1) + 1 - min(starts, default=0)
    if length < 2 * count:
        return None
    middle = first + (length - count) // 2
    middle -= middle % timeline.minibatch_microbatches  # whole minibatches of a flushing schedule
    return _make_window(timeline, starts, middle, count) if middle in starts else None


def _find_starts(timeline: Timeline) -> dict[int, float]:
    """Returns the starts of forwards at the input stage; evaluations, whose numbers begin at 0, have no backwards."""
    trained = {span.index for span in timeline.spans if span.kind in _BACKWARDS and span.stage == 0}
    starts: dict[int, float] = {}
    for span in timeline.spans:
        if span.kind == "F" and span.stage == 0 and (not trained or span.index in trained):
            starts[span.index] = min(span.start_s, starts.get(span.index, span.start_s))
    return starts


def _make_window(timeline: Timeline, starts: dict[int, float], first: int, count: int) -> Window:
    last = first + count
    end = starts.get(last)
    if end is None:
        last = max(starts) + 1
        end = max(span.end_s for span in timeline.spans)
    return Window(first, last, starts[first], end)
