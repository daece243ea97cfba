"""Blocks that a slow disk has not written yet: the forward waits for it, and nothing that is written late is lost."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

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


def make_storage(value: int) -> torch.UntypedStorage:
    return torch.full((SIZE,), value, dtype=torch.uint8).untyped_storage()


def save(mover: BlockMover, block: Block, storage: torch.UntypedStorage) -> None:
    block.tensors = block.unpacks_left = 1
    mover.put(block, storage, SIZE)


def test_a_forward_waits_while_more_than_a_window_is_unwritten(tmp_path: Path, gate: Gate) -> None:
    mover, file = BlockMover(str(tmp_path), torch.device("cpu"), lambda: None), BlockFile(str(tmp_path))
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
    mover.close()
    file.close()


def test_what_is_saved_again_during_a_write_is_written_again(tmp_path: Path, gate: Gate) -> None:
    mover, file = BlockMover(str(tmp_path), torch.device("cpu"), lambda: None), BlockFile(str(tmp_path))
    storage = make_storage(1)
    block = Block(storage, file)
    save(mover, block, storage)
    mover.flush()
    assert gate.written.acquire(timeout=PATIENCE_S)
    torch.empty(0, dtype=torch.uint8).set_(storage)[-1] = 7  # another part, which a later tensor is saved of
    mover.put(block, storage, SIZE)
    gate.may_return.release()
    with mover.condition:
        assert not mover.condition.wait_for(lambda: block.is_away, 0.2), "what was written may be too old"
    mover.flush()
    gate.may_return.release()
    with mover.condition:
        assert mover.condition.wait_for(lambda: block.is_away, PATIENCE_S)
    assert block.memory is None
    assert mover.load(block)[SIZE - 1] == 7
    mover.close()
    file.close()
