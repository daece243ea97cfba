"""The Mesh: the ranks of one worker, in a grid with named dimensions (Mesh-TensorFlow, Shazeer et al. 2018, 3).

With the profile of one of its ranks on a cluster (`profile_of_rank`), plans and simulations need no other rule for
meshes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import MOST_WORKERS, Cluster
from pipedream.core.model.collective import Collective
from pipedream.core.model.profile import LayerProfile, Profile
from pipedream.core.plan.cost import SumLink

_NONE = "-"

Box = tuple[range, ...]
"""The indices of a part of a tensor, in each of its dimensions."""


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid, counted row by row.

    Attributes:
        text: each dimension's name and size, such as ``data:2,model:2``; '' or '-' is a single rank.

    Raises:
        PlanError: text that is not of this form, a dimension that occurs twice, or a size below 1.
    """

    text: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", ",".join(f"{name}:{size}" for name, size in self._parse()))

    def _parse(self) -> list[tuple[str, int]]:
        sizes: dict[str, int] = {}
        for part, name, size in pairs_of(self.text) if self.text.strip() != _NONE else ():
            if not name.isidentifier() or not size.isdecimal() or not 1 <= int(size) <= MOST_WORKERS:
                raise PlanError(
                    f"the mesh {self.text!r} has {part!r}, which is not a name and a size; write a mesh as "
                    "model:2 or data:2,model:2"
                )
            if name in sizes:
                raise PlanError(f"the mesh {self.text!r} has the dimension {name!r} twice; give each a name of its own")
            sizes[name] = int(size)
        return list(sizes.items())

    @cached_property
    def dimensions(self) -> dict[str, int]:
        """Name -> ranks."""
        return dict(self._parse())

    @property
    def size(self) -> int:
        """Its number of ranks."""
        return prod(self.dimensions.values())

    def coordinates(self) -> list[tuple[int, ...]]:
        """Returns each rank's place in every dimension."""
        return list(product(*(range(size) for size in self.dimensions.values())))

    def __str__(self) -> str:
        return self.text or _NONE


class Piece(NamedTuple):
    """A part of a tensor that one rank sends to another; both counted within their mesh."""

    sender: int
    receiver: int
    box: Box


def pairs_of(text: str) -> list[tuple[str, str, str]]:
    """Returns each part of a text such as ``a:b, c:d``, and its two words."""
    pairs = []
    for part in text.split(",") if text.strip() else ():
        first, _, second = part.partition(":")
        pairs.append((part.strip(), first.strip(), second.strip()))
    return pairs


def meshes_of(text: str, stages: int | None = None) -> tuple[Mesh, ...]:
    """Returns the mesh of each stage, from a text such as ``data:2/model:2/-``; a single one is that of all.

    Args:
        stages: their number; None if it is that of the text.

    Raises:
        PlanError: another number of meshes.
    """
    meshes = tuple(map(Mesh, text.split("/")))
    if stages is None:
        return meshes
    if len(meshes) not in (1, stages):
        raise PlanError(
            f"the meshes {text!r} are for {len(meshes)} stages, but there are {stages}; give one for each, or a single "
            f"one for all ({_NONE} is a single rank)"
        )
    return meshes * stages if len(meshes) == 1 else meshes


def every_mesh(dimensions: Sequence[str], most: int) -> list[Mesh]:
    """Returns the meshes of 2, 4, 8, ... ranks, up to `most`, over some of these dimensions, each a power of two.

    >>> [mesh.text for mesh in every_mesh(["data", "model"], 4)]
    ['data:2', 'model:2', 'data:4', 'model:4', 'data:2,model:2']
    """
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    grids = [grid for grid in product(sizes, repeat=len(dimensions)) if 1 < prod(grid) <= most]
    grids.sort(key=lambda grid: (prod(grid), sum(size > 1 for size in grid), [-size for size in grid]))
    rows = ([(name, size) for name, size in zip(dimensions, grid, strict=True) if size > 1] for grid in grids)
    return [Mesh(",".join(f"{name}:{size}" for name, size in row)) for row in rows]


def ranks_of(text: str, workers: Sequence[int] = ()) -> int:
    """Returns the ranks of all workers, for meshes as in `meshes_of`.

    Args:
        workers: workers of each stage; by default one, and two stages if there is a single mesh.
    """
    meshes = meshes_of(text, len(workers) or None)
    counts = workers or ((2,) if len(meshes) == 1 else (1,) * len(meshes))
    return sum(count * mesh.size for count, mesh in zip(counts, meshes, strict=True))


