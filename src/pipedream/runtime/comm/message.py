"""A message, its format and its header.

A format describes what a message holds: the structure of the value, and dtype and shape of each tensor. A new format
gets a number on its channel and is described once; later messages only have its number. So a smaller last minibatch or
a longer sequence needs no negotiation, and the header of a message is short.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Any, NamedTuple

import torch

from pipedream.core.box import dense_strides, memory_order
from pipedream.runtime.comm.values import unflatten

ENDS_EPOCH = 1
"""Bit of the flags of a `DATA` message: its minibatch is the last of its epoch."""
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


_CONTENTS = tuple(Content)


class StopReason(IntEnum):
    """Why a stream of minibatches ended."""

    DATA = 0
    DRAIN = 1
    INTERRUPT = 2
    STOP = 3  # requested by the training loop or a callback


@dataclass(slots=True)
class Message:
    """One message, immutable by convention. (A frozen class takes three times as long to make.)

    Attributes:
        microbatch: number since the last drain.
        tensors: None for a gradient that does not exist.
        structure: see `values.flatten`; of a gradient, its crossings alone (`with_crossings`).
        wants: for each tensor, whether its gradient is sent back.
        minibatch: number since the start of training.
        version: number of the weights that the forward read.
        flags: `ENDS_EPOCH`, or at the end of a stream a `StopReason`.
        loss_weight: the microbatch's weight in the loss.
        share: its fraction of the minibatch's samples.
        numbers: losses and metrics.
    """

    microbatch: int
    content: Content = Content.DATA
    tensors: tuple[torch.Tensor | None, ...] = ()
    structure: str = ""
    wants: tuple[bool, ...] = ()
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
        tensors: tuple[torch.Tensor | None, ...],
        wants: tuple[bool, ...] | None = None,
        version: int = 0,
    ) -> Message:
        """Returns a message that carries a value; by default no gradients are sent back."""
        return Message(
            self.microbatch, self.content, tensors, structure, (False,) * len(tensors) if wants is None else wants,
            self.minibatch, self.epoch, self.samples, version, self.flags, self.loss_weight, self.share, self.numbers,
        )  # fmt: skip

    def value(self) -> Any:
        """Returns the value that the message carries."""
        return unflatten(self.structure, self.tensors)  # type: ignore[arg-type]

    def without_tensors(self) -> Message:
        return self.with_tensors("", (), (), self.version)

    def carry(self, results: Message) -> None:
        """Adds a minibatch's results to this message, before it is sent."""
        self.minibatch, self.epoch, self.samples = results.minibatch, results.epoch, results.samples
        self.flags, self.numbers = results.flags, results.numbers

    def copy_as_received(self) -> Message:
        """Returns a message with copies of the tensors, as over a network: the receiver may write into them."""
        tensors = tuple([None if tensor is None else copy_as_received(tensor) for tensor in self.tensors])
        return self.with_tensors(self.structure, tensors, self.wants, self.version)


