"""Costs of a layout for operators whose index names are shared by all lines (Mesh-TensorFlow, Shazeer et al. 2018).

A dimension of a tensor has, while no operator uses it, the name of the first index that runs over all of it, alone or
as the outermost of several (`64*h + k` is sharded where `h` is). An operator that has another index there, or `:`,
works on a copy that is sharded by its own indices; Mesh-TensorFlow writes this as a reshape.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

from pipedream.core.errors import PlanError
from pipedream.core.plan.ranks import Mesh
from pipedream.extensions.meshes.layout import Layout
from pipedream.extensions.meshes.layouts.description.text import Access, Operator

Names = tuple[str | None, ...]
"""Names of a tensor's dimensions; None is never sharded."""
Over = Mapping[str, str]
"""Name -> the dimension of the mesh that shards it."""


@dataclass(frozen=True)
class Report:
    """Costs of a step on a mesh.

    Attributes:
        peak: elements of one rank, at most at any operator.
        done: operations of all ranks. One operation is one value for each index of an operator.
        unique: operations that differ; the rest are done by several ranks alike.
        moved: (all-reduce, all-gather or all-to-all; dimension of the mesh) -> elements of the slices, summed over the
            ranks, as Mesh-TensorFlow counts them.
    """

    mesh: Mesh
    peak: int
    done: int
    unique: int
    moved: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def seconds(self, operations_per_s: float, elements_per_s: float | Mapping[str, float]) -> float:
        """Returns the seconds of a step whose operators and collectives run one after the other.

        A rank of n sends 2 (n - 1) / n of its slice in an all-reduce, and (n - 1) / n of it otherwise.

        Args:
            operations_per_s: speed of a rank.
            elements_per_s: bandwidth of a rank, for each dimension of the mesh or for all.
        """
        rates = read_rates(elements_per_s, self.mesh)
        total = self.done / self.mesh.size / operations_per_s
        for (kind, over), elements in self.moved.items():
            ranks = self.mesh.dimensions[over]
            times = (2 if kind == "all-reduce" else 1) * (ranks - 1) / ranks
            total += times * elements / self.mesh.size / rates[over]
        return total


def read_rates(elements_per_s: float | Mapping[str, float], mesh: Mesh) -> dict[str, float]:
    """Returns the elements per second for each dimension of a mesh.

    Raises:
        PlanError: a dimension that the mesh lacks, or that has no rate, or a rate that is not positive.
    """
    rates = elements_per_s if isinstance(elements_per_s, Mapping) else dict.fromkeys(mesh.dimensions, elements_per_s)
    for over in rates:
        if over not in mesh.dimensions:
            raise PlanError(f"elements_per_s has {over!r}, which is not a dimension of the mesh {mesh}; remove it")
    for over in mesh.dimensions:
        if over not in rates:
            raise PlanError(f"elements_per_s has no rate for {over!r} of the mesh {mesh}; give one for each dimension")
        if not rates[over] > 0:
            raise PlanError(f"elements_per_s is {rates[over]} for {over!r}; give a positive number")
    return dict(rates)


class Use(NamedTuple):
    """A tensor as an operator uses it.

    Attributes:
        elements: size of the whole tensor.
        names: names of its dimensions in this line.
        stored_names: names of its dimensions while no operator uses it.
    """

    elements: int
    names: Names
    stored_names: Names

    def _is_copied(self, over: Over) -> bool:
        return any(
            over.get(name or "") != over.get(stored_name or "")
            for name, stored_name in zip(self.names, self.stored_names, strict=True)
        )

    def count_copied(self, over: Over, mesh: Mesh) -> int:
        """Returns the elements of a rank's copy, or 0 if it uses the tensor as it is."""
        return part(self.elements, self.names, over, mesh) if self._is_copied(over) else 0

    def yield_collectives(self, over: Over, mesh: Mesh, *, is_result: bool) -> Iterator[tuple[str, str, int]]:
        """Yields kind, dimension of the mesh and a rank's elements of each collective.

        Slices come first, since they make the others smaller, then all-to-alls and all-gathers.
        """
        if not self._is_copied(over):
            return
        source, target = (self.names, self.stored_names) if is_result else (self.stored_names, self.names)
        before, after = (
            {over[name]: at for at, name in enumerate(names) if name is not None and name in over}
            for names in (source, target)
        )
        elements = part(self.elements, source, over, mesh)
        for dimension in after.keys() - before.keys():
            elements //= mesh.dimensions[dimension]
        for dimension in mesh.dimensions:
            if dimension in before and dimension in after and before[dimension] != after[dimension]:
                yield "all-to-all", dimension, elements
        for dimension in mesh.dimensions:
            if dimension in before and dimension not in after:
                elements *= mesh.dimensions[dimension]
                yield "all-gather", dimension, elements


