"""Values that are sent: tensors, or tensors in tuples, lists and dicts with numbers and strings. Nothing is pickled."""

from __future__ import annotations

import json
from typing import Any

import torch

from pipedream.core.errors import WorkerError

__all__ = ["count_samples", "flatten", "split_batch", "to_device", "unflatten"]


def flatten(value: Any) -> tuple[str, tuple[torch.Tensor, ...]]:
    """Returns a JSON text of the structure, empty for a single tensor, and the tensors in a fixed order.

    Raises TypeError for anything but tensors, containers, numbers and strings.
    """
    if isinstance(value, torch.Tensor):
        return "", (value,)
    tensors: list[torch.Tensor] = []

    def walk(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            tensors.append(item)
            return {"t": len(tensors) - 1}
        if isinstance(item, tuple) and hasattr(item, "_fields"):
            raise TypeError(f"a named tuple ({type(item).__name__}) cannot be sent; return a plain tuple or a dict")
        if isinstance(item, (tuple, list)):
            return {"u" if isinstance(item, tuple) else "l": [walk(part) for part in item]}
        if isinstance(item, dict):
            if not all(isinstance(key, str) for key in item):
                raise TypeError("a dict that is sent between stages needs strings as keys")
            return {"d": {key: walk(part) for key, part in item.items()}}
        if item is None or isinstance(item, (bool, int, float, str)):
            return {"v": item}
        raise TypeError(
            f"a {type(item).__name__} cannot be sent between stages; use tensors, numbers and strings in tuples, "
            "lists and dicts"
        )

    shape = walk(value)
    return json.dumps(shape, separators=(",", ":")), tuple(tensors)


def unflatten(structure: str, tensors: tuple[torch.Tensor, ...]) -> Any:
    """Inverse of `flatten`."""
    if not structure:
        return tensors[0]

    def build(item: Any) -> Any:
        ((kind, content),) = item.items()
        if kind == "t":
            return tensors[content]
        if kind == "d":
            return {key: build(part) for key, part in content.items()}
        if kind == "v":
            return content
        parts = [build(part) for part in content]
        return tuple(parts) if kind == "u" else parts

    return build(json.loads(structure))


def count_samples(value: Any) -> int:
    """Returns the first dimension of the first tensor (1 for a scalar)."""
    _, tensors = flatten(value)
    if not tensors:
        raise WorkerError(0, "the loader", "the batch holds no tensor", "let the loader yield tensors")
    return tensors[0].shape[0] if tensors[0].ndim else 1


def split_batch(value: Any, count: int, parts: int) -> list[Any]:
    """Splits `count` samples into microbatches as equal as possible, larger ones first; the last may be empty.

    A tensor is split if its first dimension is `count`; everything else goes to each microbatch.
    """
    if parts == 1:
        return [value]
    structure, tensors = flatten(value)
    pieces = [
        torch.tensor_split(tensor, parts) if tensor.ndim and tensor.shape[0] == count else (tensor,) * parts
        for tensor in tensors
    ]
    return [unflatten(structure, tuple(piece[i] for piece in pieces)) for i in range(parts)]


def to_device(value: Any, device: torch.device) -> Any:
    """Moves the tensors of a value."""
    structure, tensors = flatten(value)
    return unflatten(structure, tuple(tensor.to(device, non_blocking=True) for tensor in tensors))
