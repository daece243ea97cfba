"""Calls that shard a tensor, and operators on the part of it that a rank has.

A model itself may call `split`, `shard` and `replicate` (GShard's annotations, Lepikhin et al. 2020, 3.2). Each returns
its tensor with other placements and the same numbers, and can be differentiated. A tensor that is not on a mesh, and a
dimension that its mesh lacks, stay as they are, so that the model also runs in a single process.

Operators go by a table. It says, for one dimension of the mesh, which placements of the operands are possible, how the
result is placed then, and how the gradients of the operands are.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from pipedream.core.box import dense_strides, memory_order
from pipedream.core.errors import PlanError


def wrap_part(
    part: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
) -> DTensor:
    """Returns a DTensor around this rank's part.

    Args:
        shape: shape of the whole, whose parts may then be of different sizes.
        order: see `find_order`.
    """
    whole = None if shape is None else torch.Size(shape)
    stride = None if whole is None else dense_strides(whole, find_order(part, order))
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole, stride=stride)


def wrap_whole(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Returns a DTensor around a tensor that every rank has whole; one that is a DTensor stays as it is."""
    return tensor if isinstance(tensor, DTensor) else wrap_part(tensor, mesh, [Replicate()] * mesh.ndim)


def list_placements(dims: Iterable[int | None]) -> list[Placement]:
    """Returns the placements that shard these dimensions of a tensor; None is a whole one."""
    return [Replicate() if dim is None else Shard(dim) for dim in dims]


def list_shards(placements: Iterable[Placement | None]) -> tuple[int | None, ...]:
    """Returns which dimension of a tensor each placement shards; see `list_placements`."""
    return tuple(placement.dim if isinstance(placement, Shard) else None for placement in placements)


def split(t: torch.Tensor, dim: int, over: str) -> torch.Tensor:
    """Returns a tensor that is sharded along `dim` over the dimension `over` of the mesh, and elsewhere as before.

    Raises:
        PlanError: the tensor has no such dimension.
    """
    return shard(t, {dim: over})


def shard(t: torch.Tensor, dims: Mapping[int, str]) -> torch.Tensor:
    """Returns a tensor that is sharded along several dimensions.

    Over a dimension of the mesh that `dims` lacks it stays as it is, unless that shards one of the same dimensions. A
    size that does not divide is sharded as `torch.chunk` does.

    Args:
        dims: dimension of the tensor -> dimension of the mesh.

    Raises:
        PlanError: the tensor has no such dimension, or two are to be sharded over the same dimension of the mesh.
    """
    dim_over: dict[str, int] = {}
    for dim, over in dims.items():
        if not -t.dim() <= dim < t.dim():
            raise PlanError(
                f"a shard along dimension {dim} was asked for, but the tensor has the shape {tuple(t.shape)}; give a "
                f"dimension from {-t.dim()} to {t.dim() - 1}"
            )
        at = dim % t.dim()
        if over in dim_over or at in dim_over.values():
            raise PlanError(
                f"the shards {dict(dims)} were asked for of a tensor of the shape {tuple(t.shape)}, which use a "
                "dimension twice; shard each over one dimension of the mesh, and no two over the same"
            )
        dim_over[over] = at
    if not isinstance(t, DTensor):
        return t
    names = t.device_mesh.mesh_dim_names or ()
    sharded = {at for over, at in dim_over.items() if over in names}
    placed: list[Placement] = []
    for over, have in zip(names, t.placements, strict=True):
        if over in dim_over:
            placed.append(Shard(dim_over[over]))
        else:
            placed.append(Replicate() if isinstance(have, Shard) and have.dim in sharded else have)
    return redistribute_in_steps(t, placed)


