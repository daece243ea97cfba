"""A rank's activity, written by its main thread and read by the guard's threads; and Ctrl-C and SIGTERM.

Only tasks (loading, a forward, a backward, an optimizer's step) and a GPU's queue can be stuck. Waiting for a message,
the caller's loop and saving are never judged.
"""

import os
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
        interrupts: signals that this rank got.
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
        self.interrupts = Interrupts(patient=False)
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
    def waiting(self) -> Iterator[None]:
        """Context of a wait for another rank within a task, which nobody judges meanwhile."""
        task, self.task = self.task, None
        try:
            yield
        finally:
            if task is not None:
                self.begin(task[0])

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


class Terminated(SystemExit, KeyboardInterrupt):
    """SIGTERM, raised as a KeyboardInterrupt; uncaught it ends the process with status 143."""

    STATUS = 128 + signal.SIGTERM

    def __init__(self) -> None:
        super().__init__(self.STATUS)


class Interrupts:
    """Handles Ctrl-C and SIGTERM: the data stops, the pipeline drains, then the caller gets a KeyboardInterrupt.

    Records signals instead of raising them; a second one raises unless `patient`. SIGTERM is taken only where nobody
    else handles it.

    A worker must be patient: its launcher sends it the signal that the terminal has already sent it.

    Attributes:
        count: signals so far.
        is_terminated: SIGTERM was the last.
    """

    def __init__(self, patient: bool) -> None:
        self._patient = patient
        self._process = os.getpid()
        self._old_actions: dict[int, Any] = {}
        self.is_interrupted = self.is_terminated = False
        self.count = 0

    @property
    def may_raise(self) -> bool:
        """Whether a KeyboardInterrupt may come from a signal rather than from the user's code."""
        return self.is_interrupted or not self._old_actions

    def start(self) -> None:
        """Installs the handlers; does nothing outside of the main thread, which alone receives signals."""
        if not self._old_actions and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if number == signal.SIGINT or signal.getsignal(number) is signal.SIG_DFL:
                    self._old_actions[number] = signal.signal(number, self._record_signal)

    def stop(self) -> None:
        # A worker of the command only has files left to write, and the default handler would end it at once.
        ignored = self._patient and self._old_actions.get(signal.SIGINT) is signal.SIG_DFL
        for number, action in self._old_actions.items():
            signal.signal(number, signal.SIG_IGN if ignored else action)
        self._old_actions = {}

    def give_up(self) -> None:
        """Lets SIGTERM end this process, also one that came before: the peers are gone, and no drain can end."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and self._old_actions.pop(signal.SIGTERM, None) is not None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self.is_terminated:
                os.kill(os.getpid(), signal.SIGTERM)

    def make_error(self) -> KeyboardInterrupt:
        """Returns what the last signal is raised as."""
        return Terminated() if self.is_terminated else KeyboardInterrupt()

    def _record_signal(self, number: int, frame: Any) -> None:
        if number == signal.SIGTERM and os.getpid() != self._process:  # a fork of the user's, which he may want to end
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.is_terminated = number == signal.SIGTERM
        if self.is_interrupted and not self._patient:
            raise self.make_error()
        self.is_interrupted = True
        self.count += 1
