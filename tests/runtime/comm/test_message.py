"""Headers and payloads: what goes in comes out."""

from dataclasses import replace

import pytest
import torch
from exchange import assert_arrived
from hypothesis import example, given, strategies as st

from pipedream.runtime.comm import channel, message as wire

Message = wire.Message

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.float8_e5m2,
)  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draws a tensor of any type and shape, its dimensions in any order, with or without gaps."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = torch.randint(0, 2, shape).to(dtype).permute(draw(st.permutations(range(len(shape)))))
    if tensor.ndim and draw(st.booleans()):
        tensor = tensor[::2]
    if tensor.ndim and draw(st.booleans()):
        tensor = tensor[:1].expand(3 if len(tensor) else 0, *tensor.shape[1:])
    return tensor


MESSAGES = st.builds(
    Message,
    microbatch=st.integers(0, 2**62),
    content=st.sampled_from(wire.Content),
    tensors=st.lists(st.none() | tensors(), max_size=4).map(tuple),
    structure=st.text(max_size=20) | st.sampled_from(["long" * 1000, "\N{EURO SIGN}" * 1300]),
    minibatch=st.integers(0, 2**62),
    epoch=st.integers(0, 2**31),
    samples=st.integers(0, 2**31),
    version=st.integers(0, 2**31),
    flags=st.integers(0, 2**31),
    loss_weight=st.floats(allow_nan=False),
    share=st.floats(0, 1),
    numbers=st.lists(st.floats(allow_nan=False), max_size=8).map(tuple),
)


def through_bytes(message: Message, sent_formats: wire.SentFormats, formats: dict[int, wire.MessageFormat]) -> Message:
    """Writes a message and reads it again, as a channel's ends do."""
    number, message_format, description = sent_formats.find(message)
    header = wire.Header.of(message, number, 7, len(description))
    begin = header.head_bytes
    sent = torch.full((begin + message_format.payload_bytes,), 255, dtype=torch.uint8)
    header.write(sent.numpy().data, message.numbers, description)
    wire.write(message.tensors, message_format.tensors_in(sent, begin))
    arrived = sent.clone()
    head = arrived.numpy().data
    header = wire.Header.read(head)
    assert header.channel == 7
    if header.description_bytes:
        formats[header.format_number] = wire.MessageFormat.from_json(header.read_description(head))
    there = formats[header.format_number]
    assert there.payload_bytes == message_format.payload_bytes
    assert header.head_bytes == begin
    return header.message(there, tuple(there.tensors_in(arrived, begin)), header.read_numbers(head))


@given(message=MESSAGES, wants=st.lists(st.booleans(), min_size=4, max_size=4))
@example(Message(0, tensors=(torch.ones((1,) * 9),) + (torch.ones(1),) * 400, numbers=(0.5,) * 100), [])
def test_a_message_arrives_as_it_was(message: Message, wants: list[bool]) -> None:
    message = replace(message, wants=tuple(wants[: len(message.tensors)]))
    sent_formats, formats = wire.SentFormats(), {}
    for _ in range(2):  # described, then called by its number
        received = through_bytes(message, sent_formats, formats)
        assert replace(received, tensors=()) == replace(message, tensors=())
        assert_arrived(received.tensors, message.tensors)
        for copy, sent in zip(received.tensors, message.tensors, strict=True):
            if copy is not None and sent is not None:
                assert not copy._is_view(), "tensors of one message enter a graph apart from each other"
                here = wire.copy_as_received(sent)
                assert wire.dimension_order(copy) == wire.dimension_order(here)
                assert copy.stride() == here.stride(), "in one process and over a wire the layout is the same"
                assert copy.clone().stride() == copy.stride(), "a receiver's copy keeps it"


def test_a_format_is_described_once_and_the_oldest_is_forgotten() -> None:
    sent_formats, formats = wire.SentFormats(max_formats=3), {}
    ones = [Message(0, tensors=(torch.ones(size),)) for size in range(5)]
    assert [bool(sent_formats.find(ones[i])[2]) for i in (0, 1, 0, 2, 1)] == [True, True, False, True, False]
    assert [bool(sent_formats.find(ones[i])[2]) for i in (3, 1, 2, 0)] == [True, False, False, True]
    sent_formats = wire.SentFormats(max_formats=3)
    for i in (0, 1, 2, 3, 4, 0, 4, 1):
        (tensor,) = through_bytes(ones[i], sent_formats, formats).tensors
        assert torch.equal(tensor, torch.ones(i))
    assert len(formats) <= 3


@given(tensor=tensors())
def test_a_copy_and_what_is_sent_alone_are_dense_in_the_order_of_the_dimensions(tensor: torch.Tensor) -> None:
    copy = wire.copy_as_received(tensor)
    step, strides = 1, [0] * tensor.ndim
    for dimension in reversed(wire.dimension_order(tensor)):
        strides[dimension], step = step, step * max(1, tensor.shape[dimension])
    assert copy.stride() == tuple(strides)
    assert torch.equal(copy, tensor)
    assert not copy._is_view()
    assert not copy.requires_grad
    sent = wire.flatten_in_memory_order(tensor).view(torch.uint8).clone()
    (received,) = wire.MessageFormat.of(Message(0, tensors=(tensor,))).tensors_in(sent)
    assert torch.equal(received, tensor)


def test_what_cannot_be_sent_is_refused() -> None:
    for send in (wire.SentFormats().find, channel.LocalChannel().send):
        with pytest.raises(TypeError, match=r"layout torch\.sparse_coo cannot be sent"):
            send(Message(0, tensors=(torch.eye(2).to_sparse(),)))
    with pytest.raises(TypeError, match=r"torch\.bits8 cannot be sent"):
        wire.SentFormats().find(Message(0, tensors=(torch.empty(2, dtype=torch.bits8),)))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([[1 + 2j, 3j], [4 + 0j, 5 - 1j]]).conj(),
        torch.tensor([[1 + 2j, 3j], [4 + 0j, 5 - 1j]]).conj().imag,
        torch.tensor([1.0, 2.0, 0.5]).to(torch.float8_e4m3fn),
    ],
    ids=["conjugate", "negated", "float8"],
)
def test_numbers_that_memory_does_not_hold_as_such(tensor: torch.Tensor) -> None:
    numbers = wire.flatten_in_memory_order(tensor)
    received = torch.empty_like(numbers)
    received.view(torch.uint8).copy_(numbers.view(torch.uint8))  # bytes, as gloo sends them
    assert torch.equal(received.to(torch.complex64), tensor.to(torch.complex64).reshape(-1).resolve_conj())
