"""Restarts: which failures lead to another attempt, and what is printed; who kills processes that stay stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from pipedream.runtime.failure import launch as launching
from pipedream.runtime.failure import processes
from pipedream.runtime.failure.launch import _Failure, launch
from pipedream.runtime.failure.processes import LOST_CONNECTION, RankProcess, write_error


@pytest.mark.parametrize(
    ("options", "ends", "status", "attempts", "lines"),
    [
        ({}, [0], 0, [(2, 0)], []),
        ({}, ["a"], 1, [(2, 0)], ["pipedream: a"]),
        (
            {"max_restarts": 2},
            ["a", "b", 0],
            0,
            [(2, 0), (2, 1), (2, 2)],
            ["pipedream: restart 1 of 2 after: a", "pipedream: restart 2 of 2 after: b"],
        ),
        (
            {"max_restarts": 1},
            ["a", "b"],
            1,
            [(2, 0), (2, 1)],
            ["pipedream: restart 1 of 1 after: a", "pipedream: b"],
        ),
        ({"max_restarts": 5, "fewest": 1}, [2], 2, [(2, 0)], ["pipedream: bad"]),
        ({"max_restarts": 5}, ["a", 130], 130, [(2, 0), (2, 1)], ["pipedream: restart 1 of 5 after: a"]),
        (
            {"max_restarts": 1, "fewest": 1},
            ["a", "b", "c"],
            1,
            [(2, 0), (2, 1), (1, 2)],
            [
                "pipedream: restart 1 of 1 after: a",
                "pipedream: continuing with one worker fewer, 1, after: b",
                "pipedream: c",
            ],
        ),
        ({"fewest": 2}, ["a"], 1, [(2, 0)], ["pipedream: a"]),
    ],
)
def test_attempts(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, int],
    ends: list[int | str],
    status: int,
    attempts: list[tuple[int, int]],
    lines: list[str],
) -> None:
    run: list[tuple[int, int]] = []
    commands: list[list[str]] = []

    def attempt(workers: int, number: int, arguments: list[str], silent: bool) -> int | _Failure:
        run.append((workers, number))
        commands.append(list(arguments))
        end = ends[len(run) - 1]
        if end == 2:
            return _Failure("pipedream: bad", 2)
        return end if isinstance(end, int) else _Failure(f"pipedream: {end}", 1)

    monkeypatch.setattr(launching, "_run_attempt", attempt)
    monkeypatch.setattr(launching, "_silence_torch", lambda: None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "the user's")
    assert launch(2, ["x.py"], **options) == status  # type: ignore[arg-type]
    assert run == attempts
    assert capsys.readouterr().err.splitlines() == lines
    assert commands == [["x.py"] if workers == 2 else ["x.py", "--workers", "1"] for workers, _ in run]
    assert launching.os.environ["GLOO_SOCKET_IFNAME"] == "the user's"


def test_the_folders_of_killed_launchers_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    this = RankProcess.this()
    ended = subprocess.Popen(["true"])
    ended.wait()
    others = [
        replace(this, started=this.started - 1),  # its id is this process's now
        RankProcess(this.host, ended.pid, this.started),
    ]
    kept = ["pipedream-notes", f"pipedream-00000000-{ended.pid}-1-x"]  # another container's launcher
    kept += [f"{launching._begin_folder_name(this)}a", f"{launching._begin_folder_name(RankProcess.of(1))}b"]
    for name in [*kept, *(f"{launching._begin_folder_name(other)}c" for other in others)]:
        (tmp_path / name / "attempt").mkdir(parents=True)
    launching._remove_abandoned_folders()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_a_launcher_names_its_folder_and_removes_those_of_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"{launching._begin_folder_name(replace(RankProcess.this(), started=1))}x").mkdir()
    seen: list[str] = []

    def start(config: Any, entrypoint: str) -> Callable[..., None]:
        return lambda *arguments: seen.extend(path.name for path in tmp_path.iterdir())

    monkeypatch.setattr(launching, "elastic_launch", start)
    monkeypatch.setattr(launching, "_silence_torch", lambda: None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "the user's")
    assert launch(1, ["x.py"]) == 0
    (name,) = seen
    assert name.startswith(launching._begin_folder_name(RankProcess.this()))


def test_a_lost_connection_is_explained_by_how_the_other_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Even where the worker that noticed it ended first."""
    file, text = tmp_path / "error.json", f"pipedream: rank 0, stage 0, 0F4: {LOST_CONNECTION}"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    write_error(text)
    lost, gone = ProcessFailure(0, 10, 1, str(file)), ProcessFailure(1, 11, 3, "none")
    gone.timestamp = lost.timestamp + 1

    def elastic_launch(*_: object) -> Callable[..., None]:
        def run(*_: object) -> None:
            raise ChildFailedError("env", {0: lost, 1: gone})

        return run

    monkeypatch.setattr(launching, "elastic_launch", elastic_launch)
    assert "rank 1 ended with exit status 3" in launching._run_attempt(2, 0, [], silent=True).text  # type: ignore[union-attr]
    gone.exitcode = -15  # by the agent
    assert launching._run_attempt(2, 0, [], silent=True).text == text  # type: ignore[union-attr]


# -- stopped processes ------------------------------------------------------------------------------------------------


WORKER = """
import os, subprocess, sys, time
watch = "import sys; from pipedream.runtime.failure import processes; processes._ALL_STOPPED_S = 0.6; "
end = "processes._end_worker(int(sys.argv[1]))"
subprocess.Popen([sys.executable, "-c", watch + end, str(os.getpid())], start_new_session=True)
print("watched", flush=True)
time.sleep(600)
"""


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """The environment of a worker of torchrun, and the processes that it starts."""
    started: list[tuple[str, int]] = []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv(processes.LAUNCHER, raising=False)
    monkeypatch.setattr(processes, "_start", lambda *what: started.append(what))
    processes.watch_from_outside.cache_clear()
    yield started
    processes.watch_from_outside.cache_clear()


def test_a_worker_of_torchrun_is_watched_once(torchrun: list[tuple[str, int]]) -> None:
    processes.stay_with_launcher()
    processes.watch_from_outside()
    assert torchrun == [("worker", os.getpid())]


@pytest.mark.parametrize("variable", [{"WORLD_SIZE": "1"}, {"TORCHELASTIC_RUN_ID": None}, {processes.LAUNCHER: "1 1"}])
def test_others_are_not(
    torchrun: list[tuple[str, int]], variable: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variable.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    processes.watch_from_outside()
    assert torchrun == []


@pytest.mark.slow
@pytest.mark.processes
def test_a_worker_that_stays_stopped_is_killed_from_outside() -> None:
    with subprocess.Popen([sys.executable, "-c", WORKER], stdout=-1, stderr=-1, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stderr is not None
        worker.stdout.readline()
        worker.send_signal(signal.SIGSTOP)
        assert worker.wait(60) == -signal.SIGKILL
        assert "was stopped for 0.6 s and was killed" in worker.stderr.read(), "read to its end: the watch is over, too"
