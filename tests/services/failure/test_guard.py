"""Heartbeats over a store in memory, notes for the launcher, and whose process may be ended."""

from __future__ import annotations

import json
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import pipedream as pd
from pipedream.apps import cli
from pipedream.runtime import activity
from pipedream.services.failure import guard, lost_packets, processes
from pipedream.services.failure.verdict import SILENT_S, FailureDetector, RankStatus, Verdict

PERIOD_S = guard.PERIOD_S
THIS = processes.RankProcess.this()


class Store:
    """A store in memory."""

    def __init__(self) -> None:
        self.values, self.gone = dist.HashStore(), False

    def _call(self, name: str, *args: Any) -> Any:
        if self.gone:
            raise RuntimeError("Connection reset by peer")
        return getattr(self.values, name)(*args)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def clone(self) -> Store:
        return self


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def heartbeats(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[guard.Heartbeat]]:
    """The heartbeats of three ranks, faster than those of a run."""
    monkeypatch.setattr(guard, "PERIOD_S", 0.05)
    statuses = [guard.Heartbeat(store, rank, 3, lambda rank=rank: f"stage {rank}") for rank in range(3)]
    yield statuses
    for heartbeat in statuses:
        heartbeat.end()


def bare_guard(rank: int = 0, **parts: Any) -> guard.Guard:
    """Returns a guard without threads, which has these parts."""
    rank_guard = guard.Guard.__new__(guard.Guard)
    usual = {"rank": rank, "stopped": threading.Event(), "store_is_rank_0s": False, "activity": activity.Activity()}
    for name, part in (usual | parts).items():
        setattr(rank_guard, f"_{name}", part)
    return rank_guard


def detector_of(rank: int, statuses: dict[int, RankStatus], store_owner: str = "the launcher") -> FailureDetector:
    """Returns a detector that has received these statuses, and none since."""
    detector = FailureDetector(rank, activity.Activity(), stuck_after_s=1.0, store_owner=store_owner)
    detector.receive(0.0, statuses)
    return detector


def soon(holds: Callable[[], bool]) -> bool:
    """Tells whether something comes true within some seconds."""
    end = time.monotonic() + 10.0
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def test_a_link_of_half_a_second_suffices(heartbeats: list[guard.Heartbeat], monkeypatch: pytest.MonkeyPatch) -> None:
    """That is the limit which docs/checkpoints.md names; with one of 1 s all would end soon, as if out of reach."""
    assert soon(lambda: all(len(heartbeat.statuses) == 2 for heartbeat in heartbeats))
    assert {rank: status.where for rank, status in heartbeats[0].statuses.items()} == {1: "stage 1", 2: "stage 2"}
    calls: list[threading.Thread] = []
    plain = Store._call
    monkeypatch.setattr(Store, "_call", lambda *args: (calls.append(threading.current_thread()), plain(*args))[1])
    heartbeats[0]._exchange(False)
    answers = calls.count(threading.current_thread())
    assert PERIOD_S + 2 * 0.5 * answers < SILENT_S < PERIOD_S + 2 * 1.0 * answers
    assert timedelta(seconds=2 * 0.5) < guard._ANSWER_TIMEOUT


