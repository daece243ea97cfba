"""Stopped processes: who kills them when nobody else looks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pipedream.runtime.failure import processes

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
