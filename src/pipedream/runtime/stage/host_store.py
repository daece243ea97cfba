"""The host store: weights of stages in the memory of the machine, once, shared by the processes of all its workers.

The stage's *home*, the rank of its updates, writes there: the optimizer's handles are views of this memory. Before the
passes of a minibatch, home or another rank copies the weights of the version that they read to its device, in one piece
with the stage's buffers; afterwards it drops the copy. A version is read by others once its number is in the store;
home makes it in another set of tensors as long as a forward may still read the one before (`Versions`).

With a GPU, weights and buffers stay in the memory of the host, which is pinned, and home updates them there, with the
gradients that its GPU has copied into the store. Copies have a stream of their own: as the host runs ahead of its GPU,
a slot's weights arrive while the GPU still computes the slot before (`DeviceCopies`).

A forward on another rank keeps nothing. Its input is sent to the rank of the backward, which repeats the forward with
the same numbers (`recompute`); this second forward is the one that changes the buffers. Both process the microbatches
in order, from the buffers at the update that made the version.

Where ranks take turns at a stage's backwards, each leaves the summed gradients and the changed buffers of its minibatch
in the store, for home and for the next rank. There is a place for each minibatch whose update may not have been made.
"""

import os
import platform
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from pipedream.core.errors import PlanError
from pipedream.runtime.comm.channel import Pending
from pipedream.runtime.comm.message import Message, MessageFormat, align
from pipedream.runtime.comm.process_group import gather_json, machine_address, read_machine
from pipedream.runtime.stage.cpu_optimizer import CpuOptimizerWeights
from pipedream.runtime.stage.stage_module import StageModule
from pipedream.runtime.update.gradients import Gradients

_HEADER_ITEMS = 10
"""int64s at the start of a part: the newest version, the one being made, the newest update whose gradients were left,
then version v's set at 3 + v mod 7."""
_FIRST_SET = 3
_LONGEST_SLEEP_S = 1e-3

_Slots = list[tuple[dict[str, Any], str]]


