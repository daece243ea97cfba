"""Weights that are whole only while a layer uses them (ZeRO-3, Rajbhandari et al. 2020, 5; torch's fully_shard).

Each rank of a dimension of the mesh holds some rows of a weight, also in the versions that an asynchronous method
keeps. A module that reads the weight gathers it, with the weights next to it in the layer; the gradients are summed and
scattered together. The graph keeps a reference in place of the gathered weight, and the backward gathers again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipedream.core.box import memory_order
from pipedream.extensions.meshes.sharding import functions
from pipedream.extensions.meshes.sharding.functions import put_in_order, runs_early
from pipedream.tensors.parts import like_part, local_part, spec_of

# The names of torch 2.13 on; the earlier ones warn there.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_sum_and_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_TOGETHER_BYTES = 16 << 20
"""Bytes of weights that one collective gathers: enough that the time to start it does not count."""


class Rows:
    """The rows of a tensor on one rank, as `torch.chunk` shards them."""

    def __init__(self, group: dist.ProcessGroup, rows: int) -> None:
        self.group = group
        self.rows = rows
        self.rows_per_rank = -(-rows // group.size())
        begin = group.rank() * self.rows_per_rank
        self.local = range(min(begin, rows), min(begin + self.rows_per_rank, rows))

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the whole tensor."""
        return _gather_wholes([self], [part])[0]


