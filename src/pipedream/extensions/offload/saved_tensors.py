"""Offloads what a forward saves for its backward to the memory of a GPU's host.

Hooks see each tensor that autograd saves. Those of at least `_MIN_BYTES` that nothing else keeps (no weight, buffer or
input of the model) are copied while the forward continues, and copied back before their backwards, in the order of the
program (`extensions.offload.block_mover`). A storage moves once, however many tensors are views of it. The oldest of a
forward move first, because they are needed last.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pipedream.core.plan.memory import WINDOW_SHARE
from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.program import Program
from pipedream.extensions.offload.block_mover import Block, BlockMover
from pipedream.runtime.stage.graph_tensors import SavedTensor, unpack
from pipedream.runtime.stage.part import PassFacts, Resident, StagePart, Task
from pipedream.tensors.outside_func import HooksOutsideFunc

_MIN_BYTES = 1 << 16
_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


class _MovedTensor(SavedTensor):
    __slots__ = ("_block", "_mover", "_strided_view")

    def __init__(self, tensor: torch.Tensor, block: Block, mover: BlockMover) -> None:
        counter = tensor.detach()
        super().__init__(counter)
        self._strided_view = tensor.storage_offset(), self._shape, tensor.stride()
        counter.data = tensor.new_empty(0)  # keeps the counter, not the memory
        self._block = block
        self._mover = mover
        block.tensors += 1
        block.unpacks_left += 1

    def unpack(self) -> torch.Tensor:
        return super().unpack().new_empty(0).set_(self._mover.load(self._block), *self._strided_view)

    def free(self) -> None:
        if self._tensor is not None:
            super().free()
            self._mover.free(self._block)


class _Pass(NamedTuple):
    """A backward, or half of one."""

    kind: Kind
    stage: int
    microbatch: int


class Offload:
    """What the offloaded stages of one rank share in a program: a mover, and the order in which blocks are needed.

    Attributes:
        blocks: (stage, microbatch) -> what its forward has saved.
        moved_bytes: all bytes moved so far.
    """

    def __init__(self, rank: int, device: torch.device, program: Program) -> None:
        self._rank = rank
        self._device = device
        self._program = program
        self._mover: BlockMover | None = None
        self.blocks: dict[tuple[int, int], list[Block]] = {}
        self.moved_bytes = 0
        self.begin()

    @property
    def mover(self) -> BlockMover:
        """The mover, whose threads begin with the first forward."""
        if self._mover is None:
            self._mover = BlockMover(self._device, self._choose_to_load)
        return self._mover

    def begin(self) -> None:
        """Begins a stream, at a drain."""
        with self._mover.lock if self._mover is not None else nullcontext():
            self._order = self._list_passes()
            self._upcoming: deque[_Pass] = deque()
            self._position = 0  # in `_upcoming`, of the first pass whose blocks are not in `_to_load`
            self._to_load: list[Block] = []

    def _list_passes(self) -> Iterator[_Pass]:
        ops = (item for item in self._program.stream(self._rank) if isinstance(item, Op) and item.kind in _BACKWARDS)
        for kind, stage, index, _ in ops:
            if self._program.plan.stages[stage].offload:
                yield _Pass(kind, stage, index)

    def begin_backward(self, running: _Pass) -> None:
        with self.mover.lock:
            while (self._upcoming.popleft() if self._upcoming else next(self._order)) != running:
                pass  # a drain leaves this one out
            self._position = 0
            self._to_load = list(self.blocks.get((running.stage, running.microbatch), ()))
            self.mover.is_last_pass = running.kind is not Kind.INPUT_GRADIENT
            self.mover.wake_threads()

    def end_backward(self, stage: int, index: int) -> None:
        """Frees what the backward needed; after its first half, sends it away again for the second."""
        with self.mover.lock:
            blocks = self.blocks.get((stage, index), [])
            if not self.mover.is_last_pass:
                for block in blocks:
                    self.mover.send_away(block)
                return
            self.blocks.pop((stage, index), None)
            for block in blocks:
                self.mover.drop(block)
                block.unpacks_left = 0

    def _choose_to_load(self) -> Block | None:
        while True:
            while self._to_load:
                block = self._to_load.pop()
                if block.unpacks_left and not block.needed:
                    return block
            if self._position == len(self._upcoming):
                self._upcoming.append(next(self._order))
            next_pass = self._upcoming[self._position]
            if (next_pass.stage, next_pass.microbatch) not in self.blocks:  # its forward has not ended
                return None
            self._to_load = list(self.blocks[next_pass.stage, next_pass.microbatch])
            self._position += 1

    def close(self) -> None:
        """Ends the threads; may be called again."""
        if self._mover is not None:
            self._mover.close()
            self._mover = None
        self.blocks.clear()


class OffloadedStage(StagePart):
    """A stage whose forwards save tensors in the memory of the host."""

    task = Task.OFFLOAD

    def __init__(self, offload: Offload, stage: int, device: torch.device) -> None:
        self._offload = offload
        self._stage = stage
        self._device = device
        self._window_bytes = 0

    @classmethod
    def make(cls, facts: PassFacts, program: Program) -> StagePart | None:
        if not program.plan.stages[facts.stage].offload:
            return None
        if cls not in facts.shared:
            facts.shared[cls] = Offload(facts.rank, facts.module.device, program)
        return cls(facts.shared[cls], facts.stage, facts.module.device)

    @contextmanager
    def packing(self, index: int, resident: Resident) -> Iterator[None]:
        offload, mover = self._offload, self._offload.mover
        resident_storages = {t.untyped_storage()._cdata for t in resident() if t.layout is torch.strided}
        forward = _SavedTensorPacker(mover, resident_storages, self._device, self._window_bytes)
        with HooksOutsideFunc(forward.pack, unpack):
            yield
        self._window_bytes = forward.window_bytes
        offload.moved_bytes += forward.moved_bytes
        with mover.lock:
            mover.flush()
            offload.blocks[self._stage, index] = forward.blocks
            mover.wake_threads()

    def begin(self) -> None:
        self._offload.begin()

    def begin_backward(self, kind: Kind, index: int) -> None:
        self._offload.begin_backward(_Pass(kind, self._stage, index))

    def end_backward(self, index: int) -> None:
        self._offload.end_backward(self._stage, index)

    def close(self) -> None:
        self._offload.close()


class _SavedTensorPacker:
    """Packs what one forward saves.

    Args:
        resident_storages: addresses of storages that something else keeps.
        window_bytes: of the stage's previous forward.
    """

    def __init__(self, mover: BlockMover, resident_storages: set[int], device: torch.device, window_bytes: int) -> None:
        self._mover = mover
        self._resident_storages = resident_storages
        self._device = device
        self._previous_window_bytes = window_bytes
        self._by_storage: dict[int, tuple[StorageWeakRef, Block]] = {}
        self._largest_bytes = 0
        self.moved_bytes = 0
        self.blocks: list[Block] = []

    @property
    def window_bytes(self) -> int:
        """The most bytes that may still be to copy, and the most that may be copied back ahead."""
        return max(int(WINDOW_SHARE * self.moved_bytes), self._largest_bytes)

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return SavedTensor(tensor)
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size < _MIN_BYTES or (storage_id := storage._cdata) in self._resident_storages or not self._may_move(tensor):
            return SavedTensor(tensor)
        if storage_id not in self._by_storage:
            # The weak reference keeps another storage from getting the same address.
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._by_storage[storage_id] = reference, Block(storage)
            self.blocks.append(self._by_storage[storage_id][1])
            self.moved_bytes += size
            self._largest_bytes = max(self._largest_bytes, size)
        block = self._by_storage[storage_id][1]
        self._mover.put(block, storage, max(self._previous_window_bytes, self.window_bytes))
        return _MovedTensor(tensor, block, self._mover)

    def _may_move(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._device.type and not tensor.is_conj() and not tensor.is_neg()
