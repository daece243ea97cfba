"""Parts of tensors, and the order of a tensor's dimensions in memory, as numbers."""

from collections.abc import Sequence
from math import prod

Box = tuple[range, ...]
"""The indices of a part of a tensor, in each of its dimensions."""


def box_of(
    shape: Sequence[int], placements: Sequence[int | None], sizes: Sequence[int], coordinates: Sequence[int]
) -> Box:
    """Returns the part of a tensor that a rank has.

    A dimension that does not divide is sharded as by `torch.chunk`: into parts of the same size, then a smaller one,
    then empty ones. Where several dimensions of the mesh shard it, each shards the parts of the one before.

    Args:
        placements: for each dimension of the mesh, the dimension of the tensor that it shards, or None.
        sizes: ranks in each dimension of the mesh.
        coordinates: of the rank.
    """
    box = [range(size) for size in shape]
    for cut, parts, coordinate in zip(placements, sizes, coordinates, strict=True):
        if cut is not None:
            part = -(-len(box[cut]) // parts)
            box[cut] = box[cut][coordinate * part : (coordinate + 1) * part]
    return tuple(box)


def overlap(box: Box, other: Box) -> Box | None:
    """Returns the intersection of two parts of a tensor; None if it is empty."""
    common = tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(box, other, strict=True))
    return common if all(common) else None


def count_elements(box: Box | None) -> int:
    """Returns how many elements a part of a tensor has; 0 for None."""
    return 0 if box is None else prod(map(len, box))


def slice_of(box: Box) -> tuple[slice, ...]:
    """Returns the slices of a part within its tensor."""
    return tuple(slice(values.start, values.stop) for values in box)


def slice_within(box: Box, around: Box) -> tuple[slice, ...]:
    """Returns the slices of a part within a larger part."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, around, strict=True))


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Returns a tensor's dimensions from the outermost in memory to the innermost; of an expanded one, as they are.

    Of equal strides, that of a single element is the inner one, where the dimension lies in a larger tensor, too.
    """
    dims = tuple(range(len(shape)))
    return dims if 0 in strides else tuple(sorted(dims, key=lambda dim: (-strides[dim], shape[dim] <= 1)))


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a tensor without gaps, given its dimensions in the order of `memory_order`."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)
