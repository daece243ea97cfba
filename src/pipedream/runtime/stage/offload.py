"""Offloads what a forward saves for its backward to disk or to the memory of the host.

Hooks see each tensor that autograd saves. Those of at least `_MIN_BYTES` that nothing else keeps (no weight, buffer or
input of the model) are written while the forward continues, and read back before their backwards, in the order of the
program (`runtime.stage.block_mover`). A storage moves once, however many tensors are views of it. The oldest of a
forward move first, because they are needed last.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pipedream.core.errors import PlanError
from pipedream.core.plan.activations import WINDOW_SHARE, Activations
from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.program import Program
from pipedream.runtime.stage.block_mover import Block, BlockFile, BlockMover
from pipedream.sharding.outside_func import HooksOutsideFunc

_MIN_BYTES = 1 << 16
_MEASURED_LAYERS, _MEASURED_ROUNDS = 8, 15
_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


class SavedTensor:
    """A tensor saved by a graph, with its version counter, which autograd does not check for hooks."""

    __slots__ = ("_shape", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._shape = tensor.shape
        self._version = tensor._version

    def unpack(self) -> torch.Tensor:
        """Raises a `RuntimeError`, as autograd does, if it was written in place meanwhile."""
        if self._tensor is None:
            raise RuntimeError("a backward ran again through a graph that a split backward has freed")
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._shape)} that the backward needs was written in place after the "
                f"operation that saved it, at version {self._version}, and is at version {self._tensor._version}; let "
                "the layer write a copy"
            )
        return self._tensor

    def free(self) -> None:
        """Drops the tensor, which no backward needs any more."""
        self._tensor = None


class _MovedTensor(SavedTensor):
    __slots__ = ("_block", "_layout", "_mover")

    def __init__(self, tensor: torch.Tensor, block: Block, mover: BlockMover) -> None:
        counter = tensor.detach()
        super().__init__(counter)
        self._layout = tensor.storage_offset(), self._shape, tensor.stride()
        counter.data = tensor.new_empty(0)  # keeps the counter, not the memory
        self._block = block
        self._mover = mover
        block.tensors += 1
        block.unpacks_left += 1

    def unpack(self) -> torch.Tensor:
        return super().unpack().new_empty(0).set_(self._mover.load(self._block), *self._layout)

    def free(self) -> None:
        if self._tensor is not None:
            super().free()
            self._mover.free(self._block)


def unpack(saved: SavedTensor) -> torch.Tensor:
    """The unpack hook of every `SavedTensor`. Code that recognizes it knows that it may unpack more than once."""
    return saved.unpack()


def find_offload_hook() -> Callable[[torch.Tensor], SavedTensor] | None:
    """Returns the hook of the `Offload` around the running forward, for other hooks inside it."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None or hooks[1] is not unpack else hooks[0]


class _Pass(NamedTuple):
    """A backward, or half of one."""

    kind: Kind
    stage: int
    microbatch: int


