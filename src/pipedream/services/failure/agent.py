"""The worker processes of a launcher: started with torchrun's variables, watched, and ended together.

Torch's own agent starts each worker as a new interpreter, which takes seconds to import torch. Here workers are forks
of the launcher, provided that it has imported what they need, computed nothing and has no other thread. So the threads
of torch's store and of the watch for stopped processes start after the workers and end with them.
"""

import os
import runpy
import signal
import socket
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from pipedream.services.failure.processes import (
    LAUNCHER,
    RUN_ID_PREFIX,
    RankProcess,
    end_process,
    is_kill_pending,
    list_children,
    name_launcher,
    watch_stopped,
)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_ADDRESS = "127.0.0.1"
_GRACE_S = 30.0
_KILLED_S = 2.0  # a process that is not frozen begins to end at once
_PERIOD_S = 0.02  # a restart waits for two of them


@dataclass
class Worker:
    """A worker process.

    Attributes:
        status: exit status once it has ended; negative for the signal that ended it.
        ended_s: sorts workers by their ends: the second in which it wrote its error file or, without one, in which its
            end was noticed; then the exact time at which it was noticed.
        was_stopped: it was killed because it stayed stopped.
        was_lost: a signal ended it before the agent ended the others.
    """

    rank: int
    pid: int
    error_file: Path
    is_running: bool = True
    status: int = 0
    ended_s: tuple[int, float] = (0, 0.0)
    was_stopped: bool = False
    was_lost: bool = False


class Agent:
    """Runs workers; within its context, signals end them.

    Args:
        silent: hides what they print.
        forks: workers that run a module are forks of this process, where that is possible.

    Attributes:
        signals: received by this process; the first is sent to the workers (SIGTERM as SIGINT), a second
            ends the wait for them.
    """

    def __init__(self, *, silent: bool = False, forks: bool = False) -> None:
        self._silent = silent
        self._forks = forks
        self.signals: list[int] = []
        self._left: list[Worker] = []  # killed, but not ended

    def __enter__(self) -> Self:
        def receive(number: int, _: Any) -> None:
            self.signals.append(number)

        self._old_actions = {number: signal.signal(number, receive) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, action in self._old_actions.items():
            signal.signal(number, action)

    def run(self, count: int, attempt: int, arguments: Sequence[str], folder: Path) -> list[Worker]:
        """Runs ``python ARGUMENTS`` in `count` processes; once one has failed, the others are ended.

        Returns the workers in the order in which they ended.
        """
        # torch itself can only listen on all interfaces.
        listening = socket.create_server((_ADDRESS, 0), backlog=4096)
        workers: list[Worker] = []

        def kill(pid: int) -> None:
            for worker in workers:
                worker.was_stopped |= worker.pid == pid
            RankProcess.of(pid).kill()

        try:
            common = _make_common_variables(count, attempt, listening)
            for rank in range(count):
                error_file = folder / str(rank) / "error.json"
                error_file.parent.mkdir()
                variables = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)) | common
                pid = self._start(arguments, variables | {"TORCHELASTIC_ERROR_FILE": str(error_file)})
                workers.append(Worker(rank, pid, error_file))
            end_watch = watch_stopped(list_children, kill)
            store = _serve_store(listening)
            while not self.signals and _list_running(workers) and not any(worker.status for worker in workers):
                time.sleep(_PERIOD_S)
                _list_running(self._left)
            for worker in workers:
                worker.was_lost = worker.status < 0 and not self.signals
            self._end(workers)
            end_watch()
            del store
        finally:
            self._end(workers)
        return sorted(workers, key=lambda worker: worker.ended_s)

    def _start(self, arguments: Sequence[str], variables: Mapping[str, str]) -> int:
        # A fork has only the thread that forked.
        can_fork = self._forks and sys.platform == "linux" and len(sys._current_frames()) == 1
        return (_fork if can_fork and arguments[0] == "-m" else _spawn)(arguments, variables, self._silent)

    def _end(self, workers: Sequence[Worker]) -> None:
        if self.signals:  # SIGTERM would end the processes of loaders, which a drain still needs
            _send_signal(workers, signal.SIGINT if self.signals[0] == signal.SIGTERM else self.signals[0])
        else:  # a worker drains after SIGTERM; the processes that it has started may need time to clean up
            _send_signal(workers, signal.SIGTERM)
            _send_signal(workers, signal.SIGKILL, group=False)
        self._wait(workers, 0.0)
        _send_signal(workers, signal.SIGKILL)
        self._wait(workers, _KILLED_S)
        for worker in _list_running(workers):
            what = f"pipedream: rank {worker.rank} (process {worker.pid}) was killed, but is frozen or waits for a disk"
            print(f"{what}; going on without it", file=sys.stderr, flush=True)
            self._left.append(replace(worker))  # it runs nothing any more that could disturb the next attempt
            worker.is_running, worker.status, worker.ended_s = False, -signal.SIGKILL, (int(time.time()), time.time())

    def _wait(self, workers: Sequence[Worker], killed_s: float) -> None:
        """Waits until workers have ended, but only for `killed_s` if a signal to kill does not reach those left."""
        start_s, received_before = time.monotonic(), len(self.signals)
        while (running := _list_running(workers)) and len(self.signals) == received_before:
            waited_s = time.monotonic() - start_s
            if waited_s > _GRACE_S or (waited_s > killed_s and all(is_kill_pending(worker.pid) for worker in running)):
                return
            time.sleep(_PERIOD_S)