class StoreFormat:
    """Where the tensors of a stage are in its part of the store; the same on all ranks.

    Args:
        module: may be on the meta device.
        sets: how many sets of weights and buffers there are, one for each version that is read at once.
        ema: there is room for averaged weights.
        gradients: there is room for gradients, which a GPU copies there.
        trained_only: leaves out frozen weights and buffers.
        rotations: places for what ranks that take turns at backwards leave.

    Attributes:
        names: of the trained weights.
        slots: for each frozen weight, then each buffer: the (dict, key) pairs in modules that hold it.
        statistics: indices of the buffers that normalisation kernels write, unseen by autograd.
    """

    def __init__(
        self,
        module: StageModule,
        sets: int,
        ema: bool,
        gradients: bool = False,
        trained_only: bool = False,
        rotations: int = 0,
    ) -> None:
        self.names = tuple(module.handles)
        layers = [layer for _, layer in module.layers]  # modules whose forwards no stage calls belong to several stages
        owned = {id(tensor) for layer in layers for tensor in (*layer.parameters(), *layer.buffers())}
        owned -= {id(handle) for handle in module.handles.values()}
        frozen: dict[int, _Slots] = {}
        buffers: dict[int, _Slots] = {}
        statistics: set[int] = set()
        modules = {} if trained_only else {id(m): m for layer in layers for m in layer.modules()}
        for inner in modules.values():
            for tensors, slots_of in ((inner._parameters, frozen), (inner._buffers, buffers)):
                for name, tensor in tensors.items():
                    if id(tensor) in owned:
                        slots_of.setdefault(id(tensor), []).append((tensors, name))
            statistics |= {id(buffer) for buffer in inner._buffers.values() if isinstance(inner, _NormBase)}
        self.statistics = [number for number, key in enumerate(buffers) if key in statistics]
        self.slots = [*frozen.values(), *buffers.values()]  # slots that share a tensor continue to share it
        self.frozen = len(frozen)
        handles_like = [_make_meta(handle) for handle in module.handles.values()]
        untrained = [_make_meta(tensor) for tensor in self.untrained]
        self._set = _make_format([*handles_like, *untrained[self.frozen :]])
        self._frozen = _make_format(untrained[: self.frozen])
        self._ema = _make_format(handles_like if ema else [])
        self._gradients = _make_format(handles_like if gradients else [])
        buffers_like = untrained[self.frozen :]
        present = torch.empty(len(handles_like) + len(buffers_like), dtype=torch.bool, device="meta")
        numbers = torch.empty(2, dtype=torch.float64, device="meta")
        self._rotation = _make_format([numbers, present, *handles_like, *buffers_like] if rotations else [])
        self.rotations = rotations
        self.offsets = [8 * _HEADER_ITEMS]
        for message_format in (
            self._frozen,
            self._ema,
            self._gradients,
            *[self._rotation] * rotations,
            *[self._set] * sets,
        ):
            self.offsets.append(align(self.offsets[-1] + message_format.payload_bytes))

    @property
    def untrained(self) -> list[torch.Tensor]:
        """The frozen weights, then the buffers, now in the modules."""
        return [slots[0][0][slots[0][1]] for slots in self.slots]

    @property
    def stored_bytes(self) -> int:
        return self.offsets[-1]

    def view_frozen(self, memory: torch.Tensor) -> list[torch.Tensor]:
        return _view(self._frozen, memory)

    def view_ema(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(self.names, _view(self._ema, memory), strict=False))

    def view_gradients(self, memory: torch.Tensor) -> list[torch.Tensor]:
        return _view(self._gradients, memory)

    def view_rotation(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Returns the loss weight and the microbatches of a turn, which tensors are present, and the tensors: summed
        gradients, then buffers.
        """
        numbers, present, *tensors = _view(self._rotation, memory)
        return numbers, present, tensors

    def view_set(self, memory: torch.Tensor) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Returns the weights by name, and the buffers."""
        tensors, count = _view(self._set, memory), len(self.names)
        return dict(zip(self.names, tensors[:count], strict=True)), tensors[count:]

    @contextmanager
    def installed(self, tensors: list[torch.Tensor]) -> Iterator[None]:
        """Context in which the modules hold `tensors`, a list that is updated if layers replace them."""
        originals = [[holder[name] for holder, name in slots] for slots in self.slots]
        for slots, tensor in zip(self.slots, tensors, strict=True):
            for holder, name in slots:
                holder[name] = tensor
        try:
            yield
        finally:
            tensors[:] = self.untrained
            for slots, old_tensors in zip(self.slots, originals, strict=True):
                for (holder, name), tensor in zip(slots, old_tensors, strict=True):
                    holder[name] = tensor


class DeviceCopies:
    """Copies from the store to a device, and back; on a GPU on two streams of their own, one for each direction.

    Args:
        most_dropped: how many copies may be dropped before the GPU has computed with them. For more the host waits:
            it could run ahead by a minibatch, and the copies would fill the GPU's memory.
    """

    def __init__(self, device: torch.device, most_dropped: int = 1) -> None:
        self.device = device
        self._most_dropped = most_dropped
        self._dropped: deque[torch.cuda.Event] = deque()
        count = 2 if device.type == "cuda" else 0
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]

    def copy_to_device(self, part: torch.Tensor) -> torch.Tensor:
        """Returns a part of the store on the device."""
        if not self._streams:
            return part.to(self.device, copy=True)
        while len(self._dropped) > self._most_dropped:
            self._dropped.popleft().synchronize()
        stream, current = self._streams[0], torch.cuda.current_stream(self.device)
        with torch.cuda.stream(stream):
            copy = part.to(self.device, non_blocking=True)
        current.wait_stream(stream)
        copy.record_stream(current)
        return copy

    def wait(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def note_dropped(self) -> None:
        """Records that the host has dropped a copy."""
        if self._streams:
            self._dropped.append(torch.cuda.current_stream(self.device).record_event())

    def copy_to_store(
        self, tensors: list[torch.Tensor | None], slots: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor | None], torch.cuda.Event | None]:
        """Copies tensors to places in the store. Returns these, and the event to wait for before they are read."""
        if not self._streams:
            return tensors, None
        stream = self._streams[1]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        copied = list(tensors)
        with torch.cuda.stream(stream):
            for number, tensor in enumerate(tensors):
                if tensor is None or not tensor.is_cuda:
                    continue
                if tensor.layout is torch.strided:
                    copied[number] = slots[number].copy_(tensor, non_blocking=True)
                    tensor.record_stream(stream)
                else:
                    copied[number] = tensor.cpu()
            return copied, stream.record_event()


