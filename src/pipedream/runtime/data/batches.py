"""Cutting a minibatch: how many samples a value holds, and its parts.

The batch dimension of a tensor is `BatchDim`: one number for all, or a mapping from an input's name (or its position,
for positional inputs) to its dimension. Inputs that are not named have dimension 0, and those with None have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from pipedream.core.errors import WorkerError
from pipedream.runtime.comm.values import flatten, map_tensors

BatchDim = int | Mapping[str | int, int | None]

Leaf = tuple[Any, int | None]
"""A tensor or packed sequence, and its batch dimension."""

Flat = tuple[str, tuple[torch.Tensor, ...]]
"""What `values.flatten` returns."""

_LEAVES = (torch.Tensor, PackedSequence)


def count_samples(inputs: Any, batch_dim: BatchDim = 0) -> int:
    """Returns the number of samples of a model's input.

    Keyword arguments may be in any order: of their tensors, the most frequent size counts, and of equally frequent ones
    the first. Otherwise it is the size of the first tensor that has the batch dimension; 1 if none has it.
    """
    return _count(inputs, list(_list_dims(inputs, batch_dim)))


def known_samples(inputs: Any, batch_dim: BatchDim = 0) -> int | None:
    """Returns the number of samples; None if no tensor has the batch dimension."""
    return _known_count(inputs, _list_dims(inputs, batch_dim))


def split_minibatch(
    inputs: Any, targets: Any, parts: int, batch_dim: BatchDim = 0
) -> tuple[list[int], list[Flat], list[Flat]]:
    """Returns the number of samples of each part, and its inputs and targets, flattened.

    A tensor that is in both is cut once.
    """
    leaves = list(_list_dims(inputs, batch_dim))
    count = _count(inputs, leaves)
    if parts == 1:
        return [count], [flatten(inputs)], [flatten(targets)]
    cut = _Cut(count, parts)
    flat_inputs = cut.flattened(inputs, leaves)
    return cut.sizes, flat_inputs, cut.flattened(targets, list(_list_dims(targets, batch_dim)))


def split_batch(value: Any, count: int, parts: int, batch_dim: BatchDim = 0) -> list[Any]:
    """Splits `count` samples into microbatches as equal as possible, larger ones first; the last may be empty.

    A tensor is split if its size along the batch dimension is `count`, or along dimension 0 if it has no such dimension
    (such as lengths); everything else goes to each microbatch.
    """
    return [value] if parts == 1 else _Cut(count, parts).of(value, _list_dims(value, batch_dim))


def first_part(value: Any, count: int, size: int, batch_dim: BatchDim = 0) -> Any:
    """Returns the first `size` of `count` samples."""

    def cut(leaf: Any, dim: int | None) -> Any:
        if dim is None:
            return leaf
        return _split_packed(leaf, [size])[0] if isinstance(leaf, PackedSequence) else leaf.narrow(dim, 0, size)

    dims = {id(leaf): _cut_dim(leaf, dim, count) for leaf, dim in _list_dims(value, batch_dim)}
    return map_tensors(value, lambda leaf: cut(leaf, dims[id(leaf)]), _LEAVES)


class _Cut:
    """Cuts values of one minibatch; what was cut once stays cut so."""

    def __init__(self, count: int, parts: int) -> None:
        self.sizes = [count // parts + (part < count % parts) for part in range(parts)]
        self._count = count
        self._pieces: dict[int, Sequence[Any]] = {}

    def of(self, value: Any, leaves: Iterable[Leaf]) -> list[Any]:
        self._cut_all(leaves)

        def part(index: int) -> Any:
            return map_tensors(value, lambda leaf: self._pieces[id(leaf)][index], _LEAVES)

        return [part(index) for index in range(len(self.sizes))]

    def flattened(self, value: Any, leaves: Sequence[Leaf]) -> list[Flat]:
        if any(isinstance(leaf, PackedSequence) or leaf.is_meta for leaf, _ in leaves):
            return [flatten(part) for part in self.of(value, leaves)]
        # All parts have the structure of the whole.
        self._cut_all(leaves)
        structure, tensors = flatten(value)
        whole = len(self.sizes)
        pieces = [self._pieces.get(id(tensor)) or [tensor] * whole for tensor in tensors]
        return [(structure, tensors) for tensors in zip(*pieces, strict=True)] or [(structure, ())] * whole

    def _cut_all(self, leaves: Iterable[Leaf]) -> None:
        for leaf, dim in leaves:
            if id(leaf) not in self._pieces:
                self._pieces[id(leaf)] = self._cut(leaf, _cut_dim(leaf, dim, self._count))

    def _cut(self, leaf: Any, dim: int | None) -> Sequence[Any]:
        if dim is None:
            return [leaf] * len(self.sizes)
        if isinstance(leaf, PackedSequence):
            return _split_packed(leaf, self.sizes)
        # A first layer may work in place: `data`, because autograd counts changes of all views of a tensor together.
        return [part.data for part in leaf.split(self.sizes, dim)]


def _count(inputs: Any, leaves: Sequence[Leaf]) -> int:
    if not leaves:
        raise WorkerError(0, "the loader", "the batch holds no tensor", "let the loader yield tensors")
    count = _known_count(inputs, leaves)
    if count == 0:
        raise WorkerError(0, "the loader", "the batch holds no sample", "let the loader leave out empty batches")
    return 1 if count is None else count


def _known_count(inputs: Any, leaves: Iterable[Leaf]) -> int | None:
    sizes = [size for leaf, dim in leaves if (size := _find_size(leaf, dim)) is not None]
    if not sizes:
        return None
    return max(sizes, key=sizes.count) if isinstance(inputs, Mapping) else sizes[0]


def _list_dims(value: Any, batch_dim: BatchDim) -> Iterator[Leaf]:
    """Yields the tensors of an input, each with its batch dimension."""
    if isinstance(batch_dim, int):
        yield from ((leaf, batch_dim) for leaf in _list_leaves(value))
        return
    inputs: Mapping[Any, Any] = {0: value}
    if isinstance(value, Mapping):
        inputs = value
    elif isinstance(value, tuple) and not isinstance(value, PackedSequence):
        inputs = dict(enumerate(value))
    for name, item in inputs.items():
        yield from ((leaf, batch_dim.get(name, 0)) for leaf in _list_leaves(item))


def _list_leaves(value: Any) -> list[Any]:
    if isinstance(value, _LEAVES):
        return [value]
    leaves: list[Any] = []

    def note(leaf: Any) -> Any:
        leaves.append(leaf)
        return leaf

    map_tensors(value, note, _LEAVES)
    return leaves


def _find_size(leaf: Any, dim: int | None) -> int | None:
    if dim is None:
        return None
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    return leaf.shape[dim] if -leaf.ndim <= dim < leaf.ndim else None


def _cut_dim(leaf: Any, dim: int | None, count: int) -> int | None:
    if dim is None:
        return None
    size = _find_size(leaf, dim)
    if size is None and isinstance(leaf, torch.Tensor) and leaf.ndim:
        dim, size = 0, leaf.shape[0]
    return dim if size == count else None


def _split_packed(packed: PackedSequence, sizes: list[int]) -> list[Any]:
    """Cuts a packed sequence; a part without samples, which is not run, is None."""
    padded, lengths = pad_packed_sequence(packed, batch_first=True)
    parts: list[Any] = []
    first = 0
    for size in sizes:
        part_lengths = lengths[first : first + size]
        longest = int(part_lengths.max()) if size else 0
        parts.append(
            pack_padded_sequence(
                padded[first : first + size, :longest],
                part_lengths,
                batch_first=True,
                enforce_sorted=packed.sorted_indices is None,
            )
            if size
            else None
        )
        first += size
    return parts
