"""The Layout: which dimension of a mesh shards which dimension of a tensor, by names (Mesh-TensorFlow, section 3).

A rule `d_ff:model` shards the dimension `d_ff` of every tensor that has one over the mesh dimension `model`. All ranks
have what no rule shards. A layout moves numbers and does not change them. At the Boundary between two stages, the two
sides may shard the tensors that cross it differently.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pipedream.core.box import Box, box_of, overlap
from pipedream.core.errors import PlanError
from pipedream.core.plan.cost import Numbers
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.ranks import Mesh, TensorLayout, pairs_of

BATCH = "batch"
"""The name of dimension 0 of a stage's inputs and outputs."""
_OUT = ":out"
_UNNAMED = "-"
_CUT = "cut"
"""Prefix of the mesh dimensions of a searched layout: cut1, cut2, and so on."""


@dataclass(frozen=True)
class Layout:
    """Rules and the names of tensors' dimensions.

    Attributes:
        rules: tensor dimension : mesh dimension, such as ``batch:data, d_ff:model``.
        names: a parameter, or a pattern of parameters as in `fnmatch`, -> the names of its dimensions, such as
            ``{"*.up.weight": "d_ff d_model"}``; ``"blocks.3:out"`` is the output of that layer. The first that matches
            counts. A tensor without names is not sharded.
        shard_weights: mesh dimension over which weights, gradients and optimizer state are sharded while no layer uses
            them.
        cuts: tensor of a described step (`tensor_of` for parameters) -> the dimension that each cut into halves
            divides, or None. They count on meshes such as ``cut1:2,cut2:2``, where rules do not.

    Raises:
        PlanError: malformed text, or a tensor dimension on two mesh dimensions.
    """

    rules: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    shard_weights: str = ""
    cuts: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", ",".join(f"{cut}:{over}" for cut, over in self._parse()))

    @classmethod
    def of(cls, partition: Any) -> Layout:
        """Returns the layout of a `Partition`, for a mesh with a dimension for each of its cuts: ``cut1:2,cut2:2``.

        The cuts shard weights between uses, with their versions, gradients and optimizer states. Each layer runs as
        operators with matching indices (`pipedream.extensions.meshes.layouts`).
        """
        tensors = partition.cuts[0].schemes if partition.cuts else {}
        return cls(cuts={name: tuple(cut.schemes[name] for cut in partition.cuts) for name in tensors})

    @staticmethod
    def tensor_of(parameter: str) -> str:
        """Returns the name that a parameter has among the tensors of a model's step."""
        return f"p_{parameter}".replace(".", "_")

    def uses_cuts(self, mesh: Mesh) -> bool:
        """Returns whether `cuts` count on a mesh.

        Raises:
            PlanError: only some of its dimensions are cuts, or they are not the first ones with two ranks each.
        """
        count = self._count_cuts()
        expected = {f"{_CUT}{i + 1}": 2 for i in range(count)}
        if not expected or not mesh.dimensions.keys() & expected.keys():
            return False
        if list(mesh.dimensions.items()) != list(expected.items())[: len(mesh.dimensions)] or self.shard_weights:
            sharded = f"shard_weights={self.shard_weights!r}"
            raise PlanError(
                f"a layout with {count} cuts into halves has meshes such as {_format_halves(count)}, without "
                f"shard_weights; found {mesh}{f' and {sharded}' if self.shard_weights else ''}; use such a mesh, and "
                "replicas of the stage in place of other dimensions"
            )
        return True

    def parameter(self, name: str, shape: Sequence[int], mesh: Mesh) -> tuple[int | None, ...]:
        """Returns the placements of a parameter, see `placements`."""
        if self.uses_cuts(mesh):
            cuts = self.cuts.get(self.tensor_of(name)) or self.cuts.get(name) or ()
            placements = (*cuts, *[None] * len(mesh.dimensions))[: len(mesh.dimensions)]
            for over, cut in zip(mesh.dimensions, placements, strict=True):
                divisor = 2 ** placements[: list(mesh.dimensions).index(over) + 1].count(cut)
                if cut is not None and (cut >= len(shape) or shape[cut] % divisor):
                    raise PlanError(
                        f"the layout shards dimension {cut} of {name!r} over {over!r}, but its shape is "
                        f"{tuple(shape)}; describe and partition this model, with sizes that the ranks divide"
                    )
            return placements
        names = self.names_of(name)
        if names is None:
            return (None,) * len(mesh.dimensions)
        return self.placements(names, shape, mesh, f"the parameter {name!r}")

    def _count_cuts(self) -> int:
        return max(map(len, self.cuts.values()), default=0)

    def _parse(self) -> list[tuple[str, str]]:
        rules: dict[str, str] = {}
        for rule, cut, over in pairs_of(self.rules):
            if not cut.isidentifier() or not over.isidentifier():
                raise PlanError(
                    f"the layout {self.rules!r} has {rule!r}, which is not a rule; write the dimension of a "
                    "tensor and that of the mesh, such as d_ff:model"
                )
            if rules.get(cut, over) != over:
                raise PlanError(
                    f"the layout shards {cut!r} over two dimensions of the mesh, {cut}:{rules[cut]} and {cut}:{over}; "
                    "a dimension of a tensor can be sharded over one: keep one of the rules"
                )
            rules[cut] = over
        return list(rules.items())

    def __str__(self) -> str:
        parts = [
            self.rules,
            self.shard_weights and f"at rest over {self.shard_weights}",  # profiles hold this text
            "cuts that were found" if self.cuts else "",
        ]
        return "; ".join(filter(None, parts)) or "no rules"

    @cached_property
    def over(self) -> dict[str, str]:
        """Tensor dimension -> mesh dimension."""
        return dict(self._parse())

    @property
    def _used_dimensions(self) -> list[str]:
        return [over for over in dict.fromkeys([*self.over.values(), self.shard_weights]) if over]

    def placements(
        self, names: str, shape: Sequence[int], mesh: Mesh, tensor: str = "a tensor"
    ) -> tuple[int | None, ...]:
        """Returns for each dimension of a mesh the dimension of a tensor that it shards, or None.

        Args:
            names: names of the tensor's dimensions, such as ``batch length d_model``.
            tensor: the tensor in words, for errors.

        Raises:
            PlanError: a wrong number of names, two dimensions on one of the mesh, or a size that does not divide.
        """
        words = names.split()
        if len(words) != len(shape):
            raise PlanError(
                f"{tensor} has {len(words)} names ({names}), but {len(shape)} dimensions {tuple(shape)}; name each "
                "dimension once, in order"
            )
        dimension_of: dict[str, int] = {}
        for dimension, name in enumerate(words):
            over = self.over.get(name)
            if over not in mesh.dimensions:
                continue
            if over in dimension_of:
                first = words[dimension_of[over]]
                raise PlanError(
                    f"{tensor} ({names}) would be sharded twice over {over!r}, by the rules {first}:{over} and "
                    f"{name}:{over}; remove one of them, or use another name in this tensor"
                )
            if shape[dimension] % mesh.dimensions[over]:
                raise PlanError(
                    f"{tensor} has {shape[dimension]} of {name!r}, which {over}:{mesh.dimensions[over]} of the mesh "
                    f"does not divide; choose another size, or remove the rule {name}:{over}"
                )
            dimension_of[over] = dimension
        return tuple(dimension_of.get(over) for over in mesh.dimensions)

    def of_model(self, model: Any) -> Layout:
        """Returns the layout with what modules name: ``layout_names`` has the names of a parameter's dimensions."""
        model_names = {
            f"{path}.{name}".removeprefix("."): names
            for path, module in model.named_modules()
            for name, names in getattr(module, "layout_names", {}).items()
        }
        return replace(
            self, names={**self.names, **{n: model_names[n] for n in model_names if self.names_of(n) is None}}
        )

    def of_plan(self, plan: Plan, model: Any, layers: Iterable[str], *, compiles: Any, parallelizes: bool) -> Layout:
        """See `TensorLayout`."""
        layout = self.of_model(model)
        if plan.ranks > plan.workers and compiles:
            raise PlanError(
                f"compile={compiles!r} was asked for with the plan {plan.config}, but layers on a mesh are not "
                "compiled; leave it out, or plan without meshes"
            )
        layout.check([name for name, _ in model.named_parameters()], layers, () if parallelizes else plan.meshes)
        for tied in plan.tied_weights:
            if len(differing := dict.fromkeys(str(plan.meshes[stage]) for stage in tied.stages)) > 1:
                raise PlanError(
                    f"the tied weights {tied} would be on the meshes {' and '.join(differing)}, where their gradients "
                    "cannot be summed; give these stages the same mesh, or keep their layers in one stage"
                )
        return layout

    def boundary(
        self, names: str | None, shape: Sequence[int], samples: int, mesh: Mesh, tensor: str = "a tensor"
    ) -> tuple[int | None, ...]:
        """Returns the placements of a tensor that enters or leaves a stage; see `placements`.

        A batch of an indivisible size, such as a smaller last one, is not sharded.

        Args:
            names: None if only dimension 0 is known, which is the batch if its size is `samples`.
        """
        if self.uses_cuts(mesh):
            parts = len(mesh.dimensions) if shape and shape[0] == samples and samples % mesh.size == 0 else 0
            return (0,) * parts or (None,) * len(mesh.dimensions)
        words = [_UNNAMED] * len(shape) if names is None else names.split()
        if names is None and shape and shape[0] == samples:
            words[0] = BATCH
        parts = mesh.dimensions.get(self.over.get(BATCH, ""), 1)
        if BATCH in words and len(words) == len(shape) and shape[words.index(BATCH)] % parts:
            words[words.index(BATCH)] = _UNNAMED
        return self.placements(" ".join(words), shape, mesh, tensor)

    def candidates(self, shapes: Mapping[str, Sequence[int]], samples: int | None, max_ranks: int) -> dict[Mesh, str]:
        """Returns meshes of up to `max_ranks` over the rules' dimensions -> why it is not legal for a model, or ''.

        `shapes` are those of the parameters; `samples` of a minibatch are None if unknown.
        """
        cuts = range(1, self._count_cuts() + 1)
        halvings = (Mesh(_format_halves(count)) for count in cuts if 2**count <= max_ranks)
        meshes = [*every_mesh(self._used_dimensions, max_ranks), *halvings]
        return {mesh: self._find_problem(mesh, shapes, samples) for mesh in meshes}

    def _find_problem(self, mesh: Mesh, shapes: Mapping[str, Sequence[int]], samples: int | None) -> str:
        batch = self.over.get(BATCH)
        used = {self.shard_weights, batch}
        for name, shape in shapes.items():
            try:
                placements = self.parameter(name, shape, mesh)
            except PlanError as error:
                return str(error)
            used |= {over for over, cut in zip(mesh.dimensions, placements, strict=True) if cut is not None}
        if samples is not None and batch in mesh.dimensions and samples % mesh.dimensions[batch]:
            return f"a minibatch of {samples} samples cannot be sharded over {batch}:{mesh.dimensions[batch]}"
        unused = [over for over in mesh.dimensions if over not in used]
        return f"nothing of the model is sharded over {unused[0]!r}" if unused and not self.uses_cuts(mesh) else ""

    def rules_on(self, mesh: Mesh) -> str:
        """Returns the rules that affect a mesh, or ``found`` for cuts."""
        if self.uses_cuts(mesh):
            return "found"
        return ",".join(f"{cut}:{over}" for cut, over in self.over.items() if over in mesh.dimensions)

    def names_of(self, tensor: str) -> str | None:
        """Returns the names of the dimensions of a parameter (or ``LAYER:out``), or None."""
        exact = self.names.get(tensor)
        return exact or next((names for pattern, names in self.names.items() if fnmatchcase(tensor, pattern)), None)

    def check(self, parameters: Iterable[str], layers: Iterable[str], meshes: Iterable[Mesh]) -> None:
        """Raises a `PlanError` for a name or pattern that matches nothing, a mesh dimension without a rule, and words
        that resemble those of a tensor or mesh.

        Args:
            parameters, layers: the names that the model has.
            meshes: meshes of the stages.
        """
        meshes, parameters = list(meshes), list(parameters)
        tensors = [*parameters, *(f"{layer}{_OUT}" for layer in layers)]
        for pattern in self.names:
            if not any(fnmatchcase(name, pattern) for name in tensors):
                close = get_close_matches(pattern, tensors, n=1, cutoff=0.3)
                raise PlanError(
                    f"the layout names the dimensions of {pattern!r}, which matches no parameter and no layer's "
                    f"output (LAYER{_OUT}){f'; did you mean {close[0]!r}?' if close else ''}"
                )
        parameter_tensors = {tensor for name in parameters for tensor in (name, self.tensor_of(name))}
        if any(map(self.uses_cuts, meshes)) and not parameter_tensors & self.cuts.keys():
            raise PlanError(
                f"the layout was found for the tensors {', '.join(list(self.cuts)[:5])}, none of which is a parameter "
                "of the model; partition what pipedream.operators(model, ...) returns"
            )
        words = {BATCH, *(word for names in self.names.values() for word in names.split())}
        for cut, over in self.over.items():
            if cut not in words and (close := get_close_matches(cut, words, n=1, cutoff=0.75)):
                raise PlanError(
                    f"the layout has the rule {cut}:{over}, but no tensor has a dimension {cut!r}; did you mean "
                    f"{close[0]!r}?"
                )
        dimensions = [over for mesh in meshes for over in mesh.dimensions]
        if self.shard_weights not in dimensions and (
            close := get_close_matches(self.shard_weights, dimensions, n=1, cutoff=0.75)
        ):
            raise PlanError(
                f"the layout has shard_weights={self.shard_weights!r}, which no mesh has; did you mean {close[0]!r}?"
            )
        for mesh in meshes:
            for over in () if self.uses_cuts(mesh) else mesh.dimensions:
                if over not in self._used_dimensions:
                    raise PlanError(
                        f"the mesh {mesh} has the dimension {over!r}, which no rule uses, so that its ranks would all "
                        f"do the same; add a rule such as batch:{over}, or shard_weights={over!r}, or remove the "
                        "dimension"
                    )


