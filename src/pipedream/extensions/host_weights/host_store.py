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

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from pipedream.core.errors import PlanError
from pipedream.runtime.comm.channel import Pending
from pipedream.runtime.comm.message import Message, MessageFormat, align
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
    def buffers(self) -> list[torch.Tensor]:
        return self.untrained[self.frozen :]

    def select_written(
        self, buffers: Sequence[torch.Tensor], marks: Sequence[tuple[torch.Tensor, int]]
    ) -> list[torch.Tensor | None]:
        """Returns the buffers that passes have written or replaced since their `marks`, None for the others."""
        return [
            buffer if number in self.statistics or buffer is not old or buffer._version != version else None
            for number, (buffer, (old, version)) in enumerate(zip(buffers, marks, strict=True))
        ]

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


def _make_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _make_format(tensors: list[torch.Tensor]) -> MessageFormat:
    return MessageFormat.of(Message(0, tensors=tuple(tensors)))


def _view(message_format: MessageFormat, memory: torch.Tensor) -> list[torch.Tensor]:
    return [tensor for tensor in message_format.tensors_in(memory) if tensor is not None]
