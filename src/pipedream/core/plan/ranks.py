"""The ranks of a worker: a single one, or a Mesh with named dimensions (Mesh-TensorFlow, Shazeer et al. 2018, 3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, Protocol, runtime_checkable

from pipedream.core.errors import PlanError
from pipedream.core.extensions import list_offers
from pipedream.core.hardware.cluster import MAX_WORKERS

_NONE = "-"


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid, counted row by row.

    Attributes:
        text: the dimensions' names and sizes, such as ``data:2,model:2``; '' or '-' is a single rank.

    Raises:
        PlanError: text that is not of this form, a dimension that occurs twice, or a size below 1.
    """

    text: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", ",".join(f"{name}:{size}" for name, size in self._parse()))

    def _parse(self) -> list[tuple[str, int]]:
        sizes: dict[str, int] = {}
        for part, name, size in pairs_of(self.text) if self.text.strip() != _NONE else ():
            if not name.isidentifier() or not size.isdecimal() or not 1 <= int(size) <= MAX_WORKERS:
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
        """The number of ranks."""
        return prod(self.dimensions.values())

    def coordinates(self) -> list[tuple[int, ...]]:
        """Returns each rank's coordinate in every dimension."""
        return list(product(*(range(size) for size in self.dimensions.values())))

    def __str__(self) -> str:
        return self.text or _NONE


@runtime_checkable
class TensorLayout(Protocol):
    """How the ranks of a worker divide tensors, such as a `pipedream.Layout`."""

    def rules_on(self, mesh: Mesh) -> str:
        """Returns the rules that affect a mesh."""

    def of_plan(
        self, plan: Any, model: Any, layers: Iterable[str], *, compiles: Any, parallelizes: bool
    ) -> TensorLayout:
        """Returns the layout for a plan, completed with what the model's modules say.

        Args:
            layers: names of the model's layers.
            compiles: the option to compile them.
            parallelizes: the user's own function divides tensors, too, and may use any dimension of a mesh.

        Raises:
            PlanError: it does not fit the model or the plan.
        """


def pairs_of(text: str) -> list[tuple[str, str, str]]:
    """Returns each part of a text such as ``a:b, c:d``, with its two words."""
    pairs = []
    for part in text.split(",") if text.strip() else ():
        first, _, second = part.partition(":")
        pairs.append((part.strip(), first.strip(), second.strip()))
    return pairs


def choose_layout(layout: TensorLayout | None, rules: str | None, shard_weights: str | None) -> TensorLayout:
    """Returns a layout with other rules, where they are given; by default one without any.

    Args:
        rules: tensor dimension : mesh dimension, such as ``batch:data, d_ff:model``.
        shard_weights: mesh dimension over which weights are sharded while no layer uses them.

    Raises:
        PlanError: no extension divides tensors.
    """
    if not (offers := list_offers("layout")):
        raise PlanError(
            "a mesh or a layout was asked for, and no extension here divides tensors over several ranks; leave it out"
        )
    chosen: TensorLayout = offers[0].make_layout(layout, rules, shard_weights)
    return chosen


def meshes_of(text: str, stages: int | None = None) -> tuple[Mesh, ...]:
    """Returns the mesh of each stage, from a text such as ``data:2/model:2/-``; a single mesh is for all stages.

    Args:
        stages: their number; None for that of the text.

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


def ranks_of(text: str, workers: Sequence[int] = ()) -> int:
    """Returns the ranks of all workers, for meshes as in `meshes_of`.

    Args:
        workers: workers of each stage; by default one, and two stages if there is a single mesh.
    """
    meshes = meshes_of(text, len(workers) or None)
    counts = workers or ((2,) if len(meshes) == 1 else (1,) * len(meshes))
    return sum(count * mesh.size for count, mesh in zip(counts, meshes, strict=True))
