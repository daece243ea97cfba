"""Offloading of activations between a forward and its backward."""

from pipedream.core.plan.cost import Numbers

WINDOW_SHARE = 1 / 8
"""Share of a microbatch's offloaded bytes that may still be on the GPU to be copied; as many may be copied ahead."""


def window_bytes(moved_bytes: Numbers) -> Numbers:
    """Returns how many of a microbatch's offloaded bytes are on the GPU."""
    return moved_bytes // round(0.5 / WINDOW_SHARE)
