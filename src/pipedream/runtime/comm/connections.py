"""The process groups of a run, connected before its first message.

Where a worker is a mesh of n ranks, rank c of every worker together form a pipeline of their own: the ranks w n + c of
the job are its ranks w. All groups here are those of this rank's pipeline, and count their ranks by workers.

NCCL connects two ranks at their first exchange, for which each host waits. In the middle of a program both may wait
for something else first, so every group is used once here, in an order that all ranks share.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import prod
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipedream.core.errors import WorkerError
from pipedream.runtime.comm.distributed import ChannelEndpoint, DistributedReceiver, DistributedSender
from pipedream.runtime.comm.process_group import gather_texts, leave_group, machine_address, world_group
from pipedream.runtime.comm.shared_memory import (
    MOST_UNREAD,
    Listener,
    MemoryPair,
    SharedMemoryReceiver,
    SharedMemorySender,
)

__all__ = ["CONNECT_TIMEOUT_S", "Connections", "card_of", "connect_groups", "has_nccl"]

CONNECT_TIMEOUT_S = 60.0
"""How long the ranks of a group may take to connect, once all ranks are there."""
_NCCL_TIMEOUT = timedelta(days=30)  # a user may pause a run, as in a notebook; failures are found by the guard
_LINK_CTAS = 4  # of a message; they share no SM with compute


@dataclass(frozen=True)
class Connections:
    """Process groups of a run.

    Attributes:
        everyone: gloo group of all workers: messages to lower ranks, sums of small numbers.
        upward: another one, for messages to higher ranks. A group has one connection between two ranks; while one of
            them sends on it, gloo's thread spins until it can read what arrives.
        stages: each stage's replicas; None for one.
        holders: for each tied weight; None if this rank has none.
        memory: (sender, receiver) -> memory that both share, where this rank is one and both are on one machine.
        links: (sender, receiver) -> NCCL group of the two, for tensors on GPUs. Empty on CPUs, and where NCCL cannot
            be used; tensors then travel through the memory of the CPU.
        mesh: of this rank's worker; None for a single rank.
        worker: gloo group of the worker's ranks; None for one.
    """

    everyone: dist.ProcessGroup
    upward: dist.ProcessGroup
    stages: tuple[dist.ProcessGroup | None, ...]
    holders: tuple[dist.ProcessGroup | None, ...]
    memory: Mapping[tuple[int, int], MemoryPair]
    links: Mapping[tuple[int, int], dist.ProcessGroup]
    mesh: DeviceMesh | None = None
    worker: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """This rank's worker."""
        return dist.get_rank(self.everyone)

    @property
    def process(self) -> int:
        """This rank among all ranks of the job."""
        return dist.get_rank()

    def sender(
        self, receiver: int, number: int, depth: int, max_unread: int, device: torch.device, apart: str = ""
    ) -> DistributedSender | SharedMemorySender:
        """Returns the sending end of a channel; two ranks make their channels in one order."""
        memory = self._shared_memory((self.rank, receiver), max_unread)
        if memory is not None:
            return SharedMemorySender(memory.open(), receiver, max_unread, apart)
        group = self._messages(self.rank, receiver)
        return DistributedSender(ChannelEndpoint(receiver, number, depth, group, device, apart), max_unread)

    def receiver(
        self, sender: int, number: int, depth: int, max_unread: int, device: torch.device, apart: str = ""
    ) -> DistributedReceiver | SharedMemoryReceiver:
        """Returns the receiving end of a channel."""
        memory = self._shared_memory((sender, self.rank), max_unread)
        if memory is not None:
            return SharedMemoryReceiver(memory.open(), sender, device)
        group = self._messages(sender, self.rank)
        return DistributedReceiver(ChannelEndpoint(sender, number, depth, group, device, apart))

    def _messages(self, sender: int, receiver: int) -> dist.ProcessGroup:
        return self.upward if sender < receiver else self.everyone

    def _shared_memory(self, pair: tuple[int, int], max_unread: int) -> MemoryPair | None:
        return self.memory.get(pair) if max_unread <= MOST_UNREAD else None

    def close(self) -> None:
        """Destroys the groups that were made here; every rank calls it."""
        everyone = self.everyone if self.everyone is not world_group() else None
        for group in (everyone, self.worker, self.upward, *self.stages, *self.holders, *self.links.values()):
            if group is not None:
                leave_group(group)
        for memory in self.memory.values():
            memory.close()


