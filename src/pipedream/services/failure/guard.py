"""The guard: when one worker fails, all workers end.

The ranks exchange their statuses and the first failure through the process group's store (`Heartbeat`); a thread judges
them (`verdict.py`). When a worker dies, its connections close and the others usually wake up. But a worker that waits
for a third one, stopped or healthy, would wait for ever, as a blocking wait of gloo cannot be cancelled from Python. So
the thread ends its process after a grace period. It also kills an unresponsive worker of the same machine.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed re-exports them privately

from pipedream.core.errors import PeerError, PipelineError, WorkerError, is_broken_connection
from pipedream.core.user_code import elide_middle, with_place
from pipedream.runtime.activity import Activity
from pipedream.runtime.unguarded import Unguarded
from pipedream.services.failure.lost_packets import list_resent, receives
from pipedream.services.failure.processes import (
    LOST_CONNECTION,
    RankProcess,
    is_launched_here,
    is_torchruns_worker,
    watch_from_outside,
    write_doing,
    write_error,
)
from pipedream.services.failure.same_settings import check_same_settings, describe_setting
from pipedream.services.failure.verdict import STUCK_AFTER_S, UNREACHED, FailureDetector, RankStatus, Verdict
from pipedream.services.joining.joining import check_same_software

_POLL_S = 0.1
_GRACE_S = 3.0
_NOTICE_S = 3.0  # how long the others may take to read of a failure or of an end

_PEER_WORDS = ("Connection reset by peer", "Connection closed by peer")
"""Words of broken connections in errors that have lost their type."""

_CONNECTION_WAIT_S = 3.0
"""How long to wait for another rank's report of why a connection broke."""

PERIOD_S = 0.5
_ANSWER_TIMEOUT = timedelta(seconds=2)
"""Limit for one answer of the store. A heartbeat takes three, within `SILENT_S`: it works on links of 0.5 s one way."""
_MAX_CALL_S = 7.0  # with a store that has stopped: one answer, then two tries to connect
_CONNECT_S = 0.5
_REPORT = "failure"
_SENT_CALLS = 8  # the last ones; ranks make fewer between heartbeats, as most calls wait for the others

_job_guard: ContextVar[Guard | None] = ContextVar("job_guard", default=None)


