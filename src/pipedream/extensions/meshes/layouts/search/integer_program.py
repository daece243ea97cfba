"""Layouts by name as an integer program (auto_mtf, in Mesh-TensorFlow's repository).

A cost is a sum of terms, each of which depends on a few names. For a set of names there is a variable for each way to
cut them, of which one is 1. So each term is linear, and terms with the same names share variables.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from pipedream.core.errors import PlanError

Over = Mapping[str, str]
Row = dict[int, float]
"""Variable -> coefficient."""


@dataclass(frozen=True)
class Term:
    """A cost that depends on how some names are sharded.

    Attributes:
        source: what has this cost; terms with equal names and sources are equal.
        value: from the dimensions of the mesh that shard names to the cost.
    """

    names: frozenset[str]
    source: Hashable
    value: Callable[[Over], float] = field(compare=False)


class IntegerProgram:
    """The variables, and the rows that make them agree.

    Args:
        options: name -> the dimensions of the mesh that may shard it.
        apart: sets of names no two of which may lie on one dimension.
        terms: all that rows will have.

    Attributes:
        peak: a variable of its own, the first, which is not negative.
    """

    peak = 0

    def __init__(
        self, options: Mapping[str, Sequence[str]], apart: Iterable[frozenset[str]], terms: Iterable[Term]
    ) -> None:
        self._options = options
        self._apart = _keep_largest(names.intersection(options) for names in apart)
        self._blocks = _keep_largest((frozenset[str](), *(term.names.intersection(options) for term in terms)))
        pairs = [(name, dimension) for name, dimensions in options.items() for dimension in dimensions]
        self._cut = {pair: at for at, pair in enumerate(pairs, 1)}
        self._ways: dict[frozenset[str], list[tuple[int, Over]]] = {}
        variables = 1 + len(pairs)
        for block in self._blocks:
            ways = list(self._yield_ways(sorted(block), {}))
            self._ways[block] = list(enumerate(ways, variables))
            variables += len(ways)
        self.variables = variables
        self._rows: list[tuple[Row, float, float]] = list(self._yield_agreement())

    def _yield_ways(self, names: Sequence[str], before: Over) -> Iterator[Over]:
        if not names:
            yield before
            return
        name, *rest = names
        yield from self._yield_ways(rest, before)
        for dimension in self._options[name]:
            taken = {other for other, used in before.items() if used == dimension}
            if not any(name in together and taken & together for together in self._apart):
                yield from self._yield_ways(rest, {**before, name: dimension})

    def _yield_agreement(self) -> Iterator[tuple[Row, float, float]]:
        """Yields rows with their least and greatest value."""
        for ways in self._ways.values():
            yield {at: 1.0 for at, _ in ways}, 1, 1
        for (name, dimension), cut in self._cut.items():
            for block, ways in self._ways.items():
                if name in block:
                    yield {cut: -1.0} | {at: 1.0 for at, over in ways if over.get(name) == dimension}, 0, 0
        # What a block has together is already apart there.
        for name, dimensions in self._options.items():
            if not any(name in block for block in self._blocks):
                yield {self._cut[name, dimension]: 1.0 for dimension in dimensions}, 0, 1
        for together in self._apart:
            for dimension in sorted({dimension for name in together for dimension in self._options[name]}):
                row = {self._cut[name, dimension]: 1.0 for name in together if dimension in self._options[name]}
                if len(row) > 1 and not any(together <= block for block in self._blocks):
                    yield row, 0, 1

    def weigh(self, weights: Mapping[Term, float]) -> Row:
        """Returns the sum of some terms, each with a weight."""
        row: Row = {}
        for term, weight in weights.items():
            names = term.names.intersection(self._options)
            block = next(block for block in self._blocks if names <= block)
            for at, over in self._ways[block]:
                value = weight * term.value({name: over[name] for name in names if name in over})
                row[at] = row.get(at, 0.0) + value
        return row

    def count_sharded(self, weight: float) -> Row:
        """Returns the number of names that are sharded, times a weight."""
        return dict.fromkeys(self._cut.values(), weight)

    def require_at_most(self, row: Row, most: float) -> None:
        """Adds a constraint."""
        self._rows.append((row, -np.inf, most))

    def exclude(self, over: Over) -> None:
        """Excludes one solution."""
        row = {at: -1.0 if over.get(name) == dimension else 1.0 for (name, dimension), at in self._cut.items()}
        self._rows.append((row, 1.0 - sum(value < 0 for value in row.values()), np.inf))

    def minimise(self, objective: Row) -> dict[str, str] | None:
        """Returns how names are sharded where an objective is least, or None if nothing satisfies the constraints.

        HiGHS stops within 1e-6 of the least value and of each constraint's bound, so both should be near 1.
        """
        costs, whole = np.zeros(self.variables), np.zeros(self.variables)
        costs[list(objective)] = list(objective.values())
        whole[list(self._cut.values())] = 1  # the others follow
        high = np.ones(self.variables)
        high[self.peak] = np.inf
        entries = [
            (at, variable, value) for at, (row, _, _) in enumerate(self._rows) for variable, value in row.items()
        ]
        at, variable, value = zip(*entries, strict=True)
        matrix = csr_array((value, (at, variable)), shape=(len(self._rows), self.variables))
        solution = milp(
            costs,
            integrality=whole,
            bounds=Bounds(0, high),
            constraints=LinearConstraint(matrix, [low for _, low, _ in self._rows], [high for *_, high in self._rows]),
            options={"mip_rel_gap": 0.0},
        )
        if solution.status == 2:
            return None
        if solution.x is None:
            raise PlanError(
                f"HiGHS found no layout: {solution.message}; fix some names so that there are fewer to choose from"
            )
        return {name: dimension for (name, dimension), at in self._cut.items() if solution.x[at] > 0.5}


def _keep_largest(sets: Iterable[frozenset[str]]) -> list[frozenset[str]]:
    """Returns the sets that are part of no other, the smallest first."""
    largest: list[frozenset[str]] = []
    for names in sorted(set(sets), key=lambda names: (-len(names), sorted(names))):
        if not any(names <= other for other in largest):
            largest.append(names)
    return largest[::-1]