class Step(NamedTuple):
    """An operator; equal ones cost the same.

    Attributes:
        names: indices that may be sharded.
        operations: operations of the whole operator.
        reduced: names of `names` that its result lacks.
    """

    names: frozenset[str]
    operations: int
    operands: tuple[Use, ...]
    result: Use
    reduced: frozenset[str]

    @property
    def uses(self) -> tuple[Use, ...]:
        """The operands and the result."""
        return (*self.operands, self.result)

    def report(self, over: Over, mesh: Mesh) -> Report:
        """Returns what it takes by itself; its peak is that of the copies."""
        done = mesh.size * part(self.operations, self.names, over, mesh)
        moved: Counter[tuple[str, str]] = Counter()
        collectives = [
            collective for use in self.operands for collective in use.yield_collectives(over, mesh, is_result=False)
        ]
        pending = part(self.result.elements, self.result.names, over, mesh)
        collectives += [("all-reduce", over[name], pending) for name in sorted(self.reduced) if name in over]
        collectives += self.result.yield_collectives(over, mesh, is_result=True)
        for kind, dimension, elements in collectives:
            if mesh.dimensions[dimension] > 1:
                moved[kind, dimension] += mesh.size * elements
        copied = sum(use.count_copied(over, mesh) for use in self.uses)
        return Report(mesh, copied, done, self.operations, moved)


def part(elements: int, names: Names | frozenset[str], over: Over, mesh: Mesh) -> int:
    """Returns a rank's elements of a tensor."""
    return elements // prod([mesh.dimensions[over[name]] for name in names if name is not None and name in over])


