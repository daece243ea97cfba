"""Restarts: which failures lead to another attempt, and what is printed; who kills processes that stay stopped."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import commands
import pytest
from marks import long, slow

from pipedream.services.failure import agent, launch as launching, processes

THIS = processes.RankProcess.this()
ONE = "continuing with one worker fewer, 1, after: %s"


@pytest.mark.parametrize(
    ("options", "ends", "status", "counts", "lines"),
    [
        ({}, [0], 0, [2], []),
        ({}, ["a"], 1, [2], ["a"]),
        ({"max_restarts": 2}, ["a", "b", 0], 0, [2, 2, 2], ["restart 1 of 2 after: a", "restart 2 of 2 after: b"]),
        ({"max_restarts": 1}, ["a", "b"], 1, [2, 2], ["restart 1 of 1 after: a", "b"]),
        ({"max_restarts": 5, "fewest": 1}, [2], 2, [2], ["bad"]),
        ({"max_restarts": 5}, ["a", 130], 130, [2, 2], ["restart 1 of 5 after: a"]),
        ({"max_restarts": 5}, [143], 143, [2], []),
        ({}, ["the message above"], 1, [2], []),
        (
            *({"max_restarts": 1, "fewest": 1}, ["-", "-b", "c"], 1, [2, 2, 1]),
            ["restart 1 of 1 after: -", ONE % "-b", "c"],
        ),
        ({"max_restarts": 1, "fewest": 1}, ["a", "b", "c"], 1, [2, 2, 1], ["restart 1 of 1 after: a", ONE % "b", "c"]),
        ({"fewest": 2}, ["a"], 1, [2], ["a"]),
        (
            *({"fewest": 1, "workers": 4}, ["ab", "cde", "f"], 1, [4, 2, 1]),
            ["continuing with 2 workers fewer, 2, after: ab", ONE % "cde", "f"],
        ),
    ],
)
def test_attempts(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, options: Any, ends: Any, status: int, counts: Any, lines: list[str]
) -> None:
    """An end is a status, or the words of a failure, with as many lost ranks; "-": the folder is gone."""
    run: list[tuple[int, int, list[str]]] = []
    lost: list[int] = []

    def write_lost(folder: Path, ranks: tuple[int, ...]) -> None:
        processes.write_lost(folder, ranks)
        lost.append(len(processes.read_lost(folder.parent / str(run[-1][1]))))

    def run_workers(_: Any, workers: int, number: int, arguments: list[str], folder: Path) -> list[agent.Worker]:
        end = ends[len(run)]
        run.append((workers, number, list(arguments)))
        if "-" in str(end):
            shutil.rmtree(folder.parent)
        return [agent.Worker(0, 10, folder / "none", status=end if isinstance(end, int) else 1)]

    def judge(failures: list[agent.Worker], _: Path) -> launching._Failure:
        words = str(ends[len(run) - 1]).replace("2", "bad")
        return launching._Failure(f"pipedream: {words}", failures[0].status, tuple(range(len(words))))

    monkeypatch.setattr(launching, "write_lost", write_lost)
    monkeypatch.setattr(launching, "_judge", judge)
    monkeypatch.setattr(agent.Agent, "run", run_workers)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "the user's")
    arguments: dict[str, Any] = {"workers": 2, "arguments": ["x.py"], **options}
    assert launching.launch(**arguments) == status
    fewer = [["--workers", str(n)] if n != arguments["workers"] else [] for n in counts]
    assert run == [(n, number, ["x.py", *fewer[number]]) for number, n in enumerate(counts)]
    assert lost == [a - b for a, b in pairwise(counts) if a > b]
    assert capsys.readouterr().err.splitlines() == [f"pipedream: {line}" for line in lines]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "the user's"


def test_a_launcher_removes_the_folders_of_killed_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "the user's")
    prefix, during = launching._make_folder_prefix, list[str]()
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone = replace(THIS, started=THIS.started - 1), replace(THIS, pid=ended.pid)  # the first one's id is ours now
    kept = ["pipedream-notes", f"pipedream-00000000-{ended.pid}-1-x"]  # another container's launcher
    kept += [f"{prefix(THIS)}a", f"{prefix(processes.RankProcess.of(1))}b"]
    for name in [*kept, *(f"{prefix(process)}c" for process in gone)]:
        (tmp_path / name / "attempt").mkdir(parents=True)

    def run(*_: Any) -> list[agent.Worker]:
        during.extend(path.name for path in tmp_path.iterdir())
        return []

    monkeypatch.setattr(agent.Agent, "run", run)
    assert launching.launch(1, ["x.py"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
    (name,) = {*during}.difference(kept)
    assert name.startswith(prefix(THIS))


@pytest.mark.parametrize(
    ("ends", "lost"), [([(1, -9), (3, -11)], (1, 3)), ([(2, 1)], (2,)), ([(2, 1), (1, -9)], (1,)), ([(0, 3)], (0,))]
)
def test_lost_are_those_that_a_signal_ended(tmp_path: Path, ends: list[tuple[int, int]], lost: tuple[int, ...]) -> None:
    """Else the one that failed first. The launcher's own signals do not count."""
    workers = [agent.Worker(rank, 10 + rank, tmp_path / str(rank), False, status) for rank, status in ends]
    for worker in workers:
        worker.was_lost = worker.status < 0
    ended = agent.Worker(4, 14, tmp_path / "4", False, -15)
    assert launching._judge([*workers, ended], tmp_path).lost == lost


