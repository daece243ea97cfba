"""The process groups of a run, connected before its first message.

A worker is a mesh of consecutive ranks, often of one. Channels join rank c of one worker to rank c of another; where
their meshes differ, each rank to all ranks of the other. Sums are between ranks with the same number in their workers.

NCCL connects two ranks at their first exchange, for which both hosts wait. In the middle of a program each may first
wait for something else, so every group is used once here, in an order that all ranks share.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from itertools import product
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pipedream.core.errors import PlanError, WorkerError
from pipedream.core.extensions import find_offer, list_offers
from pipedream.core.plan.ranks import Mesh
from pipedream.runtime.comm.channel import DistributedGroup
from pipedream.runtime.comm.pairs import Listener, Pair, make_listener
from pipedream.runtime.comm.process_group import gather_texts, leave_group, machine_address, set_timeout, unsplit_groups

CONNECT_TIMEOUT_S = 60.0
"""How long the ranks of a group may take to connect, once all ranks are there."""
NCCL_TIMEOUT = timedelta(days=20)
"""A user may pause a run, as in a notebook; failures are found by the guard. In milliseconds it fits into 32 bits."""
_LINK_CTAS = 4  # of a message; they share no SM with compute
_ABORT_S = 5.0

Result = TypeVar("Result")


@dataclass(frozen=True)
class Connections:
    """Process groups of a run.

    Attributes:
        everyone: gloo group of all ranks, made for this run: messages to lower ranks, sums of small numbers.
        upward: another one, for messages to higher ranks, unless all share memory. A group has one connection between
            two ranks; while one of them sends on it, gloo's thread spins until it can read what arrives.
        stages: group of each stage's replicas, if there are several and this rank has one.
        holders: group of each tied weight's stages, if this rank has one.
        memory: (sender, receiver) -> shared memory, for pairs on one machine that include this rank.
        links: (sender, receiver) -> NCCL group of the two, for tensors on GPUs. Empty on CPUs, and where NCCL cannot
            be used; tensors then travel through the memory of the CPU.
        leaders: gloo group of the first rank of each worker; None at other ranks.
        meshes: the workers' meshes.
        mesh: the mesh of this rank's worker, if it has several ranks.
        worker_group: gloo group of the worker's ranks, if it has several.
        mesh_group: group of the same ranks, for tensors on their device.
    """

    everyone: dist.ProcessGroup
    upward: dist.ProcessGroup
    stages: tuple[dist.ProcessGroup | None, ...]
    holders: tuple[dist.ProcessGroup | None, ...]
    memory: Mapping[tuple[int, int], Pair]
    links: Mapping[tuple[int, int], dist.ProcessGroup]
    leaders: dist.ProcessGroup | None = None
    meshes: Sequence[Mesh] = ()
    mesh: DeviceMesh | None = None
    worker_group: dist.ProcessGroup | None = None
    mesh_group: dist.ProcessGroup | None = None
    _sums: list[DistributedGroup] = field(init=False, default_factory=list)

    @cached_property
    def workers(self) -> list[range]:
        """The ranks of each worker."""
        return _list_worker_ranks(self.meshes)

    @property
    def worker_number(self) -> int:
        """The number of this rank's worker."""
        return next(worker for worker, ranks in enumerate(self.workers) if self.process in ranks)

    @property
    def process(self) -> int:
        """This rank among all ranks of the job."""
        return dist.get_rank(self.everyone)

    @property
    def rank_in_worker(self) -> int:
        """This rank within its worker."""
        return self.process - self.workers[self.worker_number].start

    def sum_over(self, group: dist.ProcessGroup) -> DistributedGroup:
        """Returns sums over one of these groups, until `close` or `abort`."""
        self._sums.append(DistributedGroup(group))
        return self._sums[-1]

    def peers(self, worker: int) -> range:
        """Returns the ranks of another worker with which this one has channels."""
        ranks = self.workers[worker]
        same = self.meshes[worker] == self.meshes[self.worker_number]
        return ranks[self.rank_in_worker : self.rank_in_worker + 1] if same else ranks

    def close(self) -> None:
        """Destroys the groups that were made here, except those of device meshes; every rank calls it."""
        rank_groups = (self.everyone, self.leaders, self.worker_group, self.mesh_group, self.upward)  # may be equal
        for group in dict.fromkeys((*rank_groups, *self.stages, *self.holders, *self.links.values())):
            if group is not None:
                leave_group(group)
        for memory in self.memory.values():
            memory.close()

    def abort(self) -> None:
        """Closes after a failure, when other ranks may be gone, and aborts NCCL's pending operations.

        All communicators are aborted together: each waits for the kernels of the others, so torch, which at exit aborts
        one after the other, would wait for ever.
        """
        for sums in self._sums:
            sums.abandon()
        aborting = Thread(target=self._abort, daemon=True, name="pipedream-abort")  # gloo waits for what is under way
        aborting.start()
        aborting.join(_ABORT_S)
        if self.links and aborting.is_alive():
            atexit.register(_end_process)

    def _abort(self) -> None:
        if self.links:
            mesh_groups = self.mesh.get_all_groups() if self.mesh is not None else ()
            sum_groups = (*self.stages, *self.holders, self.mesh_group, *mesh_groups)
            _abort_backends({*self.links.values(), *(group for group in sum_groups if group is not None)})
        self.close()


