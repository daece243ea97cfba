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


def within(machine: Host) -> tuple[str, ...]:
    """Returns the prefix that runs a command on a machine, its processes alone."""
    return machine.inside("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def on_both(machines: Network, rendezvous: str, program: tuple[str, ...], folder: Path) -> list[Ended]:
    ends = [started.end() for started in started_on_both(machines, rendezvous, program, folder)]
    for rank, ended in enumerate(ends):
        assert ended.status == 0, f"machine {rank}: {ended.err}"
        assert not ended.orphans
    return ends


def started_on_both(machines: Network, rendezvous: str, program: tuple[str, ...], folder: Path) -> list[Started]:
    """Starts torchrun on both machines, one worker each."""
    first, started = machines.hosts[0].address, []
    for rank, host in enumerate(machines.hosts):
        meet = {
            "static": ("--master-addr", first, "--master-port", "29517", "--node-rank", str(rank)),
            "c10d": (
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29517", "--rdzv-id", "test"),
                *("--rdzv-conf", f"is_host={int(not rank)},keep_alive_interval=1,last_call_timeout=8"),
                *("--local-addr", host.address),
            ),
        }[rendezvous]
        (machine_folder := folder / f"machine{rank}").mkdir(parents=True, exist_ok=True)
        line = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meet, *program)
        interface = {"GLOO_SOCKET_IFNAME": LINK}
        started.append(commands.start(*line, folder=machine_folder, environment=interface, within=within(host)))
    return started
