"""Finds the equal time steps of an unrolled recurrent network (Tofu's coarsening, EuroSys 2019, section 5.1)."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import prod

from pipedream.layouts.description.operator import Operator
from pipedream.layouts.description.operators import Operators

_TENSOR = re.compile(r"\w+\s*\[")


class _Classes:
    """Sets of tensors, or of operators, that can be united (union-find)."""

    def __init__(self) -> None:
        self._above: dict[object, object] = {}
        self.unions = 0

    def find(self, member: object) -> object:
        while (above := self._above.get(member, member)) != member:
            self._above[member] = member = self._above.get(above, above)
        return member

    def unite(self, member: object, other: object) -> bool:
        """Returns whether they were apart."""
        first, second = self.find(member), self.find(other)
        if first != second:
            self._above[second] = first
            self.unions += 1
        return first != second


def find_equal_time_steps(operators: Operators, groups: Mapping[str, str]) -> tuple[dict[str, str], list[int]]:
    """Returns for each tensor and each operator one that is cut like it.

    Operators of one form that use the same weight are equal steps in time. So are those of one form that use, as the
    same operand, tensors of equal steps, or that compute them, and that have the same weights; where a tensor has
    several such readers, each in turn. A weight is an input that should be like other tensors, such as its gradient.

    Args:
        groups: tensor -> one that shares its layout.
    """
    forms = [_describe_form(operators, step) for step in operators.steps]
    readers: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for number, step in enumerate(operators.steps):
        for at, access in enumerate(step.accesses):
            readers[access.tensor, forms[number], at].append(number)
    tensors, steps = _Classes(), _Classes()
    for name, group in groups.items():
        tensors.unite(group, name)
    weights = {name for names in operators.groups if len(names) > 1 for name in names} & set(operators.inputs)
    changes = [same for (name, _, _), same in readers.items() if name in weights]
    of_weights = set(weights)  # and what is computed from them alone
    for step in operators.steps:
        if {access.tensor for access in step.line.operands} <= of_weights:
            of_weights.add(step.result)
    weight_of = _map_to_weights(operators, groups, weights)
    weights_read = [
        [access.tensor for access in step.line.operands if access.tensor in of_weights] for step in operators.steps
    ]
    before = -1
    while changes and before != (before := steps.unions):
        for first, *others in changes:
            for other in others:
                pairs = list(zip(operators.steps[first].accesses, operators.steps[other].accesses, strict=True))
                if any(
                    weight_of.get(first_access.tensor) != weight_of.get(other_access.tensor)
                    for first_access, other_access in pairs
                ):
                    continue
                if steps.unite(first, other):
                    for first_access, other_access in pairs:
                        tensors.unite(first_access.tensor, other_access.tensor)
        changes = _group_equal_readers(readers, weights_read, tensors, steps)
    first_tensor: dict[object, str] = {}
    first_step: dict[object, int] = {}
    return (
        {name: first_tensor.setdefault(tensors.find(name), name) for name in operators.tensors},
        [first_step.setdefault(steps.find(number), number) for number in range(len(operators.steps))],
    )


def _map_to_weights(operators: Operators, groups: Mapping[str, str], weights: set[str]) -> dict[str, str]:
    """Returns the weight that tensors belong to: those like it, and terms that add up to those, one for each step."""
    group_of_weights = {groups[name] for name in weights}
    owner = {name: group for name, group in groups.items() if group in group_of_weights}
    for step in reversed(operators.steps):
        if step.result in owner and not step.reduced:
            size = prod(operators.tensors[step.result])
            for access in step.line.operands:
                if prod(operators.tensors[access.tensor]) == size:
                    owner.setdefault(access.tensor, owner[step.result])
    return owner


def _group_equal_readers(
    readers: Mapping[tuple[str, str, int], list[int]],
    weights: Sequence[Sequence[str]],
    tensors: _Classes,
    steps: _Classes,
) -> list[list[int]]:
    """Returns operators that use, in the same way and in the same turn, tensors of one class, and are apart."""
    turns: dict[object, list[int]] = defaultdict(list)
    for (name, form, at), numbers in readers.items():
        taken: Counter[object] = Counter()
        for number in numbers:
            classes = tuple(tensors.find(weight) for weight in weights[number])
            turns[tensors.find(name), form, at, classes, taken[classes]].append(number)
            taken[classes] += 1
    return [same for same in turns.values() if len({steps.find(number) for number in same}) > 1]


def _describe_form(operators: Operators, step: Operator) -> str:
    """Returns an operator without the names of its tensors, with their sizes."""
    sizes = [operators.tensors[access.tensor] for access in step.accesses]
    return f"{_TENSOR.sub('[', step.line.text)} {sizes}"