def make_layout(layout: TensorLayout | None, rules: str | None, shard_weights: str | None) -> TensorLayout:
    """Returns a layout with other rules, where they are given; by default one without any."""
    base = layout if isinstance(layout, Layout) else Layout()
    new_rules = base.rules if rules is None else rules
    return replace(base, rules=new_rules, shard_weights=shard_weights or base.shard_weights)


def _format_halves(count: int) -> str:
    return ",".join(f"{_CUT}{i + 1}:2" for i in range(count))


_CROSSINGS_MARK = "|"  # no structure of `runtime.comm.values` begins with it


def boundary_bytes(sender_ranks: int, sent: Numbers, receiver_ranks: int, received: Numbers) -> Numbers:
    """Returns the bytes that the busiest rank at a boundary sends or receives, one way, for a minibatch.

    Each rank receives its part, from ranks that take turns sending (`pieces`).

    Args:
        sent, received: bytes of the value that a rank of the sending, and of the receiving, stage has.
    """
    forwards, back = received * receiver_ranks / sender_ranks, sent * sender_ranks / receiver_ranks
    return np.ceil(np.maximum(np.maximum(sent, received), np.maximum(forwards, back)))


class Crossing(NamedTuple):
    """How a tensor is sharded where it is sent and where it is received.

    Attributes:
        shape: shape of the whole tensor.
        sent, received: placements, see `Layout.placements`.
        order: the whole tensor's dimensions in memory, see `memory_order`; () of a gradient.
    """

    shape: tuple[int, ...]
    sent: tuple[int | None, ...]
    received: tuple[int | None, ...]
    order: tuple[int, ...] = ()

    def reversed(self) -> Crossing:
        """Returns the crossing of the tensor's gradient."""
        return Crossing(self.shape, self.received, self.sent)

    def whole(self) -> Crossing:
        """Returns the crossing of a tensor that is not sharded at either stage."""
        return Crossing(self.shape, (None,) * len(self.sent), (None,) * len(self.received))