class TensorSpec(NamedTuple):
    """A tensor of a format.

    Attributes:
        strides: those of a dense tensor.
        on_device: it is not in the memory of the CPU.
        begin: first byte in the payload; a tensor that is sent by itself has none.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    on_device: bool
    begin: int | None


class MessageFormat:
    """The form of a message, without its numbers.

    Attributes:
        structure, wants: the message's.
        specs: one for each tensor; None for a gradient that does not exist.
        payload_bytes: size of the tensors that share a payload.
        staged: some of these were not in the memory of the CPU.
        sent_bytes: size of all tensors.
    """

    __slots__ = ("payload_bytes", "sent_bytes", "specs", "staged", "structure", "wants")

    def __init__(
        self, specs: Sequence[TensorSpec | None], payload_bytes: int, structure: str = "", wants: Sequence[bool] = ()
    ) -> None:
        self.structure = structure
        self.wants = tuple(wants)
        self.specs = tuple(specs)
        self.payload_bytes = payload_bytes
        self.staged = any(spec is not None and spec.on_device and spec.begin is not None for spec in self.specs)
        self.sent_bytes = sum(prod(spec.shape) * spec.dtype.itemsize for spec in self.specs if spec is not None)

    @classmethod
    def of(cls, message: Message, separate: str = "") -> MessageFormat:
        """Returns a message's format; tensors on a device `separate` are sent by themselves. May raise TypeError."""
        specs: list[TensorSpec | None] = []
        end = 0
        for tensor in message.tensors:
            if tensor is None:
                specs.append(None)
                continue
            strides = dense_strides(tuple(tensor.shape), dimension_order(tensor))
            if tensor.dtype not in _DTYPE_CODE:
                raise TypeError(f"a tensor of {tensor.dtype} cannot be sent between stages; convert it to a plain type")
            begin = None if tensor.device.type == separate else align(end)
            specs.append(TensorSpec(tensor.dtype, tuple(tensor.shape), strides, not tensor.is_cpu, begin))
            if begin is not None:
                end = begin + tensor.numel() * tensor.element_size()
        return cls(specs, end, message.structure, message.wants)

    def to_json(self) -> bytes:
        specs = [None if spec is None else [_DTYPE_CODE[spec.dtype], *spec[1:]] for spec in self.specs]
        return json.dumps([specs, self.payload_bytes, self.structure, self.wants]).encode()

    @classmethod
    def from_json(cls, text: bytes) -> MessageFormat:
        nodes, *others = json.loads(text)
        specs = [None if n is None else TensorSpec(_DTYPES[n[0]], tuple(n[1]), tuple(n[2]), n[3], n[4]) for n in nodes]
        return cls(specs, *others)

    def tensors_in(self, payload: torch.Tensor, begin: int = 0) -> list[torch.Tensor | None]:
        """Returns the tensors of a payload, uint8[n], that begins at byte `begin`; they share its storage.

        They are not views for autograd, for which writing into one would count as writing into its neighbours.
        """
        storage, first = payload.untyped_storage(), begin + int(payload.storage_offset())
        return [
            None
            if spec is None or spec.begin is None
            else torch.empty(0, dtype=spec.dtype, device=payload.device).set_(
                storage, (first + spec.begin) // spec.dtype.itemsize, spec.shape, spec.strides
            )
            for spec in self.specs
        ]


def write(tensors: Sequence[torch.Tensor | None], targets: Sequence[torch.Tensor | None]) -> None:
    """Copies tensors into targets, except pairs with a None."""
    for tensor, target in zip(tensors, targets, strict=True):
        if target is not None and tensor is not None:
            target.copy_(tensor.detach(), non_blocking=True)


def wait_for_copies(message_format: MessageFormat) -> None:
    """Waits until `write` has copied what was on a GPU."""
    if message_format.staged:
        torch.cuda.current_stream().record_event().synchronize()


def restore_device(
    tensors: list[torch.Tensor | None], message_format: MessageFormat, device: torch.device
) -> list[torch.Tensor | None]:
    """Moves received tensors that were on their sender's GPU to this rank's GPU."""
    if not message_format.staged or device.type != "cuda":
        return tensors
    return [
        t.pin_memory().to(device, non_blocking=True) if t is not None and spec is not None and spec.on_device else t
        for t, spec in zip(tensors, message_format.specs, strict=True)
    ]


class SentFormats:
    """The formats that were sent on a channel, by number; beyond `max_formats`, a new one replaces the oldest."""

    def __init__(self, separate: str = "", max_formats: int = 1024) -> None:
        self._separate = separate
        self._max_formats = max_formats
        self._formats: dict[Any, tuple[int, MessageFormat]] = {}
        self._count = 0

    def find(self, message: Message) -> tuple[int, MessageFormat, bytes]:
        """Returns number and format of a message, and its description if it is new."""
        try:
            key = (
                message.structure,
                message.wants,
                tuple([None if t is None else (t.dtype, t.shape, t.stride(), t.is_cpu) for t in message.tensors]),
            )
        except RuntimeError:  # a sparse tensor has no strides
            MessageFormat.of(message)
            raise
        numbered = self._formats.get(key)
        if numbered is not None:
            return *numbered, b""
        message_format = MessageFormat.of(message, self._separate)
        number = self._count % self._max_formats
        if self._count >= self._max_formats:
            del self._formats[next(iter(self._formats))]
        self._count += 1
        self._formats[key] = number, message_format
        return number, message_format, message_format.to_json()


