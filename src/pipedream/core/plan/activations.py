"""Offloading of activations between a forward and its backward."""

from __future__ import annotations

from pipedream.core.errors import PlanError
from pipedream.core.plan.cost import Numbers

HOST, NONE = "host", "none"

WINDOW_SHARE = 1 / 8
"""Share of a microbatch's offloaded bytes that may still be on the GPU to be copied; as many may be copied ahead."""


def window_bytes(moved_bytes: Numbers) -> Numbers:
    """Returns how many of a microbatch's offloaded bytes are on the GPU."""
    return moved_bytes // round(0.5 / WINDOW_SHARE)


def read_activations(text: str) -> str:
    """Returns 'host', or '' for 'none' and ''. Raises a `PlanError` for anything else."""
    if text in ("", NONE, HOST):
        return "" if text == NONE else text
    if isinstance(text, str) and text.startswith("disk"):
        raise PlanError(
            f"activations={text!r} was asked for, and disks are no longer used; take schedule='roundpipe', "
            "recompute='auto' or more microbatches"
        )
    raise PlanError(f"activations={text!r} was asked for; give 'host' or 'none'")
