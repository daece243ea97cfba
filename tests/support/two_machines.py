"""Two machines, as far as one can be two: hosts of a slow network, which for most tests has no limit."""

from collections.abc import Iterator
from pathlib import Path

import commands
import pytest
from commands import Ended, Started

from pipedream.slow_links import LINK, Host, Network, slow_network


@pytest.fixture
def machines() -> Iterator[Network]:
    with slow_network((2,), (None,)) as network:
        yield network


def within(machine: Host, memory: Path | None = None) -> tuple[str, ...]:
    """Returns the prefix that runs a command on a machine, its processes alone, `memory` as its /dev/shm."""
    mounted = () if memory is None else ("sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', str(memory))
    return machine.inside("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *mounted)


def on_both(machines: Network, rendezvous: str, program: tuple[str, ...], folder: Path) -> list[Ended]:
    ends = [started.end() for started in started_on_both(machines, rendezvous, program, folder)]
    for rank, ended in enumerate(ends):
        assert ended.status == 0, f"machine {rank}: {ended.err}"
        assert not ended.orphans
    return ends


def started_on_both(
    machines: Network, rendezvous: str, program: tuple[str, ...], folder: Path, *, own_memory: bool = False
) -> list[Started]:
    """Starts torchrun on both machines, one worker each; with `own_memory` folders are their /dev/shm."""
    hosts = range(len(machines.hosts))
    return [start_on(machines, rank, rendezvous, program, folder, own_memory=own_memory) for rank in hosts]


def start_on(
    machines: Network,
    rank: int,
    rendezvous: str,
    program: tuple[str, ...],
    folder: Path,
    *,
    own_memory: bool = False,
    nodes: str = "2",
) -> Started:
    """Starts torchrun on one machine, for a run on `nodes` of them: a number, or FEWEST:MOST."""
    host, first = machines.hosts[rank], machines.hosts[0].address
    meet = {
        "static": ("--master-addr", first, "--master-port", "29517", "--node-rank", str(rank)),
        "c10d": (
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29517", "--rdzv-id", "test"),
            *("--rdzv-conf", f"is_host={int(not rank)},keep_alive_interval=1,last_call_timeout=8"),
            *("--local-addr", host.address),
        ),
    }[rendezvous]
    machine_folder = folder / f"machine{rank}"
    memory = machine_folder / "memory" if own_memory else None
    (memory or machine_folder).mkdir(parents=True, exist_ok=True)
    return commands.start(
        *("-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "1", *meet, *program),
        folder=machine_folder,
        environment={"GLOO_SOCKET_IFNAME": LINK},
        within=within(host, memory),
    )