def _abort_backends(groups: Iterable[dist.ProcessGroup]) -> None:
    backends: list[Any] = [group._get_backend(torch.device("cuda")) for group in groups]
    backends[0]._group_start()
    for backend in backends:
        backend.abort()
    backends[0]._group_end()


def _end_process() -> None:
    """Ends the process without destructing NCCL's communicators, which would never return."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


@unsplit_groups()
def connect_groups(
    pairs: Sequence[tuple[int, int]],
    stages: Sequence[Sequence[int]],
    holders: Sequence[Sequence[int]],
    device: torch.device,
    weights_device: torch.device,
    meshes: Sequence[Mesh] = (),
) -> Connections:
    """Makes the groups and uses each once. Every rank calls it with the same workers.

    Args:
        pairs: (sender, receiver) of activations, gradients and the like. These and the next two are numbers of workers.
        meshes: the workers' meshes; () for single ranks.

    Raises:
        WorkerError: ranks do not connect in time.
    """
    # Not the user's group: after a failure this run's messages would stay in it, and the next run would receive them.
    everyone = _make_group(range(dist.get_world_size()), torch.device("cpu"))
    assert everyone is not None
    uses_nccl = has_nccl(device, gather_texts(name_card(device), everyone))
    if device.type != "cpu" and not uses_nccl and any(mesh.dimensions for mesh in meshes):
        raise PlanError(
            "a plan with meshes was asked for on ranks that share a GPU, where NCCL does not run; give each rank a GPU "
            "of its own, or a plan without meshes"
        )
    sums_device = weights_device if uses_nccl else torch.device("cpu")
    meshes = meshes or [Mesh()] * (1 + max(map(max, stages)))
    workers = _list_worker_ranks(meshes)
    # So far of workers, now of ranks.
    pairs = [pair for a, b in pairs for pair in (zip if meshes[a] == meshes[b] else product)(workers[a], workers[b])]
    connector, memory, upward = _connect_memory(everyone, pairs, device)
    links = {}
    for pair in pairs if uses_nccl and list_offers("gpu_link") else ():
        make = partial(_make_group, pair, device, _LINK_CTAS)
        use = partial(_exchange_byte, sends=dist.get_rank() == pair[0], device=device)
        if (group := connector.connect(pair, make, use)) is not None:
            links[pair] = group
    if uses_nccl:  # some ranks have more links; the time for the next groups begins when all have theirs
        gather_texts("", everyone)
    mesh_groups: tuple[Any, ...] = ()
    if any(mesh.dimensions for mesh in meshes):
        offer = find_offer("mesh_groups", "the plan has meshes")
        mesh_groups = offer.connect_meshes(sums_device, workers, meshes, _make_group)
    connect = partial(_connect_sums, connector, workers, sums_device)
    stage_groups = tuple(connect(row) if len(row) > 1 else None for row in stages)
    holder_groups = tuple(map(connect, holders))
    leaders = _connect_leaders(everyone, [ranks.start for ranks in workers])
    return Connections(everyone, upward, stage_groups, holder_groups, memory, links, leaders, meshes, *mesh_groups)


def _connect_memory(
    everyone: dist.ProcessGroup, pairs: Sequence[tuple[int, int]], device: torch.device
) -> tuple[_Connector, dict[tuple[int, int], Pair], dist.ProcessGroup]:
    """Waits for all workers; returns the connector, this rank's shared memory, and the group for messages upward."""
    listener = make_listener()
    own_address = json.dumps([machine_address(), listener.name if listener else ""])
    addresses, names = zip(*map(json.loads, gather_texts(own_address, everyone)), strict=True)
    upward = everyone
    if len(set(addresses)) > 1 or not all(names):
        upward = _make_group(range(dist.get_world_size(everyone)), torch.device("cpu")) or everyone  # never None
    connector = _Connector(dist.get_rank(everyone), addresses, device)
    try:
        share = partial(_share_memory, everyone, listener)
        sides = {pair: connector.run(pair, partial(share, pair, names[pair[0]])) for pair in pairs}
    finally:
        if listener:
            listener.close()
    return connector, {pair: side for pair, side in sides.items() if side is not None}, upward