@dataclass(frozen=True)
class Boundary:
    """The boundary of two stages, which may have different meshes.

    Attributes:
        layer: last layer of the first stage; the layout may name the dimensions of its output.
        sender, receiver: the meshes.
    """

    layout: Layout
    layer: str
    sender: Mesh
    receiver: Mesh

    def crossings(self, shapes: Sequence[Sequence[int]], samples: int) -> list[Crossing]:
        """Returns the crossing of each tensor; names apply to tensors with as many dimensions.

        Raises:
            PlanError: no tensor has as many dimensions as names, or the layout is not legal for one.
        """
        names, tensor = self.layout.names_of(f"{self.layer}{_OUT}"), f"the output of {self.layer!r}"
        count = len((names or "").split())
        if names is not None and count not in map(len, shapes):
            sizes = ", ".join(str(tuple(shape)) for shape in shapes)
            raise PlanError(
                f"{tensor} has {count} names ({names}), but its shape is {sizes}; name each dimension once, in order"
            )
        crossings = []
        for shape in shapes:
            words = names if len(shape) == count else None
            sent, received = (
                self.layout.boundary(words, shape, samples, mesh, tensor) for mesh in (self.sender, self.receiver)
            )
            crossings.append(Crossing(tuple(shape), sent, received))
        return crossings


