"""Searches the cheapest cut of all tensors and operators, for one cut or several at once.

A tensor is stored cut along a dimension, or whole in both halves of the ranks. An operator takes one of its indices:
each half computes half of it, for which it needs a part of each operand, and computes a part of the result, or a
partial sum. The cost is the elements that the halves move (Tofu, Wang et al., EuroSys 2019, section 5), a sum over
pairs: an operator's index and the scheme of a tensor that it reads or computes. Bucket elimination minimises it
exactly, whatever the graph: what Tofu groups (the backward of an operator with its forward, a weight with its gradient
and update, chains of element-wise operators) has small tables, and is eliminated first at no loss. Only equal time
steps are chosen for together, where tables would become too large (`_find_equal_time_steps`).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pipedream.core.box import Box, count_elements, overlap
from pipedream.extensions.meshes.layouts.description.operators import Operators, find_box
from pipedream.extensions.meshes.layouts.description.text import Access, Affine, Operator
from pipedream.extensions.meshes.layouts.search.minimise import (
    Costs,
    Elimination,
    Table,
    Variable,
    find_elimination_order,
)

_UNEVEN = 100
"""Times the elements, where halves would not be equal (as in the authors' prototype)."""


class Halves(NamedTuple):
    """A tensor in two halves of the ranks.

    Attributes:
        first, second: part of each half; the same where it is whole.
        is_pending: both have partial sums.
        is_even: both do the same amount of work.
    """

    first: Box
    second: Box
    whole: Box
    is_pending: bool = False
    is_even: bool = True


def _split_range(values: range) -> tuple[range, range]:
    middle = values.start + -(-len(values) // 2)
    return range(values.start, middle), range(middle, values.stop)


def halve_box(box: Box, cut: int | None, *, second: bool = False) -> Box:
    """Returns one half of a tensor; where it does not divide, the first is larger."""
    return box if cut is None else (*box[:cut], _split_range(box[cut])[second], *box[cut + 1 :])


def halve_index(ranges: Mapping[str, range], index: str | None, *, second: bool = False) -> dict[str, range]:
    """Returns what one half computes."""
    return dict(ranges) if index is None else {**ranges, index: _split_range(ranges[index])[second]}


def halve_tensor(box: Box, cut: int | None) -> Halves:
    """Returns the halves of a tensor while no operator uses it."""
    is_even = cut is None or len(box[cut]) % 2 == 0
    return Halves(halve_box(box, cut), halve_box(box, cut, second=True), box, is_even=is_even)


def halve_access(
    access: Access, shape: tuple[int, ...], ranges: Mapping[str, range], index: str | None, *, is_result: bool
) -> Halves:
    """Returns the halves that an operator reads or computes, where an index is halved."""
    whole = find_box(access, ranges, shape)
    if index is None:
        return Halves(whole, whole, whole)
    first, second = _split_range(ranges[index])
    is_even = len(first) == len(second)
    if not any(name == index for expression in access.indices if expression for name, _ in expression.terms):
        return Halves(whole, whole, whole, is_result, is_even)
    first_box, second_box = (find_box(access, {**ranges, index: half}, shape) for half in (first, second))
    return Halves(first_box, second_box, whole, is_even=is_even)


def is_offered(step: Operator, shapes: Sequence[tuple[int, ...]], ranges: Mapping[str, range], index: str) -> bool:
    """Whether an operator may be halved along an index; `shapes` are those of its `accesses`.

    Not where the halves would compute the same elements of the result, or need more in common than of their own.
    """
    for access, shape in zip(step.accesses, shapes, strict=True):
        if not any(expression and expression.plain is None for expression in access.indices):
            continue
        is_result = access is step.output
        halves = halve_access(access, shape, ranges, index, is_result=is_result)
        common = 0 if halves.first == halves.second else count_elements(overlap(halves.first, halves.second))
        if common and (is_result or 2 * common > count_elements(halves.first)):
            return False
    return True


def count_moved(source: Halves, target: Halves) -> int:
    """Returns the elements that both halves of the ranks together get from each other.

    Those of the authors' prototype: partial sums r to a cut |r|, to a whole 2|r|; a whole to anything 0; a cut to a
    whole |r|, and what the target has beyond the source; from one cut to another what each lacks.
    """
    if not (source.is_even and target.is_even):
        return _UNEVEN * (count_elements(source.whole) + count_elements(target.whole))
    to_whole = target.first == target.second
    if source.is_pending:
        return (2 if to_whole else 1) * count_elements(source.whole)
    from_whole = source.first == source.second
    if to_whole:
        return count_elements(target.whole) - (count_elements(overlap(source.whole, target.whole)) if from_whole else 0)
    if from_whole:
        return 0
    return count_elements(overlap(source.first, target.second)) + count_elements(overlap(source.second, target.first))


Scheme = int | None
Index = str | None

Allowed = Callable[[Variable, Any], Sequence[Any]]
"""A tensor and its part, or the number of an operator and its indices' ranges -> its schemes or indices."""
_Taken = tuple[tuple[Any, Any], ...]
"""For each cut a choice, and the part or the ranges before it."""
_Pair = tuple[int, str, tuple[Affine | None, ...], bool]
"""An operator, a tensor, its indices, and whether it is the result."""
_TENSOR = re.compile(r"\w+\s*\[")


@dataclass(frozen=True)
class Halving:
    """One cut of all tensors and operators in two halves.

    Attributes:
        schemes: tensor -> the dimension that is cut, or None.
        indices: index of each operator, or None where both halves compute all of it.
        elements: elements that the halves move, once they are counted; in the i-th cut (from 0) 2**i pairs of them do.
    """

    schemes: Mapping[str, Scheme]
    indices: tuple[Index, ...]
    elements: int = 0


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

    def after(self, choice: Halving) -> State:
        """Returns that of the first half."""
        boxes = {name: halve_box(box, choice.schemes[name]) for name, box in self.boxes.items()}
        ranges = zip(self.ranges, choice.indices, strict=True)
        return State(boxes, tuple(halve_index(operator_ranges, index) for operator_ranges, index in ranges))


def list_choices(operators: Operators, variable: Variable, part: Any) -> list[Any]:
    """Returns all schemes of a tensor, or all indices of an operator.

    None is where both halves compute all of it, which is offered for copies, and where there is no index.
    """
    if isinstance(variable, str):
        return [None, *range(len(part))]
    step = operators.steps[variable]
    shapes = [operators.tensors[access.tensor] for access in step.accesses]
    choices = [index for index in step.sizes if not step.is_affine or is_offered(step, shapes, part, index)]
    return [*choices, None] if step.is_copy or not choices else choices


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
            self._choose_together(*_find_equal_time_steps(operators, tensors))
        order, cells = self._find_order(by_fill=True)
        if cells < self.cells:
            self._order, self.cells = order, cells

    def _choose_together(self, tensors: Mapping[str, str], steps: Sequence[int]) -> None:
        """Chooses together for several tensors, or operators; takes the one that chooses for each."""
        self._tensors, self._steps = tensors, steps
        self._pairs = Counter(
            (steps[number], tensors[access.tensor], access.indices, access is step.output)
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

    def find_cheapest(self, state: State, cuts: int = 1, most: int = 1) -> tuple[int, Iterator[tuple[Halving, ...]]]:
        """Returns the fewest elements that some cuts move, and at most so many choices that move as few.

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
            tuple(self._build_choice(chosen_ways, at) for at in range(cuts)) for chosen_ways in choices
        )

    def count_elements(self, state: State, choice: Halving) -> int:
        """Returns the elements that one cut moves."""
        total = 0
        for pair, times in self._pairs.items():
            step, tensor, *_ = pair
            index: _Taken = ((choice.indices[step], state.ranges[step]),)
            scheme: _Taken = ((choice.schemes[tensor], state.boxes[tensor]),)
            total += times * round(self._compute_costs(pair, [index], [scheme]).item())
        return total

    def choose_greedily(self, state: State) -> Halving:
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
        ways: dict[Variable, _Taken] = {}
        for tensor in tensors:
            around = [tables for tables in costs.values() if tensor in tables]
            totals = np.zeros(len(values[tensor]))
            for tables in around:
                others = [table.min(axis=1, keepdims=True) for name, table in tables.items() if name != tensor]
                totals += sum(others, tables[tensor]).min(axis=0)
            at = int(np.argmin(totals))
            ways[tensor] = values[tensor][at]
            for tables in around:
                tables[tensor] = tables[tensor][:, [at]]
        for number, tables in costs.items():
            ways[number] = values[number][int(np.argmin(sum(table[:, 0] for table in tables.values())))]
        return self._build_choice(ways, 0)

    def _build_choice(self, ways: Mapping[Variable, _Taken], at: int) -> Halving:
        schemes = {name: ways[variable][at][0] for name, variable in self._tensors.items()}
        return Halving(schemes, tuple(ways[variable][at][0] for variable in self._steps))

    def _list_ways(self, variable: Variable, part: Any, cuts: int) -> list[_Taken]:
        if not cuts:
            return [()]
        ways = []
        for choice in self.allowed(variable, part):
            half = halve_box(part, choice) if isinstance(variable, str) else halve_index(part, choice)
            for rest in self._list_ways(variable, half, cuts - 1):
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
                used = [halve_access(access, shape, way[at][1], way[at][0], is_result=is_result) for way in steps]
                stored = [halve_tensor(way[at][1], way[at][0]) for way in tensors]
                pairs = ((store, use) for use, store in product(used, stored))
                moved = [count_moved(use, store) if is_result else count_moved(store, use) for store, use in pairs]
                costs += 2**at * np.reshape(moved, costs.shape)
            self._cost_tables[key] = costs
        return self._cost_tables[key]


def _make_hashable(ways: list[_Taken]) -> object:
    return tuple(
        (choice, tuple(part.items()) if isinstance(part, dict) else part) for way in ways for choice, part in way
    )


def _find_equal_time_steps(operators: Operators, groups: Mapping[str, str]) -> tuple[dict[str, str], list[int]]:
    """Returns for each tensor and each operator one that is cut like it, in an unrolled recurrent network.

    This is Tofu's coarsening (EuroSys 2019, section 5.1).

    Operators of one form that use the same weight are equal steps in time. So are those of one form that use, as the
    same operand, tensors of equal steps, or that compute them, and that have the same weights; where a tensor has
    several such readers, each in turn. A weight is an input that should be like other tensors, such as its gradient.

    Args:
        groups: tensor -> one that shares its layout.
    """
    from scipy.cluster.hierarchy import DisjointSet  # here, because it takes a third of a second

    forms = [  # without the names of tensors, with their sizes
        f"{_TENSOR.sub('[', step.text)} {[operators.tensors[access.tensor] for access in step.accesses]}"
        for step in operators.steps
    ]
    readers: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for number, step in enumerate(operators.steps):
        for at, access in enumerate(step.accesses):
            readers[access.tensor, forms[number], at].append(number)
    tensors, steps = DisjointSet(operators.tensors), DisjointSet(range(len(operators.steps)))
    for name, group in groups.items():
        tensors.merge(group, name)
    weights = {name for names in operators.groups if len(names) > 1 for name in names} & set(operators.inputs)
    changes = [same for (name, _, _), same in readers.items() if name in weights]
    of_weights = set(weights)  # and what is computed from them alone
    for step in operators.steps:
        if {access.tensor for access in step.operands} <= of_weights:
            of_weights.add(step.result)
    weight_of = _map_to_weights(operators, groups, weights)
    weights_read = [
        [access.tensor for access in step.operands if access.tensor in of_weights] for step in operators.steps
    ]
    before = -1
    while changes and before != (before := steps.n_subsets):
        for first, *others in changes:
            for other in others:
                pairs = list(zip(operators.steps[first].accesses, operators.steps[other].accesses, strict=True))
                if any(
                    weight_of.get(first_access.tensor) != weight_of.get(other_access.tensor)
                    for first_access, other_access in pairs
                ):
                    continue
                if steps.merge(first, other):
                    for first_access, other_access in pairs:
                        tensors.merge(first_access.tensor, other_access.tensor)
        changes = _group_equal_readers(readers, weights_read, tensors, steps)
    first_tensor: dict[object, str] = {}
    first_step: dict[object, int] = {}
    return (
        {name: first_tensor.setdefault(tensors[name], name) for name in operators.tensors},
        [first_step.setdefault(steps[number], number) for number in range(len(operators.steps))],
    )


def _map_to_weights(operators: Operators, groups: Mapping[str, str], weights: set[str]) -> dict[str, str]:
    """Returns the weight that tensors belong to: those like it, and terms that add up to those, one for each step."""
    group_of_weights = {groups[name] for name in weights}
    owner = {name: group for name, group in groups.items() if group in group_of_weights}
    for step in reversed(operators.steps):
        if step.result in owner and not step.reduced:
            size = prod(operators.tensors[step.result])
            for access in step.operands:
                if prod(operators.tensors[access.tensor]) == size:
                    owner.setdefault(access.tensor, owner[step.result])
    return owner


def _group_equal_readers(
    readers: Mapping[tuple[str, str, int], list[int]], weights: Sequence[Sequence[str]], tensors: Any, steps: Any
) -> list[list[int]]:
    """Returns operators that use, in the same way and turn, tensors of one class (a `DisjointSet`), and are apart."""
    turns: dict[object, list[int]] = defaultdict(list)
    for (name, form, at), numbers in readers.items():
        times: Counter[object] = Counter()
        for number in numbers:
            classes = tuple(tensors[weight] for weight in weights[number])
            turns[tensors[name], form, at, classes, times[classes]].append(number)
            times[classes] += 1
    return [same for same in turns.values() if len({steps[number] for number in same}) > 1]
