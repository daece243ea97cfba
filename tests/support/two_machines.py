"""Two machines, as far as one can be two: network namespaces that are joined by a cable only."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import commands
import pytest
from commands import Ended, Started

__all__ = ["ADDRESSES", "ip", "machines", "on_both", "started_on_both"]


ADDRESSES = ("10.231.7.1", "10.231.7.2")


def ip(*arguments: str) -> None:
    """Runs the command ``ip``."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """The names of two network namespaces that a cable joins."""
    mark = uuid.uuid4().hex[:8]
    names = (f"pipe-{mark}-0", f"pipe-{mark}-1")
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for link in ("lo", "cable"):
                ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


def on_both(machines: tuple[str, str], rendezvous: str, program: tuple[str, ...], folder: Path) -> list[Ended]:
    """Runs torchrun on both machines, one worker each, and waits for both."""
    ends = [one.end() for one in started_on_both(machines, rendezvous, program, folder)]
    for rank, ended in enumerate(ends):
        assert ended.status == 0, f"machine {rank}: {ended.err}"
        assert not ended.orphans
    return ends


def started_on_both(
    machines: tuple[str, str], rendezvous: str, program: tuple[str, ...], folder: Path
) -> list[Started]:
    """Starts torchrun on both machines, one worker each."""
    started = []
    for rank, (name, address) in enumerate(zip(machines, ADDRESSES, strict=True)):
        meet = {
            "static": ("--master-addr", ADDRESSES[0], "--master-port", "29517", "--node-rank", str(rank)),
            "c10d": (
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29517", "--rdzv-id", "test"),
                *("--rdzv-conf", f"is_host={1 - rank}", "--local-addr", address),
            ),
        }[rendezvous]
        own = folder / f"machine{rank}"
        own.mkdir()
        started.append(
            commands.start(
                *("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meet, *program),
                folder=own,
                environment={"GLOO_SOCKET_IFNAME": "cable"},
                # Processes of one machine are none of the other's business.
                within=("ip", "netns", "exec", name, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
            )
        )
    return started