class Heartbeat:
    """Writes this rank's status and reads those of the others until `end`.

    Args:
        store: a client of this heartbeat alone, with keys of this run alone.

    Attributes:
        exchanges: how many have succeeded.
        statuses: other rank -> its newest status.
        report: (reporting rank, failure) of the first report.
    """

    def __init__(
        self, store: Any, rank: int, ranks: int, where: Callable[[], str], activity: Callable[[], Activity] = Activity
    ) -> None:
        self._store = store
        self._store.set_timeout(_ANSWER_TIMEOUT)
        self._address = _find_address(store)
        self._is_connected = True
        self._rank = rank
        self._keys = {other: f"beat/{other}" for other in range(ranks) if other != rank}
        self._seen_ranks: list[int] = []
        self._where = where
        self._activity = activity
        self._process = RankProcess.this()
        self._count = 0
        self._failure_here: Verdict | None = None
        self._has_ended = False
        self._ending = False
        self._wake = threading.Event()
        self._exchanged = threading.Event()
        self.exchanges = 0
        self.statuses: dict[int, RankStatus] = {}
        self.report: tuple[int, Verdict] | None = None
        self._thread = threading.Thread(target=self._run, name="pipedream-heartbeat", daemon=True)
        self._thread.start()

    def report_failure(self, verdict: Verdict, wait_s: float = 1.0) -> tuple[int, Verdict] | None:
        """Reports a failure; returns the first report, perhaps another rank's, if the store answers."""
        self._failure_here = verdict
        end_s = time.monotonic() + wait_s
        while self.report is None and time.monotonic() < end_s:
            self._exchange_now(end_s)
        return self.report

    def find_failure(self, wait_s: float) -> tuple[int, Verdict] | None:
        """Returns the first reported failure, after reading the store again."""
        end_s, enough = time.monotonic() + wait_s, self.exchanges + 2  # the first may have been under way before
        while self.report is None and self.exchanges < enough and time.monotonic() < end_s:
            self._exchange_now(end_s)
        return self.report

    def _exchange_now(self, end_s: float) -> None:
        self._exchanged.clear()
        self._wake.set()
        self._exchanged.wait(max(0.0, end_s - time.monotonic()))

    def wait_until_heard(self, wait_s: float) -> None:
        """Marks this rank as finished, and waits two heartbeats until the others have read it."""
        self._has_ended = True
        end_s, enough = time.monotonic() + wait_s, self.exchanges + 2  # the first may have been under way before
        counts: dict[int, int] = {}
        while self._is_connected and time.monotonic() < end_s:
            self._exchange_now(time.monotonic() + _POLL_S)
            if self.exchanges >= enough:
                counts = counts or {rank: status.count for rank, status in self.statuses.items()}
                if all(s.ended or s.count > counts.get(rank, 0) + 1 for rank, s in self.statuses.items()):
                    return
            time.sleep(_POLL_S)

    def end(self) -> None:
        """Marks this rank as finished."""
        self._has_ended = self._ending = True
        self._wake.set()
        # If the thread returned from C++ while the interpreter ends, it would abort the process.
        self._thread.join(_MAX_CALL_S)

    def _run(self) -> None:
        while True:
            self._wake.clear()
            ending = self._ending
            try:
                self._connect()
                self._exchange(ending)
            except (RuntimeError, ValueError, OSError):
                # The detector notices that no exchange succeeds. The next call uses a new connection, on which no late
                # answer can be mistaken for its own.
                self._is_connected = False
            else:
                self._exchanged.set()
            if ending:
                self._store = None  # with its connection
                return
            self._wake.wait(PERIOD_S)

    def _connect(self) -> None:
        if self._is_connected:
            return
        if self._address is not None:  # torch would try for seconds
            socket.create_connection(self._address, _CONNECT_S).close()
        client = self._store.clone()
        client.set_timeout(_ANSWER_TIMEOUT)
        self._store, self._is_connected = client, True

    def _exchange(self, ending: bool) -> None:
        if self._failure_here is not None and self.report is None:
            text = json.dumps([self._rank, asdict(self._failure_here)])
            self.report = _parse_report(self._store.compare_set(_REPORT, "", text))
        self._count += 1
        activity, where = self._activity(), self._where()
        calls = list(activity.calls)
        status = RankStatus(
            self._count,
            where,
            self._process,
            self._has_ended,
            interrupts=activity.interrupts.count,
            session=activity.session,
            calls=len(calls),
            last_calls=calls[-_SENT_CALLS:],
            resent=list_resent(),
        )
        self._store.set(f"beat/{self._rank}", json.dumps(asdict(status)))
        if ending:
            return
        for rank, key in self._keys.items():
            if rank not in self._seen_ranks and self._store.check([key]):
                self._seen_ranks.append(rank)
        if self._seen_ranks:
            texts = self._store.multi_get([self._keys[rank] for rank in self._seen_ranks])
            self.statuses = {rank: _parse_status(text) for rank, text in zip(self._seen_ranks, texts, strict=True)}
        if self.report is None and self._store.check([_REPORT]):
            self.report = _parse_report(self._store.get(_REPORT))
        self.exchanges += 1


def _find_address(store: Any) -> tuple[str, int] | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def _parse_status(text: bytes) -> RankStatus:
    fields = json.loads(text)
    resent = {connection: times for connection, times in fields["resent"].items() if receives(connection)}
    return RankStatus(**fields | {"process": RankProcess(**fields["process"]), "resent": resent})


def _parse_report(text: bytes) -> tuple[int, Verdict]:
    reporter, fields = json.loads(text)
    return int(reporter), Verdict(**fields)


