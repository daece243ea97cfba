"""The processes of one machine: their identity, how launcher and workers watch each other, and the files of a worker.

Processes are identified so that the wrong one is never killed.

A stopped process (SIGSTOP, Ctrl-Z) answers no signal but SIGKILL, so the launcher kills a stopped worker. Workers whose
launcher is stopped end, and leave a process that kills it. The system kills workers whose launcher has died. torchrun
does not check whether its workers are stopped, so each of them starts a process that does. The guard does the same
between machines, but only while there is a process group, and not if all ranks are stopped at once.

A worker writes files from which its launcher reads why it failed and, if it was killed, what it was doing. They are in
the folder of the agent's error file (TORCHELASTIC_ERROR_FILE).
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

LAUNCHER = "PIPEDREAM_LAUNCHER"
"""Variable of a worker with its launcher's process id and start time."""

_PERIOD_S = 0.5
_STOPPED_S = 7.0  # longer than the guard takes, whose message has more details
_LAUNCHER_LOOKED_AT_S = 2.0
_LAUNCHER_STOPPED_S = 10.0  # enough for a user to continue it when its workers have ended
_ALL_STOPPED_S = 10.0  # longer than the guard of a rank that is not stopped takes
_PR_SET_PDEATHSIG = 1

LOST_CONNECTION = "lost the connection to another worker, which left no message"
"""A worker's message if it has no better one; the launcher may."""
RUN_ID_PREFIX = "pipedream-"
"""Prefix of the run ids of our own launcher."""
MEMORY = Path("/dev/shm")
"""A folder in the memory of the machine."""
_DOING_FILE = "doing.txt"
_CHECKPOINT_FILE = "checkpoint.txt"
_LOST_FILE = "lost.json"


@dataclass(frozen=True)
class RankProcess:
    """A process on some machine.

    Attributes:
        host: boot id of the machine and namespace of its process ids.
        started: in kernel ticks; unlike an id, it is not used again.
    """

    host: str
    pid: int
    started: int

    @staticmethod
    def this() -> RankProcess:
        return RankProcess.of(os.getpid())

    @staticmethod
    def of(pid: int) -> RankProcess:
        """Returns a process of this machine; `started` is 0 if there is none."""
        return RankProcess(_name_host(), pid, _read_start(pid))

    @property
    def is_local(self) -> bool:
        return bool(self.host) and self.host == _name_host()

    def read_run_ns(self) -> int | None:
        """Returns how long its threads have run: no longer while it is stopped or frozen. None on other machines."""
        if not self.is_local:
            return None
        files = Path(f"/proc/{self.pid}/task").glob("*/schedstat") if _read_start(self.pid) == self.started else ()
        return sum(int((_read_text(file) or "0").split()[0]) for file in files)  # a thread may just have ended

    def kill(self) -> bool:
        """Kills the process; returns whether it still ran, on this machine."""
        if not self.is_local or not self.started:
            return False
        with suppress(OSError):
            file = os.pidfd_open(self.pid)  # from here on it stays this process's, even if the id is used again
            try:
                if _read_start(self.pid) == self.started:
                    signal.pidfd_send_signal(file, signal.SIGKILL)
                    return True
            finally:
                os.close(file)
        return False


def is_running(pid: int) -> bool:
    """Returns whether a process is neither stopped nor dead."""
    fields = _read_stat(pid)
    return bool(fields) and fields[0] not in "TtZX"


def _is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped by a signal (not by a debugger)."""
    return _read_stat(pid)[:1] == ["T"]


def is_kill_pending(pid: int) -> bool:
    """Returns whether a process has not begun to end after a SIGKILL, as it is frozen or waits for a disk."""
    pending = re.search(r"SigPnd:\s*(\w+)", _read_text(Path(f"/proc/{pid}/status")) or "")
    return pending is not None and int(pending[1], 16) >> (signal.SIGKILL - 1) & 1 == 1


def list_children() -> list[int]:
    """Returns the ids of this process's children, as far as the system lists them."""
    pids: list[int] = []
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            pids += map(int, file.read_text(encoding="ascii").split())
    return pids


def _name_host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no /proc here: then no process is killed
        return ""


