"""Offloading of activations between a forward and its backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pipedream.core.errors import PlanError
from pipedream.core.plan.cost import Numbers

HOST, DISK, NONE = "host", "disk", "none"

WINDOW_SHARE = 1 / 8
"""Share of a microbatch's offloaded bytes that may still be in memory to be written; as many may be read ahead."""

_PARTS = 1 << 10  # of a byte count: an integer, so that bytes stay whole


def share_of(whole_bytes: Numbers, share: float) -> Numbers:
    """Returns a share of some bytes, rounded down."""
    return whole_bytes * round(_PARTS * share) // _PARTS


def window_bytes(moved_bytes: Numbers) -> Numbers:
    """Returns how many of a microbatch's offloaded bytes are in memory."""
    return share_of(moved_bytes, 2 * WINDOW_SHARE)


@dataclass(frozen=True)
class Activations:
    """Where activations are kept: in the worker's own memory (''), 'host' or 'disk'."""

    kind: str = ""
    folder: str | None = None

    @classmethod
    def read(cls, text: str) -> Self:
        """Reads 'none' or '', 'host' or 'disk:FOLDER'; raises a `PlanError` for anything else."""
        if isinstance(text, str):
            kind, _, folder = text.partition(":")
            if text in ("", NONE, HOST) or (kind == DISK and folder):
                return cls("" if kind == NONE else kind, folder or None)
        raise PlanError(f"activations={text!r} was asked for; give 'host', 'disk:FOLDER' or 'none'")

    def __bool__(self) -> bool:
        return bool(self.kind)

    def __str__(self) -> str:
        return self.kind if self.folder is None else f"{self.kind}:{self.folder}"