class Guard(Unguarded):
    """Watches for a failure of any rank until `end`; every rank creates one, once they are in a process group."""

    _has_reported = False

    def __init__(self, rank: int, ranks: int, activity: Activity, *, stuck_after_s: float = STUCK_AFTER_S) -> None:
        store = dist.distributed_c10d._get_default_store()
        self._rank = rank
        self._activity = activity
        self._earlier_activities: list[Activity] = []
        self._sessions = 0
        self._store_is_rank_0s = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        owner = "rank 0" if self._store_is_rank_0s else "the launcher"
        self._detector = FailureDetector(rank, activity, stuck_after_s=stuck_after_s, store_owner=owner)
        if os.environ.get("GROUP_WORLD_SIZE") == "1":  # the launcher of this machine is the only one
            self._detector.server = RankProcess.of(os.getppid())
        client = _make_client(store, rank)
        self._heartbeat = Heartbeat(client, rank, ranks, lambda: self._activity.where, lambda: self._activity)
        watch_from_outside()
        self._parent = os.getppid()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pipedream-guard", daemon=True)
        self._thread.start()
        # A rank that ends without closing its pipeline must not seem stopped.
        atexit.register(self._end_at_exit)

    @classmethod
    def of_session(cls, rank: int, ranks: int, activity: Activity, stuck_after_s: float) -> Guard:
        """Returns the job's guard, which watches this activity until `end`, or a new one."""
        guard = _job_guard.get()
        if guard is None:
            return cls(rank, ranks, activity, stuck_after_s=stuck_after_s)
        guard._sessions += 1
        activity.session = guard._sessions
        guard._earlier_activities.append(guard._activity)
        guard._watch_activity(activity, stuck_after_s)
        return guard

    def _watch_activity(self, activity: Activity, stuck_after_s: float = STUCK_AFTER_S) -> None:
        self._activity = activity
        self._detector.watch(activity, stuck_after_s)

    @property
    def interrupts(self) -> int:
        return sum(status.interrupts for status in self._heartbeat.statuses.values())

    def check_same_software(self) -> None:
        check_same_software()

    def check_same(self, settings: Mapping[str, Any], group: dist.ProcessGroup) -> None:
        check_same_settings({name: describe_setting(value) for name, value in settings.items()}, group)

    def report(self, error: WorkerError) -> PeerError | None:
        first = self._heartbeat.report_failure(_make_verdict(error))
        if first is not None and first[0] != self._rank:
            return _make_peer_error(first[1])
        self._has_reported = True
        write_error(f"pipedream: {error}")  # now, as the launcher may end this process before it prints
        return None

    def first_cause(self, error: BaseException, where: str, status: int = 1) -> PipelineError:
        origin = error.__cause__ if isinstance(error, PipelineError) else error
        is_lost = is_broken_connection(origin) or any(words in str(error) for words in _PEER_WORDS)
        if is_lost and _is_raised_by_loader(origin):
            is_lost, error = False, WorkerError(self._rank, where, f"a process of the DataLoader has ended ({origin})")
        if is_lost:
            self._activity.interrupts.give_up()  # torchrun sends SIGTERM to the others of a worker that has failed
        first = self.wait_for_failure(_CONNECTION_WAIT_S if is_lost else 0.0)
        if first is not None:
            return first
        if is_lost:
            error = WorkerError(
                self._rank,
                where,
                f"{LOST_CONNECTION} (killed, out of memory, machine gone)",
                f"read what that worker printed last; torch's error: {elide_middle(str(origin or error))}",
            )
        elif not isinstance(error, WorkerError):
            cause = str(error) if isinstance(error, PipelineError) else with_place(error)
            error = WorkerError(self._rank, where, cause, status=status)
        return self.report(error) or error

    def wait_for_failure(self, wait_s: float = 3.0) -> PeerError | None:
        """Waits up to `wait_s` for another rank's report, and returns its error, or None.

        A report by this rank, even about another rank, does not count; a verdict of its guard does.
        """
        end = time.monotonic() + wait_s
        while True:
            report = self._heartbeat.find_failure(max(0.1, min(wait_s, 1.0)))
            if report is not None:
                is_own = self._has_reported and report[0] == self._rank
                return None if is_own or report[1].rank == self._rank else _make_peer_error(report[1])
            if time.monotonic() > end:
                return None
            time.sleep(_POLL_S / 2)

    def end(self) -> None:
        """Marks this rank as finished, unless its job continues."""
        if self._earlier_activities:
            self._watch_activity(self._earlier_activities.pop())
            return
        atexit.unregister(self._end_at_exit)
        if not self._stopped.is_set():
            self._stopped.set()
            if self._heartbeat.report is not None and self._store_is_rank_0s and not self._rank:
                self._wait_for_others()
            self._heartbeat.end()
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout=2.0)

    def _end_at_exit(self) -> None:
        # The store ends with this process, but the others may still have work to do.
        if self._store_is_rank_0s and not self._rank and self._heartbeat.report is None:
            self._heartbeat.wait_until_heard(_NOTICE_S)
        self.end()

    def _wait_for_others(self) -> None:
        """Keeps the store, which ends with this process, alive until the others have read the report."""
        end_s = time.monotonic() + _NOTICE_S
        while not all(status.ended for status in self._heartbeat.statuses.values()) and time.monotonic() < end_s:
            time.sleep(_POLL_S)

    def _watch(self) -> None:
        exchanges, doing = 0, ""
        while not self._stopped.wait(_POLL_S):
            if self._heartbeat.exchanges != exchanges:
                exchanges = self._heartbeat.exchanges
                self._detector.receive(time.monotonic(), self._heartbeat.statuses)
            if (new_doing := self._activity.where) != doing:
                doing = new_doing
                write_doing(doing)
            failure = self._heartbeat.report
            if failure is not None:
                self._end_process(failure[1])
                return
            verdict = self._check_launcher() or self._detector.check(time.monotonic())
            if verdict is not None:
                self._announce(verdict)
                return

    def _check_launcher(self) -> Verdict | None:
        """Returns a verdict if torchrun has ended; the workers of our own launcher end with it anyway."""
        if os.getppid() == self._parent or not is_torchruns_worker():
            return None
        cause = f"torchrun (process {self._parent}), which started this rank, has ended; its workers end"
        return Verdict(self._rank, self._activity.where, cause, store_lost=True)

    def _announce(self, verdict: Verdict) -> None:
        if self._stopped.is_set():
            return
        prints = True
        if verdict.store_lost:
            # Only one rank of this machine prints it, even if none has read the others' statuses.
            knows_nobody = not self._detector.statuses and not self._store_is_rank_0s
            prints = (
                os.environ.get("LOCAL_RANK", "0") == "0" if knows_nobody else self._rank == min(self._list_ranks_here())
            )
            if self._store_is_rank_0s and self._rank and (server := self._detector.statuses.get(0)):
                verdict = self._blame_rank_0(verdict, server.process)
        else:
            first = self._heartbeat.report_failure(verdict)
            if first is not None:
                prints, verdict = first[0] == self._rank, first[1]
        if prints:
            _print_verdict(verdict)
        if verdict.rank == self._rank:  # it is stuck, or cannot reach anyone
            _exit_now()
        self._end_process(verdict)

    def _blame_rank_0(self, verdict: Verdict, server: RankProcess) -> Verdict:
        if not server.is_local:
            return verdict
        cause = verdict.cause.replace(UNREACHED, "the others cannot reach it and end")
        return Verdict(0, self._detector.statuses[0].where, cause, unresponsive=True)

    def _list_ranks_here(self) -> list[int]:
        ranks = [
            rank for rank, status in self._detector.statuses.items() if status.process.is_local and not status.ended
        ]
        return [self._rank, *(rank for rank in ranks if rank or not self._store_is_rank_0s)]

    def _end_process(self, verdict: Verdict) -> None:
        """Kills an unresponsive process; ends this one unless the main thread does, after SIGTERM at once."""
        if verdict.unresponsive and verdict.rank != self._rank:
            status = self._detector.statuses.get(verdict.rank)
            if status is not None:
                status.process.kill()
        end_s = time.monotonic() + _GRACE_S
        while not self._stopped.wait(_POLL_S):
            if self._activity.interrupts.is_terminated or time.monotonic() > end_s:
                _exit_now()


