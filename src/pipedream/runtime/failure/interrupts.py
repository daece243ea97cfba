"""Ctrl-C in order: the data stops, the pipeline drains, then the caller gets a KeyboardInterrupt."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Interrupts:
    """Records SIGINT instead of raising it; a second one raises KeyboardInterrupt unless `patient`.

    A worker must be patient: its launcher passes on what the terminal has sent it already.

    Attributes:
        count: signals so far.
    """

    def __init__(self, patient: bool) -> None:
        self._patient = patient
        self._before: Any = None
        self.heard = False
        self.count = 0

    @property
    def may_raise(self) -> bool:
        """Whether a KeyboardInterrupt may be a signal's, not one that the user's code has raised."""
        return self.heard or self._before is None

    def start(self) -> None:
        """Does nothing outside of the main thread, which alone receives signals."""
        if self._before is None and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._hear)

    def stop(self) -> None:
        if self._before is not None:
            # A worker of the command, which would end at once, has only files left to write.
            ignored = self._patient and self._before is signal.SIG_DFL
            signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else self._before)
            self._before = None

    def _hear(self, number: int, frame: Any) -> None:
        if self.heard and not self._patient:
            raise KeyboardInterrupt
        self.heard = True
        self.count += 1
