"""Values that may contain tensors as JSON; nothing is pickled."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch

from pipedream.core.errors import PipelineError

_TENSOR, _TUPLE, _BYTES = "__tensor__", "__tuple__", "__bytes__"


def to_json(value: Any, where: str = "the loader's state_dict()") -> Any:
    """Marks tensors, tuples and bytes as dicts; raises PipelineError for other objects, or keys that are no strings."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        return {_TENSOR: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), base64_of(content)]}
    if isinstance(value, bytes):
        return {_BYTES: base64_of(value)}
    if isinstance(value, list):
        return [to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {_TUPLE: [to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: to_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise PipelineError(
        f"{where} is a {type(value).__name__}"
        + (" with keys that are not strings" if isinstance(value, Mapping) else "")
        + ", which JSON cannot hold; use numbers, strings, tensors, bytes, lists, tuples and dicts with string keys"
    )


def from_json(value: Any) -> Any:
    """Inverse of `to_json`."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, Mapping):
        if set(value) == {_TENSOR}:
            dtype, shape, content = value[_TENSOR]
            empty = torch.empty(shape, dtype=getattr(torch, dtype))
            if empty.numel():
                empty.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytes_of(content), dtype=torch.uint8))
            return empty
        if set(value) == {_TUPLE}:
            return tuple(from_json(item) for item in value[_TUPLE])
        if set(value) == {_BYTES}:
            return bytes(bytes_of(value[_BYTES]))
        return {key: from_json(item) for key, item in value.items()}
    return value


def base64_of(content: bytes) -> str:
    """Bytes as text."""
    return base64.b64encode(content).decode("ascii")


def bytes_of(text: str) -> bytearray:
    """Inverse of `base64_of`."""
    return bytearray(base64.b64decode(text))
