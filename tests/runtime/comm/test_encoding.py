"""Encodings keep their error bounds, hide nothing that is not finite, and leave alone what is not theirs."""

import pytest
import torch
from encoded import rounded
from hypothesis import given, strategies as st

from pipedream.core.errors import PipelineError
from pipedream.core.plan.messages import BLOCK, ENCODINGS, MessageEncoding
from pipedream.core.plan.placement import Carries
from pipedream.runtime.comm.channel import LocalChannel
from pipedream.runtime.comm.encoding import decode, encode, is_encoded, with_decoding, with_encoding
from pipedream.runtime.comm.message import Message, dimension_order
from pipedream.runtime.comm.values import flatten, unflatten

CODED = ENCODINGS[1:]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
STAGE_ORDERS = {
    "rows": lambda x: x,
    "columns": lambda x: x.t().contiguous().t(),
    "part": lambda x: torch.cat([x, x], 1)[:, 1 : 1 + x.shape[1]],
    "expanded": lambda x: x[:1].expand(len(x), -1),
}


@given(
    st.sampled_from(CODED),
    st.sampled_from(DTYPES),
    st.sampled_from(sorted(STAGE_ORDERS)),
    st.integers(0, 20),
    st.integers(1, 90),
    st.floats(1e-6, 1e4),
    st.integers(0, 2**32),
)
def test_arrives_as_documented(
    encoding: str, dtype: torch.dtype, layout: str, rows: int, columns: int, size: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    tensor = STAGE_ORDERS[layout]((values * size).to(dtype))
    arrived = decode(*encode(tensor, encoding))
    assert arrived.dtype == dtype
    assert arrived.shape == tensor.shape
    if tensor.numel() and arrived.data_ptr() != tensor.data_ptr():
        assert dimension_order(arrived) == dimension_order(tensor)
    # In single precision the rotation's rounding may move a value over the middle between two steps.
    if is_encoded(tensor, encoding) and (encoding != "int4" or dtype == torch.float64):
        torch.testing.assert_close(arrived, rounded(tensor, encoding), rtol=1e-5, atol=1e-5 * size, equal_nan=True)
    if encoding in ("int8", "int4") and rows:
        # Half a step of a block's scale: of each value, or of the block as a whole where it was rotated.
        wide = [x.contiguous().view(-1).double() for x in (tensor, arrived)]
        for whole, got in zip(*(x.split(BLOCK) for x in wide), strict=True):
            rounding = 2 * torch.finfo(dtype).eps * whole.abs().max()
            if encoding == "int8":
                assert (got - whole).abs().max() <= whole.abs().max() / 254 * 1.001 + rounding
            else:
                assert (got - whole).norm() <= 8 * whole.norm() / 14 * 1.001 + 8 * rounding


@pytest.mark.parametrize("encoding", CODED)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_hides_nothing_that_is_not_finite(encoding: str, number: float) -> None:
    tensor = torch.ones(5, 100)
    tensor[3, 50] = number
    arrived = decode(*encode(tensor, encoding))
    assert not arrived[3, 50].isfinite()
    assert arrived.isfinite().sum() >= 500 - BLOCK


@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_zeros_and_the_smallest_numbers_stay_small(encoding: str) -> None:
    assert not decode(*encode(torch.zeros(1000), encoding)).any()
    tiny = torch.full((1000,), torch.finfo(torch.float32).tiny / 16)
    assert decode(*encode(tiny, encoding)).abs().max() <= torch.finfo(torch.float32).tiny


def test_what_is_left_alone() -> None:
    assert not is_encoded(torch.ones(200), "int8"), "less than a kilobyte"
    assert not is_encoded(torch.ones(2000, dtype=torch.int64), "int8")
    assert not is_encoded(torch.ones(2000, dtype=torch.complex64), "int8")
    assert not is_encoded(torch.ones(2000, dtype=torch.bfloat16), "float16"), "as many bits"
    assert not is_encoded(torch.ones(2000), "full")
    assert is_encoded(torch.ones(2000, dtype=torch.bfloat16), "int8")


def _send(value: object, wants: tuple[bool, ...], carries: Carries, messages: str) -> tuple[Message, int]:
    channel = LocalChannel()
    sender = with_encoding(channel, MessageEncoding.parse(messages), carries)
    receiver = with_decoding(channel, MessageEncoding.parse(messages), carries)
    structure, tensors = flatten(value)
    sender.send(Message(4).with_tensors(structure, tensors, wants, 7))
    pending = receiver.receive()
    assert pending.ready()
    return pending.result(), sender.sent_bytes


def test_a_message_keeps_its_structure_and_what_has_no_gradient() -> None:
    value = {"x": torch.randn(10, 100), "mask": torch.rand(10, 100), "ids": torch.arange(300), "name": "a"}
    message, sent_bytes = _send(value, (True, False, False), Carries.ACTIVATION, "int8")
    arrived = unflatten(message.structure, message.tensors)  # type: ignore[arg-type]
    assert (message.microbatch, message.version, message.wants) == (4, 7, (True, False, False))
    assert arrived.keys() == value.keys()
    assert torch.equal(arrived["mask"], value["mask"])
    assert torch.equal(arrived["ids"], value["ids"])
    assert torch.equal(arrived["x"], rounded(value["x"], "int8"))
    assert sent_bytes == 16 * 64 + 16 * 4 + 4000 + 2400


def test_gradients_have_an_encoding_of_their_own() -> None:
    gradient = torch.randn(10, 100)
    message, _ = _send(gradient, (), Carries.GRADIENT, "full,int4")
    (arrived,) = message.tensors
    assert arrived is not None
    torch.testing.assert_close(arrived, rounded(gradient, "int4"))
    message, _ = _send(gradient, (True,), Carries.ACTIVATION, "full,int4")
    assert torch.equal(message.tensors[0], gradient)  # type: ignore[arg-type]
    message, _ = _send(gradient, (True,), Carries.INPUT, "int8")
    assert torch.equal(message.tensors[0], gradient)  # type: ignore[arg-type]


def test_what_is_asked_for_is_read() -> None:
    assert MessageEncoding.parse("int8") == MessageEncoding.parse(("int8", "int8")) == MessageEncoding("int8", "int8")
    assert str(MessageEncoding.parse("int8, bfloat16")) == "int8,bfloat16"
    assert str(MessageEncoding.parse(None)) == "full"
    assert not MessageEncoding()
    for wrong in ("int9", "int8,int8,int8", ["int8", 3], "", "int8,"):
        with pytest.raises(PipelineError, match="messages="):
            MessageEncoding.parse(wrong)  # type: ignore[arg-type]
