"""Network namespaces, one a worker, on one bridge; each worker's port is shaped both ways to a chosen rate."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["LINK", "Network", "lacking", "namespaces"]

LINK = "wire"
"""Name of a worker's port in its namespace."""

# A bucket of 32 kB is little beside a message, so the rate holds for all of it; the queue holds several messages,
# so that nothing is dropped. Jumbo frames: the cores do the work of the network cards too (benchmarks/first_look).
_BURST, _QUEUE, _PACKET_BYTES = "32kb", "16mb", "9000"


@dataclass(frozen=True)
class Network:
    """Namespaces on a bridge.

    Attributes:
        names: of the namespaces.
        addresses: of the workers' ports.
        ports: the other ends of these ports, on the bridge.
        hub: namespace of the bridge.
    """

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    ports: tuple[str, ...]
    hub: str

    def shape(self, rate: str | None) -> None:
        """Limits what each port sends and what it receives, as tc writes it ('100mbit'); None takes the limit away."""
        for name, device in (*((name, LINK) for name in self.names), *((self.hub, port) for port in self.ports)):
            subprocess.run(("tc", "-n", name, "qdisc", "del", "dev", device, "root"), check=False, capture_output=True)
            if rate is not None:
                _run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", _BURST,
                     "limit", _QUEUE)  # fmt: skip


@contextmanager
def namespaces(count: int) -> Iterator[Network]:
    """Makes the namespaces and the bridge, removes all whatever happens.

    Raises:
        subprocess.CalledProcessError: the machine does not allow it.
    """
    mark = os.getpid()
    hub = f"prediction_{mark}_hub"
    names = tuple(f"prediction_{mark}_{number}" for number in range(count))
    network = Network(
        names,
        tuple(f"10.84.0.{number + 1}" for number in range(count)),
        tuple(f"port{number}" for number in range(count)),
        hub,
    )
    made: list[str] = []
    try:
        for name in (hub, *names):
            _run("ip", "netns", "add", name)
            made.append(name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "bridge", "mtu", _PACKET_BYTES, "up")
        for name, address, port in zip(names, network.addresses, network.ports, strict=True):
            _run("ip", "link", "add", LINK, "netns", name, "type", "veth", "peer", "name", port, "netns", hub)
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", LINK)
            _run("ip", "-n", name, "link", "set", LINK, "mtu", _PACKET_BYTES, "up")
            _run("ip", "-n", hub, "link", "set", port, "master", "bridge", "mtu", _PACKET_BYTES, "up")
        yield network
    finally:
        for name in made:
            subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True)


def lacking() -> str | None:
    """Returns what this machine lacks for such a network, or None."""
    if missing := [tool for tool in ("ip", "tc", "taskset") if not shutil.which(tool)]:
        return f"no {' and no '.join(missing)} on the path (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if len(os.sched_getaffinity(0)) < 2:
        return "two workers need two cores, found one"
    try:
        with namespaces(2) as network:
            network.shape("100mbit")
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)} fails: {error.stderr.strip()}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