def _gather_wholes(rows: Sequence[Rows], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns whole tensors, by one collective."""
    group = rows[0].group
    mine, my_places = _buffer(1, rows, parts)
    torch._foreach_copy_([place[0, : len(part)] for place, part in zip(my_places, parts, strict=True)], list(parts))
    every, places = _buffer(group.size(), rows, parts)
    _gather(every, mine, group=group)
    return [
        put_in_order(place.flatten(0, 1)[: part_rows.rows], memory_order(part.shape, part.stride()))
        for part_rows, place, part in zip(rows, places, parts, strict=True)
    ]


def _sum_rows(
    rows: Sequence[Rows], wholes: Sequence[torch.Tensor], sample_memory: Callable[[], None]
) -> list[torch.Tensor]:
    """Returns this rank's rows of the sums of all ranks' tensors, by one collective; samples the memory at its peak."""
    group = rows[0].group
    every, places = _buffer(group.size(), rows, wholes)
    pairs = [
        (place[at, : len(chunk)], chunk)
        for part_rows, place, whole in zip(rows, places, wholes, strict=True)
        for at, chunk in enumerate(torch.split(whole, part_rows.rows_per_rank))
    ]
    torch._foreach_copy_([place for place, _ in pairs], [chunk for _, chunk in pairs])
    if functions.goes_over_gloo(every):  # gloo's own reduce-scatter is this of a copy
        dist.all_reduce(every, group=group)
        sample_memory()
        return [
            place[group.rank(), : len(part_rows.local)].clone() for part_rows, place in zip(rows, places, strict=True)
        ]
    mine, my_places = _buffer(1, rows, wholes)
    _sum_and_scatter(mine, every, group=group)
    return [place[0, : len(part_rows.local)] for part_rows, place in zip(rows, my_places, strict=True)]


def _buffer(ranks: int, rows: Sequence[Rows], like: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns memory for the rows of some ranks, and in it each tensor's place: [ranks, rows of each, ...]."""
    shapes = [(part_rows.rows_per_rank, *tensor.shape[1:]) for part_rows, tensor in zip(rows, like, strict=True)]
    buffer = like[0].new_empty((ranks, sum(map(prod, shapes))))
    columns = torch.split(buffer, list(map(prod, shapes)), 1)
    return buffer, [column.view(ranks, *shape) for column, shape in zip(columns, shapes, strict=True)]


class LazyParameters(dict[str, Any]):
    """A module's parameters, some of which are functions that gather them when the module reads them."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return value() if isinstance(value, _Reading) else value


class ShardedWeight(NamedTuple):
    """A weight of which each rank holds some rows; `wrap` makes of the gathered one what the layers read."""

    leaf: torch.Tensor
    rows: Rows
    wrap: Callable[[torch.Tensor], torch.Tensor]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Sequence[Rows], sample_memory: Callable[[], None], *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.rows, ctx.sample_memory = rows, sample_memory
        ctx.set_materialize_grads(False)
        return tuple(_gather_wholes(rows, [part.detach() for part in parts]))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        used = [at for at, gradient in enumerate(gradients) if gradient is not None]
        part_gradients: list[torch.Tensor | None] = [None] * len(gradients)
        rows, wholes = [ctx.rows[at] for at in used], [gradients[at] for at in used]
        sums = _sum_rows(rows, wholes, ctx.sample_memory) if used else ()
        for at, total in zip(used, sums, strict=True):
            part_gradients[at] = total
        return None, None, *part_gradients


class _Together:
    """Weights of one forward that are gathered together.

    Attributes:
        saved: this rank's parts as the hooks of the forward have packed them.
        read: weights as the layers read them, while they are held.
        wholes: the weights of a backward, while they are held.
    """

    def __init__(self, weights: list[ShardedWeight]) -> None:
        self.weights = weights
        self.saved: list[Any] = []
        self.read: list[torch.Tensor] = []
        self.wholes: list[torch.Tensor] = []

    def drop(self) -> None:
        self.read, self.wholes = [], []


class _Reading(NamedTuple):
    """The place of a weight among those gathered together."""

    gathered: GatheredWeights
    together: _Together
    at: int

    def __call__(self) -> torch.Tensor:
        return self.gathered.read(self)


class _Saved(NamedTuple):
    """A view of a gathered weight, in a graph."""

    reading: _Reading
    view: tuple[torch.Size, tuple[int, ...], int]
    spec: Any  # of a DTensor; None for a plain tensor


class GatheredWeights:
    """The gathered weights of a stage: of each dtype, the group that was read last.

    `sample_memory` is called where a backward takes most memory.
    """

    def __init__(self, sample_memory: Callable[[], None] = lambda: None) -> None:
        self.sample_memory = sample_memory
        self._last_read: dict[torch.dtype, weakref.ref[_Together]] = {}
        self._storages: dict[int, tuple[weakref.ref[torch.Tensor], _Reading]] = {}

    def plan_readings(self, weights: Iterable[ShardedWeight]) -> list[_Reading]:
        """Returns for each weight of a forward what `LazyParameters` calls."""
        readings: list[_Reading] = []
        rooms: dict[torch.dtype, tuple[int, _Together]] = {}
        for weight in weights:
            kind = weight.leaf.dtype
            size_bytes = weight.rows.rows * weight.leaf.shape[1:].numel() * kind.itemsize
            room, together = rooms.get(kind, (0, _Together([])))
            if room < size_bytes:
                room, together = _TOGETHER_BYTES, _Together([])
            rooms[kind] = room - size_bytes, together
            readings.append(_Reading(self, together, len(together.weights)))
            together.weights.append(weight)
        return readings

    @staticmethod
    def needed_bytes(weights: Iterable[ShardedWeight]) -> int:
        """Returns the most that the sum of their gradients takes at once: the gradients and a buffer for them."""
        groups = {
            id(reading.together): reading.together for reading in GatheredWeights().plan_readings(weights)
        }.values()
        sizes = (
            [weight.rows.rows * weight.leaf[:1].nbytes for weight in group.weights if len(weight.leaf)]
            for group in groups
        )
        return 2 * max(map(sum, sizes), default=0)

    def read(self, reading: _Reading) -> torch.Tensor:
        """Returns what layers read of a weight."""
        together = reading.together
        if not together.read:
            self._hold(together)
            leaves, rows, wraps = zip(*together.weights, strict=True)
            wholes = _Gather.apply(rows, self.sample_memory, *leaves)  # type: ignore[no-untyped-call]
            runs_early(wholes[0])
            together.read = [wrap(whole) for wrap, whole in zip(wraps, wholes, strict=True)]
            for at, whole in enumerate(wholes):
                key = whole.untyped_storage()._cdata
                gone = weakref.ref(together.read[at], partial(self._forget, key))
                self._storages[key] = gone, _Reading(self, together, at)
        return together.read[reading.at]

    def _forget(self, key: int, _: object) -> None:
        self._storages.pop(key, None)

    def _hold(self, together: _Together) -> None:
        kind = together.weights[0].leaf.dtype
        before = self._last_read[kind]() if kind in self._last_read else None
        if before is not None and before is not together:
            before.drop()
        self._last_read[kind] = weakref.ref(together)

    def drop(self) -> None:
        """Frees the gathered weights."""
        for reference in self._last_read.values():
            if (together := reference()) is not None:
                together.drop()

    @contextmanager
    def keep_references(self) -> Iterator[None]:
        """Context of a forward whose graph refers to gathered weights.

        The hooks around it get other tensors, and of a gathered weight this rank's part. So the backward gathers what
        they give it, which may be another version.
        """
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False) or (_keep, _keep)
        with torch.autograd.graph.saved_tensors_hooks(partial(self._pack, pack), WithReferences(self, unpack)):
            yield

    def _pack(self, pack: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        local = local_part(tensor)
        entry = None if local.is_sparse or not local.numel() else self._storages.get(local.untyped_storage()._cdata)
        if entry is None:
            return pack(tensor)
        together = entry[1].together
        together.saved = together.saved or [pack(weight.leaf) for weight in together.weights]
        return _Saved(entry[1], (local.size(), local.stride(), int(local.storage_offset())), spec_of(tensor))

    def unpack_saved(self, packed: _Saved, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Returns a view of a gathered weight."""
        together, at = packed.reading.together, packed.reading.at
        if not together.wholes:
            self._hold(together)
            rows = [weight.rows for weight in together.weights]
            together.wholes = _gather_wholes(rows, [unpack(part).detach() for part in together.saved])
        size, stride, offset = packed.view
        return like_part(together.wholes[at].as_strided(size, stride, offset), packed.spec)


@dataclass(frozen=True)
class WithReferences:
    """Unpacks what a forward with sharded weights has saved.

    Attributes:
        around: unpacks what the hooks around it have packed; who checks a graph's hooks looks for this name.
    """

    gathered: GatheredWeights
    around: Callable[[Any], torch.Tensor]

    def __call__(self, saved: Any) -> torch.Tensor:
        return self.gathered.unpack_saved(saved, self.around) if isinstance(saved, _Saved) else self.around(saved)


def _keep(saved: Any) -> Any:
    return saved
