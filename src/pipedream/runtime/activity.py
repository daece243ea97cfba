"""A rank's activity, written by its main thread and read by the guard's threads; and Ctrl-C.

Only tasks (loading, a forward, a backward, an optimizer's step) and a GPU's queue can be stuck. Waiting for a message,
the caller's loop and saving are never judged.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class TaskDurations:
    """How long tasks of one kind take."""

    done: int = 0
    longest_s: float = 0.0


class Activity:
    """The activity of a rank.

    Attributes:
        doing: what is done outside of the program ("the training loop"); None while it runs.
        task: (kind, number); None while the rank waits or its caller runs.
        gpu_mark: returns the oldest mark in the GPU's queue that it has not reached; None while it is idle.
        interrupts: returns how often this rank was interrupted.
        calls: (name, minibatches that the loop had received) of each call that all ranks must make.
        loop_minibatches: how many minibatches the loop has received.
        session: number of this session among those with the same guard.
    """

    def __init__(self) -> None:
        self.doing: str | None = "starting"
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
        duration_s = time.monotonic() - self._start_s
        durations = self.durations.setdefault(self.task[0], TaskDurations())
        self.task = None
        durations.done += 1
        durations.longest_s = max(durations.longest_s, duration_s)

    def stop(self) -> None:
        """Drops a task that failed."""
        self.task = None

    @contextmanager
    def at(self, doing: str) -> Iterator[None]:
        """Context of an activity other than an op."""
        old_doing, self.doing = self.doing, doing
        try:
            yield
        finally:
            self.doing = old_doing

    @property
    def where(self) -> str:
        task = self.task
        if self.doing is not None and task is None:
            return self.doing
        words = self.describe_op()
        return f"{words} ({task[0]})" if task is not None and task[0] == "loading data" else words


class Interrupts:
    """Handles Ctrl-C: the data stops, the pipeline drains, then the caller gets a KeyboardInterrupt.

    Records SIGINT instead of raising it; a second one raises KeyboardInterrupt unless `patient`.

    A worker must be patient: its launcher sends it the signal that the terminal has already sent it.

    Attributes:
        count: signals so far.
    """

    def __init__(self, patient: bool) -> None:
        self._patient = patient
        self._old_action: Any = None
        self.is_interrupted = False
        self.count = 0

    @property
    def may_raise(self) -> bool:
        """Whether a KeyboardInterrupt may come from a signal rather than from the user's code."""
        return self.is_interrupted or self._old_action is None

    def start(self) -> None:
        """Installs the handler; does nothing outside of the main thread, which alone receives signals."""
        if self._old_action is None and threading.current_thread() is threading.main_thread():
            self._old_action = signal.signal(signal.SIGINT, self._record_signal)

    def stop(self) -> None:
        if self._old_action is not None:
            # A worker of the command only has files left to write, and the default handler would end it at once.
            ignored = self._patient and self._old_action is signal.SIG_DFL
            signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else self._old_action)
            self._old_action = None

    def _record_signal(self, number: int, frame: Any) -> None:
        if self.is_interrupted and not self._patient:
            raise KeyboardInterrupt
        self.is_interrupted = True
        self.count += 1