def test_who_reports_prints(heartbeats: list[guard.Heartbeat], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank reports the rank whose save has failed; if the first to do so is not that rank, it says so for it."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    full = pd.errors.WorkerError(0, "saving the checkpoint of minibatch 20", "No space left on device")
    for rank in (1, 0):
        rank_guard = bare_guard(rank=rank, heartbeat=heartbeats[rank])
        first = rank_guard.first_cause(full, "stage 0, 1F19")
        assert isinstance(rank_guard.first_cause(first, "stage 0, 1F19"), pd.errors.PeerError) == (rank == 0)
        assert str(first) == str(full)
        error = processes.read_error(tmp_path / "error.json")
        assert error == f"pipedream: {full}", "it is left before the launcher, which hears of a failure, ends this rank"


def test_a_bad_call_ends_all(heartbeats: list[guard.Heartbeat], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Also one that reports it second, or lost the connection: else the launcher may start them again."""
    guards = [bare_guard(rank, heartbeat=heartbeats[rank], earlier_activities=[]) for rank in range(3)]
    monkeypatch.setattr(guard, "Guard", lambda rank, *_: guards[rank])
    recipe, lost = pd.errors.RecipeError("no recipe"), RuntimeError("Connection closed by peer")
    for rank, error in ((1, recipe), (0, pd.errors.RecipeError("no recipe")), (2, lost)):
        guards[rank]._stopped.set()
        with pytest.raises(pd.PipelineError) as caught, guard.guard_job(rank, 3):
            raise error
        assert cli._report_error(pickle.loads(pickle.dumps(caught.value))) == 2
    assert capsys.readouterr().err == "pipedream: no recipe\n"


def test_after_sigterm_a_rank_does_not_wait_for_its_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun sends it to the others of a worker that has failed."""
    rank_guard, ends = bare_guard(0), list[None]()
    monkeypatch.setattr(guard, "_GRACE_S", 1e9)
    monkeypatch.setattr(guard, "_exit_now", lambda: (ends.append(None), rank_guard._stopped.set()))
    rank_guard._activity.interrupts.is_terminated = True
    rank_guard._end_process(Verdict(1, "stage 1", "it has failed"))
    assert ends == [None]


@pytest.mark.parametrize(("store_owner", "ended"), [("rank 0", False), ("the launcher", False), ("rank 0", True)])
def test_a_store_may_go_only_with_the_rank_0_that_has_finished(store_owner: str, ended: bool) -> None:
    """The verdict is also read as that of rank 0, which serves the store, on the others."""
    detector = detector_of(1, {0: RankStatus(1, "stage 0", THIS, ended=ended)}, store_owner)
    verdict = next(filter(None, map(detector.check, range(80))), None)
    assert (verdict is None) == ended
    if verdict is not None:
        assert verdict.cause.endswith("; this rank cannot reach the others and ends")
        blamed = bare_guard(detector=detector)._blame_rank_0(verdict, THIS)
        assert blamed.rank == 0
        assert blamed.cause.endswith("; the others cannot reach it and end")


@pytest.mark.parametrize("heard", [False, True])
def test_one_rank_of_a_machine_reports_that_the_launcher_is_away(heard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before the ranks have heard of each other."""
    printed: list[str] = []
    monkeypatch.setattr(guard, "_print_verdict", lambda verdict: printed.append(f"{verdict.rank}: {verdict.cause}"))
    monkeypatch.setattr(guard, "_exit_now", lambda: printed.append("exit"))
    monkeypatch.setattr(guard.Guard, "_end_process", lambda self, verdict: None)
    for rank in (0, 1):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        detector = detector_of(rank, {1 - rank: RankStatus(1, "here", THIS)} if heard else {})
        verdict = Verdict(rank, "here", "the store has not answered", store_lost=True)
        bare_guard(rank, detector=detector)._announce(verdict)
    assert printed == ["0: the store has not answered", "exit", "exit"]


def test_a_broken_connection_to_a_process_of_the_loader_is_the_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_guard = bare_guard(rank=0)
    monkeypatch.setattr(guard.Guard, "wait_for_failure", lambda self, wait_s: None)
    monkeypatch.setattr(guard.Guard, "report", lambda self, error: None)
    raised = "def broken(): raise ConnectionResetError(104, 'Connection reset by peer')"
    for file, words in (
        ("/lib/torch/utils/data/dataloader.py", "the DataLoader has ended"),
        ("x.py", "another worker"),
    ):
        names: dict[str, Callable[[], None]] = {}
        exec(compile(raised, file, "exec"), names)  # type: ignore[arg-type]
        with pytest.raises(ConnectionResetError) as caught:
            names["broken"]()
        assert words in str(rank_guard.first_cause(caught.value, "stage 0, 0F4"))


def test_a_store_that_has_ended_holds_no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is still in C++ when the interpreter has ended aborts the process, and torch tries for 4 s."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heartbeat = guard.Heartbeat(dist.PrefixStore("a run", server.clone()), 0, 1, lambda: "stage 0")
    assert soon(lambda: heartbeat.exchanges > 0)
    tries: list[object] = []
    monkeypatch.setattr(dist.PrefixStore, "clone", tries.append)
    del server
    assert soon(lambda: not heartbeat._is_connected)
    start = time.monotonic()
    heartbeat.wait_until_heard(60.0)
    heartbeat.end()
    assert not tries, "torch would try for 4 s"
    assert time.monotonic() - start < 30.0
    assert not heartbeat._thread.is_alive()


def test_a_new_connection_is_used_once_the_store_answers() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heartbeat = guard.Heartbeat(dist.PrefixStore("a run", server.clone()), 0, 1, lambda: "stage 0")
    assert soon(lambda: heartbeat.exchanges > 0)
    heartbeat._is_connected = False
    before = heartbeat._store
    assert soon(lambda: heartbeat._is_connected and heartbeat._store is not before)
    exchanges = heartbeat.exchanges
    assert soon(lambda: heartbeat.exchanges > exchanges)
    heartbeat.end()


def test_rank_0_that_has_finished_lets_the_others_know_before_its_store_ends(heartbeats: list[guard.Heartbeat]) -> None:
    assert soon(lambda: all(len(heartbeat.statuses) == 2 for heartbeat in heartbeats))
    heartbeats[0].wait_until_heard(60.0)
    assert all(heartbeat.statuses[0].ended for heartbeat in heartbeats[1:])
    heartbeats[1].end()
    heartbeats[2].end()
    start = time.monotonic()
    heartbeats[0].wait_until_heard(60.0)
    assert time.monotonic() - start < 30.0, "they have ended and hear nothing"


def test_only_the_same_process_is_ended() -> None:
    program = "import time; print('up', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=-1) as sleeper:
        try:
            assert sleeper.stdout is not None
            sleeper.stdout.readline()
            fields = Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()
            process = replace(THIS, pid=sleeper.pid, started=int(fields[19]))
            assert not replace(process, started=process.started + 1).kill(), "another process has this id now"
            assert not replace(process, host="elsewhere").kill()
            assert not replace(process, host="").kill()
            assert sleeper.poll() is None
            assert processes.is_running(sleeper.pid)
            assert not processes.is_kill_pending(sleeper.pid)
            sleeper.send_signal(signal.SIGSTOP)
            assert soon(lambda: not processes.is_running(sleeper.pid))
            assert process.read_run_ns() == process.read_run_ns() != 0
            assert THIS.read_run_ns() != THIS.read_run_ns()
            assert replace(process, host="elsewhere").read_run_ns() is None
            assert process.kill()
            assert sleeper.wait(10) == -9
            assert not process.kill(), "it is no more"
            assert process.read_run_ns() == 0
            assert not processes.is_running(sleeper.pid)
        finally:
            sleeper.kill()


def test_packets_sent_again_are_listed_by_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        with server.accept()[0] as receiver:
            ends = [f"{end.getsockname()[1]:04x}7f000001" + 16 * "0" for end in (sender, receiver)]
            there, back = " ".join(ends), " ".join(reversed(ends))
            assert not {there, back} & set(lost_packets.list_resent())
            monkeypatch.setattr(lost_packets, "_RETRANSMITS", 0)  # the state, which is 1
            assert {there: 1, back: 1}.items() <= lost_packets.list_resent().items()
        process = {"host": "", "pid": 1, "started": 1}
        fields = {"count": 1, "where": "", "process": process, "resent": {there: 3, back: 3, "elsewhere": 3}}
        assert guard._parse_status(json.dumps(fields).encode()).resent == {back: 3}