def test_a_lost_connection_is_explained_by_how_the_other_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Even where the worker that noticed it ended first."""
    file, text = tmp_path / "error.json", f"pipedream: rank 0, stage 0, 0F4: {processes.LOST_CONNECTION}"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    processes.write_error(text)
    lost, gone = agent.Worker(0, 10, file, status=1), agent.Worker(1, 11, tmp_path / "none", status=3)
    assert "rank 1 ended with exit status 3" in launching._judge([lost, gone], tmp_path).text
    gone.status = -9  # by the agent
    assert launching._judge([lost, gone], tmp_path).text == text
    gone.was_lost = True
    assert "rank 1 was ended by SIGKILL" in launching._judge([lost, gone], tmp_path).text
    file.write_text("")  # on a full disk, and the worker has printed its message
    assert launching._judge([replace(gone, status=2), lost], tmp_path).text == launching._PRINTED


@pytest.mark.parametrize(
    ("received", "sent"),
    [(signal.SIGINT, [signal.SIGINT]), (signal.SIGTERM, [signal.SIGINT]), (0, [signal.SIGTERM, -signal.SIGKILL])],
)
def test_workers_drain_or_end(received: int, sent: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SIGTERM to the launcher reaches them as SIGINT; after a failure it is for the processes that they started."""
    numbers: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, number: numbers.append(number))
    monkeypatch.setattr(os, "kill", lambda pid, number: numbers.append(-number))
    monkeypatch.setattr(agent, "_list_running", lambda workers: [])
    launcher = agent.Agent()
    launcher.signals = [received] * bool(received)
    launcher._end([agent.Worker(0, 10, tmp_path)])
    assert numbers == [*sent, signal.SIGKILL]


@pytest.mark.parametrize("frozen", [True, False])
def test_a_worker_that_no_kill_reaches_is_left(frozen: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """It is reaped later; one that has begun to end is waited for."""
    sleeper, launcher = subprocess.Popen(["sleep", "600"]), agent.Agent()
    worker = agent.Worker(1, sleeper.pid, Path("none"))
    waits, kill = list[float](), agent._send_signal
    monkeypatch.setattr(agent.time, "sleep", waits.append)
    monkeypatch.setattr(agent, "_GRACE_S", 1.0 if frozen else 60.0)
    monkeypatch.setattr(agent, "_KILLED_S", 0.0)
    monkeypatch.setattr(agent, "is_kill_pending", lambda pid: frozen)
    monkeypatch.setattr(agent, "_send_signal", lambda to, *_, **how: None if frozen else kill(to, signal.SIGKILL))
    launcher._end([worker])
    assert not frozen or len(waits) < 9
    assert (worker.is_running, worker.status, len(launcher._left)) == (False, -signal.SIGKILL, frozen)
    line = f"pipedream: rank 1 (process {sleeper.pid}) was killed, but is frozen or waits for a disk; going on "
    assert capsys.readouterr().err == f"{line}without it\n" * frozen
    sleeper.kill()
    while agent._list_running(launcher._left):
        time.sleep(0.01)
    assert sleeper.wait() == 0, "the agent has read its status"


@pytest.mark.parametrize(
    ("name", "value"), [("WORLD_SIZE", "1"), ("TORCHELASTIC_RUN_ID", None), (processes.LAUNCHER, "1 1")]
)
def test_torchruns_workers_alone_are_watched(name: str, value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, int]] = []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv(processes.LAUNCHER, raising=False)
    monkeypatch.setattr(processes, "_start_watcher", lambda *what: started.append(what))
    monkeypatch.setattr(processes, "watch_from_outside", cache(processes.watch_from_outside.__wrapped__))
    processes.stay_with_launcher()
    processes.watch_from_outside()
    assert started == [("worker", os.getpid())]
    processes.watch_from_outside.cache_clear()
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    processes.watch_from_outside()
    assert len(started) == 1


