"""Encodings of the tensors in messages: half precision, 8 bits in blocks, 4 bits after a rotation.

    bfloat16, float16  each value, rounded to the nearest
    int8               blocks of 64 values share a scale: their greatest size / 127 (as SWARM, arXiv 2301.11913)
    int4               blocks rotated by an orthonormal Hadamard matrix, which spreads outliers over a block; then the
                       same with / 7 (as TAH-Quant, arXiv 2506.01352)

Blocks are taken row by row. If one value of a block is not finite, none of the decoded ones are, so that an overflow is
still noticed. Rounding is deterministic.
"""

import json
from functools import cache, lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from pipedream.core.box import dense_strides
from pipedream.core.plan.messages import BITS, BLOCK, MIN_ENCODED_BYTES, MessageEncoding
from pipedream.core.plan.placement import Carries
from pipedream.runtime.comm.channel import Pending, Receiver, Sender
from pipedream.runtime.comm.message import Message, dimension_order

_MARK = "~"  # begins neither a structure of `values` nor one with crossings
_HALF_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_MAX_CODE = {"int8": 127, "int4": 7}
_CODE_BYTES = {"int8": BLOCK, "int4": BLOCK // 2}  # of a block
_SCALE_BYTES = 4
_MIN_SCALE = torch.finfo(torch.float32).tiny  # keeps a block of zeros from dividing by 0
_BLOCKS_AT_ONCE = 1 << 11
"""Few enough for their temporaries to stay in a CPU's cache."""


class TensorHeader(NamedTuple):
    """What a code lacks of its tensor; only block codes need shape and strides, those of a dense tensor."""

    dtype: str
    encoding: str
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()


def is_encoded(tensor: torch.Tensor, encoding: str) -> bool:
    """Returns whether an encoding makes a tensor smaller."""
    is_smaller = 8 * tensor.element_size() > BITS[encoding]
    return tensor.is_floating_point() and tensor.nbytes >= MIN_ENCODED_BYTES and is_smaller


def encode(tensor: torch.Tensor, encoding: str) -> tuple[torch.Tensor, TensorHeader]:
    """Returns the code of a floating-point tensor: 16-bit numbers, or scales and codes of values as uint8."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if encoding in _HALF_DTYPES:
        return tensor.detach().to(_HALF_DTYPES[encoding]), TensorHeader(dtype, encoding)
    original = TensorHeader(dtype, encoding, shape, dense_strides(shape, dimension_order(tensor)))
    values = tensor.detach().contiguous().view(-1)
    blocks = nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)  # zeros change no maximum
    scales = torch.empty(len(blocks), 1, dtype=torch.float32, device=tensor.device)
    codes = torch.empty(len(blocks), _CODE_BYTES[encoding], dtype=torch.int8, device=tensor.device)
    step = _BLOCKS_AT_ONCE if tensor.is_cpu else max(len(blocks), 1)
    for begin in range(0, len(blocks), step):
        rows = slice(begin, begin + step)
        _encode_blocks(blocks[rows], scales[rows], codes[rows], encoding)
    return torch.cat([scales.view(torch.uint8).view(-1), codes.view(torch.uint8).view(-1)]), original


def _encode_blocks(blocks: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, encoding: str) -> None:
    """Writes the scale of each row, and the codes of its values."""
    blocks = blocks.to(torch.promote_types(blocks.dtype, torch.float32))
    if encoding == "int4":
        blocks = blocks @ _make_hadamard(blocks.dtype, blocks.device)
    scales.copy_(blocks.abs().amax(1, keepdim=True) / _MAX_CODE[encoding]).clamp_(_MIN_SCALE)
    rounded = (blocks / scales).round_()
    if encoding == "int4":
        first, second = rounded.to(torch.int8).chunk(2, 1)
        torch.bitwise_or(first & 0xF, second << 4, out=codes)
    else:
        codes.copy_(rounded)


def decode(code: torch.Tensor, original: TensorHeader) -> torch.Tensor:
    """Returns a dense tensor of the original's type and shape."""
    dtype = getattr(torch, original.dtype)
    if original.encoding in _HALF_DTYPES:
        return code.to(dtype)
    count = prod(original.shape)
    blocks = _decode_blocks(code, original.encoding, -(-count // BLOCK), torch.promote_types(dtype, torch.float32))
    # Keeps the order of memory, in which a dropout mask is drawn. Not a view, which autograd would follow to its base.
    decoded = torch.empty_strided(original.shape, original.strides, dtype=dtype, device=code.device)
    return decoded.copy_(blocks.view(-1)[:count].view(original.shape))


def _decode_blocks(code: torch.Tensor, encoding: str, count: int, dtype: torch.dtype) -> torch.Tensor:
    scales, codes = code[: count * _SCALE_BYTES], code[count * _SCALE_BYTES :]
    rows = codes.view(torch.int8).view(count, _CODE_BYTES[encoding])
    if encoding == "int4":
        rows = torch.cat([rows << 4 >> 4, rows >> 4], 1)
    blocks = rows.to(dtype).mul_(scales.view(torch.float32).view(count, 1))
    return torch.matmul(blocks, _make_hadamard(dtype, code.device)) if encoding == "int4" else blocks


@cache
def _make_hadamard(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns Sylvester's matrix over the root of its size, its own inverse."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix.div(BLOCK**0.5).to(device, dtype)


# -- messages ---------------------------------------------------------------------------------------


def encode_message(message: Message, encoding: str, *, only_wanted: bool) -> Message:
    """Returns a message with codes in place of tensors that the encoding makes smaller.

    Args:
        only_wanted: tensors whose gradient is not sent back travel as they are.
    """
    tensors = list(message.tensors)
    originals: list[TensorHeader | None] = [None] * len(tensors)
    for i, tensor in enumerate(tensors):
        if tensor is not None and (not only_wanted or message.wants[i]) and is_encoded(tensor, encoding):
            tensors[i], originals[i] = encode(tensor, encoding)
    if not any(originals):
        return message
    return message.with_tensors(
        _mark(message.structure, tuple(originals)), tuple(tensors), message.wants, message.version
    )


def decode_message(message: Message) -> Message:
    """Returns the message that `encode_message` took, up to rounding."""
    originals, structure = _read_mark(message.structure)
    if not originals:
        return message
    tensors = [
        tensor if tensor is None or original is None else decode(tensor, original)
        for tensor, original in zip(message.tensors, originals, strict=True)
    ]
    return message.with_tensors(structure, tuple(tensors), message.wants, message.version)


@lru_cache(maxsize=1024)
def _mark(structure: str, originals: tuple[TensorHeader | None, ...]) -> str:
    return f"{_MARK}{json.dumps(originals)}{_MARK}{structure}"


@lru_cache(maxsize=1024)
def _read_mark(structure: str) -> tuple[tuple[TensorHeader | None, ...], str]:
    if not structure.startswith(_MARK):
        return (), structure
    _, text, rest = structure.split(_MARK, 2)
    rows = json.loads(text)
    return tuple(None if row is None else TensorHeader(*row[:2], *map(tuple, row[2:])) for row in rows), rest


class EncodingSender(Sender):
    """A sending end that encodes."""

    def __init__(self, sender: Sender, encoding: str, *, only_wanted: bool) -> None:
        self._sender = sender
        self._encode = partial(encode_message, encoding=encoding, only_wanted=only_wanted)

    def send(self, message: Message) -> None:
        self._sender.send(self._encode(message))

    def begin_drain(self) -> None:
        self._sender.begin_drain()

    def drain(self) -> None:
        self._sender.drain()

    @property
    def sent_bytes(self) -> int:
        return self._sender.sent_bytes


class DecodingReceiver(Receiver):
    """A receiving end that decodes."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def receive(self) -> Pending[Message]:
        return _Decoded(self._receiver.receive())

    def drain(self) -> None:
        self._receiver.drain()


class _Decoded(Pending[Message]):
    def __init__(self, pending: Pending[Message]) -> None:
        self._pending = pending

    def ready(self) -> bool:
        return self._pending.ready()

    def result(self) -> Message:
        return decode_message(self._pending.result())


def with_encoding(sender: Sender, messages: MessageEncoding, carries: Carries) -> Sender:
    """Returns a channel's sending end, which encodes if the user wants it."""
    encoding = messages.encoding(carries)
    if encoding == "full":
        return sender
    return EncodingSender(sender, encoding, only_wanted=carries == Carries.ACTIVATION)


def with_decoding(receiver: Receiver, messages: MessageEncoding, carries: Carries) -> Receiver:
    """Returns the receiving end of such a channel."""
    return receiver if messages.encoding(carries) == "full" else DecodingReceiver(receiver)


# -- in one process ---------------------------------------------------------------------------------


class _EncodedCopy(torch.autograd.Function):
    """Copies a value as the next stage would receive it, and the gradient as this stage would."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, messages: MessageEncoding) -> torch.Tensor:
        ctx.encoding = messages.gradients
        return _apply_encoding(tensor, messages.activations)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _apply_encoding(gradients[0], ctx.encoding), None


def apply_messages(tensor: torch.Tensor, messages: MessageEncoding) -> torch.Tensor:
    """Returns a tensor as another worker would receive it; its gradient is as this worker would receive it."""
    return _EncodedCopy.apply(tensor, messages) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]


def _apply_encoding(tensor: torch.Tensor, encoding: str) -> torch.Tensor:
    return decode(*encode(tensor, encoding)) if is_encoded(tensor, encoding) else tensor.clone()