def connect_groups(
    pairs: Sequence[tuple[int, int]],
    stages: Sequence[Sequence[int]],
    holders: Sequence[Sequence[int]],
    device: torch.device,
    mesh: Mapping[str, int] | None = None,
) -> Connections:
    """Makes the groups and uses each once; every rank calls it with the same ranks.

    Args:
        pairs: (sender, receiver) of activations, gradients and the like.
        mesh: of each worker: the size of each dimension.

    Raises:
        WorkerError: ranks do not connect in time.
    """
    world, mesh_ranks = world_group(), prod((mesh or {}).values())
    assert world is not None
    uses_nccl = has_nccl(device, gather_texts(card_of(device), world))
    on, cpu, place = device if uses_nccl else torch.device("cpu"), torch.device("cpu"), dist.get_rank() % mesh_ranks

    workers = range(1 + max(map(max, stages)))

    def made(ranks: Sequence[int], device: torch.device, ctas: int | None = None) -> dist.ProcessGroup | None:
        """Makes a group in every pipeline; returns that of this rank's."""
        groups = [_new_group([r * mesh_ranks + at for r in ranks], device, ctas) for at in range(mesh_ranks)]
        return groups[place]

    everyone = world if mesh_ranks == 1 else made(workers, cpu)
    upward = made(workers, cpu)
    assert everyone is not None
    assert upward is not None
    rank = dist.get_rank(everyone)
    listener = Listener()
    mine = json.dumps([machine_address(), listener.name])
    addresses, names = zip(*map(json.loads, gather_texts(mine, everyone)), strict=True)  # waits for all workers
    connecting = _Connecting(rank, addresses, device)
    memory: dict[tuple[int, int], MemoryPair] = {}
    try:
        for pair in pairs:
            connecting.run(pair, partial(_share_memory, everyone, pair, listener, names[pair[0]], memory))
    finally:
        listener.close()

    def sums(ranks: Sequence[int]) -> dist.ProcessGroup | None:
        return connecting.group(ranks, lambda: made(ranks, on), lambda group: _add(group, on))

    def link(pair: tuple[int, int]) -> dist.ProcessGroup | None:
        return connecting.group(
            pair, lambda: made(pair, on, _LINK_CTAS), lambda group: _exchange(group, rank == pair[0], (0, 1), on)
        )

    found = {pair: link(pair) for pair in pairs} if uses_nccl else {}
    return Connections(
        everyone,
        upward,
        tuple(sums(row) if len(row) > 1 else None for row in stages),
        tuple(sums(ranks) for ranks in holders),
        memory,
        {pair: group for pair, group in found.items() if group is not None},
        _device_mesh(on, len(workers), mesh) if mesh else None,
        _worker_group(len(workers), mesh_ranks) if mesh else None,
    )


