"""Launcher and workers of one machine watch each other, from the first line of the command to its last.

A stopped process (SIGSTOP, Ctrl-Z) answers no signal but SIGKILL: the launcher kills a stopped worker. Workers whose
launcher is stopped end, and a process that they leave kills it. Workers of a launcher that has died are killed by the
system. torchrun does not look whether its workers are stopped; each of them starts a process that does. The guard does
the same between machines, but only while there is a process group, and not if all ranks are stopped at once.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import cache

from pipedream.runtime.failure import notes
from pipedream.runtime.failure.process import RankProcess, is_stopped, parent_of

LAUNCHER = "PIPEDREAM_LAUNCHER"
"""Variable of a worker with its launcher's process id and start time."""

_PERIOD_S = 0.5
_STOPPED_S = 7.0  # longer than the guard's judgement takes, whose message says more
_LAUNCHER_LOOKED_AT_S = 2.0
_LAUNCHER_STOPPED_S = 10.0  # long enough to continue it when its workers have ended
_ALL_STOPPED_S = 10.0  # longer than the guard of a rank that is not stopped takes
_PR_SET_PDEATHSIG = 1


def watch_stopped(
    processes: Callable[[], Iterable[int]], end: Callable[[int], None], after_s: float = _STOPPED_S
) -> Callable[[], None]:
    """Calls `end(process id)`, in a thread, for each process that has been stopped for `after_s`.

    Returns a function that ends the watch.
    """
    over = threading.Event()

    def watch() -> None:
        stopped_s: dict[int, float] = {}
        looked_s = time.monotonic()
        while not over.wait(_PERIOD_S):
            # This process may have been stopped itself.
            since_s, looked_s = min(time.monotonic() - looked_s, 2 * _PERIOD_S), time.monotonic()
            before_s = stopped_s
            stopped_s = {pid: before_s.get(pid, 0.0) + since_s for pid in processes() if is_stopped(pid)}
            for pid in [pid for pid in stopped_s if before_s.get(pid, 0.0) <= after_s < stopped_s[pid]]:
                end(pid)

    threading.Thread(target=watch, name="pipedream-stopped", daemon=True).start()
    return over.set


def launcher_variable() -> str:
    """Returns the environment variable by which workers know this process as their launcher."""
    this = RankProcess.this()
    return f"{LAUNCHER}={this.pid} {this.started}"


def stay_with_launcher() -> None:
    """Ends this worker, and the processes that it forks, with its launcher. torchrun's worker is only watched."""
    text = os.environ.get(LAUNCHER)
    if text is None:
        watch_from_outside()
        return
    pid, started = map(int, text.split())
    _die_with_parent()
    if os.getppid() != pid:
        if RankProcess.of(pid).started == started:
            return  # a command that a worker has started
        os._exit(1)  # it died before this line
    in_main_thread = True

    def before() -> None:
        nonlocal in_main_thread
        in_main_thread = threading.current_thread() is threading.main_thread()

    def after() -> None:
        # The system counts the end of the thread that forked as the parent's.
        if in_main_thread:
            _die_with_parent()

    os.register_at_fork(before=before, after_in_child=after)
    watch_stopped(lambda: [pid], _start_ending_launcher, _LAUNCHER_LOOKED_AT_S)
    atexit.register(_start_ending_launcher, pid)  # it may be stopped while its workers end
    watch_stopped(lambda: [pid], _leave)


@cache
def watch_from_outside() -> None:
    """Starts a process that kills this one if it stays stopped, where torchrun, which does not look, has started it."""
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ and LAUNCHER not in os.environ
    if torchrun and os.environ.get("WORLD_SIZE", "1") != "1" and sys.platform == "linux":
        _start("worker", os.getpid())


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _leave(launcher: int) -> None:
    """Ends this worker, whose launcher is stopped."""
    text = f"pipedream: the launcher (process {launcher}) was stopped for {_STOPPED_S:g} s; its workers end"
    # The guard has written a message if it was there.
    if os.environ.get("LOCAL_RANK") == "0" and not notes.has_error() and notes.write_error(text, verdict=True):
        print(text, file=sys.stderr, flush=True)
    os._exit(1)


def _start_ending_launcher(pid: int) -> None:
    # All workers may have ended before the launcher has been stopped for long enough.
    if is_stopped(pid):
        _start("launcher", pid)


def _start(what: str, pid: int) -> None:
    subprocess.Popen([sys.executable, "-m", __name__, what, str(pid)], start_new_session=True)


def _end_launcher(pid: int) -> None:
    """Kills a launcher that stays stopped."""
    process, end_s = RankProcess.of(pid), time.monotonic() + _LAUNCHER_STOPPED_S - _LAUNCHER_LOOKED_AT_S
    while is_stopped(pid):
        if time.monotonic() > end_s:
            process.kill()
            return
        time.sleep(_PERIOD_S / 5)


def _end_worker(pid: int) -> None:
    """Kills a worker, this process's parent, if it stays stopped; a job that is suspended as a whole is left alone."""
    worker = RankProcess.of(pid)
    agent = parent_of(pid)

    def kill(_: int) -> None:
        if os.getppid() == pid and worker.kill():
            rank = os.environ.get("RANK")
            print(f"pipedream: rank {rank} was stopped for {_ALL_STOPPED_S:g} s and was killed", file=sys.stderr)

    watch_stopped(lambda: [] if is_stopped(agent) else [pid], kill, _ALL_STOPPED_S)
    while os.getppid() == pid:
        time.sleep(_PERIOD_S)
    time.sleep(_PERIOD_S)  # the thread that has killed it may still have to say so


if __name__ == "__main__":
    {"launcher": _end_launcher, "worker": _end_worker}[sys.argv[1]](int(sys.argv[2]))