def with_crossings(structure: str, crossings: Sequence[Crossing]) -> str:
    """Returns the structure of a message with the crossings of its tensors, for `read_crossings`."""
    return f"{_CROSSINGS_MARK}{json.dumps(crossings)}{_CROSSINGS_MARK}{structure}" if crossings else structure


@lru_cache(maxsize=1024)
def read_crossings(structure: str) -> tuple[tuple[Crossing, ...], str]:
    """Returns the crossings, () if there are none, and the structure without them."""
    if not structure.startswith(_CROSSINGS_MARK):
        return (), structure
    _, text, rest = structure.split(_CROSSINGS_MARK, 2)
    return tuple(Crossing(*map(tuple, row)) for row in json.loads(text)), rest


class Piece(NamedTuple):
    """A part of a tensor that one rank sends to another; ranks are numbered within their meshes."""

    sender: int
    receiver: int
    box: Box


def every_mesh(dimensions: Sequence[str], max_ranks: int) -> list[Mesh]:
    """Returns the meshes of 2, 4, 8, ... up to `max_ranks` ranks over some of these dimensions, all powers of two.

    >>> [mesh.text for mesh in every_mesh(["data", "model"], 4)]
    ['data:2', 'model:2', 'data:4', 'model:4', 'data:2,model:2']
    """
    sizes = [1 << power for power in range(max_ranks.bit_length()) if 1 << power <= max_ranks]
    grids = [grid for grid in product(sizes, repeat=len(dimensions)) if 1 < prod(grid) <= max_ranks]
    grids.sort(key=lambda grid: (prod(grid), sum(size > 1 for size in grid), [-size for size in grid]))
    rows = ([(name, size) for name, size in zip(dimensions, grid, strict=True) if size > 1] for grid in grids)
    return [Mesh(",".join(f"{name}:{size}" for name, size in row)) for row in rows]


