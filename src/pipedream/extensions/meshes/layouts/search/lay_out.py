"""Finds a layout by names: the least memory, as Mesh-TensorFlow's auto_mtf does, or the least time."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from math import prod

import numpy as np

from pipedream.core.errors import PlanError
from pipedream.core.plan.ranks import Mesh
from pipedream.extensions.meshes.layout import Layout
from pipedream.extensions.meshes.layouts.description.named import NamedOperators, Report, Step, read_rates
from pipedream.extensions.meshes.layouts.description.operators import Operators
from pipedream.extensions.meshes.layouts.search.integer_program import IntegerProgram, Over, Row, Term

OBJECTIVES = ("memory", "time")


def lay_out(
    operators: Operators,
    mesh: Mesh,
    objective: str = "memory",
    fixed: Iterable[str] = (),
    *,
    memory_elements: int | None = None,
    operations_per_s: float | None = None,
    elements_per_s: float | Mapping[str, float] | None = None,
) -> Layout:
    """Chooses for each name of an index the dimension of a mesh that shards it in all operators, or none.

    A dimension of the mesh may shard a name if it divides all sizes of the name. No two indices of an operator lie on
    one dimension. Indices of expressions are not sharded, except the outermost of merged dimensions. `Operators.report`
    says what the layout costs.

    Args:
        objective: "memory", the least peak of a rank, and among equals the most names sharded; or "time", the fewest
            seconds (`Report.seconds`), and among equals the least peak.
        fixed: names that are not sharded.
        memory_elements: elements that fit on a rank; by default any number.
        operations_per_s: speed of a rank, for "time".
        elements_per_s: bandwidth of a rank, for "time"; for each dimension of the mesh, or for all.

    Raises:
        PlanError: an unknown name or dimension of the mesh, rates missing for "time" or given without it, or nothing
            fits.
    """
    if objective not in OBJECTIVES:
        raise PlanError(f"the objective {objective!r} was asked for; there are {' and '.join(OBJECTIVES)}")
    if memory_elements is not None and memory_elements < 1:
        raise PlanError(f"memory_elements is {memory_elements}; give at least 1, or nothing for no limit")
    rates: Mapping[str, float] = {}
    if objective == "time":
        if operations_per_s is None or elements_per_s is None:
            raise PlanError(
                "the objective 'time' needs operations_per_s, of a rank, and elements_per_s, that a rank sends over "
                "each dimension of the mesh; give both"
            )
        if not operations_per_s > 0:
            raise PlanError(f"operations_per_s is {operations_per_s}; give a positive number")
        rates = read_rates(elements_per_s, mesh)
    elif operations_per_s is not None or elements_per_s is not None:
        raise PlanError("operations_per_s and elements_per_s have no effect on the objective 'memory'; remove them")
    search = _Search(operators, mesh, _check_fixed(operators.named, fixed))
    if operations_per_s is None:
        layout = search.minimise_peak(memory_elements)
    else:
        layout = search.minimise_time(operations_per_s, rates, memory_elements)
    if layout is None:
        raise PlanError(_explain_shortage(search, memory_elements or 0))
    return layout


def _check_fixed(named: NamedOperators, fixed: Iterable[str]) -> frozenset[str]:
    names = frozenset(fixed)
    for name in sorted(names - named.sizes.keys() - named.whole.keys()):
        near = get_close_matches(name, [*named.sizes, *named.whole], n=1)
        raise PlanError(
            f"fixed has {name!r}, which is an index of no operator; "
            + (f"did you mean {near[0]!r}?" if near else f"they have {', '.join(sorted(named.sizes))}")
        )
    return names


class _Search:
    """The layouts of one step on one mesh, in which `fixed` names are not sharded."""

    def __init__(self, operators: Operators, mesh: Mesh, fixed: frozenset[str] = frozenset()) -> None:
        self.operators, self.mesh, self.fixed = operators, mesh, fixed
        named = operators.named
        self._steps = Counter(named.steps)
        fitting = {
            name: [
                dimension for dimension, ranks in mesh.dimensions.items() if all(size % ranks == 0 for size in sizes)
            ]
            for name, sizes in named.sizes.items()
            if name not in fixed
        }
        self._options = {name: dimensions for name, dimensions in fitting.items() if dimensions}
        self._uncut = self.report({})

    def report(self, over: Over) -> Report:
        return self.operators.report(_build_layout(over), self.mesh)

    def build_program(self, *others: Term) -> IntegerProgram:
        """Returns a program with these terms too, whose `peak` is that of a rank, as `_scale`."""
        memory_rows = _list_memory_rows(self.operators, self.mesh)
        terms = [*others, *(term for row in memory_rows for term in row)]
        program = IntegerProgram(self._options, self.operators.named.apart, terms)
        for elements in memory_rows:
            row = program.weigh({term: self._scale(weight) for term, weight in elements.items()})
            program.require_at_most({**row, program.peak: -1.0}, 0)
        return program

    def _scale(self, elements: float) -> float:
        """Returns elements of a rank so that the least possible peak is 1."""
        return elements * self.mesh.size / (self._uncut.peak or 1)

    def minimise_peak(self, memory_elements: int | None = None) -> Layout | None:
        """Returns the layout with the least peak, or None if it does not fit."""
        program = self.build_program()
        over = program.minimise({program.peak: 1.0}) or {}
        least = self.report(over).peak
        if memory_elements is not None and least > memory_elements:
            return None
        program.require_at_most({program.peak: 1.0}, self._scale(least))
        most_sharded = self._find_first(program, program.count_sharded(-1.0), lambda report: report.peak <= least)
        return _build_layout(most_sharded or over)

    def minimise_time(
        self, operations_per_s: float, elements_per_s: Mapping[str, float], memory_elements: int | None = None
    ) -> Layout | None:
        """Returns the layout with the fewest seconds that fits, or None."""

        def compute_seconds(step: Step, over: Over) -> float:
            return step.report(over, self.mesh).seconds(operations_per_s, elements_per_s)

        terms = {
            Term(
                _list_names(step.names, *(use.stored_names for use in step.uses)), step, partial(compute_seconds, step)
            ): count
            for step, count in self._steps.items()
        }
        program = self.build_program(*terms)
        # So that no layout has less than 1.
        scale = self.mesh.size / (self._uncut.seconds(operations_per_s, elements_per_s) or 1)
        seconds = program.weigh({term: count * scale for term, count in terms.items()})
        most = np.inf if memory_elements is None else memory_elements
        if memory_elements is not None:
            program.require_at_most({program.peak: 1.0}, self._scale(memory_elements))
        over = self._find_first(program, seconds, lambda report: report.peak <= most)
        if over is None:
            return None
        least = self.report(over).seconds(operations_per_s, elements_per_s) * (1 + 1e-9)
        program.require_at_most(seconds, least * scale)

        def is_as_good(report: Report) -> bool:
            return report.peak <= most and report.seconds(operations_per_s, elements_per_s) <= least

        return _build_layout(self._find_first(program, {program.peak: 1.0}, is_as_good) or over)

    def _find_first(self, program: IntegerProgram, objective: Row, accepts: Callable[[Report], bool]) -> Over | None:
        """Returns the best solution that satisfies the constraints exactly; the solver has tolerances."""
        while (over := program.minimise(objective)) is not None and not accepts(self.report(over)):
            program.exclude(over)
        return over


def _build_layout(over: Over) -> Layout:
    return Layout(",".join(f"{name}:{dimension}" for name, dimension in sorted(over.items())))


def _list_names(*rows: Iterable[str | None]) -> frozenset[str]:
    return frozenset(name for row in rows for name in row if name)


def _list_memory_rows(operators: Operators, mesh: Mesh) -> list[dict[Term, float]]:
    """Returns what a rank holds at each operator, without operators at which another one holds more of everything."""
    named = operators.named
    terms: dict[Term, int] = {}
    entries: list[tuple[int, int, int]] = []
    end = max(1, len(named.steps))

    def compute_share(over: Over) -> float:
        return 1 / prod(mesh.dimensions[dimension] for dimension in over.values())

    for name, live in named.live.items():
        term = terms.setdefault(Term(_list_names(named.stored_names[name]), "share", compute_share), len(terms))
        size = prod(operators.tensors[name])
        entries += [(live.start, term, size), (live.stop, term, -size)]
    for at, step in enumerate(named.steps):
        for use in step.uses:
            if use.names != use.stored_names:
                copied = Term(_list_names(use.names, use.stored_names), use, partial(use.count_copied, mesh=mesh))
                term = terms.setdefault(copied, len(terms))
                entries += [(at, term, 1), (at + 1, term, -1)]
    change = np.zeros((end + 1, len(terms)))
    for at, term, size in entries:
        change[at, term] += size
    rows = np.unique(np.cumsum(change, axis=0)[:end], axis=0)
    maximal = np.zeros((0, len(terms)))
    for row in rows[np.argsort(-rows.sum(axis=1), kind="stable")]:
        if not (maximal >= row).all(axis=1).any():
            maximal = np.vstack([maximal, row])
    return [{term: float(row[at]) for term, at in terms.items() if row[at]} for row in maximal]


def _explain_shortage(search: _Search, memory_elements: int) -> str:
    """Returns an error that says by how much, and what would fit."""
    least = search.minimise_peak() or Layout()
    peak = search.operators.report(least, search.mesh).peak
    advice = [f"give each rank {peak}"]
    if search.fixed:
        free = _Search(search.operators, search.mesh).minimise_peak(memory_elements)
        advice += [f"let {', '.join(sorted(search.fixed))} be sharded ({free} fits)"] if free else []
    for mesh in _list_larger_meshes(search.mesh):
        if fitting := _Search(search.operators, mesh, search.fixed).minimise_peak(memory_elements):
            advice.append(f"take a mesh such as {mesh} ({fitting})")
            break
    return (
        f"no layout on the mesh {search.mesh} fits {memory_elements} elements on a rank: the least is {peak}, by "
        f"{least}, {peak - memory_elements} too many; {', or '.join(advice)}"
    )


def _list_larger_meshes(mesh: Mesh) -> list[Mesh]:
    """Returns meshes with one dimension up to 64 times as large, the smallest first."""
    return [
        Mesh(",".join(f"{name}:{size * times if name == enlarged else size}" for name, size in mesh.dimensions.items()))
        for times in (2, 4, 8, 16, 32, 64)
        for enlarged in mesh.dimensions
    ]
