"""Searches the cheapest cut of all tensors and operators, for one cut or several at once.

The cost is a sum over pairs: an operator's index and the scheme of a tensor that it reads or computes. Bucket
elimination minimises it exactly, whatever the graph: what Tofu groups (the backward of an operator with its forward, a
weight with its gradient and update, chains of element-wise operators) has small tables, and is eliminated first at no
loss. Only equal time steps are chosen for together, where tables would become too large (`find_equal_time_steps`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from typing import Any

import numpy as np

from pipedream.core.plan.mesh import Box
from pipedream.layouts.description.operators import Operators
from pipedream.layouts.description.text import Access, Affine
from pipedream.layouts.search.cost import count_moved, halve_access, halve_box, halve_index, halve_tensor, is_offered
from pipedream.layouts.search.minimise import Costs, Elimination, Table, Variable, find_elimination_order
from pipedream.layouts.search.time_steps import find_equal_time_steps

Scheme = int | None
Index = str | None


@dataclass(frozen=True)
class Choice:
    """One cut of all tensors and operators.

    Attributes:
        schemes: tensor -> the dimension that is cut, or None.
        indices: index of each operator, or None where both halves compute all of it.
    """

    schemes: Mapping[str, Scheme]
    indices: tuple[Index, ...]


@dataclass(frozen=True)
class State:
    """The tensors and operations of one rank after some cuts.

    Attributes:
        boxes: tensor -> part.
        ranges: for each operator, index -> values.
    """

    boxes: Mapping[str, Box]
    ranges: tuple[Mapping[str, range], ...]

    @classmethod
    def uncut(cls, operators: Operators) -> State:
        """Returns that of a single rank."""
        boxes = {name: tuple(map(range, shape)) for name, shape in operators.tensors.items()}
        return cls(boxes, tuple({name: range(size) for name, size in step.sizes.items()} for step in operators.steps))

    def after(self, choice: Choice) -> State:
        """Returns that of the first half."""
        boxes = {name: halve_box(box, choice.schemes[name]) for name, box in self.boxes.items()}
        ranges = zip(self.ranges, choice.indices, strict=True)
        return State(boxes, tuple(halve_index(operator_ranges, index) for operator_ranges, index in ranges))


Allowed = Callable[[Variable, Any], Sequence[Any]]
"""A tensor and its part, or the number of an operator and its indices' ranges -> its schemes or indices."""


def list_choices(operators: Operators, variable: Variable, part: Any) -> list[Any]:
    """Returns all schemes of a tensor, or all indices of an operator.

    None is where both halves compute all of it, which is offered for copies, and where there is no index.
    """
    if isinstance(variable, str):
        return [None, *range(len(part))]
    step = operators.steps[variable]
    shapes = [operators.tensors[access.tensor] for access in step.accesses]
    choices = [index for index in step.sizes if not step.is_affine or is_offered(step, shapes, part, index)]
    return [*choices, None] if step.line.is_copy or not choices else choices


