"""What to say where nothing fits the memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from pipedream.core.errors import ShortageError
from pipedream.core.units import format_bytes

__all__ = ["Shortage", "refuse"]


@dataclass(frozen=True)
class Shortage:
    """The stage that is in the way of the plan that comes nearest to fitting.

    Attributes:
        need_bytes, memory_bytes: that a worker of it needs, and has.
        first, last: its layers first <= i < last.
    """

    need_bytes: int
    memory_bytes: int
    first: int
    last: int

    @property
    def missing_bytes(self) -> int:
        """By how much the memory is too small."""
        return self.need_bytes - self.memory_bytes


def refuse(shortage: Shortage, what: str) -> NoReturn:
    """Refuses a family of plans of which none fits.

    Raises:
        ShortageError: names the least need, the layers that have it, and the memory.
    """
    layers = f"layers {shortage.first} to {shortage.last - 1}"
    if shortage.last == shortage.first + 1:
        layers = f"layer {shortage.first}"
    raise ShortageError(
        f"none of the {what} fits: the least that any of them needs on its fullest worker, for {layers}, is "
        f"{format_bytes(shortage.need_bytes)} ({shortage.need_bytes} bytes), a worker has "
        f"{format_bytes(shortage.memory_bytes)}; give more memory or workers, smaller minibatches, more microbatches, "
        "recomputation or a schedule that holds fewer versions",
        shortage.need_bytes,
    )