def pieces(
    shape: Sequence[int], sender: Mesh, sent: Sequence[int | None], receiver: Mesh, received: Sequence[int | None]
) -> list[Piece]:
    """Returns the pieces that ranks of one mesh send so that each rank of another gets exactly its part of a tensor.

    Each element comes from one rank. Where several have it, receivers take turns among them.

    Args:
        sent, received: placements of the tensor on both meshes, see `Layout.placements`.
    """
    have, need = (
        [box_of(shape, placed, list(mesh.dimensions.values()), coordinates) for coordinates in mesh.coordinates()]
        for mesh, placed in ((sender, sent), (receiver, received))
    )
    return plan_pieces(have, need, lambda ranks, rank: ranks[rank % len(ranks)])


def plan_pieces(
    have: Sequence[Box | None], need: Sequence[Box | None], choose_sender: Callable[[list[int], int], int]
) -> list[Piece]:
    """Returns the pieces that ranks send, so that each rank gets each element that it needs once.

    Args:
        have: boxes of which two are the same or have nothing in common.
        choose_sender: from the ranks that have a piece, and the one that needs it, to the one that sends it.
    """
    owners: dict[Box, list[int]] = {}
    for rank, box in enumerate(have):
        if box is not None:
            owners.setdefault(box, []).append(rank)
    return [
        Piece(choose_sender(ranks, receiver), receiver, part)
        for receiver, needed in enumerate(need)
        for box, ranks in owners.items()
        if needed is not None and (part := overlap(needed, box)) is not None
    ]