def _read_start(pid: int) -> int:
    fields = _read_stat(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def _read_stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the command's name."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def watch_stopped(
    processes: Callable[[], Iterable[int]], end: Callable[[int], None], after_s: float = _STOPPED_S
) -> Callable[[], None]:
    """Calls `end(process id)`, in a thread, for each process that has been stopped for `after_s`.

    Returns a function that ends the watch and its thread.
    """
    is_over = threading.Event()

    def watch() -> None:
        stopped_s: dict[int, float] = {}
        checked_s = time.monotonic()
        while not is_over.wait(_PERIOD_S):
            # At most two periods: this process may have been stopped itself.
            since_s, checked_s = min(time.monotonic() - checked_s, 2 * _PERIOD_S), time.monotonic()
            old_stopped_s = stopped_s
            stopped_s = {pid: old_stopped_s.get(pid, 0.0) + since_s for pid in processes() if _is_stopped(pid)}
            for pid in [pid for pid in stopped_s if old_stopped_s.get(pid, 0.0) <= after_s < stopped_s[pid]]:
                end(pid)

    def end_watch() -> None:
        is_over.set()
        thread.join()

    thread = threading.Thread(target=watch, name="pipedream-stopped", daemon=True)
    thread.start()
    return end_watch


def name_launcher() -> str:
    """Returns the value of `LAUNCHER` for workers of this process."""
    this = RankProcess.this()
    return f"{this.pid} {this.started}"


def find_launch_folder() -> Path | None:
    """Returns the folder that our own launcher keeps until its end; None if it has not started this worker."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file).parents[2] if file and LAUNCHER in os.environ else None


def is_launched_here() -> bool:
    """Returns whether our own launcher started this worker and still runs."""
    is_our_launcher = os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(RUN_ID_PREFIX)
    return is_our_launcher and "TORCHELASTIC_ERROR_FILE" in os.environ and is_running(os.getppid())


def stay_with_launcher() -> None:
    """Makes this worker, and the processes that it forks, end with their launcher; only watches torchrun's workers."""
    text = os.environ.get(LAUNCHER)
    if text is None:
        watch_from_outside()
        return
    pid, started = map(int, text.split())
    follow_parent()
    if os.getppid() != pid:
        if RankProcess.of(pid).started == started:
            return  # a command that a worker has started
        os._exit(1)  # the launcher died before `follow_parent`
    in_main_thread = True

    def before_fork() -> None:
        nonlocal in_main_thread
        in_main_thread = threading.current_thread() is threading.main_thread()

    def after_fork() -> None:
        # Not in a fork of another thread, whose end would count as the parent's.
        if in_main_thread:
            follow_parent()

    os.register_at_fork(before=before_fork, after_in_child=after_fork)
    watch_stopped(lambda: [pid], _start_ending_launcher, _LAUNCHER_LOOKED_AT_S)
    atexit.register(_start_ending_launcher, pid)  # it may be stopped while its workers end
    watch_stopped(lambda: [pid], _end_with_launcher)


def end_process(status: int) -> NoReturn:
    """Ends this process as the interpreter would, but skips two steps that take a second or may abort it.

    These are garbage collection of torch's million objects, and joining the threads of process groups.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                status = status or 1
    finally:
        os._exit(status)


def is_torchruns_worker() -> bool:
    """Returns whether torchrun, not our own launcher, has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and LAUNCHER not in os.environ


@cache
def watch_from_outside() -> None:
    """Starts a process that kills this worker of torchrun if it stays stopped, which torchrun does not check."""
    if is_torchruns_worker() and os.environ.get("WORLD_SIZE", "1") != "1" and sys.platform == "linux":
        _start_watcher("worker", os.getpid())


