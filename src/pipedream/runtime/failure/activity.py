"""The activity of a rank, written by its main thread and read by the guard's threads; and Ctrl-C.

Only a task can be stuck: loading, a forward, a backward, an optimizer's step; and a GPU with what it was given. Waiting
for a message, the caller's own loop and saving are never judged.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class TaskDurations:
    """How long tasks of one kind take."""

    def __init__(self) -> None:
        self.done = 0
        self.longest_s = 0.0


class Activity:
    """The activity of a rank.

    Attributes:
        place: what is done outside of the program ("the training loop"); None while it runs.
        task: (kind, number); None while the rank waits or its caller runs.
        gpu_mark: returns what the GPU has not reached yet and was given first; None while it has nothing to do.
        interrupts: returns how often this rank was interrupted.
        calls: (name, minibatches that the loop had been given) of each call that all ranks must make.
        loop_minibatches: that the loop has been given so far.
        session: distinguishes this one from earlier ones with the same guard.
    """

    def __init__(self) -> None:
        self.place: str | None = "starting"
        self.task: tuple[str, int] | None = None
        self.durations: dict[str, TaskDurations] = {}
        self.describe_op: Callable[[], str] = lambda: "the start"
        self.gpu_mark: Callable[[], object] = lambda: None
        self.interrupts: Callable[[], int] = lambda: 0
        self.calls: list[tuple[str, int]] = []
        self.loop_minibatches = 0
        self.session = 0
        self._number = 0
        self._start_s = 0.0

    def begin(self, kind: str) -> None:
        self._number += 1
        self._start_s = time.monotonic()
        self.task = (kind, self._number)

    def end(self) -> None:
        if self.task is None:
            return
        took_s = time.monotonic() - self._start_s
        durations = self.durations.get(self.task[0])
        if durations is None:
            durations = self.durations[self.task[0]] = TaskDurations()
        self.task = None
        durations.done += 1
        durations.longest_s = max(durations.longest_s, took_s)

    def stop(self) -> None:
        """Forgets the task, which failed."""
        self.task = None

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Context of anything that is not an op."""
        before, self.place = self.place, place
        try:
            yield
        finally:
            self.place = before

    @property
    def where(self) -> str:
        task = self.task
        if self.place is not None and task is None:
            return self.place
        words = self.describe_op()
        return f"{words} ({task[0]})" if task is not None and task[0] == "loading data" else words


class Interrupts:
    """Ctrl-C in order: the data stops, the pipeline drains, then the caller gets a KeyboardInterrupt.

    Records SIGINT instead of raising it; a second one raises KeyboardInterrupt unless `patient`.

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
        """A KeyboardInterrupt may be a signal's, not one that the user's code has raised."""
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