class Offload:
    """Offloads the saved tensors of one rank's forwards.

    Lifecycle: `switch_to` a program, `begin` a stream; then `packing` around each forward, `begin_backward` and
    `end_backward` around each backward; `close`.

    Attributes:
        moved_bytes: all bytes moved so far.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._mover: BlockMover | None = None
        self._shares: tuple[float, ...] = ()
        self._blocks: dict[tuple[int, int], list[Block]] = {}
        self._files: list[BlockFile] = []
        self._free_files: list[BlockFile] = []
        self._movable_bytes: dict[int, int] = {}  # stage -> of its last forward
        self._windows: dict[int, int] = {}
        self.moved_bytes = 0

    def switch_to(self, program: Program) -> None:
        self._program = program
        self._place = Activations.read(program.plan.activations)
        self._shares = tuple(stage.offload if self._place else 0.0 for stage in program.plan.stages)
        self.begin()

    def begin(self) -> None:
        """Begins a stream, at a drain."""
        with self._mover.lock if self._mover is not None else nullcontext():
            self._order = self._list_passes()
            self._upcoming: deque[_Pass] = deque()
            self._position = 0  # in `_upcoming`, of the first pass whose blocks are not in `_to_read`
            self._to_read: list[Block] = []

    def _list_passes(self) -> Iterator[_Pass]:
        for instruction in self._program.stream(self._rank):
            if isinstance(instruction, Op) and instruction.kind in _BACKWARDS and self.moves(instruction.stage):
                yield _Pass(instruction.kind, instruction.stage, instruction.index)

    def moves(self, stage: int) -> bool:
        return bool(self._shares) and self._shares[stage] > 0

    @contextmanager
    def packing(self, stage: int, index: int, resident: Callable[[], Iterable[torch.Tensor]]) -> Iterator[None]:
        """Context of a forward.

        Args:
            resident: yields tensors that stay anyway: weights, buffers, inputs.
        """
        if not self.moves(stage):
            yield
            return
        mover = self._mover = self._mover or BlockMover(self._place.folder, self._device, self._choose_to_read)
        share, movable_bytes = self._shares[stage], self._movable_bytes.get(stage)
        forward = _Forward(
            mover,
            {tensor.untyped_storage()._cdata for tensor in resident() if tensor.layout is torch.strided},
            self._take_file(mover),
            self._device,
            None if share == 1 or movable_bytes is None else int(share * movable_bytes),
            self._windows.get(stage, 0),
        )
        with HooksOutsideFunc(forward.pack, unpack):
            yield
        self._movable_bytes[stage], self._windows[stage] = forward.movable_bytes, forward.window_bytes
        self.moved_bytes += forward.moved_bytes
        with mover.lock:
            mover.flush()
            self._blocks[stage, index] = forward.blocks
            mover.wake_threads()

    def _take_file(self, mover: BlockMover) -> BlockFile:
        if self._free_files:
            file = self._free_files.pop()
            file.used_bytes = 0
            return file
        try:
            self._files.append(BlockFile(self._place.folder))
        except OSError as error:
            mover.fail(error)
            mover.raise_failure()
        return self._files[-1]

    def begin_backward(self, kind: Kind, stage: int, index: int) -> None:
        if not self.moves(stage) or self._mover is None:
            return
        running = _Pass(kind, stage, index)
        with self._mover.lock:
            while (self._upcoming.popleft() if self._upcoming else next(self._order)) != running:
                pass  # a drain leaves this one out
            self._position = 0
            self._to_read = list(self._blocks.get((stage, index), ()))
            self._mover.is_last_pass = kind is not Kind.INPUT_GRADIENT
            self._mover.wake_threads()

    def end_backward(self, stage: int, index: int) -> None:
        """Frees what the backward needed; after its first half, sends it away again for the second."""
        if not self.moves(stage) or self._mover is None:
            return
        with self._mover.lock:
            blocks = self._blocks.get((stage, index), [])
            if not self._mover.is_last_pass:
                for block in blocks:
                    self._mover.send_away(block)
                return
            self._blocks.pop((stage, index), None)
            for block in blocks:
                self._mover.drop(block)
                block.unpacks_left = 0
            if blocks:
                self._free_files.append(blocks[0].file)

    def _choose_to_read(self) -> Block | None:
        while True:
            while self._to_read:
                block = self._to_read.pop()
                if block.unpacks_left and not block.needed:
                    return block
            if self._position == len(self._upcoming):
                self._upcoming.append(next(self._order))
            next_pass = self._upcoming[self._position]
            if (next_pass.stage, next_pass.microbatch) not in self._blocks:  # its forward has not ended
                return None
            self._to_read = list(self._blocks[next_pass.stage, next_pass.microbatch])
            self._position += 1

    def close(self) -> None:
        """Ends the threads and frees the files."""
        if self._mover is not None:
            self._mover.close()
        for file in self._files:
            file.close()
        self._blocks.clear()


class _Forward:
    """Packs what one forward saves.

    Args:
        resident_storages: addresses of storages that something else keeps.
        limit_bytes: how much to move at most; None for everything.
        window_bytes: of the stage's previous forward.
    """

    def __init__(
        self,
        mover: BlockMover,
        resident_storages: set[int],
        file: BlockFile,
        device: torch.device,
        limit_bytes: int | None,
        window_bytes: int,
    ) -> None:
        self._mover = mover
        self._resident_storages = resident_storages
        self._file = file
        self._device = device
        self._limit_bytes = limit_bytes
        self._previous_window_bytes = window_bytes
        self._by_storage: dict[int, tuple[StorageWeakRef, Block]] = {}
        self._largest_bytes = 0
        self.movable_bytes = self.moved_bytes = 0
        self.blocks: list[Block] = []

    @property
    def window_bytes(self) -> int:
        """The most bytes that may be unwritten, and the most that may be read ahead."""
        return max(int(WINDOW_SHARE * self.moved_bytes), self._largest_bytes)

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return SavedTensor(tensor)
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size < _MIN_BYTES or (storage_id := storage._cdata) in self._resident_storages or not self._may_move(tensor):
            return SavedTensor(tensor)
        if storage_id not in self._by_storage:
            self.movable_bytes += size
            if self._limit_bytes is not None and self.moved_bytes + size // 2 > self._limit_bytes:
                self._resident_storages.add(storage_id)
                return SavedTensor(tensor)
            # The weak reference keeps another storage from getting the same address.
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._by_storage[storage_id] = reference, Block(storage, self._file)
            self.blocks.append(self._by_storage[storage_id][1])
            self.moved_bytes += size
            self._largest_bytes = max(self._largest_bytes, size)
        block = self._by_storage[storage_id][1]
        self._mover.put(block, storage, max(self._previous_window_bytes, self.window_bytes))
        return _MovedTensor(tensor, block, self._mover)

    def _may_move(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._device.type and not tensor.is_conj() and not tensor.is_neg()


def measure_core_time(folder: str) -> float:
    """Returns the seconds of a core for each byte that passes on a CPU move to a folder, and again back.

    That is what a few layers need more with their activations there than in memory. The layers have weights, because
    hooks and copies are several times as fast where nothing else uses the caches. Raises a `PlanError` if the folder
    cannot be written.
    """
    cpu, weights, inputs = torch.device("cpu"), torch.randn(512, 512), torch.zeros(64, 512, requires_grad=True)
    resident_storages, threads = {weights.untyped_storage()._cdata}, torch.get_num_threads()
    more_s = []
    torch.set_num_threads(1)  # others would take time while they wait
    try:
        with closing(BlockMover(folder, cpu, lambda: None)) as mover, closing(BlockFile(folder)) as file:
            for _ in range(_MEASURED_ROUNDS):
                file.used_bytes = 0
                forward = _Forward(mover, set(resident_storages), file, cpu, None, 0)
                kept_s, moved_s = (
                    _time_layers(inputs, weights, hooks, mover)
                    for hooks in (nullcontext(), HooksOutsideFunc(forward.pack, unpack))
                )
                more_s.append(moved_s - kept_s)
    except (OSError, RuntimeError) as error:
        raise PlanError(f"activations cannot be offloaded to {folder!r}, as a trial shows: {error}") from error
    finally:
        torch.set_num_threads(threads)
    return max(0.0, median(more_s)) / (2 * forward.moved_bytes)


def _time_layers(
    inputs: torch.Tensor, weights: torch.Tensor, hooks: AbstractContextManager[Any], mover: BlockMover
) -> float:
    """Returns the seconds of all cores for a forward and a backward."""
    start_s, output = time.process_time(), inputs
    with hooks:
        for _ in range(_MEASURED_LAYERS):
            output = torch.tanh(output @ weights)
    mover.flush()
    torch.autograd.backward(output.sum())
    return time.process_time() - start_s