def follow_parent() -> None:
    """Makes the system kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_launcher(launcher: int) -> None:
    """Ends this worker, whose launcher is stopped."""
    text = f"pipedream: the launcher (process {launcher}) was stopped for {_STOPPED_S:g} s; its workers end"
    # If there was a guard, it has written a message.
    is_explained = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).is_file()
    if os.environ.get("LOCAL_RANK") == "0" and not is_explained and write_error(text, verdict=True):
        print(text, file=sys.stderr, flush=True)
    os._exit(1)


def _start_ending_launcher(pid: int) -> None:
    # By a separate process: all workers may end before the launcher has been stopped for long enough.
    if _is_stopped(pid):
        _start_watcher("launcher", pid)


def _start_watcher(role: str, pid: int) -> None:
    subprocess.Popen([sys.executable, "-m", __name__, role, str(pid)], start_new_session=True)


def _end_launcher(pid: int) -> None:
    """Kills a launcher that stays stopped."""
    process, end_s = RankProcess.of(pid), time.monotonic() + _LAUNCHER_STOPPED_S - _LAUNCHER_LOOKED_AT_S
    while _is_stopped(pid):
        if time.monotonic() > end_s:
            process.kill()
            return
        time.sleep(_PERIOD_S / 5)


def _end_worker(pid: int) -> None:
    """Kills a worker, this process's parent, if it stays stopped, unless the whole job is suspended."""
    worker = RankProcess.of(pid)
    agent = int((_read_stat(pid) or ["", "0"])[1])  # its parent

    def kill(_: int) -> None:
        if os.getppid() == pid and worker.kill():
            rank = os.environ.get("RANK")
            print(f"pipedream: rank {rank} was stopped for {_ALL_STOPPED_S:g} s and was killed", file=sys.stderr)

    watch_stopped(lambda: [] if _is_stopped(agent) else [pid], kill, _ALL_STOPPED_S)
    while os.getppid() == pid:
        time.sleep(_PERIOD_S)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file and (checkpoint := _read_text(Path(error_file).with_name(_CHECKPOINT_FILE))):
        print(f"pipedream: training was cut short; the last checkpoint is {checkpoint}", file=sys.stderr)
    time.sleep(_PERIOD_S)  # the thread that has killed it may still have to print that


def write_error(message: str, *, verdict: bool = False) -> bool:
    """Writes a message for the elastic agent; returns whether there is an agent.

    Args:
        verdict: the message is about another rank, or a rank that could not report itself; it counts for the run.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    body = {"message": message, "extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))}}
    with suppress(OSError):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"message": body, "verdict": verdict}), encoding="utf-8")
        return True
    return False


def write_doing(where: str) -> None:
    """Writes what this worker is doing."""
    _write_text(_DOING_FILE, where)


def write_checkpoint(path: str) -> None:
    """Writes the checkpoint to resume from if this worker is killed; '' after an orderly end."""
    _write_text(_CHECKPOINT_FILE, path)


def _write_text(name: str, text: str) -> None:
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            # Atomically, because a worker may be killed while it writes.
            new_file = Path(path).with_name(f"{name}.new")
            new_file.write_text(text, encoding="utf-8")
            new_file.replace(Path(path).with_name(name))


def _read_text(file: Path) -> str | None:
    with suppress(OSError):
        return file.read_text(encoding="utf-8") or None
    return None


def read_error(error_file: Path) -> str | None:
    """Returns a worker's message."""
    return next((message for message, _ in _read_errors(error_file)), None)


def read_verdict(folder: Path) -> str | None:
    """Returns the verdict on a run."""
    files = sorted(folder.rglob("error.json"))
    return next((message for file in files for message, verdict in _read_errors(file) if verdict), None)


def read_doing(folder: Path, rank: int) -> str | None:
    """Returns what a worker was last doing, once it had built its pipeline."""
    return next((_read_text(file) for file in folder.rglob(_DOING_FILE) if file.parent.name == str(rank)), None)


def write_lost(folder: Path, ranks: Sequence[int]) -> None:
    """Writes the ranks that the run continues without into an attempt's folder."""
    (folder / _LOST_FILE).write_text(json.dumps(ranks), encoding="utf-8")


def read_lost(folder: Path) -> list[int]:
    """Returns the ranks of `write_lost`, the highest first; none if all workers were replaced."""
    text = _read_text(folder / _LOST_FILE)
    return [] if text is None else sorted(json.loads(text), reverse=True)


def _read_errors(file: Path) -> Iterator[tuple[str, bool]]:
    """Yields (message, is a verdict)."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        contents = json.loads(file.read_text(encoding="utf-8"))
        yield str(contents["message"]["message"]), bool(contents.get("verdict"))


if __name__ == "__main__":
    {"launcher": _end_launcher, "worker": _end_worker}[sys.argv[1]](int(sys.argv[2]))