FORKED = """
import json, os, random, sys, time
from pathlib import Path
imported, started_by = "torch" in sys.modules, os.getppid()
import numpy, torch
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
facts = {
    "imported": imported,
    "started_by": started_by,
    "leads": os.getsid(0) == os.getpid(),
    "arguments": sys.argv[1:],
    "module": sys.modules["__main__"].__spec__.name,
    "drawn": [random.random(), numpy.random.rand(), torch.rand(1).item()],
    "threads": [torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]],
    "store": torch.distributed.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False).num_keys() >= 0,
    "variables": {name: text for name, text in os.environ.items() if name not in BEFORE},
}
Path("partial" + rank).write_text(json.dumps(facts))
Path("partial" + rank).rename(f"facts{attempt}{rank}.json")
while rank == "1" and not Path(f"facts{attempt}0.json").exists():
    time.sleep(0.01)  # the launcher ends rank 0 when this one has ended
if (rank, attempt) == ("1", "0"):
    os.kill(os.getpid(), 9)
sys.exit(int(rank) * 3 if attempt == "1" else 0)
"""

LAUNCHER = """
import os, sys, threading
from pipedream.services.failure.launch import import_for_workers, launch
assert "torch" not in sys.modules
del os.environ["OMP_NUM_THREADS"]
import_for_workers(["torch", "numpy.random"], 2)
if sys.argv[1] == "threads":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
elif sys.argv[1] == "cards":
    import torch
    torch.cuda._is_in_bad_fork = lambda: True
print(os.getpid(), launch(2, ["-m", "worker", "a", "b"], max_restarts=1, fewest=1, forks=True))
"""


@pytest.mark.processes
@pytest.mark.parametrize("how", [slow("forks"), long("threads"), long("cards")])
def test_workers_and_their_replacements_are_forks_and_differ_in_nothing_else(tmp_path: Path, how: str) -> None:
    """Where the launcher has another thread, or has asked for cards, they are interpreters."""
    (tmp_path / "worker.py").write_text(f"BEFORE = {sorted(os.environ)}\n{FORKED}", encoding="utf-8")
    ended = commands.run("-c", LAUNCHER, how, folder=tmp_path)
    launcher, status = map(int, ended.out.split())
    assert (status, ended.orphans) == (0, [])
    first = "pipedream: restart 1 of 1 after: rank 1 was ended by SIGKILL; it had not built"
    second = "pipedream: continuing with one worker fewer, 1, after: rank 1 ended with exit status 3"
    assert re.match(f"(?s){first}.*\n{second}", ended.err)
    facts = {path.stem[5:]: json.loads(path.read_text()) for path in sorted(tmp_path.glob("facts*.json"))}
    assert list(facts) == ["00", "01", "10", "11", "20"]
    for name, of_worker in facts.items():
        arguments, workers = (["a", "b", "--workers", "1"], 1) if name == "20" else (["a", "b"], 2)
        threads, variables = (os.cpu_count() or 1) // workers, of_worker["variables"]
        assert of_worker == {
            **{"imported": how == "forks", "started_by": launcher, "leads": True, "store": True},
            **{"arguments": arguments, "module": "worker", "threads": [threads, str(threads)]},
            **{"drawn": of_worker["drawn"], "variables": variables},
        }
        assert {variables[rank] for rank in ("RANK", "LOCAL_RANK", "ROLE_RANK")} == {name[1]}
        assert variables["WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"] == str(workers)
        assert variables["PIPEDREAM_LAUNCHER"].split()[0] == str(launcher)
        assert variables.keys() == facts["00"]["variables"].keys()
    for drawn in zip(*(of_worker["drawn"] for of_worker in facts.values()), strict=True):
        assert len(set(drawn)) == 5, "each draws its own numbers, by Python, numpy and torch"
