"""The guard's decision: from the ranks' statuses to a verdict, without a clock, store or process.

Each check counts at most a second, so that a detector that was itself stopped blames nobody.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipedream.runtime.activity import Activity
from pipedream.services.failure.processes import RankProcess

SILENT_S = 6.0
"""A rank that has sent no heartbeat, and has not run, for this long has failed. A failed run must end within 15 s."""

AWAY_S = 8.0  # where it cannot be seen whether it runs
# Of a rank that runs: what holds Python's lock for 0.5 s, also against its guard, takes 10 s on a busy machine.
RUNNING_S = 60.0

STUCK_AFTER_S = 10.0
"""Default for how long a task may take: ops take milliseconds to seconds."""

UNREACHED = "this rank cannot reach the others and ends"
_MAX_STEP_S = 1.0
_FIRST_TASKS = 3  # of a kind, which may compile, allocate or start the loader's processes
_TASK_TIMES = 20.0
_RESENT_TIMES = 3  # of one packet, after which Linux suspects the path too (tcp_retries1)
_GPU_TIMES = 6.0  # times the limit of a task; nothing between two marks of a GPU takes nearly as long


@dataclass(frozen=True)
class RankStatus:
    """The status that a rank sends with each heartbeat; `count` must keep growing until the rank has `ended`.

    `calls` counts the calls in `session` that all ranks must make; `last_calls` has (name, minibatches) of the last.
    `resent`: connection to the rank that reads this -> how often its oldest packet was sent again (`lost_packets`).
    """

    count: int
    where: str
    process: RankProcess
    ended: bool = False
    interrupts: int = 0
    session: int = 0
    calls: int = 0
    last_calls: Sequence[Sequence[Any]] = ()
    resent: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """The judgement that a rank has failed.

    Attributes:
        where: its last activity.
        unresponsive: its process may be killed if it still exists.
        store_lost: the other ranks cannot be informed.
        status: see `WorkerError`.
    """

    rank: int
    where: str
    cause: str
    advice: str = ""
    unresponsive: bool = False
    store_lost: bool = False
    status: int = 1


@dataclass
class _Silence:
    """How long a process has not been heard, and how long it has not run either."""

    silent_s: float = 0.0
    still_s: float = 0.0
    run_ns: int | None = None  # None if that cannot be seen here

    def last(self, since_s: float, process: RankProcess | None, *, is_seen: bool = False) -> None:
        run_ns = None if process is None else process.read_run_ns()
        runs = is_seen if run_ns is None else self.run_ns not in (None, run_ns)
        self.silent_s += since_s
        self.still_s = 0.0 if runs else self.still_s + since_s
        self.run_ns = run_ns

    @property
    def is_too_long(self) -> bool:
        return self.silent_s > RUNNING_S or self.still_s > (AWAY_S if self.run_ns is None else SILENT_S)


class FailureDetector:
    """Judges the other ranks, the store, and this rank's own main thread.

    Args:
        stuck_after_s: how long any task may take; 0 for no limit.

    Attributes:
        server: the process that serves the store, where it is on this machine and no rank.
        statuses: other rank -> its newest status.
    """

    def __init__(self, rank: int, activity: Activity, *, stuck_after_s: float, store_owner: str) -> None:
        self._rank = rank
        self._activity = activity
        self._stuck_after_s = stuck_after_s
        self._store_owner = store_owner
        self.server: RankProcess | None = None
        self.statuses: dict[int, RankStatus] = {}
        self._silences: dict[int, _Silence] = {}
        self._resent: dict[int, dict[str, tuple[int, float]]] = {}  # rank -> connection -> times, since when
        self._clock_s = 0.0
        self._exchanged_at_s: float | None = None
        self._checked_at_s: float | None = None
        self._unanswered = _Silence()
        self._task: tuple[str, int] | None = None
        self._task_s = 0.0
        self._gpu_mark: object = None
        self._gpu_s = 0.0

    def watch(self, activity: Activity, stuck_after_s: float) -> None:
        """Judges another activity of this rank from here on."""
        self._activity, self._stuck_after_s = activity, stuck_after_s

    def receive(self, now_s: float, statuses: Mapping[int, RankStatus]) -> None:
        """Takes the statuses from an exchange that has just succeeded."""
        since_s = min(now_s - (self._exchanged_at_s or now_s), _MAX_STEP_S)
        self._exchanged_at_s, self._clock_s = now_s, self._clock_s + since_s
        self._unanswered = _Silence()
        counts = {rank: status.count for rank, status in self.statuses.items()}
        heard = {rank: status for rank, status in statuses.items() if status.count != counts.get(rank) or status.ended}
        # A rank that is heard sees whether the others of its machine run.
        hosts = {status.process.host for status in heard.values() if not status.ended} - {""}
        for rank, status in statuses.items():
            if rank not in heard:
                self._silences[rank].last(since_s, status.process, is_seen=status.process.host in hosts)
                continue
            self._silences[rank] = _Silence()
            old, new = self._resent.get(rank, {}), status.resent
            begun_s = {name: begin_s for name, (times, begin_s) in old.items() if times <= new.get(name, 0)}
            self._resent[rank] = {name: (times, begun_s.get(name, self._clock_s)) for name, times in new.items()}
        self.statuses |= statuses

    def check(self, now_s: float) -> Verdict | None:
        since_s = 0.0 if self._checked_at_s is None else min(now_s - self._checked_at_s, _MAX_STEP_S)
        self._checked_at_s = now_s
        verdict = self._check_gpu(since_s) or self._check_stuck(since_s) or self._check_packets()
        return verdict or self._check_silence() or self._check_calls() or self._check_store(since_s)

    def _check_calls(self) -> Verdict | None:
        """Returns a verdict if another rank made a call that this rank did not make at the same point."""
        activity = self._activity
        minibatches = activity.loop_minibatches  # before the calls, so that a call made meanwhile counts
        calls = len(activity.calls)
        for rank, status in sorted(self.statuses.items()):
            if status.session != activity.session:
                continue
            for number, (name, at) in enumerate(status.last_calls, status.calls - len(status.last_calls)):
                if number < calls and activity.calls[number] != (name, at):
                    own_name, own_at = activity.calls[number]
                    difference = f"rank {self._rank} called {own_name} {_spell_after(own_at)}"
                elif number == calls and minibatches > at:
                    difference = f"rank {self._rank} did not"
                else:
                    continue
                return Verdict(
                    rank,
                    status.where,
                    f"this rank called {name} {_spell_after(at)}, {difference}",
                    "every rank must make the same calls: without a condition on the rank around them; what rank 0 "
                    "alone needs it is given alone",
                )
        return None

    def _check_silence(self) -> Verdict | None:
        for rank, silence in sorted(self._silences.items()):
            if silence.is_too_long:
                cause = f"has sent no heartbeat for {silence.silent_s:.1f} s (stopped, swapping, machine or link gone)"
                return Verdict(rank, self.statuses[rank].where, cause, unresponsive=True)
        return None

    def _check_packets(self) -> Verdict | None:
        """Returns a verdict if packets of another rank do not arrive here, though its heartbeats do."""
        # How long a message takes says nothing on a slow link, but there the kernel soon counts for another packet.
        for rank, resent in self._resent.items() if self._stuck_after_s else ():
            for times, begin_s in resent.values():
                for_s = self._clock_s - begin_s
                if for_s > self._stuck_after_s and times >= _RESENT_TIMES and not self._silences[rank].silent_s:
                    return self._find_stuck(
                        f"rank {rank}, in {self.statuses[rank].where}, has sent this rank a packet {times + 1} times "
                        f"in {for_s:.1f} s, which does not arrive, though small messages do",
                        "check the MTU between the machines (ping -M do -s 1472); if it may be lost for this long",
                    )
        return None

    def _check_store(self, since_s: float) -> Verdict | None:
        status = self.statuses.get(0) if self._store_owner == "rank 0" else None
        server, is_late = status.process if status else self.server, self._unanswered.silent_s > _MAX_STEP_S
        self._unanswered.last(since_s, server if is_late else None)
        if not self._unanswered.is_too_long or (status is not None and status.ended):
            return None
        cause = (
            f"the store, which {self._store_owner} serves, has not answered for {self._unanswered.silent_s:.1f} s "
            f"(stopped, ended, machine or link gone, wrong MTU); {UNREACHED}"
        )
        return Verdict(self._rank, self._activity.where, cause, store_lost=True)

    def _check_gpu(self, since_s: float) -> Verdict | None:
        """Returns a verdict if the GPU makes no progress in its queue; nothing else times out that wait."""
        mark = self._activity.gpu_mark()
        self._gpu_s = self._gpu_s + since_s if mark is not None and mark is self._gpu_mark else 0.0
        self._gpu_mark = mark
        if not self._stuck_after_s or self._gpu_s <= _GPU_TIMES * self._stuck_after_s:
            return None
        return self._find_stuck(
            f"the GPU has made no progress for {self._gpu_s:.1f} s",
            "check dmesg and nvidia-smi for errors of the card or its links; if a kernel may take this long",
        )

    def _check_stuck(self, since_s: float) -> Verdict | None:
        task = self._activity.task
        if task is None or task != self._task:
            self._task = task
            self._task_s = 0.0
            return None
        self._task_s += since_s
        durations = self._activity.durations.get(task[0])
        if not self._stuck_after_s or durations is None or durations.done < _FIRST_TASKS:
            return None
        limit_s = max(self._stuck_after_s, _TASK_TIMES * durations.longest_s)
        if self._task_s <= limit_s:
            return None
        gpu = f", nor on the GPU for {self._gpu_s:.1f} s" if self._gpu_s > self._task_s / 2 else ""
        longest = f"the longest one before took {durations.longest_s:.2g} s"
        return self._find_stuck(
            f"no progress in {task[0]} for {self._task_s:.1f} s{gpu}; {longest}", "if it may take this long"
        )

    def _find_stuck(self, cause: str, advice: str) -> Verdict:
        limit = f"raise stuck_after_s (--stuck-after), now {self._stuck_after_s:g} s; 0 turns this check off"
        return Verdict(self._rank, self._activity.where, cause, f"{advice}, {limit}")


def _spell_after(minibatches: int) -> str:
    return f"after {minibatches} minibatch{'es' * (minibatches != 1)}"
