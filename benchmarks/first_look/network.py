"""Two network namespaces joined by one link of a chosen rate, for a true slow network on one machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ADDRESSES", "LINK", "lacking", "two_namespaces"]

ADDRESSES = ("10.83.0.1", "10.83.0.2")
LINK = "wire"
"""Name of the link's end in each namespace."""

# A bucket of 32 kB is little beside a message, so the rate holds for all of it; the queue
# holds several messages, so that nothing is dropped.
_BURST, _QUEUE = "32kb", "16mb"

# Jumbo frames: the two cores do the work of the network card too, and a shaped link wakes them for each packet. With
# packets of 1500 bytes that takes 4 to 10 ms of a core for each message of 0.8 MB at 400 mbit/s.
_PACKET_BYTES = "9000"


def lacking() -> str | None:
    """Returns what this machine lacks for such a network, or None."""
    if missing := [tool for tool in ("ip", "tc", "taskset") if not shutil.which(tool)]:
        return f"no {' and no '.join(missing)} on the path (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if len(os.sched_getaffinity(0)) < 2:
        return "two workers need two cores, found one"
    try:
        with two_namespaces("100mbit"):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)} fails: {error.stderr.strip()}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextmanager
def two_namespaces(rate: str | None) -> Iterator[tuple[str, str]]:
    """Makes two namespaces and the link, yields their names, removes both whatever happens.

    Args:
        rate: of each direction, as tc writes it ('100mbit'); None does not limit it.

    Raises:
        subprocess.CalledProcessError: the machine does not allow it.
    """
    names = (f"first_look_{os.getpid()}_0", f"first_look_{os.getpid()}_1")
    ends = (f"fl{os.getpid()}a", f"fl{os.getpid()}b")
    made: list[str] = []
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            made.append(name)
        _run(
            "ip", "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1]
        )
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            inside = ("ip", "-n", name)
            _run(*inside, "link", "set", end, "name", LINK)
            _run(*inside, "address", "add", f"{address}/24", "dev", LINK)
            _run(*inside, "link", "set", LINK, "mtu", _PACKET_BYTES)
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "link", "set", LINK, "up")
            if rate is not None:
                _run("tc", "-n", name, "qdisc", "add", "dev", LINK, "root", "tbf", "rate", rate, "burst", _BURST,
                     "limit", _QUEUE)  # fmt: skip
        yield names
    finally:
        for name in made:
            subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True)