def replicate(t: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that every rank has whole."""
    return redistribute_in_steps(t, [Replicate()] * t.device_mesh.ndim) if isinstance(t, DTensor) else t


def sum_partials(t: DTensor) -> DTensor:
    """Adds up what is a partial sum still, and its gradient too, which goes to what has been sharded."""
    if not any(isinstance(placement, Partial) for placement in t.placements):
        return t
    result = redistribute(
        t, [Replicate() if isinstance(placement, Partial) else placement for placement in t.placements]
    )
    if result.requires_grad:
        result.register_hook(sum_partials)  # type: ignore[no-untyped-call]
    return result


def redistribute(t: DTensor, placements: Iterable[Placement]) -> DTensor:
    """Returns a tensor with other placements, whose parts lie in memory in the order that its strides say.

    DTensor's own keeps the strides of the whole where a collective has made the part contiguous. A view that the
    strides allow then fails, and dropout draws another mask than in one process.
    """
    result: DTensor = _Redistribute.apply(t, tuple(placements))  # type: ignore[no-untyped-call]
    return result


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: DTensor, placements: tuple[Placement, ...]) -> DTensor:
        ctx.before = t.placements
        result = t.redistribute(placements=placements)
        order = memory_order(result.shape, result._spec.stride)
        part = put_in_order(result._local_tensor, order)
        return DTensor(part, result._spec, requires_grad=t.requires_grad)  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[DTensor, None]:
        gradient: DTensor = gradients[0]
        pairs = zip(gradient.placements, ctx.before, strict=True)
        # What is no longer a sum need not become one again.
        placed = [Replicate() if before.is_partial() and not have.is_partial() else before for have, before in pairs]
        return redistribute(gradient, placed), None


def find_order(part: torch.Tensor, expected: Sequence[int] | None = None) -> Sequence[int]:
    """Returns the order of a whole tensor's dimensions in memory (`memory_order`), given a part.

    Args:
        expected: the order if the part lies so; by default that of the dimensions. The stride of a dimension that has a
            single element in the part may be anything.
    """
    order = range(part.dim()) if expected is None else expected
    return order if part.permute(tuple(order)).is_contiguous() else memory_order(part.shape, part.stride())


def put_in_order(part: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Returns a tensor whose dimensions lie in memory in this order, see `memory_order`; copies it if they do not."""
    inverse = sorted(order, key=order.__getitem__)
    in_order = part.permute(tuple(order))
    return part if in_order.is_contiguous() else in_order.contiguous().permute(inverse)


def redistribute_in_steps(t: DTensor, target: list[Placement]) -> DTensor:
    """Returns a tensor with other placements.

    It changes one dimension of the mesh at a time, the cheapest first: slices, sums, all-to-alls, gathers.
    """
    while list(t.placements) != target:
        placed = list(t.placements)
        again = [at for at, placement in enumerate(placed) if isinstance(placement, Shard) and placement in placed[:at]]
        if again:  # several dimensions of the mesh shard one of the tensor: the inner ones first
            placed[again[-1]] = Replicate()
            t = redistribute(t, placed)
            continue
        at, to = min(
            ((at, to) for at, (have, to) in enumerate(zip(placed, target, strict=True)) if have != to),
            key=lambda change: _rate_change(placed, *change),
        )
        if _rate_change(placed, at, to) == _ALL_TO_ALL:
            assert isinstance(to, Shard)
            t = _shard_along(sum_partials(t), at, to.dim)
            target = [Replicate() if isinstance(placement, Partial) else placement for placement in target]
        else:  # where another dimension of the mesh shards `to` still, it is whole for a moment
            placed[at] = Replicate() if _rate_change(placed, at, to) == _GATHER else to
            t = redistribute(t, placed)
    return t


_SLICE, _SUM, _ALL_TO_ALL, _GATHER, _LATER = range(5)


def _rate_change(placed: list[Placement], at: int, to: Placement) -> int:
    have = placed[at]
    if isinstance(to, Shard) and to in placed:
        return _GATHER if isinstance(have, Shard) else _LATER
    if isinstance(have, Partial):
        return _SUM
    if isinstance(have, Shard):
        return _ALL_TO_ALL if isinstance(to, Shard) else _GATHER
    return _SLICE


def _shard_along(t: DTensor, at: int, dim: int) -> DTensor:
    """Changes the dimension that `at` of the mesh shards, for which DTensor itself would gather on a CPU."""
    mesh, placed = t.device_mesh, list(t.placements)
    before = placed[at]
    assert isinstance(before, Shard)
    part = all_to_all(t.to_local(grad_placements=placed), mesh.get_group(at), before.dim, dim, t.shape[before.dim])
    placed[at] = Shard(dim)
    order = memory_order(t.shape, t._spec.stride)
    return wrap_part(put_in_order(part, order), mesh, placed, t.shape, order)


def part_sizes(size: int, parts: int) -> list[int]:
    """Returns the sizes of the parts of a dimension, as `Shard` and `torch.chunk` shard it."""
    part_size = -(-size // parts)
    return [max(0, min(part_size, size - part * part_size)) for part in range(parts)]


def all_to_all(part: torch.Tensor, group: dist.ProcessGroup, before: int, after: int, size: int) -> torch.Tensor:
    """Returns a rank's part along another dimension.

    Args:
        part: a plain tensor, this rank's part along `before` and whole along `after`.
        size: size of the whole tensor along `before`.
    """
    moved: torch.Tensor = _AllToAll.apply(part, group, before, after, size)  # type: ignore[no-untyped-call]
    return moved


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, group: dist.ProcessGroup, before: int, after: int, size: int
    ) -> torch.Tensor:
        ctx.back = group, after, before, part.shape[after]
        return _exchange_parts(part, group, before, after, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None, None, None]:
        return _exchange_parts(gradients[0], *ctx.back), None, None, None, None


def _exchange_parts(part: torch.Tensor, group: dist.ProcessGroup, before: int, after: int, size: int) -> torch.Tensor:
    pieces = part.split(part_sizes(part.shape[after], group.size()), after)  # type: ignore[no-untyped-call]
    shapes = [list(pieces[group.rank()].shape) for _ in pieces]
    for shape, rows in zip(shapes, part_sizes(size, group.size()), strict=True):
        shape[before] = rows
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    sizes = [torch.Size(shape).numel() for shape in shapes]
    incoming = sent.new_empty(sum(sizes))
    exchange(incoming, sent, sizes, [piece.numel() for piece in pieces], group.group_name, "all-to-all")
    arrived = incoming.split(sizes)  # type: ignore[no-untyped-call]
    return torch.cat([piece.view(shape) for piece, shape in zip(arrived, shapes, strict=True)], before)


def goes_over_gloo(tensor: torch.Tensor) -> bool:
    """Returns whether the ranks of a mesh exchange and sum such tensors over gloo."""
    return tensor.device.type == "cpu"


# An operator, so that a dispatch mode sees one call, and tensors without data are exchanged as well.
@torch.library.custom_op("pipedream::exchange", mutates_args=("incoming",))
def exchange(
    incoming: torch.Tensor, outgoing: torch.Tensor, received: list[int], sent: list[int], group: str, kind: str
) -> None:
    """Sends parts of a flat tensor to each rank of a group; on CPUs it posts its receives first.

    gloo's own all-to-all posts its sends first. The rank that comes last then says that it is ready to receive only
    after its own data have left, on the same connection; the other direction waits for that, and the exchange takes
    twice as long.

    Args:
        received: elements of `incoming` from each rank.
        sent: elements of `outgoing` for each rank.
        group: its name.
        kind: kind of collective as which it is counted.
    """
    ranks = distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type, attr-defined]
    if not goes_over_gloo(outgoing):  # NCCL sends and receives at once, and its first batch waits for all ranks
        dist.all_to_all_single(incoming, outgoing, received, sent, group=ranks)
        return
    my_rank, count = ranks.rank(), ranks.size()
    arriving, leaving = incoming.split(received), outgoing.split(sent)  # type: ignore[no-untyped-call]
    arriving[my_rank].copy_(leaving[my_rank])
    sources = [rank for rank in (*range(my_rank), *range(my_rank + 1, count)) if received[rank]]
    # Each begins with the next rank, so that not all send to one.
    targets = [rank for rank in (*range(my_rank + 1, count), *range(my_rank)) if sent[rank]]
    moves = [dist.P2POp(dist.irecv, arriving[rank], group=ranks, group_peer=rank) for rank in sources]
    moves += [dist.P2POp(dist.isend, leaving[rank], group=ranks, group_peer=rank) for rank in targets]
    for work in dist.batch_isend_irecv(moves) if moves else ():
        work.wait()


@exchange.register_fake
def _(
    incoming: torch.Tensor, outgoing: torch.Tensor, received: list[int], sent: list[int], group: str, kind: str
) -> None:
    pass


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
    """Applies a function of each channel of each sample.

    `spatial` dimensions follow the channels, and a batch may lack; None is for all after the first two.
    """
    name = getattr(function, "__name__", "a normalization")
    apart = input.dim() - spatial if spatial is not None else 2
    table: Table = {(at,): (at, (at,)) for at in (WHOLE, *map(Shard, range(apart)))}
    return compute_on_parts(name, table, lambda part: function(part, *rest, **options), [sum_partials(input)])
