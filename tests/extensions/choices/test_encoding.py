"""Encodings keep their error bounds, hide nothing that is not finite, and leave alone what is not theirs."""

from typing import Any

import pytest
import torch
from encoded import _hadamard, rounded
from hypothesis import example, given, strategies as st

import pipedream as pd
from pipedream.core.plan import codec as codecs, placement
from pipedream.extensions.choices.messages import MessageEncoding, encoded as codec
from pipedream.runtime.comm import blocks, channel, message as wire

CODED = codecs.list_encodings()
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
@example("int8", torch.float32, "columns", 9, 80, 1.0, 0)
def test_arrives_as_documented(
    encoding: str, dtype: torch.dtype, layout: str, rows: int, columns: int, size: float, seed: int
) -> None:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    tensor = STAGE_ORDERS[layout]((values * size).to(dtype))
    arrived = codec.decode(*codec.encode(tensor, encoding))
    assert arrived.dtype == dtype
    assert arrived.shape == tensor.shape
    if tensor.numel() and arrived.data_ptr() != tensor.data_ptr():
        assert wire.dimension_order(arrived) == wire.dimension_order(tensor)
    # In single precision the rotation's rounding may move a value over the middle between two steps.
    if codec.is_encoded(tensor, encoding) and (dtype == torch.float64 or "int4" not in encoding):
        torch.testing.assert_close(arrived, rounded(tensor, encoding), rtol=1e-5, atol=1e-5 * size, equal_nan=True)
    if encoding.startswith("int") and rows:
        # Half a step of a block's scale, or a whole one: of each value, or of the block where it was rotated.
        wide = [x.contiguous().view(-1).double() for x in (tensor, arrived)]
        for whole, got in zip(*(x.split(blocks.BLOCK) for x in wide), strict=True):
            rounding = 2 * torch.finfo(dtype).eps * whole.abs().max()
            if steps := {"int8": 254, "int3": 7, "int2": 3}.get(encoding):
                assert (got - whole).abs().max() <= whole.abs().max() / steps * 1.001 + rounding
            else:
                share = 1 if encoding == "int4_stochastic" else 1 / 2
                assert (got - whole).norm() <= share * 8 * whole.norm() / 7 * 1.001 + 8 * rounding


@pytest.mark.parametrize("encoding", CODED)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_hides_nothing_that_is_not_finite(encoding: str, number: float) -> None:
    tensor = torch.ones(5, 100)
    tensor[3, 50] = number
    arrived = codec.decode(*codec.encode(tensor, encoding))
    assert not arrived[3, 50].isfinite()
    assert arrived.isfinite().sum() >= 500 - blocks.BLOCK


@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_zeros_and_the_smallest_numbers_stay_small(encoding: str) -> None:
    assert not codec.decode(*codec.encode(torch.zeros(1000), encoding)).any()
    tiny = torch.full((1000,), torch.finfo(torch.float32).tiny / 16)
    assert codec.decode(*codec.encode(tiny, encoding)).abs().max() <= torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("part", [0.1, 0.4, 0.8])
def test_the_mean_of_stochastic_roundings_is_the_value(part: float) -> None:
    """To nearest, each of them is rounded the same way."""
    scales, hadamard = torch.logspace(-3, 3, 1000).view(-1, 1), _hadamard().float()
    blocks = scales * torch.tensor([7.0, *[2 + part] * 63]) @ hadamard
    nearest, drawn = (
        codec.decode(*codec.encode(blocks, encoding)) @ hadamard / scales for encoding in ("int4", "int4_stochastic")
    )
    assert nearest[:, 1:].round().unique().tolist() == [2 + round(part)]
    torch.testing.assert_close(drawn[:, 0], torch.full((1000,), 7.0), rtol=1e-4, atol=0.0)
    parts = drawn[:, 1:] - 2
    assert set(parts.round().unique().tolist()) == {0, 1}
    for means in (parts.mean(0), parts.mean(1)):  # of a place, and of a scale
        assert means.mean() == pytest.approx(part, abs=0.01)
        assert (means - part).abs().max() < 0.3