class Search:
    """The cheapest cuts of a step.

    Args:
        allowed: the schemes and indices to choose from; by default all.
        uniform: several cuts at once are along one dimension, or one index.
        most_cells: the most cells of a table; where one would have more, equal time steps are cut alike.

    Attributes:
        uncut: the state of a single rank.
        sizes: variable -> number of its choices, about.
        cells: cells of the largest table for one cut.
    """

    def __init__(
        self,
        operators: Operators,
        allowed: Allowed | None = None,
        *,
        uniform: bool = False,
        most_cells: int = 1_000_000,
    ) -> None:
        self.operators = operators
        self.allowed = allowed or partial(list_choices, operators)
        self.uniform = uniform
        self.uncut = State.uncut(operators)
        self.cells = 0
        self._first: dict[int, Elimination] = {}
        self._cost_tables: dict[object, Costs] = {}
        tensors = {name: group[0] for group in operators.groups for name in group}
        self._choose_together(tensors, list(range(len(operators.steps))))
        if self.cells > most_cells:
            self._choose_together(*find_equal_time_steps(operators, tensors))
        order, cells = self._find_order(by_fill=True)
        if cells < self.cells:
            self._order, self.cells = order, cells

    def _choose_together(self, tensors: Mapping[str, str], steps: Sequence[int]) -> None:
        """Chooses together for several tensors, or operators; takes the one that chooses for each."""
        self._tensors, self._steps = tensors, steps
        self._pairs = Counter(
            (steps[number], tensors[access.tensor], access.indices, access is step.line.result)
            for number, step in enumerate(self.operators.steps)
            for access in step.accesses
        )
        variables: list[Variable] = [*dict.fromkeys(tensors.values()), *dict.fromkeys(steps)]
        self.sizes = {
            variable: len(list_choices(self.operators, variable, self._select_part(self.uncut, variable)))
            for variable in variables
        }
        self._order, self.cells = self._find_order(by_fill=False)

    def _find_order(self, *, by_fill: bool) -> tuple[list[Variable], int]:
        return find_elimination_order([pair[:2] for pair in self._pairs], self.sizes, by_fill=by_fill)

    @staticmethod
    def _select_part(state: State, variable: Variable) -> Any:
        return state.boxes[variable] if isinstance(variable, str) else state.ranges[variable]

    def find_cheapest(self, state: State, cuts: int = 1, most: int = 1) -> tuple[int, Iterator[tuple[Choice, ...]]]:
        """Returns the fewest elements that some cuts move, and choices that move as few.

        Args:
            most: choices; see `Elimination.choices`.

        Raises:
            PlanError: a table would be too large.
        """
        values = {
            variable: self._list_ways(variable, self._select_part(state, variable), cuts) for variable in self._order
        }
        elimination = self._first.get(cuts) if state is self.uncut else None
        if elimination is None:
            tables = [
                Table(pair[:2], times * self._compute_costs(pair, values[pair[0]], values[pair[1]]))
                for pair, times in self._pairs.items()
            ]
            elimination = Elimination(
                tables, {variable: len(options) for variable, options in values.items()}, self._order
            )
        if state is self.uncut:
            self._first[cuts] = elimination
        choices = (
            {variable: values[variable][at] for variable, at in chosen.items()} for chosen in elimination.choices(most)
        )
        return round(elimination.least), (
            tuple(self._build_choice(taken, at) for at in range(cuts)) for taken in choices
        )

    def count_elements(self, state: State, choice: Choice) -> int:
        """Returns the elements that one cut moves."""
        total = 0
        for pair, times in self._pairs.items():
            step, tensor, *_ = pair
            index: _Taken = ((choice.indices[step], state.ranges[step]),)
            scheme: _Taken = ((choice.schemes[tensor], state.boxes[tensor]),)
            total += times * round(self._compute_costs(pair, [index], [scheme]).item())
        return total

    def choose_greedily(self, state: State) -> Choice:
        """Returns one cut: tensor after tensor, the largest first, takes the scheme that is cheapest with those before.

        Operators take their cheapest index, with the cheapest schemes of the tensors that have none yet.
        """
        values = {
            variable: self._list_ways(variable, self._select_part(state, variable), 1) for variable in self._order
        }
        costs: dict[Variable, dict[str, Costs]] = defaultdict(dict)  # operator -> tensor -> costs of index and scheme
        for pair, times in self._pairs.items():
            step, tensor = pair[:2]
            costs[step][tensor] = costs[step].get(tensor, 0) + times * self._compute_costs(
                pair, values[step], values[tensor]
            )
        tensors = sorted(
            (variable for variable in self._order if isinstance(variable, str)),
            key=lambda variable: -prod(map(len, state.boxes[variable])),
        )
        taken: dict[Variable, _Taken] = {}
        for tensor in tensors:
            around = [tables for tables in costs.values() if tensor in tables]
            each = np.zeros(len(values[tensor]))
            for tables in around:
                others = [table.min(axis=1, keepdims=True) for name, table in tables.items() if name != tensor]
                each += sum(others, tables[tensor]).min(axis=0)
            at = int(np.argmin(each))
            taken[tensor] = values[tensor][at]
            for tables in around:
                tables[tensor] = tables[tensor][:, [at]]
        for number, tables in costs.items():
            taken[number] = values[number][int(np.argmin(sum(table[:, 0] for table in tables.values())))]
        return self._build_choice(taken, 0)

    def _build_choice(self, taken: Mapping[Variable, _Taken], at: int) -> Choice:
        schemes = {name: taken[variable][at][0] for name, variable in self._tensors.items()}
        return Choice(schemes, tuple(taken[variable][at][0] for variable in self._steps))

    def _list_ways(self, variable: Variable, part: Any, cuts: int) -> list[_Taken]:
        if not cuts:
            return [()]
        ways = []
        for choice in self.allowed(variable, part):
            left = halve_box(part, choice) if isinstance(variable, str) else halve_index(part, choice)
            for rest in self._list_ways(variable, left, cuts - 1):
                if not (self.uniform and rest and rest[0][0] != choice):
                    ways.append(((choice, part), *rest))
        return ways

    def _compute_costs(self, pair: _Pair, steps: list[_Taken], tensors: list[_Taken]) -> Costs:
        """Returns what an operator and a tensor move, for each choice of both, over all cuts."""
        _, tensor, indices, is_result = pair
        shape = self.operators.tensors[tensor]
        key = indices, is_result, shape, _make_hashable(steps), _make_hashable(tensors)
        if key not in self._cost_tables:
            access = Access(tensor, indices, 0)
            costs = np.zeros((len(steps), len(tensors)))
            for at in range(len(steps[0])):
                used = [halve_access(access, shape, taken[at][1], taken[at][0], is_result=is_result) for taken in steps]
                stored = [halve_tensor(taken[at][1], taken[at][0]) for taken in tensors]
                ways = ((kept, use) for use, kept in product(used, stored))
                each = [count_moved(use, kept) if is_result else count_moved(kept, use) for kept, use in ways]
                costs += 2**at * np.reshape(each, costs.shape)
            self._cost_tables[key] = costs
        return self._cost_tables[key]


_Taken = tuple[tuple[Any, Any], ...]
"""For each cut a choice, and the part or the ranges before it."""
_Pair = tuple[int, str, tuple[Affine | None, ...], bool]
"""An operator, a tensor, its indices, and whether it is the result."""


def _make_hashable(taken: list[_Taken]) -> object:
    return tuple(
        (choice, tuple(part.items()) if isinstance(part, dict) else part) for value in taken for choice, part in value
    )
