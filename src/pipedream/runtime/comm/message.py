"""A message and its header.

The header has a fixed size, so its receive can be posted before anything is known about the message. It holds the type
and shape of each tensor: a smaller last minibatch or a longer sequence needs no negotiation. It also holds the text of
the structure, if that is short: no worker waits for its GPU to read it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import NamedTuple

import torch

__all__ = [
    "ENDS_EPOCH",
    "HEADER_WORDS",
    "Content",
    "Ending",
    "Message",
    "TensorSpec",
    "copy_as_received",
    "decode_header",
    "dimension_order",
    "encode_header",
    "join_payload",
    "split_payload",
]

HEADER_WORDS = 512
ENDS_EPOCH = 1
"""Bit of the flags of a `DATA` message: its minibatch is the last of its epoch."""
_FIXED = 16
_LAYOUT = struct.Struct("=9q2d2q")
_MOST_DIMENSIONS = 8
_MOST_NUMBERS = 64
_ALIGNMENT = 64
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Content(IntEnum):
    """The kind of a message."""

    DATA = 0
    EMPTY = 1  # the minibatch has fewer samples than microbatches
    END = 2  # no further microbatch; `microbatch` is their count


class Ending(IntEnum):
    """Why a stream of minibatches ended."""

    DATA = 0
    DRAIN = 1
    INTERRUPT = 2


class TensorSpec(NamedTuple):
    """The layout of a tensor in a payload; `order` as in `dimension_order`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]


@dataclass(slots=True)
class Message:
    """One message; nobody writes to it after it was made. (Not frozen: that would make each cost three times as much.)

    Attributes:
        microbatch: number since the last drain.
        tensors: None for a gradient that does not exist.
        structure: see `values.flatten`.
        gradients: for each tensor, whether its gradient is sent back.
        minibatch: number since the start of training.
        version: of the weights that the forward read.
        flags: `ENDS_EPOCH`, or at the end of a stream an `Ending`.
        loss_weight: of the microbatch.
        share: of the minibatch's samples.
        numbers: losses and metrics.
    """

    microbatch: int
    content: Content = Content.DATA
    tensors: tuple[torch.Tensor | None, ...] = ()
    structure: str = ""
    gradients: tuple[bool, ...] = ()
    minibatch: int = 0
    epoch: int = 0
    samples: int = 0
    version: int = 0
    flags: int = 0
    loss_weight: float = 0.0
    share: float = 1.0
    numbers: tuple[float, ...] = ()

    def with_tensors(
        self,
        structure: str,
        tensors: tuple[torch.Tensor, ...],
        gradients: tuple[bool, ...] | None = None,
        version: int = 0,
    ) -> Message:
        """By default no gradients are sent back."""
        wants = (False,) * len(tensors) if gradients is None else gradients
        return self._with(tensors, structure, wants, version)

    def without_tensors(self) -> Message:
        return self._with((), "", (), self.version)

    def copy_as_received(self) -> Message:
        """Returns a message with copies of the tensors, as over a network: the receiver may write into them."""
        tensors = tuple([None if tensor is None else copy_as_received(tensor) for tensor in self.tensors])
        return self._with(tensors, self.structure, self.gradients, self.version)

    def _with(
        self, tensors: tuple[torch.Tensor | None, ...], structure: str, gradients: tuple[bool, ...], version: int
    ) -> Message:
        return Message(
            self.microbatch, self.content, tensors, structure, gradients, self.minibatch, self.epoch, self.samples,
            version, self.flags, self.loss_weight, self.share, self.numbers,
        )  # fmt: skip


def encode_header(message: Message, payload_bytes: int) -> torch.Tensor:
    """Writes int64[HEADER_WORDS] on the CPU.

    Raises:
        ValueError: more tensors or numbers than it can hold.
        TypeError: a tensor of a type that cannot be sent.
    """
    if len(message.numbers) > _MOST_NUMBERS:
        raise ValueError(f"a message carries at most {_MOST_NUMBERS} numbers, found {len(message.numbers)}")
    room = HEADER_WORDS - _FIXED - len(message.numbers)
    words: list[int] = []
    for i, tensor in enumerate(message.tensors):
        shape = () if tensor is None else tuple(tensor.shape)
        if len(shape) > _MOST_DIMENSIONS or len(words) + 2 + len(shape) > room:
            raise ValueError(
                f"the value has too many tensors or dimensions for a header: {len(message.tensors)} tensors, tensor "
                f"{i} has shape {shape}; cut the model where fewer tensors cross, or stack tensors of one shape"
            )
        if tensor is not None and tensor.dtype not in _DTYPE_CODE:
            raise TypeError(f"a tensor of {tensor.dtype} cannot be sent between stages; convert it to a plain type")
        code = -1 if tensor is None else _DTYPE_CODE[tensor.dtype]
        wants = bool(message.gradients) and message.gradients[i]
        layout = len(shape) if tensor is None else _packed(dimension_order(tensor))
        words += ((code + 1) * 2 + wants, layout, *shape)
    text = message.structure.encode() if _fits_header(message) else b""
    header = bytearray(8 * HEADER_WORDS)
    _LAYOUT.pack_into(
        header, 0, message.content, message.microbatch, message.minibatch, message.epoch, message.samples,
        message.version, message.flags, payload_bytes, len(message.tensors), message.loss_weight, message.share,
        len(message.numbers), len(text),
    )  # fmt: skip
    struct.pack_into(f"={len(message.numbers)}d{len(words)}q", header, 8 * _FIXED, *message.numbers, *words)
    if text:
        header[-len(text) :] = text
    return torch.frombuffer(header, dtype=torch.int64)


