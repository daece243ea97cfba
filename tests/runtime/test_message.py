"""Headers and payloads: what goes in comes out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipedream.runtime.comm.channel import LocalChannel
from pipedream.runtime.comm.message import (
    Content,
    Message,
    copy_as_received,
    decode_header,
    dimension_order,
    encode_header,
    join_payload,
    split_payload,
)

CPU = torch.device("cpu")
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.float8_e5m2,
)  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draws a tensor of any type and shape, its dimensions in any order, with or without gaps."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    order = draw(st.permutations(range(len(shape))))
    tensor = torch.randint(0, 2, shape).to(dtype).permute(order)
    if tensor.ndim and draw(st.booleans()):
        tensor = tensor[::2]
    if tensor.ndim and draw(st.booleans()):
        tensor = tensor[:1].expand(3 if len(tensor) else 0, *tensor.shape[1:])
    return tensor


MESSAGES = st.builds(
    Message,
    microbatch=st.integers(0, 2**62),
    content=st.sampled_from(Content),
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


@given(message=MESSAGES, wanted=st.lists(st.booleans(), min_size=4, max_size=4))
def test_a_message_arrives_as_it_was(message: Message, wanted: list[bool]) -> None:
    message = replace(message, gradients=tuple(wanted[: len(message.tensors)]))
    payload = join_payload(message, CPU)
    header, size, specs = decode_header(encode_header(message, payload.numel()))
    assert size == payload.numel()
    found = split_payload(header, specs, payload.clone())
    assert replace(found, tensors=()) == replace(message, tensors=())
    for there, here in zip(found.tensors, message.tensors, strict=True):
        assert (there is None) == (here is None)
        if there is not None and here is not None:
            assert there.dtype == here.dtype
            assert torch.equal(there.double(), here.double()) if not here.is_complex() else torch.equal(there, here)
            assert dimension_order(there) == dimension_order(copy_as_received(here))
            assert there.stride() == copy_as_received(here).stride(), (
                "in one process and over a wire the layout is the same"
            )


@given(tensor=tensors())
def test_a_copy_is_dense_in_the_order_of_its_dimensions(tensor: torch.Tensor) -> None:
    copy = copy_as_received(tensor)
    step, strides = 1, [0] * tensor.ndim
    for dimension in reversed(dimension_order(tensor)):
        strides[dimension], step = step, step * max(1, tensor.shape[dimension])
    assert copy.stride() == tuple(strides)
    assert torch.equal(copy, tensor)
    assert not copy._is_view()
    assert not copy.requires_grad


def test_a_transposed_tensor_keeps_its_order_of_memory() -> None:
    for tensor in (torch.randn(3, 4, 5).transpose(0, 1), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)):
        assert copy_as_received(tensor).stride() == tensor.stride()
        assert copy_as_received(tensor).data_ptr() != tensor.data_ptr()


def test_tensors_of_one_message_enter_a_graph_apart_from_each_other() -> None:
    message = Message(0, tensors=(torch.ones(2), torch.ones(3), torch.ones(4)))
    payload = join_payload(message, CPU)
    _, _, specs = decode_header(encode_header(message, payload.numel()))
    assert not any(t._is_view() for t in split_payload(message, specs, payload).tensors)


def test_what_does_not_fit_into_a_header_is_refused() -> None:
    with pytest.raises(ValueError, match="cut the model where fewer tensors cross"):
        encode_header(Message(0, tensors=(torch.ones(1),) * 400), 0)
    with pytest.raises(ValueError, match="cut the model where fewer tensors cross"):
        encode_header(Message(0, tensors=(torch.ones((1,) * 9),)), 0)
    with pytest.raises(ValueError, match="at most 64 numbers"):
        encode_header(Message(0, numbers=(0.0,) * 65), 0)
    with pytest.raises(TypeError, match=r"torch\.bits8 cannot be sent"):
        encode_header(Message(0, tensors=(torch.empty(2, dtype=torch.bits8),)), 0)
    for send in (lambda message: join_payload(message, CPU), LocalChannel().send):
        with pytest.raises(TypeError, match=r"layout torch\.sparse_coo cannot be sent"):
            send(Message(0, tensors=(torch.eye(2).to_sparse(),)))


def test_a_short_structure_is_in_the_header() -> None:
    tensor = torch.ones(3)
    for text, extra in (("[1]", 0), ("x" * 5000, 5000)):
        message = Message(0, tensors=(tensor,), structure=text)
        payload = join_payload(message, CPU)
        assert payload.numel() == (64 + extra if extra else tensor.nbytes)
        header, _, specs = decode_header(encode_header(message, payload.numel()))
        assert split_payload(header, specs, payload).structure == text


def test_a_transposed_tensor_arrives_transposed() -> None:
    for tensor in (torch.arange(12.0).reshape(3, 4).t(), torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)):
        message = Message(0, tensors=(tensor,))
        payload = join_payload(message, CPU)
        header, _, specs = decode_header(encode_header(message, payload.numel()))
        (found,) = split_payload(header, specs, payload.clone()).tensors
        assert found is not None
        assert torch.equal(found, tensor)
        assert found.stride() == tensor.stride()
