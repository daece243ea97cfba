"""Kills one of two hosts with all its processes, and times the restart with another host. See README.md.

Each host has network, process ids and memory of its own; they share the run folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import kills
import recovery

from pipedream.slow_links import LINK, Network, slow_network

CASES = {
    "the launcher of one of two hosts, a third one waiting": 2,
    "the same, started again there": 1,
}
"""Name -> the host that takes its place."""
_KILLED_AFTER = 400
"""Minibatches; meanwhile the third host has joined."""


def measure(name: str) -> tuple[float, int]:
    """Kills the launcher of the second host.

    Returns the seconds until a minibatch is finished again, and the minibatches that are repeated.
    """
    host = CASES[name]
    with TemporaryDirectory() as folder, slow_network((3,), (None,)) as network, ExitStack() as running:
        place = Path(folder)
        running.callback(_wait_until_gone, place)
        recovery.make_plan((1, 1)).save(place / "plan.json")
        first, second = (_start(network, host, place, running) for host in (0, 1))
        finished = place / "finished"
        recovery.wait_until(finished.exists, first, 300.0)
        if host == 2:
            _start(network, host, place, running)
        recovery.wait_until(lambda: len(recovery.read_finished(finished)) >= _KILLED_AFTER, first)
        killed_s = time.time()
        _kill(second)
        if host == 1:
            _start(network, host, place, running)
        return recovery.wait_for_restart(finished, killed_s, first)


def _start(network: Network, host: int, folder: Path, running: ExitStack) -> subprocess.Popen[bytes]:
    """Starts torchrun for a run on two hosts, one worker each."""
    host_folder, address = folder / f"host{host}", network.hosts[0].address
    (host_folder / "memory").mkdir(parents=True, exist_ok=True)
    namespaces = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c")
    namespaces += ('mount --bind "$0" /dev/shm && exec "$@"', str(host_folder / "memory"))
    meet = ("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", "--rdzv-backend", "c10d")
    meet += ("--rdzv-endpoint", f"{address}:29517", "--rdzv-id", "lost", "--local-addr", network.hosts[host].address)
    meet += ("--rdzv-conf", f"is_host={int(not host)},keep_alive_interval=1")
    shared = str(folder / "run")
    run = ("-m", "pipedream", "train", recovery.__file__, "--out", shared, "--resume", shared, *recovery.SAVES_OFTEN)
    run += ("--plan", str(folder / "plan.json"), "--epochs", "1000000")
    variables = {
        "PYTHONPATH": str(recovery.SOURCE),
        "FINISHED": str(folder / "finished"),
        "GLOO_SOCKET_IFNAME": LINK,
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    launcher = subprocess.Popen(
        network.hosts[host].inside(*namespaces, sys.executable, "-m", "torch.distributed.run", *meet, *run),
        env=os.environ | variables,
        cwd=host_folder,
        stdout=subprocess.DEVNULL,
        stderr=(host_folder / "errors").open("wb"),
        start_new_session=True,
    )
    running.callback(_kill, launcher)
    return launcher


def _kill(launcher: subprocess.Popen[bytes]) -> None:
    """Kills a host's first process, and with it all others there."""
    if launcher.poll() is None:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()


def _wait_until_gone(folder: Path) -> None:
    """Waits for the processes that the system kills."""
    while kills.list_processes(folder):
        time.sleep(0.05)