def _worker_group(workers: int, mesh_ranks: int) -> dist.ProcessGroup | None:
    groups = [_new_group(range(w * mesh_ranks, (w + 1) * mesh_ranks), torch.device("cpu")) for w in range(workers)]
    return groups[dist.get_rank() // mesh_ranks]


def _device_mesh(device: torch.device, workers: int, mesh: Mapping[str, int]) -> DeviceMesh:
    """Returns that of this rank's worker."""
    names = ("pipedream_worker", *mesh)
    return init_device_mesh(device.type, (workers, *mesh.values()), mesh_dim_names=names)[tuple(mesh)]


class _Connecting:
    """Runs what may wait for another host in a thread of its own, so that the wait can end."""

    def __init__(self, rank: int, addresses: Sequence[str], device: torch.device) -> None:
        self._rank = rank
        self._addresses = addresses
        self._device = device

    def group(
        self,
        ranks: Sequence[int],
        make: Callable[[], dist.ProcessGroup | None],
        use: Callable[[dist.ProcessGroup], None],
    ) -> dist.ProcessGroup | None:
        """Returns the group that `make` makes, on every rank, once its own ranks have used it; None on others."""
        if self._rank not in ranks:
            make()
            return None
        made: list[dist.ProcessGroup] = []

        def begin() -> None:
            group = make()
            assert group is not None
            use(group)
            made.append(group)

        self.run(ranks, begin)
        return made[0]

    def run(self, ranks: Sequence[int], function: Callable[[], Any]) -> None:
        """Runs a function at these ranks.

        Raises:
            WorkerError: it failed, or took longer than `CONNECT_TIMEOUT_S`.
        """
        if self._rank not in ranks:
            return
        failures: list[Exception] = []

        def guarded() -> None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # a new thread's is 0
                function()
            except Exception as error:
                failures.append(error)

        thread = Thread(target=guarded, daemon=True, name="pipedream-connect")
        thread.start()
        thread.join(CONNECT_TIMEOUT_S)
        if thread.is_alive() or failures:
            others = " and ".join(f"rank {rank} at {self._addresses[rank]}" for rank in ranks if rank != self._rank)
            why = f"torch's error: {failures[0]}" if failures else f"nothing came within {CONNECT_TIMEOUT_S:g} s"
            raise WorkerError(
                self._rank,
                "connecting",
                f"no connection from rank {self._rank} at {self._addresses[self._rank]} to {others}; {why}",
                "let the machines reach each other on all ports, and name the interface that joins them on each of "
                "them (GLOO_SOCKET_IFNAME, on GPUs also NCCL_SOCKET_IFNAME)",
            ) from (failures[0] if failures else None)


def _share_memory(
    everyone: dist.ProcessGroup,
    pair: tuple[int, int],
    listener: Listener,
    name: str,
    memory: dict[tuple[int, int], MemoryPair],
) -> None:
    """The receiver tries to reach the sender within their machine, and answers it by gloo, which connects them too."""
    sender, receiver = pair
    key, answer = f"{sender}-{receiver}", torch.zeros(1, dtype=torch.uint8)
    if dist.get_rank(everyone) == receiver:
        found = listener.connect(name, key)
        answer += found is not None
        everyone.send([answer], sender, 0).wait()
    else:
        everyone.recv([answer], receiver, 0).wait()
        found = listener.accept(key) if answer else None
    if found is not None:
        memory[pair] = MemoryPair(found, sends=dist.get_rank(everyone) == sender)


def _exchange(group: dist.ProcessGroup, sends: bool, places: tuple[int, int], device: torch.device) -> None:
    """Sends one byte from a rank to another, whose places in the group are given, and waits for it."""
    byte = [torch.zeros(1, dtype=torch.uint8, device=device)]
    _finish(group.send(byte, places[1], 0) if sends else group.recv(byte, places[0], 0))


def _add(group: dist.ProcessGroup, device: torch.device) -> None:
    work = dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
    assert work is not None
    _finish(work)


def _finish(work: dist.Work) -> None:
    work.wait()
    while not work.is_completed():  # NCCL's wait only makes the stream wait
        time.sleep(0.001)


def _new_group(ranks: Sequence[int], device: torch.device, ctas: int | None = None) -> dist.ProcessGroup | None:
    """`ctas` makes a group for messages, which has no gloo."""
    made: dist.ProcessGroup | None
    if device.type != "cuda":
        made = dist.new_group(list(ranks), backend="gloo")
    elif ctas is None:  # numbers that the host reads stay in the memory of the CPU, and go over gloo
        made = dist.new_group(list(ranks), backend="cpu:gloo,cuda:nccl", timeout=_NCCL_TIMEOUT, device_id=device)
    else:
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = ctas
        made = dist.new_group(
            list(ranks), backend="nccl", timeout=_NCCL_TIMEOUT, pg_options=options, device_id=device, sort_ranks=False
        )
    return made


def has_nccl(device: torch.device, cards: Sequence[str]) -> bool:
    """Returns whether the user's process group has NCCL, which refuses ranks that share a card."""
    if device.type != "cuda" or len(set(cards)) < len(cards):
        return False
    return "nccl" in dist.get_backend_config()


def card_of(device: torch.device) -> str:
    """Returns a name of a GPU that no other GPU has; "" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