def box_of(
    shape: Sequence[int], placements: Sequence[int | None], sizes: Sequence[int], coordinates: Sequence[int]
) -> Box:
    """Returns the part of a tensor that a rank has.

    A dimension that does not divide is sharded as `torch.chunk` does: into parts of the same size, then a smaller one,
    then empty ones. One that several dimensions of the mesh shard is sharded by the first of them, its parts by the
    next.

    Args:
        placements: for each dimension of the mesh the dimension of the tensor that it shards, or None.
        sizes: sizes of the mesh.
        coordinates: place of the rank.
    """
    box = [range(size) for size in shape]
    for cut, parts, at in zip(placements, sizes, coordinates, strict=True):
        if cut is not None:
            part = -(-len(box[cut]) // parts)
            box[cut] = box[cut][at * part : (at + 1) * part]
    return tuple(box)


def overlap(box: Box, other: Box) -> Box | None:
    """Returns what two parts of a tensor have in common; None if that is nothing."""
    common = tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(box, other, strict=True))
    return common if all(common) else None


def count_elements(box: Box | None) -> int:
    """Returns how many elements a part of a tensor has; 0 for None."""
    return 0 if box is None else prod(map(len, box))


def slice_of(box: Box) -> tuple[slice, ...]:
    """Returns where a part of a tensor is in the whole."""
    return tuple(slice(values.start, values.stop) for values in box)


def slice_within(box: Box, around: Box) -> tuple[slice, ...]:
    """Returns where a part of a tensor is in a larger part."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, around, strict=True))


def pieces(
    shape: Sequence[int],
    sender: Mesh,
    sent: Sequence[int | None],
    receiver: Mesh,
    received: Sequence[int | None],
) -> list[Piece]:
    """Returns what the ranks of one mesh send so that each rank of another gets exactly its part of a tensor.

    Each element comes from one rank that has it. Where several have it, the receivers take turns between them.

    Args:
        sent, received: placements of the tensor on both meshes, see `Layout.placements`.
    """
    owners: dict[Box, list[int]] = {}
    for rank, coordinates in enumerate(sender.coordinates()):
        box = box_of(shape, sent, list(sender.dimensions.values()), coordinates)
        owners.setdefault(box, []).append(rank)
    to_send = []
    for rank, coordinates in enumerate(receiver.coordinates()):
        mine = box_of(shape, received, list(receiver.dimensions.values()), coordinates)
        for box, ranks in owners.items():
            part = overlap(mine, box)
            if part is not None:
                to_send.append(Piece(ranks[rank % len(ranks)], rank, part))
    return to_send


def profile_of_rank(profile: Profile, mesh: Mesh, cluster: Cluster, reach: tuple[int, ...] | None = None) -> Profile:
    """Returns what one rank of a mesh needs, its collectives included.

    Args:
        cluster: its workers are ranks.
        reach: `reach_of` the worker; by default that of the first ranks.

    Raises:
        PlanError: the profile does not know the mesh.
    """
    measured = next((rank for rank in profile.ranks if Mesh(rank.mesh) == mesh), None)
    if measured is None:
        meshes = ", ".join(rank.mesh for rank in profile.ranks) or "none"
        raise PlanError(
            f"a plan with the mesh {mesh} was asked for, but the profile has no measurement of one of its ranks "
            f"(meshes that it has: {meshes}); profile with meshes=({mesh.text!r},) and the layout, or --mesh {mesh}"
        )
    levels = reach_of(mesh, cluster) if reach is None else reach
    level = dict(zip(mesh.dimensions, levels, strict=True))

    def seconds(rows: Iterable[Collective], *, fixed: bool = False) -> float:
        """`fixed`: only what a smaller microbatch does not save."""
        total_s = 0.0
        for row in rows:
            size_bytes = row.size_bytes if row.of_weights or not fixed else 0
            over = row.over.split("+")
            ranks = prod(mesh.dimensions[dimension] for dimension in over)
            link = SumLink.across(cluster, max(map(level.__getitem__, over)))
            total_s += float(link.collective_s(row.kind, row.count, size_bytes, ranks))
        return total_s

    def with_collectives(
        layer: LayerProfile, forward: tuple[Collective, ...], backward: tuple[Collective, ...]
    ) -> LayerProfile:
        return replace(
            layer,
            forward_s=layer.forward_s + seconds(forward),
            backward_s=layer.backward_s + seconds(backward),
            forward_fixed_s=layer.forward_fixed_s + seconds(forward, fixed=True),
            backward_fixed_s=layer.backward_fixed_s + seconds(backward, fixed=True),
        )

    rank = profile.of_rank(measured)
    layers = tuple(map(with_collectives, measured.layers, measured.forward, measured.backward))
    return replace(rank, layers=layers, update_s=rank.update_s + seconds(measured.update))


def reach_of(mesh: Mesh, cluster: Cluster, first: int = 0) -> tuple[int, ...]:
    """Returns, for each dimension of a mesh, the outermost level that its collectives cross.

    Args:
        cluster: its workers are ranks.
        first: the mesh's first rank.
    """
    sizes = list(mesh.dimensions.values())
    reaches = []
    for at, size in enumerate(sizes):
        step = prod(sizes[at + 1 :])
        last = min(first + (size - 1) * step, cluster.workers - 1)
        reaches.append(cluster.reach(*range(first, last + 1, step)))
    return tuple(reaches)
