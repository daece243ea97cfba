"""A strict stand-in for NCCL, between processes on CPUs.

It does what NCCL does, and refuses what would make NCCL wait for ever or return wrong numbers:

- the making of a group waits for all ranks, which must give the same arguments; the first use of a communicator in a
  direction, and its making with a device, waits until both hosts are there;
- tensors on another device than the communicator's, and types that NCCL lacks, are refused;
- messages, sums and the collectives of meshes run in the hardware queues of their process, as NCCL's kernels do: in the
  order in which they were issued. One that waits for its other end holds up what comes after it in its queue;
- each receive must match the next send in bytes and type, and each collective those of the other ranks;
- `wait` returns at once and data arrive later: what the host does with tensors after it waits, as the GPU's stream
  would. Until then a receive's tensor has wrong numbers;
- a wait for the whole device, and a drain, fail while something is outstanding that was not waited for;
- the end of a peer leaves transfers that never end, and a process that has such cannot exit before it aborts them.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import cases
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipedream.extensions.meshes.sharding import functions
from pipedream.extensions.shared_memory import pair_memory as shared_memory
from pipedream.runtime.comm import channel, connections, process_group
from pipedream.runtime.session import streams

_HOST_TIMEOUT_S = 30.0
_TRANSFER_S = 1e-3
_QUEUES = 32
"""CUDA_DEVICE_MAX_CONNECTIONS, as the library sets it."""
NCCL_DTYPES = {
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
}  # fmt: skip
"""Those of torch's table in torch/csrc/distributed/c10d/NCCLUtils.cpp."""
_COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced", "_allgather_base",
    "reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base", "gather", "scatter", "barrier",
)  # fmt: skip
_NEWER_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
_SEVERAL = {  # names of several collectives in one, by torch's version
    "allgather_into_tensor_coalesced": "_allgather_base",
    "all_gather_single_coalesced": "_allgather_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
}
_FIRST_TAG = 1 << 20
_communicators: list[_Communicator] = []
_numbers = itertools.count()
_groups = itertools.count()
_queue_numbers = itertools.count()


class StrictError(AssertionError):
    """NCCL would stand still here, or return wrong numbers."""


class _Work(dist._Work):  # type: ignore[name-defined]
    """A transfer or a sum, with the methods that are used of it."""

    def __init__(self, what: str, timeout_s: float, tensors: Any = ()) -> None:
        super().__init__()
        self.what = what
        self.waited = False
        self.done = threading.Event()
        self.error: BaseException | None = None
        self._timeout_s = timeout_s
        self._tensors = tensors

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self, timeout: Any = None) -> bool:
        """Lets the stream wait, not the host; without a stream, as in other tests, the host."""
        self.waited = True
        _waits.works.append(self)
        if not _Stream.installed:
            _finish_stream()
        return True

    def result(self) -> Any:
        return self._tensors

    def finish(self) -> None:
        """Waits as the stream does."""
        if not self.done.wait(self._timeout_s):
            raise StrictError(f"{self.what} does not end")
        if self.error is not None:
            raise self.error


class _Waits(threading.local):
    """What the next op on this thread's stream waits for."""

    def __init__(self) -> None:
        self.works: list[_Work] = []


_waits = _Waits()


def _finish_stream() -> None:
    while _waits.works:
        _waits.works.pop(0).finish()


class _Stream(TorchDispatchMode):
    """The stream of the computation: each op begins once all that was waited for before is over."""

    installed = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # it runs ops on its parts
        _finish_stream()
        return op(*args, **kwargs or {})

    def __enter__(self) -> Any:
        _Stream.installed += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _Stream.installed -= 1
        super().__exit__(*error)
        _waits.works.clear()


