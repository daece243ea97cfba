"""Weights that are whole only while a layer uses them (ZeRO-3, Rajbhandari et al. 2020, 5; torch's fully_shard).

Each rank of a dimension of the mesh holds some rows of a weight, also in the versions that an asynchronous method
keeps. A module that reads the weight gathers it; the gradient is summed and scattered. The graph keeps a reference in
place of the gathered weight, and the backward gathers again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipedream.sharding.parts import like_part, local_part, spec_of

__all__ = ["GatheredWeights", "LazyParameters", "Rows"]


# The names of torch 2.13 on; the earlier ones warn there.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_sum_and_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Rows:
    """The rows of a tensor on one rank, as `torch.chunk` cuts them.

    Args:
        rows: of the whole tensor.
    """

    def __init__(self, group: dist.ProcessGroup, rows: int) -> None:
        self._group = group
        self._rows = rows
        self._each = -(-rows // group.size())
        begin = group.rank() * self._each
        self.here = range(min(begin, rows), min(begin + self._each, rows))

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the whole tensor."""
        whole = part.new_empty((self._each * self._group.size(), *part.shape[1:]))
        _gather(whole, self._padded(part, self._each), group=self._group)
        return whole[: self._rows]

    def sum(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's rows of the sum of all ranks' tensors."""
        found = whole.new_empty((self._each, *whole.shape[1:]))
        _sum_and_scatter(found, self._padded(whole, self._each * self._group.size()), group=self._group)
        return found[: len(self.here)]

    @staticmethod
    def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
        if tensor.shape[0] == rows:
            return tensor.contiguous()
        padded = tensor.new_zeros((rows, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        return padded


class LazyParameters(dict[str, Any]):
    """A module's parameters, some of which are functions that gather them when the module reads them."""

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        return found() if isinstance(found, _Reading) else found


class _Reading:
    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        self._read = read

    def __call__(self) -> torch.Tensor:
        return self._read()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        return rows.gather(part.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        return ctx.rows.sum(gradients[0]), None


class _Saved(NamedTuple):
    """A view of a gathered weight, in a graph."""

    leaf: torch.Tensor
    rows: Rows
    view: tuple[torch.Size, tuple[int, ...], int]
    spec: Any  # of a DTensor; None for a plain tensor


class GatheredWeights:
    """The weights of a stage that are gathered now, known by their storage."""

    def __init__(self) -> None:
        self._alive: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor, Rows]] = {}

    def reading(self, leaf: torch.Tensor, rows: Rows, wrap: Callable[[torch.Tensor], torch.Tensor]) -> _Reading:
        """Returns what `LazyParameters` calls."""

        def read() -> torch.Tensor:
            whole: torch.Tensor = _Gather.apply(leaf, rows)  # type: ignore[no-untyped-call]
            key, read = whole.untyped_storage()._cdata, wrap(whole)
            self._alive[key] = weakref.ref(read, lambda _: self._alive.pop(key, None)), leaf, rows
            return read

        return _Reading(read)

    @contextmanager
    def kept_as_references(self) -> Iterator[None]:
        """Context of a forward whose graph refers to gathered weights; other tensors go to the hooks around it."""
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False) or (_as_is, _as_is)

        def packed(tensor: torch.Tensor) -> Any:
            found = self._packed(tensor)
            return pack(tensor) if found is None else found

        def unpacked(saved: Any) -> torch.Tensor:
            return _unpacked(saved) if isinstance(saved, _Saved) else unpack(saved)

        with torch.autograd.graph.saved_tensors_hooks(packed, unpacked):
            yield

    def _packed(self, tensor: torch.Tensor) -> _Saved | None:
        local = local_part(tensor)
        if local.is_sparse or local.numel() == 0:
            return None
        found = self._alive.get(local.untyped_storage()._cdata)
        if found is None:
            return None
        _, leaf, rows = found
        return _Saved(leaf, rows, (local.size(), local.stride(), int(local.storage_offset())), spec_of(tensor))


def _as_is(saved: Any) -> Any:
    return saved


def _unpacked(packed: _Saved) -> torch.Tensor:
    size, stride, offset = packed.view
    return like_part(packed.rows.gather(packed.leaf.detach()).as_strided(size, stride, offset), packed.spec)