FILLER = 255
"""The content of an empty message at the end of a stream."""
_HEADER = struct.Struct("=BxHIII6q2d")
HEADER_BYTES = _HEADER.size


class Header(NamedTuple):
    """The fixed part of a message on the wire; `numbers` and a format's description follow.

    Attributes:
        format_number: of the message's format.
        channel: number of the channel, where several share a connection.
        numbers: how many numbers follow.
        description_bytes: 0 if the format was described before.
    """

    content: int
    format_number: int
    channel: int
    numbers: int
    description_bytes: int
    microbatch: int
    minibatch: int
    epoch: int
    samples: int
    version: int
    flags: int
    loss_weight: float
    share: float

    @classmethod
    def of(cls, message: Message, format_number: int, channel: int, description_bytes: int) -> Header:
        return cls(
            message.content, format_number, channel, len(message.numbers), description_bytes, message.microbatch,
            message.minibatch, message.epoch, message.samples, message.version, message.flags, message.loss_weight,
            message.share,
        )  # fmt: skip

    @classmethod
    def of_filler(cls) -> Header:
        return cls.of(Message(0), 0, 0, 0)._replace(content=FILLER)

    @property
    def head_bytes(self) -> int:
        """Bytes of header, numbers and description, up to the payload."""
        return align(HEADER_BYTES + 8 * self.numbers + self.description_bytes)

    def write(self, head: Any, numbers: Sequence[float], description: bytes) -> None:
        """Writes header, numbers and description to bytes."""
        _HEADER.pack_into(head, 0, *self)
        end = HEADER_BYTES + 8 * len(numbers)
        if numbers:
            struct.pack_into(f"={len(numbers)}d", head, HEADER_BYTES, *numbers)
        if description:
            head[end : end + len(description)] = description

    @classmethod
    def read(cls, head: Any) -> Header:
        return cls._make(_HEADER.unpack_from(head))

    def read_numbers(self, head: Any) -> tuple[float, ...]:
        return struct.unpack_from(f"={self.numbers}d", head, HEADER_BYTES) if self.numbers else ()

    def read_description(self, head: Any) -> bytes:
        begin = HEADER_BYTES + 8 * self.numbers
        return bytes(head[begin : begin + self.description_bytes])

    def message(
        self, message_format: MessageFormat, tensors: tuple[torch.Tensor | None, ...], numbers: tuple[float, ...]
    ) -> Message:
        return Message(
            self.microbatch, _CONTENTS[self.content], tensors, message_format.structure, message_format.wants,
            self.minibatch, self.epoch, self.samples, self.version, self.flags, self.loss_weight, self.share, numbers,
        )  # fmt: skip


class ReceivedFormats:
    """The formats that were received on a channel, by number."""

    def __init__(self) -> None:
        self._formats: dict[int, MessageFormat] = {}

    def find(self, header: Header, head: Any) -> MessageFormat:
        """Returns a message's format, which its head describes if it is new."""
        if header.description_bytes:
            self._formats[header.format_number] = MessageFormat.from_json(header.read_description(head))
        return self._formats[header.format_number]


def dimension_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the dimensions from the outermost in memory to the innermost.

    Sending keeps this order: dropout masks are drawn in memory order, so the transposed output of a batch-first LSTM
    must arrive in the same layout.
    """
    if tensor.layout is not torch.strided:
        raise TypeError(f"a tensor of layout {tensor.layout} cannot be sent between stages; make it dense")
    return tuple(range(tensor.ndim)) if tensor.is_contiguous() else memory_order(tensor.shape, tensor.stride())


def copy_as_received(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a dense copy with the same order of dimensions in memory."""
    if tensor.layout is torch.strided and tensor.is_contiguous():
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    shape = tuple(tensor.shape)
    strides = dense_strides(shape, dimension_order(tensor))
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def flatten_in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor flattened in the order of its memory; copies only if it is not dense."""
    numbers = tensor.detach().resolve_conj().resolve_neg()  # before, its memory holds other numbers
    dense = numbers.permute(dimension_order(tensor)).contiguous()
    # Not view(-1): a dimension of size 1 may keep any stride, and bytes are viewed only at stride 1.
    return dense.as_strided((dense.numel(),), (1,))


def align(size: int) -> int:
    """Returns the next offset at which a tensor of any dtype may begin."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
