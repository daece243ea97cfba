"""A strict stand-in for NCCL, between processes on CPUs.

It does what NCCL does, and refuses what would make NCCL wait for ever or return wrong numbers:

- the first use of a communicator in a direction, and the making of one with a device, waits until both hosts are there;
- tensors on another device than the communicator's are refused;
- what was issued on a communicator runs in that order, in a thread, as NCCL's kernels on their stream: a receive whose
  send has not been issued holds up what comes after it;
- each receive must match the next send in bytes and type, which is one that NCCL has;
- `is_completed` is true once the transfer has ended; `wait` does not let the host wait for more than that;
- a wait for the whole device, and a drain, fail while something is outstanding.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import cases
import torch
import torch.distributed as dist
from torch import Tensor

from pipedream.runtime.comm import channel, connections, process_group, shared_memory
from pipedream.runtime.session import streams

_HOST_TIMEOUT_S = 30.0
NCCL_DTYPES = {
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
}  # fmt: skip
"""Those of torch's table in torch/csrc/distributed/c10d/NCCLUtils.cpp."""
_FIRST_TAG = 1 << 20
_communicators: list[StrictCommunicator] = []
_numbers = itertools.count()


class StrictError(AssertionError):
    """NCCL would stand still here, or return wrong numbers."""


class _Work:
    """A transfer, with the methods that the runtime uses."""

    def __init__(self, what: str, timeout_s: float) -> None:
        self.what = what
        self._timeout_s = timeout_s
        self.done = threading.Event()
        self.error: BaseException | None = None

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self, timeout: Any = None) -> bool:
        if not self.done.wait(self._timeout_s):
            raise StrictError(f"{self.what} does not end")
        if self.error is not None:
            raise self.error
        return True


class StrictCommunicator:
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
        self._timeout_s = timeout_s
        self._ranks = ranks
        self._device = device
        self._tag = _FIRST_TAG + 3 * number
        self._rank = dist.get_rank()
        self._connected = False
        self._jobs: queue.SimpleQueue[tuple[_Work, Callable[[], None]] | None] = queue.SimpleQueue()
        self.outstanding: list[_Work] = []
        self.issued = 0
        _communicators.append(self)
        threading.Thread(target=self._run, daemon=True).start()
        if connects:
            self._meet("the making of a communicator")

    def rank(self) -> int:
        return self._ranks.index(self._rank)

    def send(self, tensors: list[Tensor], place: int, tag: int) -> _Work:
        return self._issue("a send", tensors, place, self._send)

    def recv(self, tensors: list[Tensor], place: int, tag: int) -> _Work:
        return self._issue("a receive", tensors, place, self._receive)

    def close(self) -> None:
        assert self.issued, f"the link from rank {self._ranks[0]} to rank {self._ranks[1]} was never used"
        self._jobs.put(None)
        _communicators.remove(self)

    def _issue(self, what: str, tensors: list[Tensor], place: int, run: Callable[[Tensor, int], None]) -> _Work:
        (tensor,) = tensors
        peer = self._ranks[place]
        if tensor.device != self._device:
            raise StrictError(f"{what} of a tensor on {tensor.device} was issued on a communicator of {self._device}")
        if tensor.dtype not in NCCL_DTYPES:
            raise StrictError(f"{what} of a tensor of {tensor.dtype}, which NCCL does not have")
        if not tensor.is_contiguous():
            raise StrictError(f"{what} of a tensor that is not contiguous")
        if peer == self._rank:
            raise StrictError(f"{what} to its own rank")
        self._meet(what)
        work = _Work(f"{what} between ranks {self._ranks[0]} and {self._ranks[1]}", self._timeout_s)
        self.outstanding = [work for work in self.outstanding if not work.is_completed()]
        self.outstanding.append(work)
        self.issued += 1
        self._jobs.put((work, lambda: run(tensor, peer)))
        return work

    def _meet(self, what: str) -> None:
        """Waits until both hosts are here."""
        if self._connected:
            return
        self._connected = True
        peer, word = self._ranks[1 - self._ranks.index(self._rank)], torch.zeros(1)
        both = [
            dist.group.WORLD.send([torch.zeros(1)], peer, self._tag),
            dist.group.WORLD.recv([word], peer, self._tag),
        ]

        def wait() -> None:
            for work in both:
                work.wait()

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(self._timeout_s)
        if waiting.is_alive():
            raise StrictError(f"{what} waits at rank {self._rank} for rank {peer}, which waits for something else")

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, run = job
            try:
                run()
            except BaseException as error:
                work.error = error
            work.done.set()

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


def outstanding() -> list[str]:
    """Returns what this process has issued and what has not ended."""
    return [
        work.what for communicator in _communicators for work in communicator.outstanding if not work.is_completed()
    ]


def synchronize(device: Any = None) -> None:
    """Replaces torch.cuda.synchronize."""
    if works := outstanding():
        raise StrictError(f"a wait for the whole device, while {works[0]} is outstanding")


@contextmanager
def installed(on_one_machine: bool) -> Iterator[None]:
    """Runs tensors between ranks over the stand-in, as if the CPU were a GPU of each rank's own.

    Args:
        on_one_machine: their headers go through sockets of the machine; otherwise over gloo.
    """

    def new_group(ranks: Any, device: torch.device, ctas: int | None = None) -> Any:
        if ctas is None:  # sums have gloo's
            return plain(ranks, device)
        number = next(_numbers)
        return StrictCommunicator(tuple(sorted(ranks)), device, number) if dist.get_rank() in ranks else None

    def drained(ends: Any) -> None:
        channel.drain(ends)
        check_drained()

    def leave_group(group: Any) -> None:
        return group.close() if isinstance(group, StrictCommunicator) else process_group.leave_group(group)

    plain = connections._make_group
    changes = [
        mock.patch.object(connections, "_make_group", new_group),
        mock.patch.object(connections, "has_nccl", return_value=True),
        mock.patch.object(connections, "leave_group", leave_group),
        mock.patch.object(streams, "drain", drained),
        mock.patch.object(torch.cuda, "synchronize", synchronize),
    ]
    if not on_one_machine:
        changes.append(mock.patch.object(shared_memory, "is_supported", return_value=False))
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        yield


def run_all(chosen: list[cases.Case]) -> list[cases.Outcome]:
    """Runs one case after the other over the stand-in, by turns as between machines and on one."""
    outcomes = []
    for number, case in enumerate(chosen):
        with installed(on_one_machine=number % 2 == 1):
            outcomes.append(cases.run(case))
    assert next(_numbers), "no link was made"
    assert not _communicators, "a communicator was left"
    return outcomes


def check_drained() -> None:
    """Raises if something is outstanding."""
    if works := outstanding():
        raise StrictError(f"a drain, while {works[0]} is outstanding")