def count_threads(workers: int) -> str:
    """Returns the OMP_NUM_THREADS of workers of one machine: the user's, else a share of the cores."""
    return os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))


def _make_common_variables(workers: int, attempt: int, listening: socket.socket) -> dict[str, str]:
    return {
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(workers)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default_role",
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": str(listening.getsockname()[1]),
        "OMP_NUM_THREADS": count_threads(workers),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_RUN_ID": f"{RUN_ID_PREFIX}{uuid.uuid4().hex}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        LAUNCHER: name_launcher(),
    }


def _serve_store(listening: socket.socket) -> object:
    from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it privately

    port = listening.getsockname()[1]
    return TCPStore(_ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _spawn(arguments: Sequence[str], variables: Mapping[str, str], silent: bool) -> int:
    """Starts ``python ARGUMENTS`` in a new session; returns its process id."""
    file_actions = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)] if silent else []
    command = [sys.executable, *arguments]
    return os.posix_spawn(sys.executable, command, os.environ | variables, file_actions=file_actions, setsid=True)


def _fork(arguments: Sequence[str], variables: Mapping[str, str], silent: bool) -> int:
    """Does the same for ``-m MODULE ...``, in a fork of this process."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until the fork has its own handlers
    if pid := os.fork():
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pid
    status: object = 1
    try:
        os.setsid()
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.environ.update(variables)
        if silent:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _run_module(arguments)
        status = 0
    except SystemExit as leave:
        status = leave.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        end_process(status if isinstance(status, int) else int(status is not None))


def _run_module(arguments: Sequence[str]) -> None:
    """Runs ``python -m MODULE ...`` in this fork."""
    import torch  # the launcher has imported it

    if torch.cuda._is_in_bad_fork():  # the launcher has initialised CUDA, which a fork cannot use
        os.execv(sys.executable, [sys.executable, *arguments])
    torch.default_generator.seed()  # Python's own generator is seeded anew in each fork
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    threads = os.environ["OMP_NUM_THREADS"]
    if threads.isdecimal() and int(threads) != torch.get_num_threads():
        torch.set_num_threads(int(threads))  # the variable was read when torch was imported
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    _, module, *sys.argv[1:] = arguments
    sys.modules.pop("pipedream.__main__", None)  # runpy would warn that it runs twice
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _send_signal(workers: Sequence[Worker], number: int, *, group: bool = True) -> None:
    """Sends a signal to each running worker, and to the processes that it has started."""
    for worker in [worker for worker in workers if worker.is_running]:
        try:
            (os.killpg if group else os.kill)(worker.pid, number)
        except ProcessLookupError:  # it has not called setsid yet
            os.kill(worker.pid, number)


def _list_running(workers: Sequence[Worker]) -> list[Worker]:
    """Records which workers have ended, and how; returns those that still run."""
    now_s = time.time()
    for worker in [worker for worker in workers if worker.is_running]:
        pid, status = os.waitpid(worker.pid, os.WNOHANG)
        if pid:
            worker.is_running, worker.status = False, os.waitstatus_to_exitcode(status)
            ended_s = now_s
            with suppress(OSError):
                ended_s = worker.error_file.stat().st_mtime
            worker.ended_s = int(ended_s), now_s
    return [worker for worker in workers if worker.is_running]
