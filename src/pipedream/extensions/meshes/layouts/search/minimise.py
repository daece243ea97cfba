"""Minimises a sum of tables over variables with few values each: bucket elimination (Dechter 1999)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from heapq import heapify, heappop, heappush
from itertools import islice
from math import prod
from random import Random
from typing import Any

import numpy as np

from pipedream.core.errors import PlanError

_MAX_CELLS = 200_000_000
"""The most cells of a table, which has then 1.6 GB."""

Costs = np.ndarray[Any, np.dtype[np.float64]]
Variable = str | int


@dataclass(frozen=True)
class Table:
    """A cost for each combination of values of some variables.

    Attributes:
        costs: one axis for each variable.
    """

    variables: tuple[Variable, ...]
    costs: Costs

    def aligned(self, variables: Sequence[Variable]) -> Costs:
        """Returns the costs with an axis for each variable, of size 1 where the table lacks it."""
        order = sorted(range(len(self.variables)), key=lambda at: variables.index(self.variables[at]))
        sizes = [
            self.costs.shape[self.variables.index(variable)] if variable in self.variables else 1
            for variable in variables
        ]
        return self.costs.transpose(order).reshape(sizes)


def find_elimination_order(
    scopes: Sequence[Sequence[Variable]], sizes: Mapping[Variable, int], *, by_fill: bool
) -> tuple[list[Variable], int]:
    """Returns an order of the variables, and the cells of the largest table.

    Next is the variable with the smallest table, or `by_fill` the one whose elimination brings together the fewest
    pairs of variables that share no table yet (min-fill; Dechter 2003, section 4.1.3), which takes longer to find and
    makes smaller tables.
    """
    neighbours: dict[Variable, set[Variable]] = {name: set() for name in sizes}
    for scope in scopes:
        for name in scope:
            neighbours[name] |= set(scope) - {name}

    def cost(name: Variable) -> tuple[int, int]:
        near = neighbours[name]
        twice = sum(len(near - neighbours[other]) - 1 for other in near) if by_fill else 0
        return twice, sizes[name] * prod(sizes[other] for other in near)

    order, largest = [], 0
    costs = {name: cost(name) for name in sizes}
    waiting = [(priority, at, name) for at, (name, priority) in enumerate(costs.items())]
    turn = {name: at for _, at, name in waiting}
    heapify(waiting)
    while waiting:
        priority, _, name = heappop(waiting)
        if costs.get(name) != priority:
            continue  # it has changed since
        order.append(name)
        largest = max(largest, costs.pop(name)[1])
        near = neighbours.pop(name)
        for other in near:
            neighbours[other] |= near
            neighbours[other] -= {name, other}
        changed = near.union(*(neighbours[other] for other in near)) if priority[0] else near
        for other in changed:
            costs[other] = cost(other)
            heappush(waiting, (costs[other], turn[other], other))
    return order, largest


class Elimination:
    """The minimum of a sum of tables.

    Args:
        tables: costs are finite.
        sizes: variable -> number of its values.
        order: the order in which variables are eliminated.

    Attributes:
        least: the minimum.

    Raises:
        PlanError: a sum of tables has too many cells for the memory of a machine.
    """

    def __init__(self, tables: Sequence[Table], sizes: Mapping[Variable, int], order: Sequence[Variable]) -> None:
        place = {name: at for at, name in enumerate(order)}
        self._buckets: list[tuple[Variable, Table]] = []  # each variable, and the sum of the tables that had it
        waiting: dict[Variable, list[Table]] = {name: [] for name in order}
        self.least = 0.0
        for table in tables:
            self._wait(table, waiting, place)
        for name in order:
            bucket = waiting.pop(name)
            others = {variable for table in bucket for variable in table.variables} - {name}
            variables = (name, *sorted(others, key=place.__getitem__))
            shape = [sizes[variable] for variable in variables]
            if prod(shape) > _MAX_CELLS:
                raise PlanError(
                    f"the cheapest of all choices for {len(order)} tensors and operators was asked for, but its search "
                    f"needs a table of {prod(shape):.1g} entries, more than {_MAX_CELLS:.1g}; take the method "
                    "'spartan', or partition parts of the model, such as its layers"
                )
            summed = Table(variables, reduce(np.add, (table.aligned(variables) for table in bucket), np.zeros(shape)))
            self._buckets.append((name, summed))
            self._wait(Table(variables[1:], summed.costs.min(axis=0)), waiting, place)

    def _wait(self, table: Table, waiting: dict[Variable, list[Table]], place: Mapping[Variable, int]) -> None:
        if table.variables:
            waiting[min(table.variables, key=place.__getitem__)].append(table)
        else:
            self.least += float(table.costs)

    def choices(self, most: int) -> Iterator[dict[Variable, int]]:
        """Yields the choices of values with the least sum, each once.

        Of more than `most` some are drawn at random, for those that follow each other are nearly the same.
        """
        choices = list(islice(self._iterate(), most + 1))
        if len(choices) <= most or most == 1:
            yield from choices[:most]
            return
        random, yielded = Random(0), set()
        for _ in range(most):
            choice: dict[Variable, int] = {}
            for name, table in reversed(self._buckets):
                choice[name] = random.choice(_find_tied(table, choice))
            if (values := tuple(choice.values())) not in yielded:
                yielded.add(values)
                yield choice

    def _iterate(self) -> Iterator[dict[Variable, int]]:
        chosen: dict[Variable, int] = {}
        tied: list[list[int]] = []  # of each variable from the last eliminated on, values that are still to be taken
        while True:
            while len(tied) < len(self._buckets):
                name, table = self._buckets[-1 - len(tied)]
                tied.append(_find_tied(table, chosen)[::-1])
                chosen[name] = tied[-1].pop()
            yield dict(chosen)
            while tied and not tied[-1]:
                tied.pop()
            if not tied:
                return
            chosen[self._buckets[-len(tied)][0]] = tied[-1].pop()


def _find_tied(table: Table, chosen: Mapping[Variable, int]) -> list[int]:
    """Returns the values of a bucket's variable that are best with those of the other variables."""
    at: Any = (slice(None), *(chosen[variable] for variable in table.variables[1:]))
    row = table.costs[at]
    values: list[int] = np.flatnonzero(row == row.min()).tolist()
    return values