def make_gloo_group(ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Returns a new gloo group of some ranks, by default of all; every rank calls it, at the same time."""
    try:
        group: dist.ProcessGroup = dist.new_group(ranks, timeout=timedelta(seconds=CONNECT_TIMEOUT_S), backend="gloo")
    except RuntimeError as error:  # perhaps one of them could start no thread
        cause = f"no group with the other ranks; torch's error: {error}"
        advice = "read what they printed, and raise the limit of processes and threads (ulimit -u, pids.max)"
        raise WorkerError(dist.get_rank(), "connecting", cause, advice) from error
    if isinstance(group, dist.ProcessGroup):  # else it is without this rank
        set_timeout(dist.default_pg_timeout, group)  # the limit was for connecting
    return group


def make_link_group(ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup | None:
    """Returns a process group of two ranks as messages use it, for measurements; every rank calls it."""
    uses_nccl = device.type == "cuda" and "nccl" in dist.get_backend_config()
    with unsplit_groups():
        return _make_group(ranks, device if uses_nccl else torch.device("cpu"), _LINK_CTAS)


def _connect_sums(
    connector: _Connector, workers: Sequence[range], device: torch.device, stage_workers: Sequence[int]
) -> dist.ProcessGroup | None:
    """Returns the group of the ranks with this rank's number in workers with equal meshes."""
    places = list(zip(*(workers[worker] for worker in stage_workers), strict=True))
    use = partial(_sum_zeros, device=device)
    groups = [connector.connect(ranks, partial(_make_group, ranks, device), use) for ranks in places]
    return next(filter(None, groups), None)


def _list_worker_ranks(meshes: Sequence[Mesh]) -> list[range]:
    workers: list[range] = []
    for mesh in meshes:
        first = workers[-1].stop if workers else 0
        workers.append(range(first, first + mesh.size))
    return workers


def _connect_leaders(everyone: dist.ProcessGroup, first_ranks: Sequence[int]) -> dist.ProcessGroup | None:
    if len(first_ranks) == dist.get_world_size(everyone):
        return everyone
    group = _make_group(first_ranks, torch.device("cpu"))
    return group if dist.get_rank(everyone) in first_ranks else None  # torch gives others a marker


class _Connector:
    """Runs calls that may wait for another host in a thread, so that the wait can time out."""

    def __init__(self, rank: int, addresses: Sequence[str], device: torch.device) -> None:
        self._rank = rank
        self._addresses = addresses
        self._device = device

    def connect(
        self,
        ranks: Sequence[int],
        make: Callable[[], dist.ProcessGroup | None],
        use: Callable[[dist.ProcessGroup], None],
    ) -> dist.ProcessGroup | None:
        """Returns the group that every rank makes by `make`, once its members have used it; None on other ranks."""
        if self._rank not in ranks:
            make()
            return None

        def begin() -> dist.ProcessGroup:
            group = make()
            assert group is not None
            use(group)
            return group

        return self.run(ranks, begin)

    def run(self, ranks: Sequence[int], function: Callable[[], Result]) -> Result | None:
        """Returns a function's result at these ranks, else None. Raises WorkerError if it fails or takes too long."""
        if self._rank not in ranks:
            return None
        outcome = Future[Result]()

        def run_on_device() -> None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # in a new thread it is GPU 0
                outcome.set_result(function())
            except Exception as error:
                outcome.set_exception(error)

        Thread(target=run_on_device, daemon=True, name="pipedream-connect").start()
        try:
            return outcome.result(CONNECT_TIMEOUT_S)
        except Exception as error:
            others = " and ".join(f"rank {rank} at {self._addresses[rank]}" for rank in ranks if rank != self._rank)
            reason = f"torch's error: {error}" if outcome.done() else f"nothing came within {CONNECT_TIMEOUT_S:g} s"
            raise WorkerError(
                self._rank,
                "connecting",
                f"no connection from rank {self._rank} at {self._addresses[self._rank]} to {others}; {reason}",
                "let the machines reach each other on all ports, and name the interface that joins them on each of "
                "them (GLOO_SOCKET_IFNAME, on GPUs also NCCL_SOCKET_IFNAME)",
            ) from error


def _share_memory(
    everyone: dist.ProcessGroup, listener: Listener | None, pair: tuple[int, int], name: str
) -> Pair | None:
    """Lets the receiver try to reach the sender within the machine, and reply over gloo, which connects them too."""
    sender, receiver = pair
    key, answer = f"{sender}-{receiver}", torch.zeros(1, dtype=torch.uint8)
    if dist.get_rank(everyone) == receiver:
        connection = listener and listener.connect(name, key)
        answer += connection is not None
        everyone.send([answer], sender, 0).wait()
    else:
        everyone.recv([answer], receiver, 0).wait()
        connection = listener.accept(key) if listener and answer else None
    if listener is None or connection is None:
        return None
    return listener.make_pair(connection, sends=dist.get_rank(everyone) == sender)


def _exchange_byte(group: dist.ProcessGroup, sends: bool, device: torch.device) -> None:
    """Sends one byte to the other rank of a group of two, or receives it, and waits for that."""
    byte, other = [torch.zeros(1, dtype=torch.uint8, device=device)], 1 - group.rank()
    _wait_until_completed(group.send(byte, other, 0) if sends else group.recv(byte, other, 0))


def _sum_zeros(group: dist.ProcessGroup, device: torch.device) -> None:
    work = dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
    assert work is not None
    _wait_until_completed(work)


def _wait_until_completed(work: dist.Work) -> None:
    work.wait()
    while not work.is_completed():  # NCCL's wait only makes the stream wait
        time.sleep(0.001)


def _make_group(ranks: Sequence[int], device: torch.device, ctas: int | None = None) -> dist.ProcessGroup | None:
    """Returns a new group; with `ctas`, one for messages, without gloo."""
    group: dist.ProcessGroup | None
    if device.type != "cuda":
        group = make_gloo_group(list(ranks))
    elif ctas is None:  # numbers that the host reads stay in the memory of the CPU, and go over gloo
        group = dist.new_group(list(ranks), backend="cpu:gloo,cuda:nccl", timeout=NCCL_TIMEOUT, device_id=device)
    else:
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = ctas
        options._timeout = NCCL_TIMEOUT  # the argument counts, but torch warns if this differs
        # A link serializes its messages on purpose; torch would warn of that.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")
        group = dist.new_group(
            sorted(ranks), backend="nccl", timeout=NCCL_TIMEOUT, pg_options=options, device_id=device
        )
    return group


def has_nccl(device: torch.device, cards: Sequence[str]) -> bool:
    """Returns whether NCCL can be used: the user's process group has it, and no ranks share a card."""
    if device.type != "cuda" or len(set(cards)) < len(cards) or "nccl" not in dist.get_backend_config():
        return False
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        warnings.warn(
            "CUDA_LAUNCH_BLOCKING=1 makes each send wait for its receive, and two ranks that send to each other would "
            "wait for ever; messages go through the memory of the CPU instead. Unset it for NCCL",
            stacklevel=2,
        )
        return False
    return True


def name_card(device: torch.device) -> str:
    """Returns a name of a GPU that no other GPU has; "" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
