"""The registry of described operators: torch's, which this library describes, and those that users add."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from pipedream.core.errors import PlanError
from pipedream.layouts.description.text import read_lines
from pipedream.layouts.tracing.calls import Description, OperatorCall, Rule, list_overloads
from pipedream.layouts.tracing.convolutions import CONVOLUTIONS
from pipedream.layouts.tracing.rules import CONSTANT, DRAWN, POINTWISE, RULES


class OperatorRegistry:
    """Operators and their descriptions."""

    def __init__(self, rules: Iterable[Rule] = (*RULES, *CONVOLUTIONS)) -> None:
        self._descriptions: dict[tuple[Any, int | None], Description] = {}
        self._added: set[Any] = set()
        for rule in rules:
            self._descriptions |= rule.descriptions()

    def add(self, operator: Any, spec: str) -> None:
        """Adds an operator of a user; see `register_operator`."""
        operator = getattr(operator, "_opoverload", operator)
        if not isinstance(operator, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            raise PlanError(
                f"{operator!r} was described, but is not a torch operator; give one such as torch.ops.mine.scan, or "
                "what torch.library.custom_op returns"
            )
        if [line.result.tensor for line in read_lines(spec)] != ["out"]:
            raise PlanError(
                f"{operator} was described as {spec!r}; give one line, whose result is out, such as "
                "'out[i, j] = f(x[i, j])'"
            )
        for overload in list_overloads(operator):
            if len(overload._schema.returns) != 1:
                raise PlanError(
                    f"{overload} was described, but has {len(overload._schema.returns)} results, and only operators "
                    "with one can be described; write it as several operators"
                )
        self._descriptions |= Rule((operator,), spec).descriptions()
        self._added.update(list_overloads(operator))

    def is_added(self, function: Any) -> bool:
        """Whether a user has added an operator; the library's own are checked by its tests."""
        return function in self._added

    def is_described(self, function: Any) -> bool:
        """Whether an operator has a description, or needs none."""
        needs_none = torch.Tag.pointwise in function.tags or function in CONSTANT or function in DRAWN
        return needs_none or any((function, item) in self._descriptions for item in (None, 0))

    def find(self, call: OperatorCall) -> Description | None:
        """Returns the description of a call, if there is one."""
        tags = call.function.tags
        if torch.Tag.nondeterministic_seeded in tags:
            return None
        is_pointwise = torch.Tag.pointwise in tags and call.item is None
        return self._descriptions.get((call.function, call.item), POINTWISE if is_pointwise else None)


REGISTRY = OperatorRegistry()
"""The registry of this process, to which `register_operator` adds."""


def register_operator(operator: Any, spec: str) -> None:
    """Adds an operator of yours, such as ``torch.ops.mine.scan``.

    It is checked where a model uses it, once for each shape: on random numbers, its parts along each index must make
    the whole.

    Args:
        operator: also what `torch.library.custom_op` returns. It has one result.
        spec: one line of the form of `pipedream.layouts.description.text`, with the names of the operator's schema, and
            `out` for its result. The tensors of a list have numbers after its name: `xs0`, `xs1`.

    Raises:
        PlanError: the text cannot be read, or `operator` is not an operator with one result.
    """
    REGISTRY.add(operator, spec)