class _HardwareQueue:
    """Runs what was issued, one after the other, as a GPU does with the kernels of one of its queues."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[_Work, Callable[[], None]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            work, run = self.jobs.get()
            try:
                time.sleep(_TRANSFER_S)
                run()
            except StrictError as error:
                work.error = error
            except BaseException:  # the other end is gone: the kernel spins
                threading.Event().wait()
            work.done.set()


_queues: defaultdict[int, _HardwareQueue] = defaultdict(_HardwareQueue)


class _Communicator:
    """What communicators of messages and of sums share."""

    def begin(self, timeout_s: float) -> None:
        self.outstanding: list[_Work] = []
        self.issued = 0
        self.aborted = False
        self.timeout_s = timeout_s
        self._queue = _queues[next(_queue_numbers) % _QUEUES]
        _communicators.append(self)

    def issue(self, what: str, tensors: Sequence[Tensor], run: Callable[[], None], result: Any = ()) -> _Work:
        for tensor in tensors:
            if tensor.dtype not in NCCL_DTYPES and not tensor.is_complex():  # sums see complex numbers as two real ones
                raise StrictError(f"{what} of a tensor of {tensor.dtype}, which NCCL does not have")
            if not tensor.is_contiguous():
                raise StrictError(f"{what} of a tensor that is not contiguous")
        work, before = _Work(what, self.timeout_s, result), [] if what.startswith("a receive") else list(_waits.works)
        self.outstanding = [*(work for work in self.outstanding if not work.is_completed()), work]
        self.issued += 1

        def run_behind_stream() -> None:
            for earlier in before:
                earlier.finish()
            run()

        self._queue.jobs.put((work, run_behind_stream))
        return work

    def end(self) -> None:
        _communicators.remove(self)

    # What torch's groups of NCCL have, as the library aborts them.
    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _group_start(self) -> None:
        return

    def _group_end(self) -> None:
        return

    def abort(self) -> None:
        self.aborted = True


class StrictCommunicator(_Communicator):
    """Stands in for a ProcessGroup of NCCL with two ranks.

    Args:
        number: the same at both ranks, and of no other communicator.
        connects: at once, as with a `device_id`; otherwise at the first use.
        timeout_s: longer waits of a host are taken to have no end.
    """

    def __init__(
        self,
        ranks: tuple[int, int],
        device: torch.device,
        number: int,
        *,
        connects: bool = True,
        timeout_s: float = _HOST_TIMEOUT_S,
    ) -> None:
        self._ranks = ranks
        self._device = device
        self._tag = _FIRST_TAG + 3 * number
        self._rank = dist.get_rank()
        self._connected = False
        self.begin(timeout_s)
        if connects:
            self._meet("the making of a communicator")

    def rank(self) -> int:
        return self._ranks.index(self._rank)

    def send(self, tensors: list[Tensor], place: int, tag: int) -> _Work:
        return self._begin_transfer("a send", tensors, place, self._send)

    def recv(self, tensors: list[Tensor], place: int, tag: int) -> _Work:
        return self._begin_transfer("a receive", tensors, place, self._receive)

    def close(self) -> None:
        assert self.issued, f"the link from rank {self._ranks[0]} to rank {self._ranks[1]} was never used"
        self.end()

    def _begin_transfer(
        self, what: str, tensors: list[Tensor], place: int, run: Callable[[Tensor, int], None]
    ) -> _Work:
        (tensor,) = tensors
        peer = self._ranks[place]
        if tensor.device != self._device:
            raise StrictError(f"{what} of a tensor on {tensor.device} was issued on a communicator of {self._device}")
        if tensor.is_complex():
            raise StrictError(f"{what} of a tensor of {tensor.dtype}, which NCCL does not have")
        if peer == self._rank:
            raise StrictError(f"{what} to its own rank")
        self._meet(what)
        if run == self._receive and not tensor.is_meta:
            tensor.view(torch.uint8).fill_(255)  # floats are nan
        return self.issue("{} between ranks {} and {}".format(what, *self._ranks), tensors, partial(run, tensor, peer))

    def _meet(self, what: str) -> None:
        """Waits until both hosts are here."""
        if self._connected:
            return
        self._connected = True
        peer, word = self._ranks[1 - self._ranks.index(self._rank)], torch.zeros(1)
        world = dist.group.WORLD
        both = [world.send([torch.zeros(1)], peer, self._tag), world.recv([word], peer, self._tag)]

        def wait() -> None:
            for work in both:
                work.wait()

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(self.timeout_s)
        if waiting.is_alive():
            raise StrictError(f"{what} waits at rank {self._rank} for rank {peer}, which waits for something else")

    def _send(self, tensor: Tensor, peer: int) -> None:
        world = dist.group.WORLD
        world.send([_size(tensor)], peer, self._tag + 1).wait()
        if tensor.numel() and not tensor.is_meta:
            world.send([tensor], peer, self._tag + 2).wait()

    def _receive(self, tensor: Tensor, peer: int) -> None:
        world, size = dist.group.WORLD, torch.zeros(2, dtype=torch.int64)
        world.recv([size], peer, self._tag + 1).wait()
        if size.tolist() != _size(tensor).tolist():
            world.recv([torch.empty(int(size[0]), dtype=torch.uint8)], peer, self._tag + 2).wait()
            raise StrictError(f"a receive of {_size(tensor).tolist()} bytes meets a send of {size.tolist()}")
        if tensor.numel() and not tensor.is_meta:
            world.recv([tensor], peer, self._tag + 2).wait()


def _size(tensor: Tensor) -> Tensor:
    return torch.tensor([tensor.nbytes, tensor.element_size()])


class StrictGroup(_Communicator, dist.ProcessGroup):
    """Stands in for a ProcessGroup of NCCL for sums, or for a dimension of a mesh; gloo computes."""

    def __init__(self, options: Any, _: Any) -> None:
        dist.ProcessGroup.__init__(self, options.group_rank, options.group_size)
        self._gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        self._name = options.group_id
        self.begin(_HOST_TIMEOUT_S)

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return "strict"

    def shutdown(self) -> None:
        self.end()

    def _collect_several(self, name: str, outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> _Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            work = self._collect(name, output, tensor, *options)
        return work

    def _collect(self, name: str, *args: Any, **kwargs: Any) -> _Work:
        tensors = list(_tensors_in((args, kwargs)))

        def run() -> None:
            mine = hashlib.sha256(repr((name, [(t.nbytes, t.dtype) for t in tensors])).encode()).digest()
            digests = [torch.zeros(32, dtype=torch.uint8) for _ in range(self.size())]
            self._gloo.allgather([digests], [torch.tensor(list(mine), dtype=torch.uint8)]).wait()
            if any(bytes(digest.tolist()) != mine for digest in digests):
                raise StrictError(f"{name} of {[tuple(t.shape) for t in tensors]} meets another collective")
            getattr(self._gloo, name)(*args, **kwargs).wait()

        return self.issue(f"{name} of {self.size()} ranks", tensors, run, args[0] if args else ())


for _name in _COLLECTIVES:
    setattr(StrictGroup, _name, lambda self, *args, _name=_name, **kwargs: self._collect(_name, *args, **kwargs))
for _several, _name in _SEVERAL.items():
    setattr(StrictGroup, _several, lambda self, *args, _name=_name: self._collect_several(_name, *args))
for _newer, _name in _NEWER_NAMES.items():
    setattr(StrictGroup, _newer, getattr(StrictGroup, _name))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(part)


def _meet_all(number: int, arguments: str) -> None:
    """Waits until every rank makes its group of this number, with the same arguments."""
    store, prefix = distributed_c10d._get_default_store(), f"strict/group/{number}/"
    store.set(f"{prefix}{dist.get_rank()}", arguments)
    for rank in range(dist.get_world_size()):
        try:
            store.wait([f"{prefix}{rank}"], timedelta(seconds=_HOST_TIMEOUT_S))
        except RuntimeError:  # of torch's stores, whose error for a timeout it is
            raise StrictError(f"group {number} is not made by rank {rank}") from None
        if (other := store.get(f"{prefix}{rank}").decode()) != arguments:
            raise StrictError(f"group {number} is {arguments} at rank {dist.get_rank()}, and {other} at rank {rank}")


def outstanding(waited: bool = True) -> list[str]:
    """Returns what this process has issued and what has not ended; without `waited`, and was not waited for."""
    works = [work for communicator in _communicators for work in communicator.outstanding if not work.is_completed()]
    return [work.what for work in works if waited or not work.waited]


def synchronize(device: Any = None) -> None:
    if works := outstanding(waited=False):
        raise StrictError(f"a wait for the whole device, while {works[0]} is outstanding")
    _finish_stream()


def _hang_at_exit() -> None:
    """The destructors of torch's groups: each waits for what is under way on all."""
    while outstanding() and not all(communicator.aborted for communicator in _communicators):
        time.sleep(0.1)


