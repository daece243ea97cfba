"""Passes move blocks while the disk is quick. For a slow one a forward waits, and what is written late is not lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipedream.runtime.stage import block_mover
from pipedream.runtime.stage.block_mover import Block, BlockFile, BlockMover

SIZE = 4096
PATIENCE_S = 10.0


class Gate:
    """Writes return one at a time."""

    def __init__(self) -> None:
        self.written, self.may_return = threading.Semaphore(0), threading.Semaphore(0)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate, write = Gate(), BlockFile.write

    def write_and_wait(self: BlockFile, offset: int, data: memoryview) -> None:
        write(self, offset, data)
        gate.written.release()
        assert gate.may_return.acquire(timeout=PATIENCE_S)

    monkeypatch.setattr(BlockFile, "write", write_and_wait)
    return gate


@pytest.fixture
def file(tmp_path: Path) -> Iterator[BlockFile]:
    file = BlockFile(str(tmp_path))
    yield file
    file.close()


@pytest.fixture
def mover(tmp_path: Path) -> Iterator[BlockMover]:
    mover = BlockMover(str(tmp_path), torch.device("cpu"), lambda: None)
    yield mover
    mover.close()


def make_storage(value: int) -> torch.UntypedStorage:
    return torch.full((SIZE,), value, dtype=torch.uint8).untyped_storage()


def save(mover: BlockMover, block: Block, storage: torch.UntypedStorage) -> None:
    block.tensors = block.unpacks_left = 1
    mover.put(block, storage, SIZE)


def set_slow(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Lets moves count as slow from some seconds on."""
    monkeypatch.setattr(block_mover, "_MIN_SLOW_S", seconds)
    monkeypatch.setattr(block_mover, "_MIN_BYTES_PER_S", float("inf"))


def test_threads_move_blocks_after_two_slow_ones_and_then_passes_try_again(
    mover: BlockMover, file: BlockFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def move_one() -> None:
        block, is_left_to_threads = Block(storage := make_storage(1), file), mover.is_threaded
        save(mover, block, storage)
        mover.flush()
        assert block.is_away or is_left_to_threads
        assert mover.load(block)[SIZE - 1] == 1

    monkeypatch.setattr(block_mover, "_THREADED_BLOCKS", 5)
    set_slow(monkeypatch, PATIENCE_S)
    for _ in range(3):
        move_one()
    assert not mover.is_threaded
    set_slow(monkeypatch, 0.0)
    move_one()
    assert mover.is_threaded, "a write and a read were slow"
    set_slow(monkeypatch, PATIENCE_S)
    for _ in range(4):
        move_one()
    assert mover.is_threaded
    move_one()
    assert not mover.is_threaded


def test_one_slow_move_among_quick_ones_is_no_slow_disk(
    mover: BlockMover, file: BlockFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(24):
        set_slow(monkeypatch, 0.0 if number % 6 == 0 else PATIENCE_S)
        save(mover, block := Block(storage := make_storage(1), file), storage)
        mover.flush()
        assert block.is_away
        assert not mover.is_threaded


def test_a_forward_waits_while_more_than_a_window_is_unwritten(mover: BlockMover, file: BlockFile, gate: Gate) -> None:
    mover.is_threaded = True
    storages = [make_storage(value) for value in range(3)]
    blocks = [Block(storage, file) for storage in storages]
    saved: list[int] = []

    def run_forward() -> None:
        for number, (block, storage) in enumerate(zip(blocks, storages, strict=True)):
            save(mover, block, storage)
            saved.append(number)

    forward = threading.Thread(target=run_forward)
    forward.start()
    forward.join(0.2)
    assert saved == [0], "block 1 is saved, but block 0 is not written"
    gate.may_return.release(3)
    forward.join(PATIENCE_S)
    assert saved == [0, 1, 2]


def test_what_is_saved_again_during_a_write_is_written_again(mover: BlockMover, file: BlockFile, gate: Gate) -> None:
    mover.is_threaded = True
    storage = make_storage(1)
    block = Block(storage, file)
    save(mover, block, storage)
    mover.flush()
    assert gate.written.acquire(timeout=PATIENCE_S)
    torch.empty(0, dtype=torch.uint8).set_(storage)[-1] = 7  # another part, which a later tensor is saved of
    mover.put(block, storage, SIZE)
    gate.may_return.release()
    time.sleep(0.2)
    assert not block.is_away, "what was written may be too old"
    mover.flush()
    gate.may_return.release()
    assert gate.written.acquire(timeout=PATIENCE_S)
    while not block.is_away:
        time.sleep(0.001)
    assert block.memory is None
    assert mover.load(block)[SIZE - 1] == 7
