"""The heartbeat: the status of each rank and the first failure, exchanged through the process group's store.

In its own thread, because a call to a stopped store returns only after its timeout.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from pipedream.runtime.failure.activity import Activity
from pipedream.runtime.failure.process import RankProcess
from pipedream.runtime.failure.verdict import RankStatus, Verdict

PERIOD_S = 0.5
_ANSWER = timedelta(seconds=2)
_REPORT = "failure"
_CALLS = 8  # more than are made from beat to beat where it matters: most of them wait for the others


class Heartbeat:
    """Writes this rank's status and reads those of the others until `end`.

    Args:
        store: a client that nobody else uses, with keys of this run only.

    Attributes:
        exchanges: successful ones so far.
        statuses: rank -> newest status of the others.
        report: (reporting rank, failure), the first.
    """

    def __init__(
        self, store: Any, rank: int, ranks: int, where: Callable[[], str], activity: Callable[[], Activity] = Activity
    ) -> None:
        self._store = store
        self._store.set_timeout(_ANSWER)
        self._rank = rank
        self._keys = {other: f"beat/{other}" for other in range(ranks) if other != rank}
        self._seen: list[int] = []
        self._where = where
        self._activity = activity
        self._process = RankProcess.this()
        self._count = 0
        self._failure_here: Verdict | None = None
        self._ending = False
        self._wake = threading.Event()
        self._exchanged = threading.Event()
        self.exchanges = 0
        self.statuses: dict[int, RankStatus] = {}
        self.report: tuple[int, Verdict] | None = None
        self._thread = threading.Thread(target=self._run, name="pipedream-heartbeat", daemon=True)
        self._thread.start()

    def report_failure(self, verdict: Verdict, wait_s: float = 1.0) -> tuple[int, Verdict] | None:
        """Returns the failure reported first, perhaps another rank's; None if the store does not answer."""
        self._failure_here = verdict
        end_s = time.monotonic() + wait_s
        while self.report is None and time.monotonic() < end_s:
            self._exchange_now(end_s)
        return self.report

    def newest_failure(self, wait_s: float) -> tuple[int, Verdict] | None:
        """Returns the first reported failure, asking the store again."""
        end_s, enough = time.monotonic() + wait_s, self.exchanges + 2  # the first may have been under way before
        while self.report is None and self.exchanges < enough and time.monotonic() < end_s:
            self._exchange_now(end_s)
        return self.report

    def _exchange_now(self, end_s: float) -> None:
        self._exchanged.clear()
        self._wake.set()
        self._exchanged.wait(max(0.0, end_s - time.monotonic()))

    def end(self) -> None:
        """Marks this rank as ended in order."""
        self._ending = True
        self._wake.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while True:
            self._wake.clear()
            ending = self._ending
            try:
                self._exchange(ending)
            except (RuntimeError, ValueError):
                # The detector sees that no exchange succeeds. A late answer could be taken
                # for that of the next call, so the next call uses a new connection.
                self._reconnect()
            else:
                self._exchanged.set()
            if ending:
                return
            self._wake.wait(PERIOD_S)

    def _reconnect(self) -> None:
        with suppress(RuntimeError):
            fresh = self._store.clone()
            fresh.set_timeout(_ANSWER)
            self._store = fresh

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
            ending,
            interrupts=activity.interrupts(),
            session=activity.session,
            calls=len(calls),
            last_calls=calls[-_CALLS:],
        )
        self._store.set(f"beat/{self._rank}", json.dumps(asdict(status)))
        if ending:
            return
        for rank, key in self._keys.items():
            if rank not in self._seen and self._store.check([key]):
                self._seen.append(rank)
        if self._seen:
            texts = self._store.multi_get([self._keys[rank] for rank in self._seen])
            self.statuses = {rank: _parse_status(text) for rank, text in zip(self._seen, texts, strict=True)}
        if self.report is None and self._store.check([_REPORT]):
            self.report = _parse_report(self._store.get(_REPORT))
        self.exchanges += 1


def _parse_status(text: bytes) -> RankStatus:
    fields = json.loads(text)
    return RankStatus(**fields | {"process": RankProcess(**fields["process"])})


def _parse_report(text: bytes) -> tuple[int, Verdict]:
    reporter, fields = json.loads(text)
    return int(reporter), Verdict(**fields)