class NamedOperators:
    """Operators with shared names.

    Args:
        groups: tensors that share a layout.

    Attributes:
        sizes: name -> all its sizes, of names that may be sharded.
        whole: name -> why it cannot be sharded.
        stored_names: tensor -> the names of its dimensions.
        steps: as they cost.
        live: for each tensor, the first and the last operator during which it exists: an input from the start, others
            from where they are computed, until what reads them last, or to the end.
    """

    def __init__(
        self, tensors: Mapping[str, tuple[int, ...]], groups: Sequence[Sequence[str]], operators: Sequence[Operator]
    ) -> None:
        self._operators, self._tensors = operators, tensors
        self.whole = self._find_whole_names()
        self.sizes: dict[str, list[int]] = {}
        for operator in operators:
            for name, size in operator.sizes.items():
                if name not in self.whole and size not in self.sizes.setdefault(name, []):
                    self.sizes[name].append(size)
        self.stored_names = self._name_dimensions(groups)
        self.steps = tuple(map(self._build_step, operators))
        self.live = self._compute_lifetimes()

    def _find_outermost(self, operator: Operator, access: Access) -> Names:
        sizes = self._tensors[access.tensor]
        return tuple(operator.outermost(index, size) for index, size in zip(access.indices, sizes, strict=True))

    def _find_whole_names(self) -> dict[str, str]:
        """Returns indices that cannot be sharded: those of affine expressions, and of two dimensions of one tensor."""
        whole: dict[str, str] = {}
        for operator in self._operators:
            line = f"line {operator.number}, {operator.text!r}"
            for access in operator.accesses:
                outermost = self._find_outermost(operator, access)
                for index, outer in zip(access.indices, outermost, strict=True):
                    for name, _ in index.terms if index else ():
                        if name != outer:
                            whole.setdefault(name, f"{line}, has it in an expression")
                for twice in {name for name in outermost if name and outermost.count(name) > 1}:
                    whole.setdefault(twice, f"{line}, has it in two dimensions of {access.tensor!r}")
        return whole

    def _yield_names(self, operator: Operator) -> Iterator[tuple[str, Names]]:
        """Yields each tensor that it reads, then the one that it computes."""
        for access in operator.accesses:
            outermost = self._find_outermost(operator, access)
            yield access.tensor, tuple(name if name in self.sizes else None for name in outermost)

    def _name_dimensions(self, groups: Sequence[Sequence[str]]) -> dict[str, Names]:
        first: dict[str, list[str | None]] = {}
        for group in groups:
            first |= dict.fromkeys(group, [None] * len(self._tensors[group[0]]))
        for operator in self._operators:
            for tensor, names in self._yield_names(operator):
                stored = first[tensor]
                for at, name in enumerate(names):
                    if stored[at] is None and name not in stored:
                        stored[at] = name
        return {name: tuple(stored) for name, stored in first.items()}

    def _build_step(self, operator: Operator) -> Step:
        uses = {
            (tensor, names): Use(prod(self._tensors[tensor]), names, self.stored_names[tensor])
            for tensor, names in self._yield_names(operator)
        }
        *operands, result = uses.values()
        # What an operator does for `:` is not known; at least it looks at each element.
        whole = max(
            prod(
                size for size, index in zip(self._tensors[access.tensor], access.indices, strict=True) if index is None
            )
            for access in operator.accesses
        )
        return Step(
            frozenset(operator.sizes).intersection(self.sizes),
            prod(operator.sizes.values()) * whole,
            tuple(operands),
            result,
            operator.reduced.intersection(self.sizes),
        )

    def _compute_lifetimes(self) -> dict[str, range]:
        end = max(1, len(self._operators))
        starts = {operator.result: at for at, operator in enumerate(self._operators)}
        last = {access.tensor: at for at, operator in enumerate(self._operators) for access in operator.operands}
        return {name: range(starts.get(name, 0), last.get(name, end - 1) + 1) for name in self._tensors}

    def report(self, layout: Layout, mesh: Mesh) -> Report:
        """Returns what a step takes with a layout; see `Operators.report`."""
        over = self.read_rules(layout, mesh)
        change = [0] * (max(1, len(self.steps)) + 1)
        for name, live in self.live.items():
            elements = part(prod(self._tensors[name]), self.stored_names[name], over, mesh)
            change[live.start] += elements
            change[live.stop] -= elements
        live_elements = peak = 0
        done = unique = 0
        moved: Counter[tuple[str, str]] = Counter()
        reports: dict[Step, Report] = {}
        for at, more in enumerate(change[:-1]):
            live_elements += more
            peak = max(peak, live_elements)
            if at < len(self.steps):
                step = self.steps[at]
                report = reports[step] = reports.get(step) or step.report(over, mesh)
                peak = max(peak, live_elements + report.peak)
                done, unique = done + report.done, unique + report.unique
                moved.update(report.moved)
        return Report(mesh, peak, done, unique, dict(sorted(moved.items())))

    def read_rules(self, layout: Layout, mesh: Mesh) -> dict[str, str]:
        """Returns a layout's rules that have an effect on a mesh.

        Raises:
            PlanError: see `Operators.report`.
        """
        for name in layout.over:
            if name not in self.sizes and name not in self.whole:
                raise PlanError(
                    f"the layout {layout} shards {name!r}, which is an index of no operator; they have "
                    f"{', '.join(sorted(self.sizes)) or 'no index that may be sharded'}"
                )
        over = {name: dimension for name, dimension in layout.over.items() if dimension in mesh.dimensions}
        for name, dimension in over.items():
            if name in self.whole:
                raise PlanError(f"the layout {layout} shards {name!r}, but {self.whole[name]}; remove the rule")
            for size in self.sizes[name]:
                if size % mesh.dimensions[dimension]:
                    raise PlanError(
                        f"the layout {layout} shards {name!r}, which has size {size} in an operator, over "
                        f"{dimension}:{mesh.dimensions[dimension]}, which does not divide it; choose another size, or "
                        f"remove the rule {name}:{dimension}"
                    )
        for together, where in self.apart.items():
            name_on: dict[str, str] = {}
            for name in sorted(together & over.keys()):
                if (other := name_on.setdefault(over[name], name)) != name:
                    raise PlanError(
                        f"the layout {layout} shards both {other!r} and {name!r} over {over[name]!r}, but {where} has "
                        "both; remove one of the rules"
                    )
        return over

    @cached_property
    def apart(self) -> dict[frozenset[str], str]:
        """Sets of names no two of which may lie on one dimension of a mesh, each with what has them all."""
        apart: dict[frozenset[str], str] = {}
        for operator, step in zip(self._operators, self.steps, strict=True):
            apart.setdefault(step.names, f"{operator.text!r} (line {operator.number})")
        for tensor, names in self.stored_names.items():
            apart.setdefault(frozenset(name for name in names if name), f"the tensor {tensor!r}")
        return apart
