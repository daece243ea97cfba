"""Encoded messages: tensors travel as the codes of a `Codec`. Equal tensors have equal codes."""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from pipedream.core.box import dense_strides
from pipedream.core.plan.codec import CODECS, FULL, MIN_ENCODED_BYTES, is_smaller
from pipedream.core.plan.placement import Carries
from pipedream.runtime.comm.channel import Pending, Receiver, Sender
from pipedream.runtime.comm.message import Message, dimension_order

_MARK = "~"  # begins neither a structure of `values` nor one with crossings


class TensorHeader(NamedTuple):
    """What a code lacks of its tensor; shape and strides, those of a dense tensor, unless the code keeps them."""

    dtype: str
    encoding: str
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()


def is_encoded(tensor: torch.Tensor, encoding: str) -> bool:
    """Returns whether an encoding makes a tensor smaller."""
    is_large = tensor.is_floating_point() and tensor.nbytes >= MIN_ENCODED_BYTES
    return is_large and is_smaller(encoding, 8 * tensor.element_size())


def encode(tensor: torch.Tensor, encoding: str) -> tuple[torch.Tensor, TensorHeader]:
    """Returns the code of a floating-point tensor."""
    codec, dtype = CODECS.find(encoding), str(tensor.dtype).removeprefix("torch.")
    code = codec.encode(tensor.detach())
    if codec.keeps_shape:
        return code, TensorHeader(dtype, encoding)
    shape = tuple(tensor.shape)
    return code, TensorHeader(dtype, encoding, shape, dense_strides(shape, dimension_order(tensor)))


def decode(code: torch.Tensor, original: TensorHeader) -> torch.Tensor:
    """Returns a dense tensor of the original's type and shape."""
    codec, dtype = CODECS.find(original.encoding), getattr(torch, original.dtype)
    values: torch.Tensor = codec.decode(code, dtype, original.shape)
    if codec.keeps_shape:
        return values
    # Keeps the order of memory, in which a dropout mask is drawn. Not a view, which autograd would follow to its base.
    decoded = torch.empty_strided(original.shape, original.strides, dtype=dtype, device=code.device)
    return decoded.copy_(values)


# -- messages ---------------------------------------------------------------------------------------


def encode_message(message: Message, encoding: str, chosen: Sequence[bool]) -> Message:
    """Encodes those of the chosen tensors that become smaller."""
    tensors = list(message.tensors)
    originals: list[TensorHeader | None] = [None] * len(tensors)
    for i, (tensor, is_chosen) in enumerate(zip(tensors, chosen, strict=True)):
        if tensor is not None and is_chosen and is_encoded(tensor, encoding):
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
    """A sending end that encodes.

    Of activations, only those whose gradient is sent back. An evaluation has no gradients; it encodes those which the
    last training message did.
    """

    def __init__(self, sender: Sender, encoding: str, of_evaluations: str, *, only_wanted: bool) -> None:
        self._sender, self._encoding, self._of_evaluations = sender, encoding, of_evaluations
        self._only_wanted = only_wanted
        self._chosen_in_training: tuple[bool, ...] = ()

    def send(self, message: Message) -> None:
        count = len(message.tensors)
        if not self._only_wanted:
            message = encode_message(message, self._encoding, (True,) * count)
        elif any(message.wants):
            self._chosen_in_training = message.wants
            message = encode_message(message, self._encoding, message.wants)
        elif len(self._chosen_in_training) == count:
            message = encode_message(message, self._of_evaluations, self._chosen_in_training)
        self._sender.send(message)

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


def with_encoding(sender: Sender, encoding: str, of_evaluations: str, carries: Carries) -> Sender:
    """Returns a channel's sending end, which encodes if the user wants it."""
    if encoding == of_evaluations == FULL:
        return sender
    return EncodingSender(sender, encoding, of_evaluations, only_wanted=carries == Carries.ACTIVATION)


def with_decoding(receiver: Receiver, encoding: str, of_evaluations: str) -> Receiver:
    """Returns the receiving end of such a channel."""
    return receiver if encoding == of_evaluations == FULL else DecodingReceiver(receiver)


# -- in one process ---------------------------------------------------------------------------------


class _EncodedCopy(torch.autograd.Function):
    """Copies a value as the next stage would receive it, and the gradient as this stage would."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, activations: str, gradients: str) -> torch.Tensor:
        ctx.encoding = gradients
        return _apply_encoding(tensor, activations)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _apply_encoding(gradients[0], ctx.encoding), None, None


def apply_messages(tensor: torch.Tensor, activations: str, gradients: str) -> torch.Tensor:
    """Returns a tensor as another worker would receive it; its gradient is as this worker would receive it."""
    if not tensor.requires_grad:
        return tensor
    copy: torch.Tensor = _EncodedCopy.apply(tensor, activations, gradients)  # type: ignore[no-untyped-call]
    return copy


def _apply_encoding(tensor: torch.Tensor, encoding: str) -> torch.Tensor:
    return decode(*encode(tensor, encoding)) if is_encoded(tensor, encoding) else tensor.clone()
