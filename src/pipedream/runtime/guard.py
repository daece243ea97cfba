"""When one worker fails, all end: the guard.

A failing worker writes what happened into the process group's store. A thread of each other worker looks
there every tenth of a second. Its main thread usually wakes by itself, because the dead worker's
connections close; one that waits for a healthy third worker would wait on, and a blocking wait of gloo
cannot be called off from Python, so after a grace the thread ends the process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..core.errors import PeerError, WorkerError

__all__ = ["Guard"]

_LOOK_S = 0.1
_GRACE_S = 5.0


class Guard:
    """Watches for a failure of any rank of a run.

    Args:
        store: of the process group.
        rank: of this worker.
        on_hard_exit: called with the message before the process is ended from the thread.
    """

    def __init__(self, store: Any, rank: int, on_hard_exit: Callable[[str], None] | None = None) -> None:
        self._store = store
        self._rank = rank
        # Runs of one process group follow one another; a failure of an earlier one is over.
        self._key = f"pipedream/failure/{store.add(f'pipedream/runs/{rank}', 1)}"
        self._on_hard_exit = on_hard_exit or (lambda text: print(text, file=sys.stderr, flush=True))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pipedream-guard", daemon=True)
        self._thread.start()

    def report(self, error: WorkerError) -> None:
        """Tells all ranks that this one failed; the first report of a run counts."""
        text = json.dumps([error.rank, error.where, error.cause, error.advice])
        with suppress(RuntimeError):  # where the store's own process is gone, the others notice that
            self._store.compare_set(self._key, "", text)

    def failure(self, wait_s: float = 3.0) -> PeerError | None:
        """Returns the failure that another rank has reported, waiting for it a little."""
        end = time.monotonic() + wait_s
        while True:
            found = self._read()
            if found is not None or time.monotonic() > end:
                return found
            time.sleep(_LOOK_S / 2)

    def end(self) -> None:
        """Stops watching."""
        self._over.set()
        self._thread.join(timeout=2.0)

    def _read(self) -> PeerError | None:
        try:
            if not self._store.check([self._key]):
                return None
            rank, where, cause, advice = json.loads(self._store.get(self._key))
        except (RuntimeError, ValueError):
            return None
        return None if rank == self._rank else PeerError(rank, where, cause, advice)

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            found = self._read()
            if found is not None:
                if not self._over.wait(_GRACE_S):
                    self._on_hard_exit(f"rank {self._rank} ends because another failed: {found}")
                    os._exit(1)
                return
