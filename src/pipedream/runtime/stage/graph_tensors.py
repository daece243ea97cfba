"""Tensors that a graph has saved for its backward."""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import Node


class SavedTensor:
    """A tensor saved by a graph, with its version counter, which autograd does not check for hooks."""

    __slots__ = ("_shape", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._shape = tensor.shape
        self._version = tensor._version

    def unpack(self) -> torch.Tensor:
        """Raises a `RuntimeError`, as autograd does, if it was written in place meanwhile."""
        if self._tensor is None:
            raise RuntimeError("a backward ran again through a graph that a split backward has freed")
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._shape)} that the backward needs was written in place after the "
                f"operation that saved it, at version {self._version}, and is at version {self._tensor._version}; let "
                "the layer write a copy"
            )
        return self._tensor

    def free(self) -> None:
        """Drops the tensor, which no backward needs any more."""
        self._tensor = None


def unpack(saved: SavedTensor) -> torch.Tensor:
    """The unpack hook of every `SavedTensor`. Code that recognizes it knows that it may unpack more than once."""
    return saved.unpack()


def find_saving_hook() -> Callable[[torch.Tensor], SavedTensor] | None:
    """Returns the hook around the running forward that packs into a `SavedTensor`, for other hooks inside it."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None or hooks[1] is not unpack else hooks[0]


def list_saved_tensors(node: Node) -> list[Any]:
    """Returns autograd's handles of the tensors that a node has saved."""
    handles: list[Any] = []
    for name in _list_saved_names(type(node)):
        with suppress(RuntimeError):  # they are freed
            saved = getattr(node, name)
            handles += saved if isinstance(saved, tuple | list) else [saved]
    return handles


@cache
def _list_saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
