"""The part of a DTensor that a rank has, and operators on such parts, by a table of placements.

A table says, for one dimension of the mesh, which placements of the operands are possible, how the result is placed
then, and how the gradients of the operands are.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from pipedream.core.errors import PlanError
from pipedream.extensions.meshes.sharding.functions import sum_partials, wrap_part, wrap_whole

WHOLE, SUM = Replicate(), Partial()
Placed = Placement | tuple[Placement, ...]
Table = Mapping[tuple[Placement, ...], tuple[Placed, tuple[Placement, ...]]]
"""Placements of the operands -> that of the result, or of several, and those of the operands' gradients."""


def runs_early(tensor: torch.Tensor) -> None:
    """Lets the backward pass on a tensor's gradient when it is complete, before it computes others.

    Autograd runs last what was called first, so that the gradients of all weights would wait for the end together.
    """
    if tensor.grad_fn is not None:
        tensor.grad_fn._set_sequence_nr(2**64 - 1)  # type: ignore[attr-defined]  # as of the leaves


def compute_on_parts(
    name: str,
    table: Table,
    function: Callable[..., Any],
    operands: Sequence[DTensor],
    shape: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
) -> Any:
    """Applies a function to the parts; returns a DTensor, or a tuple of them.

    Args:
        name: the operator in words, for errors.
        shape: shape of the result, whose parts may then be of different sizes.
        order: of the result, see `find_order`.

    Raises:
        PlanError: the table has no row for the operands' placements, or parts are of different sizes.
    """
    mesh, rows = operands[0].device_mesh, []
    for at, over in enumerate(mesh.mesh_dim_names or ()):
        placed = tuple(operand.placements[at] for operand in operands)
        sizes = ", ".join(str(tuple(operand.shape)) for operand in operands)
        if placed not in table:
            raise PlanError(
                f"{name} of tensors of the sizes {sizes} cannot be computed where the dimension {over!r} of the mesh "
                f"shards them as {placed}; change their names in the layout, or a rule"
            )
        cuts = zip(operands, placed, strict=True)
        if shape is None and any(
            isinstance(cut, Shard) and operand.shape[cut.dim] % mesh.size(at) for operand, cut in cuts
        ):
            raise PlanError(
                f"{name} of tensors of the sizes {sizes} was asked for, but the dimension {over!r} of the mesh, of "
                f"{mesh.size(at)} ranks, does not divide what it shards, {placed}; choose other sizes, or "
                "do not shard it"
            )
        rows.append(table[placed])
    results: Any = [result for result, _ in rows]
    gradients = zip(*(placements for _, placements in rows), strict=True)
    parts = [operand.to_local(grad_placements=row) for operand, row in zip(operands, gradients, strict=True)]
    computed = function(*parts)
    if isinstance(computed, torch.Tensor):
        return wrap_part(computed, mesh, results, shape, order)
    return tuple(wrap_part(part, mesh, placed) for part, *placed in zip(computed, *results, strict=True))


def make_dtensors(*operands: Any) -> list[DTensor]:
    """Returns the operands as DTensors; every rank has plain tensors whole."""
    mesh = next(operand.device_mesh for operand in operands if isinstance(operand, DTensor))
    return [wrap_whole(operand, mesh) for operand in operands]


def complete_sums(value: Any) -> Any:
    """Adds up partial sums in an argument.

    DTensor itself may scatter such a sum over another dimension, and gather it later.
    """
    if type(value) in (tuple, list):
        return type(value)(map(complete_sums, value))
    return sum_partials(value) if isinstance(value, DTensor) else value


def is_sharded(x: Any, dims: Sequence[int] | None = None) -> bool:
    """Whether one of the dimensions, counted from the end, is sharded; None: whether any is."""
    return isinstance(x, DTensor) and any(
        isinstance(placement, Shard) and (dims is None or placement.dim - x.dim() in dims) for placement in x.placements
    )


def check_whole(name: str, operands: Iterable[Any]) -> None:
    """Raises a `PlanError` if an operand is sharded."""
    for operand in operands:
        if is_sharded(operand):
            raise PlanError(
                f"{name} draws random numbers for a tensor of {tuple(operand.shape)} that the layout shards "
                f"({operand.placements}), where they would not be those of one process; use nn.Dropout, or a layout "
                "that does not shard it"
            )


def apply_by_channel(
    function: Callable[..., torch.Tensor], spatial: int | None, input: DTensor, *rest: Any, **options: Any
) -> Any:
    """A function of each channel of each sample.

    Args:
        spatial: dimensions after the channels, before which a batch may lack; None: all after the first two.
    """
    name = getattr(function, "__name__", "a normalization")
    apart = input.dim() - spatial if spatial is not None else 2
    table: Table = {(at,): (at, (at,)) for at in (WHOLE, *map(Shard, range(apart)))}
    return compute_on_parts(name, table, lambda part: function(part, *rest, **options), [sum_partials(input)])
