"""Starts the command, and programs, as a user's shell would; knows all processes of a start; imports scripts."""

import importlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType
from typing import Any

Run = Callable[..., tuple[int, str, str]]
"""The fixture `run_command`."""
Refused = Callable[..., str]
"""The fixture `refused`."""
Answer = Callable[..., Any]
"""A function: the arguments of a command -> the object that it prints with --json."""

_MARK = "STARTED_BY_TEST"
_KILL = signal.SIGKILL


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    Attributes:
        status: exit status.
        out, err: what it wrote.
        seconds: from the last signal, else from when the last worker was there (it writes a file ``pidN``), else from
            the start, to its end: how long an interpreter takes to start is not the question.
        orphans: command lines of processes that it left behind; they were ended.
    """

    status: int
    out: str
    err: str
    seconds: float
    orphans: list[str]


def without_progress(text: str) -> str:
    """Returns what a program wrote without the lines about what takes long, which a slow machine has more of."""
    progress = re.compile(r"\w.*( \.\.\.|: \d+( of \d+)?(, about .* left)?)\n")
    return "".join(line for line in text.splitlines(keepends=True) if not progress.fullmatch(line))


class Started:
    """A running program, in a process group of its own; `end` it once."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        folder: Path,
        environment: dict[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        self._mark = uuid.uuid4().hex
        self._folder = folder
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
        environment_before = {name: value for name, value in os.environ.items() if name not in names}
        # `end` closes and so removes them.
        self._out, self._err = NamedTemporaryFile("w+"), NamedTemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [*within, sys.executable, *arguments],
            cwd=folder,
            env=environment_before | {_MARK: self._mark, "OMP_NUM_THREADS": "1"} | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )
        self._since, self._signalled = time.monotonic(), False

    def signal(self, number: int, *, group: bool) -> None:
        """Sends a signal to the program, or as a terminal does to its whole process group; time starts again."""
        self._since, self._signalled = time.monotonic(), True
        (os.killpg if group else os.kill)(self._process.pid, number)

    def kill(self, pid: int, number: int = _KILL) -> None:
        """Sends one of its processes a signal; time starts again."""
        assert pid in self.processes(), f"process {pid} does not come from this start"
        self._since, self._signalled = time.monotonic(), True
        os.kill(pid, number)

    def wait_for_file(self, name: str, timeout_s: float = 60.0) -> Path:
        """Waits until one of its processes has written a file, and returns its path; else none of them is left."""
        path = self._folder / name
        end = time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > end or self._process.poll() is not None:
                self._kill_all()
                raise AssertionError(f"no {name} after {timeout_s} s, or its end\n{self._read(self._err)}")
            time.sleep(0.02)
        return path

    def ended(self) -> bool:
        return self._process.poll() is not None

    def processes(self) -> dict[int, str]:
        """Returns the processes that come from this start and still run: id -> command line."""
        commands = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{_MARK}={self._mark}".encode() in (folder / "environ").read_bytes():
                    commands[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:  # it has ended meanwhile, or is not ours
                continue
        return {pid: words for pid, words in commands.items() if words}  # a zombie has no words

    def end(self, timeout_s: float = 120.0) -> Ended:
        """Waits for its end; after `timeout_s` all its processes are killed and the status is that of the kill."""
        in_time = True
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status, in_time = -signal.SIGKILL, False
        seconds = time.monotonic() - self._since
        if not self._signalled:
            there = [path.stat().st_mtime for path in self._folder.glob("pid[0-9]*")]
            seconds = min(seconds, time.time() - max(there, default=0.0))
        end = time.monotonic() + 10.0
        while self.processes() and in_time and time.monotonic() < end:
            time.sleep(0.05)
        processes = self._kill_all()
        self._process.wait()
        ended = Ended(status, self._read(self._out), self._read(self._err), seconds, list(processes.values()))
        self._out.close()
        self._err.close()
        return ended

    def _kill_all(self) -> dict[int, str]:
        """Returns what was killed."""
        processes = self.processes()
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return processes

    @staticmethod
    def _read(file: object) -> str:
        return Path(file.name).read_text(encoding="utf-8")  # type: ignore[attr-defined]


def start(
    *arguments: str, folder: Path, environment: dict[str, str] | None = None, within: Sequence[str] = ()
) -> Started:
    return Started(arguments, folder=folder, environment=environment, within=within)


def run(*arguments: str, folder: Path, environment: dict[str, str] | None = None, timeout_s: float = 120.0) -> Ended:
    return start(*arguments, folder=folder, environment=environment).end(timeout_s)


def load_script(file: Path) -> ModuleType:
    """Imports a file of no package anew; its module is known by its path, as several are called run.py."""
    spec = importlib.util.spec_from_file_location(str(file), file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def load_benchmark(name: str, *modules: str) -> list[Any]:
    """Imports files of a benchmark, which are then known as ``benchmarks.NAME.FILE``.

    They import each other by bare names, which other benchmarks have, too: only during the import do these names, and
    the path, lead to this one.
    """
    folder = Path(__file__).parents[2] / "benchmarks" / name
    names, path = {file.stem for file in folder.glob("*.py")}, [*sys.path]
    others = {file: sys.modules.pop(file) for file in names & sys.modules.keys()}
    sys.path.insert(0, str(folder))
    try:
        return [importlib.import_module(module) for module in modules]
    finally:
        sys.path[:] = path
        sys.modules |= {f"benchmarks.{name}.{file}": sys.modules.pop(file) for file in names & sys.modules.keys()}
        sys.modules |= others
