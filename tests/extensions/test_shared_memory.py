"""Messages through memory that two processes share; here both ends are in one."""

import socket
from collections.abc import Iterator
from threading import Thread

import pytest
import torch
from exchange import assert_arrived, message_of
from hypothesis import given, strategies as st

from pipedream.extensions.shared_memory import pair_memory as shared_memory
from pipedream.runtime.comm import channel, message as wire

Ends = tuple[shared_memory.SharedMemorySender, shared_memory.SharedMemoryReceiver]


def ends_of(max_unread: int) -> tuple[tuple[shared_memory.MemoryPair, shared_memory.MemoryPair], Ends]:
    """Returns both ends, of rank 0 that sends and of rank 1."""
    near_end, far_end = (
        shared_memory.MemoryPair(end, sends) for end, sends in zip(socket.socketpair(), (True, False), strict=True)
    )
    sender = shared_memory.SharedMemorySender(near_end.open(), 1, max_unread)
    return (near_end, far_end), (sender, shared_memory.SharedMemoryReceiver(far_end.open(), 0))


@pytest.fixture
def ends() -> Iterator[Ends]:
    pairs, both = ends_of(3)
    yield both
    for pair in pairs:
        pair.close()


def check(number: int, size: int, message: wire.Message) -> None:
    sent = message_of(number, size)
    assert (message.microbatch, message.content, message.loss_weight) == (number, sent.content, sent.loss_weight)
    assert message.structure == sent.structure
    assert_arrived(message.tensors, sent.tensors)


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 9), st.sampled_from((0, 1, 7, 600, 5000))), max_size=30))
def test_messages_of_any_size_arrive_whole_and_in_order(max_unread: int, turns: list[tuple[int, int]]) -> None:
    """In each turn the receiver reads all but some, and one message is sent; memory grows while some are unread."""
    pairs, (sender, receiver) = ends_of(max_unread)
    unread: list[tuple[int, int]] = []
    for number, (most_unread, size) in enumerate(turns):
        while len(unread) > min(most_unread, max_unread):
            check(*unread.pop(0), receiver.receive().result())
        sender.send(message_of(number, size))
        unread.append((number, size))
    for number_and_size in unread:
        check(*number_and_size, receiver.receive().result())
    channel.drain([sender, receiver])
    for pair in pairs:
        pair.close()


def test_a_received_tensor_belongs_to_the_receiver(ends: Ends) -> None:
    sender, receiver = ends
    for value in range(3):
        sender.send(wire.Message(value, tensors=(torch.full((4,), float(value)),)))
    first = receiver.receive().result().tensors[0]
    first += 10.0
    sender.send(wire.Message(3, tensors=(torch.full((4,), 3.0),)))
    assert [receiver.receive().result().tensors[0].tolist()[0] for _ in range(3)] == [1.0, 2.0, 3.0]
    assert first.tolist() == [10.0] * 4


def test_memory_is_used_again(ends: Ends) -> None:
    sender, receiver = ends
    for number in range(20):
        sender.send(message_of(number, 500))
        memory = sender._slots
        check(number, 500, receiver.receive().result())
        assert sender._slots is memory
    assert memory.slot_bytes == 3 << 12
    assert sum(message_format is not None for message_format, _ in memory._tensors) == 2, "one is given back late"


def test_the_end_of_the_other_is_an_error_after_its_messages() -> None:
    (near_end, far_end), (sender, receiver) = ends_of(3)
    sender.send(message_of(0, 10))
    near_end.close()
    check(0, 10, receiver.receive().result())
    with pytest.raises(RuntimeError, match="Connection closed by rank 0"):
        receiver.receive().result()
    far_end.close()
    (near_end, far_end), (sender, _) = ends_of(3)
    far_end.close()
    with pytest.raises(RuntimeError, match="Connection closed by rank 1"):
        sender.send(message_of(1, 10))
    near_end.close()


def test_what_no_packet_holds_and_what_is_left_at_a_drain_are_errors(ends: Ends) -> None:
    with pytest.raises(ValueError, match=r"structure takes 1[34]\d,\d+ bytes, and shared memory allows 131,072; cut"):
        ends[0].send(wire.Message(0, structure="x" * 140_000))
    ends[0].send(wire.Message(0, wire.Content.EMPTY))
    with pytest.raises(AssertionError, match="left on a channel"):
        channel.drain(ends)


def test_processes_find_each_other_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = shared_memory.Listener()
    first, second = listener.connect(listener.name, "0-1"), listener.connect(listener.name, "0-2")
    for key, other in (("0-2", second), ("0-1", first)):  # in any order
        with listener.accept(key) as connection:
            other.sendall(b"here")
            assert connection.recv(4) == b"here"
        other.close()
    assert listener.connect("pipedream-on-another-machine", "0-1") is None
    monkeypatch.setattr(shared_memory, "is_supported", lambda: False)
    assert shared_memory.Listener().name == ""
    assert shared_memory.Listener().connect(listener.name, "0-1") is None
    assert listener.connect("", "0-1") is None
    listener.close()


def test_strangers_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither who sends no key, nor a part of one; other users are turned away."""
    listener = shared_memory.Listener()
    accepted: list[socket.socket] = []

    def begin_to_accept(key: str) -> Thread:
        thread = Thread(target=lambda: accepted.append(listener.accept(key)), daemon=True)
        thread.start()
        return thread

    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(5.0)
        connection.connect(f"\0{listener.name}")
        return connection

    silent, gone, brief = connect(), connect(), connect()
    gone.close()
    brief.sendall(b"0-1")
    first = listener.connect(listener.name, "0-1")
    begin_to_accept("0-1").join(5.0)
    assert len(accepted) == 1
    assert brief.recv(1) == b""
    monkeypatch.setattr(shared_memory, "_is_same_user", lambda connection: False)
    accepting, stranger = begin_to_accept("0-2"), connect()
    assert stranger.recv(1) == b"", "at once, not when the next one comes"
    monkeypatch.undo()
    second = listener.connect(listener.name, "0-2")
    accepting.join(5.0)
    assert len(accepted) == 2
    listener.close()
    assert silent.recv(1) == b""
    for connection in (*accepted, first, second, silent, brief, stranger):
        connection.close()