def decode_header(
    words: torch.Tensor,
) -> tuple[Message, int, list[TensorSpec | None]]:
    """Returns the message without tensors, or a structure in its payload; the payload's bytes; the tensors' layouts."""
    ints = words.numpy()
    (
        content, microbatch, minibatch, epoch, samples, version, flags, payload, count, loss_weight, share, numbers,
        text,
    ) = _LAYOUT.unpack_from(ints.data)  # fmt: skip
    named = ints[_FIXED + numbers : _FIXED + numbers + count * (2 + _MOST_DIMENSIONS)].tolist()
    specs: list[TensorSpec | None] = []
    wants = []
    place = 0
    for _ in range(count):
        code, want = divmod(named[place], 2)
        order = _unpacked(named[place + 1])
        end = place + 2 + len(order)
        specs.append(None if code == 0 else TensorSpec(_DTYPES[code - 1], tuple(named[place + 2 : end]), order))
        wants.append(bool(want))
        place = end
    message = Message(
        microbatch=microbatch,
        content=Content(content),
        structure=ints.data.cast("B")[-text:].tobytes().decode() if text else "",
        gradients=tuple(wants),
        minibatch=minibatch,
        epoch=epoch,
        samples=samples,
        version=version,
        flags=flags,
        loss_weight=loss_weight,
        share=share,
        numbers=struct.unpack_from(f"={numbers}d", ints.data, 8 * _FIXED),
    )
    return message, payload, specs


def join_payload(message: Message, device: torch.device) -> torch.Tensor:
    """Returns the tensors, and a structure too long for the header, as uint8[n]; does not copy a single tensor."""
    tensors = [tensor.detach() for tensor in message.tensors if tensor is not None]
    text = b"" if _fits_header(message) else message.structure.encode()
    if len(tensors) == 1 and not text:
        return _as_bytes(tensors[0])
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    total = sum(map(_aligned, sizes)) + len(text)
    payload = torch.empty(total, dtype=torch.uint8, device=device)
    place = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        payload[place : place + size].copy_(_as_bytes(tensor))
        place += _aligned(size)
    if text:
        payload[place:].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return payload


def split_payload(message: Message, specs: list[TensorSpec | None], payload: torch.Tensor) -> Message:
    """Returns the message with tensors that share the payload's storage."""
    place = 0
    tensors: list[torch.Tensor | None] = []
    for spec in specs:
        if spec is None:
            tensors.append(None)
            continue
        size = prod(spec.shape) * spec.dtype.itemsize
        # `.data`: autograd must not take these for views, or would rewrite a tensor's neighbours.
        tensors.append(_restored(payload[place : place + size].view(spec.dtype), spec.shape, spec.order).data)
        place += _aligned(size) if place + _aligned(size) <= payload.numel() else size
    structure = bytes(payload[place:].cpu().numpy()).decode() if place < payload.numel() else message.structure
    return message._with(tuple(tensors), structure, message.gradients, message.version)


def _fits_header(message: Message) -> bool:
    words = _FIXED + len(message.numbers) + sum(2 if t is None else 2 + t.ndim for t in message.tensors)
    return len(message.structure.encode()) <= 8 * (HEADER_WORDS - words)


def dimension_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the dimensions from the largest stride to the smallest.

    A tensor keeps this order when it is sent: a dropout mask is drawn in the order of memory, so the transposed output
    of a batch-first LSTM must not arrive in another layout.
    """
    if tensor.layout is not torch.strided:
        raise TypeError(f"a tensor of layout {tensor.layout} cannot be sent between stages; make it dense")
    plain = tuple(range(tensor.ndim))
    strides = tensor.stride()
    if tensor.is_contiguous() or 0 in strides:
        return plain
    return tuple(sorted(plain, key=lambda dimension: -strides[dimension]))


def copy_as_received(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a dense copy with the same order of dimensions in memory."""
    if tensor.layout is torch.strided and tensor.is_contiguous():
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    order = dimension_order(tensor)
    numbers = tensor.detach().permute(order).clone(memory_format=torch.contiguous_format).view(-1)
    return _restored(numbers, tuple(tensor.shape), order).data


def _restored(numbers: torch.Tensor, shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    dense = numbers.view([shape[dimension] for dimension in order])
    return dense.permute([order.index(dimension) for dimension in range(len(shape))])


def _packed(order: tuple[int, ...]) -> int:
    return sum(dimension << 4 * (i + 1) for i, dimension in enumerate(order)) | len(order)


def _unpacked(layout: int) -> tuple[int, ...]:
    return tuple(layout >> 4 * (i + 1) & 0xF for i in range(layout & 0xF))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.permute(dimension_order(tensor)).contiguous()
    # Not view(-1): a dimension of size 1 may keep any stride, and bytes are viewed only at stride 1.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
