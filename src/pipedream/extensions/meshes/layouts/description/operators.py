"""Operators: all that a training step computes, as the planners see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from math import prod
from typing import ClassVar

from pipedream.core.artifact import Artifact
from pipedream.core.box import Box
from pipedream.core.errors import PlanError
from pipedream.core.plan.ranks import Mesh
from pipedream.extensions.meshes.layout import Layout
from pipedream.extensions.meshes.layouts.description.named import NamedOperators, Report
from pipedream.extensions.meshes.layouts.description.text import (
    Access,
    Affine,
    Operator,
    read_lines,
    rename_indices,
)

_Place = tuple[str | int, str | int]
"""A tensor and a dimension, or the number of an operator and an index."""
_Class = dict[str | int, str | int]
"""Connected places, at most one of each tensor and operator; the places of a class share it."""


@dataclass(frozen=True)
class Operators(Artifact):
    """The operators of a step, in the order in which they run.

    Attributes:
        tensors: name -> size of each dimension.
        text: one operator a line (`pipedream.extensions.meshes.layouts.description.text`).
        alike: tensors that share a layout, such as a weight, its gradient and its optimizer state.

    Raises:
        PlanError: text that cannot be read, a tensor that is not given, another number of dimensions, an index with
            two sizes or without one, an index that is reduced by nothing, a tensor that is computed twice or is read
            before, or unlike tensors that should be alike.
    """

    FORMAT: ClassVar[int] = 1

    tensors: dict[str, tuple[int, ...]]
    text: str
    alike: tuple[tuple[str, ...], ...] = field(default=())

    def __post_init__(self) -> None:
        # Lists, as users write them and JSON has them.
        object.__setattr__(self, "tensors", {name: tuple(shape) for name, shape in self.tensors.items()})
        object.__setattr__(self, "alike", tuple(map(tuple, self.alike)))
        for name, shape in self.tensors.items():
            if any(size < 1 for size in shape):
                raise PlanError(f"the tensor {name!r} has the sizes {shape}; give each dimension at least 1")
        _check_order(self.steps)
        for names in self.alike:
            shapes = {name: self.tensors[self._check_known(name, "alike")] for name in names}
            if len(set(shapes.values())) > 1:
                raise PlanError(f"{shapes} should be alike, but differ in size; name tensors of one size")

    @cached_property
    def steps(self) -> tuple[Operator, ...]:
        """Each line of the text."""
        return tuple(self._build_operator(line) for line in read_lines(self.text))

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """All tensors, those together that share a layout."""
        group = {name: [name] for name in self.tensors}
        for first, *others in self.alike:
            for other in others:
                if group[other] is not group[first]:
                    group[first] += group[other]
                    for name in group[other]:
                        group[name] = group[first]
        return tuple(tuple(names) for names in {id(names): names for names in group.values()}.values())

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The tensors that no operator computes."""
        computed = {step.result for step in self.steps}
        return tuple(name for name in self.tensors if name not in computed)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The tensors that are computed and that no operator reads."""
        read = {access.tensor for step in self.steps for access in step.operands}
        return tuple(step.result for step in self.steps if step.result not in read)

    @cached_property
    def named(self) -> NamedOperators:
        """With the names of indices shared by all lines."""
        return NamedOperators(self.tensors, self.groups, self.steps)

    def with_shared_names(self) -> Operators:
        """Renames indices so that dimensions which operators connect have one name in all lines.

        For operators, such as a model's, whose index names mean something in their own line alone. An index and the
        dimensions that it runs over have one name, unless an operator would then have two indices, or a tensor two
        dimensions, of this name; lines are connected in their order. The name is that of the first tensor with the
        dimension, and its number: `x0_0`.
        """
        first = {tensor: group[0] for group in self.groups for tensor in group}
        classes: dict[_Place, _Class] = {}
        for number, operator in enumerate(self.steps):
            for access in operator.accesses:
                for at, (index, size) in enumerate(zip(access.indices, self.tensors[access.tensor], strict=True)):
                    if (name := operator.outermost(index, size)) is not None:
                        _connect(classes, (first[access.tensor], at), (number, name))
        names: dict[int, str] = {}  # of each class
        for tensor in self.tensors:
            for at in range(len(self.tensors[tensor])):
                place = first[tensor], at
                names.setdefault(id(classes.setdefault(place, dict([place]))), f"{tensor}_{at}")
        used = set(names.values())
        lines = []
        for number, operator in enumerate(self.steps):
            shared = {}
            for letter in operator.sizes:
                connected = classes.setdefault((number, letter), {})
                if id(connected) not in names:  # it runs over no whole dimension
                    name = f"{operator.result}_{letter}"
                    while name in used:
                        name += "_"
                    used.add(name)
                    names[id(connected)] = name
                shared[letter] = names[id(connected)]
            lines.append(rename_indices(operator, shared))
        return replace(self, text="\n".join(lines))

    def report(self, layout: Layout, mesh: Mesh) -> Report:
        """Returns what the step takes on a mesh, whose layout shards indices by name in all lines.

        An input lives from the start and each tensor until its last reader, or to the end; operators run in order. A
        partial sum is all-reduced right after its operator. As for layers, a rule whose mesh dimension the mesh lacks
        has no effect.

        Raises:
            PlanError: a rule for a name that no operator has or that is an index of an expression, a size that does
                not divide, or two names of an operator on one dimension of the mesh.
        """
        return self.named.report(layout, mesh)

    def _check_known(self, name: str, where: str) -> str:
        if name not in self.tensors:
            near = get_close_matches(name, self.tensors, n=1)
            raise PlanError(
                f"{where} has the tensor {name!r}, whose sizes are not given"
                f"{f'; did you mean {near[0]!r}?' if near else '; add it to tensors'}"
            )
        return name

    def _build_operator(self, line: Operator) -> Operator:
        sizes = dict(line.bounds)
        owner = dict.fromkeys(sizes, "where")
        affine: dict[str, Access] = {}
        for access in (line.output, *line.operands):
            where = f"line {line.number}, column {access.column} of the operators"
            shape = self.tensors[self._check_known(access.tensor, where)]
            if len(access.indices) != len(shape):
                raise PlanError(
                    f"{where}: {access.tensor!r} has {len(access.indices)} indices in {line.text!r}, but "
                    f"{len(shape)} dimensions {shape}; write one for each dimension (: for a whole one)"
                )
            for index, size in zip(access.indices, shape, strict=True):
                for name, _ in index.terms if index else ():
                    affine.setdefault(name, access)
                if index is None or (name := index.plain or "") == "":
                    continue
                first_size = sizes.setdefault(name, size)
                if first_size != size and (name not in line.bounds or access is line.output or first_size > size):
                    raise PlanError(
                        f"{where}: the index {name!r} of {line.text!r} has two sizes, {sizes[name]} in {owner[name]!r} "
                        f"and {size} in {access.tensor!r}; use another name for one of them, or correct the sizes"
                    )
                owner.setdefault(name, access.tensor)
        for name, size in line.bounds.items():
            if name not in affine:
                raise PlanError(
                    f"line {line.number} of the operators: {line.text!r} says {name} < {size}, but has no such index; "
                    "remove it"
                )
        for name, access in affine.items():
            if name not in sizes:
                raise PlanError(
                    f"line {line.number}, column {access.column} of the operators: the size of {name!r} in "
                    f"{line.text!r} is not known, since no tensor has it alone as an index; add `where {name} < 3`"
                )
        operator = replace(line, sizes={name: sizes[name] for name in affine})
        if operator.reduced and not line.reduction:
            name = next(name for name in affine if name in operator.reduced)
            raise PlanError(
                f"line {line.number} of the operators: {line.text!r} has the index {name!r} only on the right; "
                "reduce it by +=, *=, max= or min=, or use : for a dimension that a function needs whole"
            )
        return operator


@dataclass(frozen=True)
class DescribedStep:
    """Operators with what a search of them needs.

    Attributes:
        element_bytes: tensor -> bytes of an element.
        batch: the index of the samples, '' if unknown.
    """

    operators: Operators
    element_bytes: Mapping[str, int]
    batch: str = ""

    @property
    def usual_bytes(self) -> int:
        """Bytes of an element of the largest tensor."""
        largest = max(self.operators.tensors, key=lambda name: prod(self.operators.tensors[name]), default="")
        return self.element_bytes.get(largest, 1)


def _check_order(steps: tuple[Operator, ...]) -> None:
    computed: dict[str, int] = {}
    read: dict[str, int] = {}
    for step in steps:
        for access in step.operands:
            read.setdefault(access.tensor, step.number)
        result, line = step.result, step.number
        if result in computed:
            raise PlanError(
                f"{result!r} is computed in the lines {computed[result]} and {line} of the operators; give each result "
                "a name of its own, and list them as alike if they should share a layout"
            )
        if result in read:
            raise PlanError(
                f"{result!r} is read in line {read[result]} of the operators and computed in line {line}; give the new "
                "one a name of its own, and list them as alike if they should share a layout"
            )
        computed[result] = line


def find_range(index: Affine, ranges: Mapping[str, range]) -> range:
    """Returns the values from the least to the greatest of an expression, where its indices have these ranges."""
    if any(not ranges[name] for name, _ in index.terms):
        return range(0)
    low = high = index.offset
    for name, times in index.terms:
        ends = times * ranges[name].start, times * (ranges[name].stop - 1)
        low, high = low + min(ends), high + max(ends)
    return range(low, high + 1)


def find_box(access: Access, ranges: Mapping[str, range], shape: tuple[int, ...]) -> Box:
    """Returns the part of a tensor that an operator needs for these ranges of its indices; padding is left out."""
    box = []
    for index, size in zip(access.indices, shape, strict=True):
        values = range(size) if index is None else find_range(index, ranges)
        start = min(max(values.start, 0), size)
        box.append(range(start, max(start, min(values.stop, size))))
    return tuple(box)


def _connect(classes: dict[_Place, _Class], place: _Place, other: _Place) -> None:
    """Makes one class of two, unless it would have two places of an operator or tensor."""
    large, small = sorted((classes.setdefault(at, dict([at])) for at in (place, other)), key=len, reverse=True)
    if large is not small and not large.keys() & small.keys():
        large |= small
        classes |= dict.fromkeys(small.items(), large)
