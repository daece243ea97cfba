"""The allocator of the C library."""

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_SCARCE_SHARE = 0.75  # of the free memory: gaps between blocks are up to a quarter of what is in use


def keep_freed_memory(peak_bytes: int = 0, free_bytes: int = sys.maxsize) -> None:
    """Lets malloc keep up to 256 MiB of freed memory, including blocks of up to 32 MiB.

    By default malloc returns much of what an update frees to the system, and each minibatch spends up to 6% of its time
    to get it back page by page. Where memory is scarce, blocks above 4 MiB are returned at once instead, at up to 30%
    of the time. Does nothing if the user has set malloc's environment variables.

    Args:
        peak_bytes: what this process is going to need.
        free_bytes: what it may take.
    """
    user_settings = [name for name in os.environ if name.startswith("MALLOC_")]
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None and not user_settings and "glibc.malloc" not in os.environ.get("GLIBC_TUNABLES", ""):
        is_scarce = peak_bytes > _SCARCE_SHARE * free_bytes
        set_option(_TRIM_THRESHOLD, 1 << (17 if is_scarce else 28))  # 17 is glibc's own
        set_option(_MMAP_THRESHOLD, 1 << (22 if is_scarce else 25))
