"""Messages through memory that two processes share; here both ends are in one."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipedream.runtime.comm.shared_memory import Listener, MemoryPair, SharedMemoryEndpoint, _Blocks

Ends = tuple[MemoryPair, SharedMemoryEndpoint, MemoryPair, SharedMemoryEndpoint]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The pair and the endpoint of rank 0, which sends, and of rank 1."""
    here, there = (MemoryPair(end, sends) for end, sends in zip(socket.socketpair(), (True, False), strict=True))
    sending, receiving = (SharedMemoryEndpoint(pair, peer, 0, 2, None) for pair, peer in ((here, 1), (there, 0)))  # type: ignore[arg-type]
    yield here, sending, there, receiving
    here.close()
    there.close()


def test_messages_arrive_in_order_in_blocks_that_are_used_again(ends: Ends) -> None:
    _, sending, _, receiving = ends
    for number in range(50):
        sizes = (number * 100, 0, 5000)
        works = [sending.send([torch.full((size,), number, dtype=torch.uint8)], 0) for size in sizes]
        assert all(work.wait() for work in works)
        for size in sizes:
            found = torch.full((6000,), 255, dtype=torch.uint8)
            receiving.receive([found], 0).wait()
            assert found[:size].eq(number).all()
            assert found[size:].eq(255).all(), "a message may be shorter than its receive"
    assert sending._blocks._end <= 5 * 8192, "blocks that were read are used again"


def test_the_end_of_a_process_ends_the_wait_for_it(ends: Ends) -> None:
    here, sending, there, receiving = ends
    word = [torch.ones(4, dtype=torch.uint8)]
    sending.send(word, 0)
    here.close()
    receiving.receive(word, 0).wait()  # what it had sent is there
    with pytest.raises(RuntimeError, match="Connection closed by rank 0"):
        receiving.receive(word, 0).wait()
    there.close()


def test_a_message_to_a_process_that_ended_is_refused(ends: Ends) -> None:
    _, sending, there, _ = ends
    there.close()
    with pytest.raises(RuntimeError, match="Connection closed by rank 1"):
        sending.send([torch.ones(4, dtype=torch.uint8)], 0)


@given(st.lists(st.integers(0, 40_000) | st.none(), max_size=60))
def test_blocks_do_not_overlap(steps: list[int | None]) -> None:
    blocks, out = _Blocks(1 << 17), []
    for size in steps:
        if size is None and out:
            blocks.free(1)
            out.pop(0)
        elif size is not None and (place := blocks.take(size)) is not None:
            assert 0 <= place <= place + size <= 1 << 17
            assert all(place + size <= begin or end <= place for begin, end in out)
            out.append((place, place + size))


def test_processes_find_each_other_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener()
    first, second = listener.connect(listener.name, "0-1"), listener.connect(listener.name, "0-2")
    assert first is not None
    assert second is not None
    for key, other in (("0-2", second), ("0-1", first)):  # in any order
        with listener.accept(key) as found:
            other.sendall(b"here")
            assert found.recv(4) == b"here"
        other.close()
    assert listener.connect("pipedream-on-another-machine", "0-1") is None
    monkeypatch.setenv("PIPEDREAM_SHARED_MEMORY", "0")
    assert Listener().name == ""
    assert Listener().connect(listener.name, "0-1") is None
    assert listener.connect("", "0-1") is None
    listener.close()
