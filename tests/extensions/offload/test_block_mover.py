"""A forward waits for slow copies, and what is copied late is not lost."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from pipedream.extensions.offload.block_mover import Block, BlockMover

SIZE = 4096
PATIENCE_S = 10.0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Lets copies return one at a time."""
    gate = SimpleNamespace(copied=threading.Semaphore(0), may_return=threading.Semaphore(0))
    copy_out = BlockMover._copy_out

    def copy_and_wait(self: BlockMover, block: Block, memory: torch.UntypedStorage) -> torch.Tensor:
        host = copy_out(self, block, memory)
        gate.copied.release()
        assert gate.may_return.acquire(timeout=PATIENCE_S)
        return host

    monkeypatch.setattr(BlockMover, "_copy_out", copy_and_wait)
    return gate


@pytest.fixture
def mover() -> Iterator[BlockMover]:
    mover = BlockMover(torch.device("cpu"), lambda: None)
    yield mover
    mover.close()


def make_storage(value: int) -> torch.UntypedStorage:
    return torch.full((SIZE,), value, dtype=torch.uint8).untyped_storage()


def save(mover: BlockMover, block: Block, storage: torch.UntypedStorage) -> None:
    block.tensors = block.unpacks_left = 1
    mover.put(block, storage, SIZE)


def test_a_forward_waits_while_more_than_a_window_is_to_be_copied(mover: BlockMover, gate: SimpleNamespace) -> None:
    saved: list[int] = []

    def run_forward() -> None:
        for number in range(3):
            storage = make_storage(number)
            save(mover, Block(storage), storage)
            saved.append(number)

    forward = threading.Thread(target=run_forward)
    forward.start()
    forward.join(0.2)
    assert saved == [0], "block 1 is saved, but block 0 is not copied"
    gate.may_return.release(3)
    forward.join(PATIENCE_S)
    assert saved == [0, 1, 2]


def test_what_is_saved_again_during_a_copy_is_copied_again(mover: BlockMover, gate: SimpleNamespace) -> None:
    storage = make_storage(1)
    block = Block(storage)
    save(mover, block, storage)
    mover.flush()
    assert gate.copied.acquire(timeout=PATIENCE_S)
    torch.empty(0, dtype=torch.uint8).set_(storage)[-1] = 7  # another part, which a later tensor is saved of
    mover.put(block, storage, SIZE)
    gate.may_return.release()
    time.sleep(0.2)
    assert not block.is_away, "what was copied may be too old"
    mover.flush()
    gate.may_return.release()
    assert gate.copied.acquire(timeout=PATIENCE_S)
    while not block.is_away:
        time.sleep(0.001)
    assert block.memory is None
    assert mover.load(block)[SIZE - 1] == 7