class SharedWeights:
    """A stage in the store.

    Args:
        memory: uint8[n], of `StoreFormat.stored_bytes`.
        shared: between processes.
    """

    def __init__(self, store_format: StoreFormat, memory: torch.Tensor, shared: bool, copies: DeviceCopies) -> None:
        self.store_format = store_format
        self.copies = copies
        self._shared = shared
        self._numbers = memory[: 8 * _HEADER_ITEMS].view(torch.int64)
        self.frozen, self.ema, self.gradients, *further = (
            memory[begin:end] for begin, end in zip(store_format.offsets, store_format.offsets[1:], strict=False)
        )
        self._rotations, self.sets = further[: store_format.rotations], further[store_format.rotations :]

    def adopt_averages(self, ema: dict[str, torch.Tensor]) -> None:
        """Moves averaged weights into the store, and the dict's values with them."""
        for name, slot in self.store_format.view_ema(self.ema).items():
            ema[name] = slot.copy_(ema[name])

    def publish(self, version: int, number: int) -> None:
        """Lets all ranks read a version, which is in set `number`."""
        self._numbers[_FIRST_SET + version % (_HEADER_ITEMS - _FIRST_SET)] = number
        self._numbers[:2] = version
        if not version:  # a stream begins
            self._numbers[2] = 0

    def announce(self, version: int) -> None:
        """Lets the ranks of this process wait for a version, which a thread makes."""
        self._numbers[1] = version

    def wait(self, version: int = 0, gradients_of: int = 0) -> Pending[None]:
        """Waits for a version, and until the gradients of an update have been left."""
        newest, upcoming, turn = self._numbers[:_FIRST_SET]
        return _PendingInStore(
            self._shared,
            lambda: int(newest) >= version and int(turn) >= gradients_of,
            lambda: int(upcoming) >= version and int(turn) >= gradients_of,
        )

    def leave_rotation(self, update: int, gradients: Gradients, buffers: Sequence[torch.Tensor | None]) -> None:
        """Leaves an update's summed gradients, and the buffers that have changed, for its home and the next rank.

        Raises:
            PlanError: a gradient is sparse.
        """
        sums, loss_weight, count = gradients.take()
        for name, gradient in zip(self.store_format.names, sums, strict=True):
            if gradient is not None and gradient.is_sparse:
                raise PlanError(
                    f"the gradient of {name!r} is sparse, and workers take turns at its stage, for which they leave "
                    "dense gradients; make it dense (sparse=False), or choose a method without a delay"
                )
        numbers, present, slots = self.store_format.view_rotation(self._rotations[update % len(self._rotations)])
        numbers[0], numbers[1] = loss_weight, count
        for number, (tensor, slot) in enumerate(zip((*sums, *buffers), slots, strict=True)):
            present[number] = tensor is not None
            if tensor is not None:
                slot.copy_(tensor)  # waits for a GPU
        self._numbers[2] = update

    def read_rotation(self, update: int) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None], float, int]:
        """Returns an update's summed gradients and changed buffers, which are in the store, its loss weight and its
        microbatches.
        """
        numbers, present, tensors = self.store_format.view_rotation(self._rotations[update % len(self._rotations)])
        left = [tensor if is_present else None for tensor, is_present in zip(tensors, present.tolist(), strict=True)]
        count, (loss_weight, microbatches) = len(self.store_format.names), numbers.tolist()
        return left[:count], left[count:], loss_weight, int(microbatches)

    def copy(self, version: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Returns the weights of a version, as leaves by name, and its buffers, on the device."""
        number = int(self._numbers[_FIRST_SET + version % (_HEADER_ITEMS - _FIRST_SET)])
        leaves, buffers = self.store_format.view_set(self.copies.copy_to_device(self.sets[number]))
        return {name: leaf.requires_grad_() for name, leaf in leaves.items()}, buffers


class _PendingInStore(Pending[None]):
    """Waits until something is in the store: in a process of its own for what another process does, else for a thread.

    Args:
        is_coming: whether a thread is about to do it.
    """

    def __init__(self, shared: bool, is_there: Callable[[], bool], is_coming: Callable[[], bool]) -> None:
        self._shared, self._is_there, self._is_coming = shared, is_there, is_coming

    def ready(self) -> bool:
        if not self._shared:  # wait only for what has begun: this thread may have to begin it
            self._wait(self._is_coming)
        return self._shared or self._is_there()

    def result(self) -> None:
        self._wait(lambda: True)

    def _wait(self, may_wait: Callable[[], bool]) -> None:
        sleep_s = 1e-5
        while not self._is_there() and may_wait():
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)


class HostStore:
    """The parts of the store that this process uses, by stage.

    Args:
        group: of all ranks; None in a single process.
        device: of this process's workers.
        workers: in this process.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, workers: int = 1) -> None:
        self._group = None if group is None else weakref.ref(group)  # which ends with the run
        self._device = device
        self._workers = workers
        self._memory: dict[int | tuple[int, int], torch.Tensor] = {}
        self._files: dict[int, tuple[int, int]] = {}  # stage -> descriptor, bytes; of the parts that were made here

    @property
    def is_shared(self) -> bool:
        """Whether several processes share it."""
        return self._group is not None

    @cached_property
    def _copies(self) -> DeviceCopies:
        return DeviceCopies(self._device, self._workers)

    def host(
        self, stage: int, replica: int, handles: Mapping[str, nn.Parameter], store_format: StoreFormat
    ) -> CpuOptimizerWeights:
        """Returns copies of a stage replica's weights, in memory of this process."""
        memory = self._memory[stage, replica] = self._make(stage, store_format.stored_bytes)
        shared_weights = SharedWeights(store_format, memory, False, self._copies)
        slots, _ = store_format.view_set(shared_weights.sets[0])
        copy_gradients = partial(
            shared_weights.copies.copy_to_store, slots=store_format.view_gradients(shared_weights.gradients)
        )
        return CpuOptimizerWeights(handles, slots, copy_gradients)

    def open(self, stage: int, store_format: StoreFormat) -> SharedWeights:
        """Opens a stage's part; makes it first if no process has."""
        if stage not in self._memory:
            self._memory[stage] = self._make(stage, store_format.stored_bytes)
        return SharedWeights(store_format, self._memory[stage], self.is_shared, self._copies)

    def close(self) -> None:
        """Unpins the memory, which the user's model continues to use."""
        if self._memory and self._device.type == "cuda":
            self._copies.wait()
            for memory in self._memory.values():
                torch.cuda.check_error(int(_cudart().cudaHostUnregister(memory.data_ptr())))
        self._memory.clear()

    def exchange(self) -> None:
        """Opens the parts that other processes have made; every rank calls it.

        Raises:
            PlanError: ranks are on several machines, or on processors that reorder writes.
        """
        group = None if self._group is None else self._group()
        if group is None:
            return
        if (processor := platform.machine()) not in ("x86_64", "AMD64"):
            # A version's number is written after its weights, and others read both without a lock.
            raise PlanError(
                f"weights in memory that processes share were asked for on {processor}, which may show a write before "
                "an earlier one; run all workers in one process, or choose another method"
            )
        process_place = [read_machine(), os.getpid(), machine_address()]
        parts = gather_json([process_place, list(self._files.items())], group)
        if len(machines := {machine: address for (machine, _, address), _ in parts}) > 1:
            raise PlanError(
                "weights in the memory of one machine were asked for, but the ranks are on "
                f"{len(machines)}: {', '.join(machines.values())}; start all of them on one, or choose another method"
            )
        for (_, process, _), files in parts:
            for stage, (file, size) in files:
                if stage not in self._memory:
                    self._memory[stage] = self._pin(_map_file(f"/proc/{process}/fd/{file}", size))
        dist.barrier(group)
        for file, _ in self._files.values():
            os.close(file)

    def _pin(self, memory: torch.Tensor) -> torch.Tensor:
        # Not by torch, which would take the next power of two.
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                status = int(_cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
            if status:
                raise PlanError(
                    f"{memory.nbytes} bytes of the machine's memory were to be pinned for the weights of a stage, but "
                    f"CUDA answered {_cudart().cudaGetErrorString(status)}; raise the limit of locked memory "
                    "(ulimit -l), or choose another method"
                )
        return memory

    def _make(self, stage: int, size: int) -> torch.Tensor:
        # As for messages in shared memory: in no file system.
        file = os.memfd_create(f"pipedream-stage-{stage}")
        os.ftruncate(file, size)
        memory = self._pin(_map_file(f"/proc/self/fd/{file}", size))
        if self._group is None:
            os.close(file)
        else:
            self._files[stage] = file, size
        return memory


def _make_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _make_format(tensors: list[torch.Tensor]) -> MessageFormat:
    return MessageFormat.of(Message(0, tensors=tuple(tensors)))


def _view(message_format: MessageFormat, memory: torch.Tensor) -> list[torch.Tensor]:
    return [tensor for tensor in message_format.tensors_in(memory) if tensor is not None]


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _map_file(path: str, size: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