@contextmanager
def installed(on_one_machine: bool) -> Iterator[None]:
    """Runs tensors between ranks over the stand-in, headers through sockets where `on_one_machine`, else gloo."""
    new_group, make_group = dist.new_group, connections._make_group
    backend: list[str] = []
    if "STRICT" not in dist.Backend._plugins:
        dist.Backend.register_backend("strict", StrictGroup, extended_api=True, devices=["cpu"])
        atexit.register(_hang_at_exit)

    def new_group_of_all(ranks: Any = None, *args: Any, **options: Any) -> Any:
        options |= {"backend": backend[-1]} if backend else {}
        _meet_all(next(_groups), f"{options.get('backend')} of {list(ranks or ())}")
        return new_group(ranks, *args, **options)

    def over_strict(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_over_strict(*args: Any, **options: Any) -> Any:
            backend.append("strict")
            try:
                return make(*args, **options)
            finally:
                backend.pop()

        return make_over_strict

    def make(ranks: Any, device: torch.device, ctas: int | None = None) -> Any:
        if ctas is None:
            return make_group(ranks, device)
        number = next(_numbers)
        _meet_all(next(_groups), f"a link of {list(ranks)}")
        return StrictCommunicator(tuple(sorted(ranks)), device, number) if dist.get_rank() in ranks else None

    def drained(ends: Any) -> None:
        channel.drain(ends)
        check_drained()

    def leave_group(group: Any) -> None:
        return group.close() if isinstance(group, StrictCommunicator) else process_group.leave_group(group)

    def after_stream(read: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: (_finish_stream(), read(*args, **options))[1]

    changes = [
        mock.patch.object(dist, "new_group", new_group_of_all),
        mock.patch.object(device_mesh, "new_group", over_strict(new_group_of_all)),
        mock.patch.object(connections, "_make_group", make),
        mock.patch.object(connections, "_connect_sums", over_strict(connections._connect_sums)),
        mock.patch.object(connections, "has_nccl", return_value=True),
        mock.patch.object(connections, "leave_group", leave_group),
        mock.patch.object(functions, "goes_over_gloo", return_value=False),
        mock.patch.object(streams, "drain", drained),
        mock.patch.object(torch.cuda, "synchronize", synchronize),
        *(mock.patch.object(Tensor, name, after_stream(getattr(Tensor, name))) for name in ("numpy", "tolist")),
    ]
    if not on_one_machine:
        changes.append(mock.patch.object(shared_memory, "is_supported", return_value=False))
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        stack.enter_context(_Stream())
        yield


def run_all(chosen: list[cases.Case]) -> list[cases.Trained]:
    """Runs one case after the other over the stand-in, by turns as between machines and on one."""
    outcomes = []
    for number, case in enumerate(chosen):
        with installed(on_one_machine=number % 2 == 1):
            outcomes.append(cases.run(case))
    assert next(_numbers), "no link was made"
    assert not _communicators, "a communicator was left"
    return outcomes


def check_drained() -> None:
    """Raises if something is outstanding that was not waited for."""
    if works := outstanding(waited=False):
        raise StrictError(f"a drain, while {works[0]} is outstanding")