@contextmanager
def guard_job(rank: int, ranks: int) -> Iterator[Activity]:
    """Context of a job, which may have sessions; yields its activity.

    A failure at any rank is raised as a `WorkerError` or `PeerError`. An error that all ranks raise is raised as it is.
    """
    activity = Activity()
    if ranks == 1 or _job_guard.get() is not None:
        yield activity
        return
    guard = Guard(rank, ranks, activity)
    token = _job_guard.set(guard)
    try:
        yield activity
    except (KeyboardInterrupt, PeerError):
        raise
    except BaseException as error:
        status = error.status if isinstance(error, PipelineError) else 1
        first = guard.first_cause(error, activity.where, status)
        if isinstance(error, PipelineError) and not isinstance(first, PeerError):
            error.is_first = True
            raise
        raise first from error
    finally:
        _job_guard.reset(token)
        guard._earlier_activities.clear()  # a session may have failed
        guard.end()


def _is_raised_by_loader(error: BaseException | None) -> bool:
    """Returns whether a connection to a process of a DataLoader has broken, not one between ranks."""
    frames = traceback.extract_tb(None if error is None else error.__traceback__)
    return any(Path(frame.filename).match("torch/utils/data/dataloader.py") for frame in frames)


def _make_client(store: Any, rank: int) -> Any:
    """Returns a client of the store with keys of this run's guard alone."""
    # Runs may share a process group, and restarts a store; failures of earlier runs must not count.
    number = store.add(f"pipedream/runs/{rank}", 1)
    key = f"pipedream/run/{number}"
    if rank == 0:
        store.set(key, uuid.uuid4().hex)
    return PrefixStore(f"pipedream/{store.get(key).decode()}", store.clone())


def _make_peer_error(verdict: Verdict) -> PeerError:
    return PeerError(verdict.rank, verdict.where, verdict.cause, verdict.advice, status=verdict.status)


def _make_verdict(error: WorkerError) -> Verdict:
    return Verdict(error.rank, error.where, error.cause, error.advice, status=error.status)


def _print_verdict(verdict: Verdict) -> None:
    """Prints a verdict once for the run, through our own launcher if it runs."""
    text = f"pipedream: {_make_peer_error(verdict)}"
    is_written = write_error(text, verdict=True)
    if not (is_written and is_launched_here()):
        with suppress(OSError):  # the terminal may be gone
            print(text, file=sys.stderr, flush=True)


def _exit_now() -> None:
    with suppress(Exception):
        for child in multiprocessing.active_children():
            child.kill()
    os._exit(1)