@pytest.mark.parametrize(
    ("tensor", "encoding", "expected"),
    [
        (torch.ones(200), "int8", False),  # less than a kilobyte
        (torch.ones(2000, dtype=torch.int64), "int8", False),
        (torch.ones(2000, dtype=torch.complex64), "int8", False),
        (torch.ones(2000, dtype=torch.bfloat16), "float16", False),  # as many bits
        (torch.ones(2000), "full", False),
        (torch.ones(2000, dtype=torch.bfloat16), "int8", True),
    ],
)
def test_what_is_left_alone(tensor: torch.Tensor, encoding: str, expected: bool) -> None:
    assert codec.is_encoded(tensor, encoding) is expected


def _send(
    tensors: Any, wants: Any, carries: placement.Carries, messages: str, *earlier: Any
) -> tuple[wire.Message, int]:
    link, encodings = channel.LocalChannel(), MessageEncoding.parse(messages)
    sender, receiver = encodings.wrap_sender(link, carries), encodings.wrap_receiver(link, carries)
    for each in (*earlier, wants):
        sender.send(wire.Message(4).with_tensors("[0,1,2]", tensors, each, 7))
        pending = receiver.receive()
        assert pending.ready()
        message = pending.result()
    return message, sender.sent_bytes


def test_a_message_keeps_its_structure_and_what_has_no_gradient() -> None:
    x, mask, ids = torch.randn(10, 100), torch.rand(10, 100), torch.arange(300)
    message, sent_bytes = _send((x, mask, ids), (True, False, False), placement.Carries.ACTIVATION, "int8")
    assert (message.microbatch, message.version, message.wants) == (4, 7, (True, False, False))
    assert message.structure == "[0,1,2]"
    for arrived, expected in zip(message.tensors, (rounded(x, "int8"), mask, ids), strict=True):
        assert torch.equal(arrived, expected)
    assert sent_bytes == 16 * 64 + 16 * 4 + 4000 + 2400


@pytest.mark.parametrize(
    ("wants", "carries", "messages", "encoding"),
    [
        ((), placement.Carries.GRADIENT, "full,int4", "int4"),
        ((True,), placement.Carries.ACTIVATION, "full,int4", "full"),
        ((True,), placement.Carries.INPUT, "int8", "full"),
    ],
)
def test_gradients_have_their_own_encoding(
    wants: Any, carries: placement.Carries, messages: str, encoding: str
) -> None:
    sent = torch.randn(10, 100)
    (arrived,) = _send((sent,), wants, carries, messages)[0].tensors
    torch.testing.assert_close(arrived, rounded(sent, encoding))


def test_evaluations_encode_what_training_does() -> None:
    """None of its tensors has a gradient: the last training message says which are encoded."""
    x, mask = torch.randn(10, 100), torch.rand(10, 100)
    for earlier, expected in (((), x), (((True, False),), rounded(x, "int8"))):
        message, _ = _send((x, mask), (False, False), placement.Carries.ACTIVATION, "full,full,int8", *earlier)
        assert all(map(torch.equal, message.tensors, (expected, mask)))


def test_what_is_asked_for_is_read() -> None:
    assert MessageEncoding.parse("int8") == MessageEncoding.parse(("int8", "int8")) == MessageEncoding("int8", "int8")
    assert str(MessageEncoding.parse("int8, bfloat16")) == "int8,bfloat16"
    assert str(MessageEncoding.parse(None)) == "full"
    assert str(MessageEncoding.parse("int8, int8, bfloat16")) == "int8,int8,bfloat16"
    assert not MessageEncoding()
    for wrong in ("int9", "int8,int8,int8,int8", ["int8", 3], "", "int8,"):
        with pytest.raises(pd.PipelineError, match="messages="):
            MessageEncoding.parse(wrong)
