"""The groups of processes that have joined, and short texts between their ranks."""

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pipedream.core.errors import PeerError, is_broken_connection

_TEXT_GROUP = "texts of pipedream"
"""Name of the group that carries texts where the user's own is NCCL's."""

_END_FIRST_S = 1.0
"""How long a rank that lost a peer waits before it ends: the launcher blames the first worker to end."""


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Limits the waits in a group, by default that of all ranks."""
    # Public from torch 2.14 on, where the private name warns.
    (getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout)(timeout, group)


def machine_address() -> str:
    """Returns the name of this machine, with its address or the interface that was chosen for messages."""
    name, interface = socket.gethostname(), os.environ.get("GLOO_SOCKET_IFNAME")
    try:
        return f"{name} ({interface or socket.gethostbyname(name)})"
    except OSError:
        return name


def read_machine() -> str:
    """Returns what only processes of one machine, or one host of an emulated network, share."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"


def world_group() -> dist.ProcessGroup | None:
    """Returns a gloo group of all ranks, for small CPU tensors; None in a single process. Every rank calls it."""
    if not dist.is_initialized():
        return None
    if dist.get_backend() == "gloo" or "cpu:gloo" in dist.get_backend():
        return dist.group.WORLD
    # The user's group is NCCL's. From the first call on torch's table has a second one.
    for group in distributed_c10d._world.pg_map:
        if group.group_desc == _TEXT_GROUP:
            return group
    return dist.new_group(backend="gloo", group_desc=_TEXT_GROUP)  # type: ignore[no-any-return]


@contextmanager
def peers_may_end() -> Iterator[None]:
    """Turns a broken connection into a `PeerError`: the worker that ended, or its launcher, prints the cause."""
    try:
        yield
    except (RuntimeError, ConnectionError) as error:
        if not (isinstance(error, ConnectionError) or is_broken_connection(error)):
            raise
        time.sleep(_END_FIRST_S)
        raise PeerError(
            dist.get_rank(),
            "waiting for the other ranks",
            "one of them has ended, whose own message says why",
            f"torch's error: {error}",
        ) from error


@peers_may_end()
def broadcast_text(text: str, group: dist.ProcessGroup | None) -> str:
    """Returns the text of the group's rank 0."""
    texts = [text]
    if group is not None:
        dist.broadcast_object_list(texts, group=group, group_src=0)
    return texts[0]


@peers_may_end()
def gather_texts(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """Returns the texts of the group's ranks in their order."""
    if group is None:
        return [text]
    texts = [""] * dist.get_world_size(group)
    dist.all_gather_object(texts, text, group=group)
    return texts


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns the values of the group's ranks in their order, as JSON gives them back."""
    return [json.loads(text) for text in gather_texts(json.dumps(value), group)]


def wait_for_all() -> None:
    """Returns once every rank has called it."""
    gather_texts("", world_group())


def make_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Returns a process group of some ranks; every rank calls it, in the same order."""
    with unsplit_groups():
        group: dist.ProcessGroup = dist.new_group(list(ranks))
    return group


@contextmanager
def unsplit_groups() -> Iterator[None]:
    """Makes new groups connect by themselves, without a split of the user's group.

    After `init_process_group(..., device_id=...)` torch splits each new group off the first. For a gloo group, ranks
    outside of it then wait for a split that its members never join.
    """
    world = dist.group.WORLD
    assert world is not None
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def leave_group(group: dist.ProcessGroup | None = None) -> None:
    """Destroys a group; each of its ranks calls it.

    Otherwise a gloo thread may free tensors while the interpreter shuts down, and the process aborts (SIGABRT).
    """
    if dist.is_initialized():
        dist.destroy_process_group(group)
