"""The registry of described operators: torch's, here those of convolutions, and those that users add."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional as F

from pipedream.core.box import Box, slice_of
from pipedream.core.errors import PlanError
from pipedream.extensions.meshes.layouts.description.operators import Operators, find_box
from pipedream.extensions.meshes.layouts.description.text import read_lines, spell_function, spell_sum
from pipedream.extensions.meshes.layouts.search.search import halve_index, is_offered
from pipedream.extensions.meshes.layouts.tracing.rules import (
    COMBINE,
    CONSTANT,
    DESCRIPTIONS,
    DRAWN,
    POINTWISE,
    Description,
    OperatorCall,
    Part,
    list_overloads,
)

A = torch.ops.aten


def _spell_convolution(call: OperatorCall) -> str:
    values = call.values
    if values["transposed"]:  # each input reaches several outputs, which the text cannot say
        return _spell_roles(call, lambda at: (":", ":", ":"))
    kernel = values["weight"].shape[2:]

    def name_row(at: int) -> tuple[str, str, str]:
        outer = [] if call.out.shape[2 + at] == 1 else [(values["stride"][at], f"h{at}")]
        inner = [] if kernel[at] == 1 else [(values["dilation"][at], f"r{at}")]
        return f"{spell_sum(*outer, *inner) or 0} - {values['padding'][at]}", f"r{at}", f"h{at}"

    return _spell_roles(call, name_row)


def _spell_gradient(call: OperatorCall) -> str:
    result = ("input", "weight")[call.item or 0]  # the other argument matters by its size
    used = {name: value for name, value in call.values.items() if name != result}
    return _spell_roles(OperatorCall(call.function, call.item, used, call.out), lambda at: (":", ":", ":"))


def _spell_roles(call: OperatorCall, name_row: Callable[[int], tuple[str, str, str]]) -> str:
    """Returns the text of a convolution, or of one of its gradients.

    `name_row` returns the indices of input, weight and output for a spatial dimension.
    """
    tensors = call.tensors() | {"out": call.out}
    roles = {
        "input": "out" if call.item == 0 else "input",
        "weight": "out" if call.item == 1 else "weight",
        "output": "out" if call.item is None else "grad_output",
    }
    groups = call.values["groups"]
    inputs, outputs = (tensors[roles[role]].shape[1] // groups for role in ("input", "output"))
    # With groups a channel is one of those of its group.
    c, o = ("c", "o") if groups == 1 else (spell_sum((inputs, "g"), (1, "c")), spell_sum((outputs, "g"), (1, "o")))
    rows = [name_row(at) for at in range(tensors[roles["output"]].dim() - 2)]
    indices = {
        "input": ["n", c, *(row[0] for row in rows)],
        "weight": [*((c, "o") if call.values["transposed"] else (o, "c")), *(row[1] for row in rows)],
        "output": ["n", o, *(row[2] for row in rows)],
    }
    for role, tensor in roles.items():
        sizes = zip(indices[role], tensors[tensor].shape, strict=True)
        indices[role] = ["0" if size == 1 and index.isidentifier() else index for index, size in sizes]
    out = next(role for role, tensor in roles.items() if tensor == "out")
    operands = {roles[role]: indices[role] for role in indices if role != out and roles[role] in tensors}
    text = spell_function(indices[out], operands, "+=")
    bounds = {"g": groups, "o": outputs, "c": inputs} if groups > 1 else {}
    alone = {index for names in indices.values() for index in names}
    missing = [f"{name} < {size}" for name, size in bounds.items() if name not in alone]
    return text + (f" where {', '.join(missing)}" if missing else "")


def _convolve(part: Part) -> torch.Tensor:
    values, groups = part.values, _count_groups(part)
    if values["transposed"]:
        return part.call.function(**{**values, "groups": groups})  # type: ignore[no-any-return]
    around = [size for pair in reversed(part.outside("input")[2:]) for size in pair]
    x = F.pad(values["input"], around) if any(around) else values["input"]
    none = [0] * (x.dim() - 2)
    result: torch.Tensor = A.convolution(
        x, values["weight"], None, values["stride"], none, values["dilation"], False, none, groups
    )
    return result


def _compute_gradient(part: Part) -> torch.Tensor:
    values, item = part.values, part.call.item or 0
    gradient = values["grad_output"]
    empty = gradient.new_empty(part.shape)
    x, weight = (empty, values["weight"]) if item == 0 else (values["input"], empty)
    gradients = A.convolution_backward(
        gradient, x, weight, None, values["stride"], values["padding"], values["dilation"], values["transposed"],
        values["output_padding"], _count_groups(part), [item == 0, item == 1, False],
    )  # fmt: skip
    return gradients[item]  # type: ignore[no-any-return]


def _count_groups(part: Part) -> int:
    return len(part.ranges["g"]) if "g" in part.ranges else 1


def _spell_bias_gradient(call: OperatorCall) -> str:
    gradient = call.values["grad_output"]
    samples, channels = gradient.shape[:2]
    source = ["n" if samples > 1 else "0", "o" if channels > 1 else "0", *[":"] * (gradient.dim() - 2)]
    # Not over the samples where there is one.
    return spell_function([source[1]], {"grad_output": source}, "+=" if samples > 1 else "=")


def _sum_bias_gradient(part: Part) -> torch.Tensor:
    gradient: torch.Tensor = part.values["grad_output"]
    return gradient.sum([dim for dim in range(gradient.dim()) if dim != 1])


CONVOLUTIONS = (
    Description((A.convolution,), _spell_convolution, _convolve),
    Description((A.convolution_backward,), _spell_gradient, _compute_gradient, items=(0, 1)),
    Description((A.convolution_backward,), _spell_bias_gradient, _sum_bias_gradient, items=(2,)),
)


class OperatorRegistry:
    """Operators and their descriptions."""

    def __init__(self) -> None:
        self._descriptions: dict[tuple[Any, int | None], Description] = {}
        self._added: set[Any] = set()
        for description in (*DESCRIPTIONS, *CONVOLUTIONS):
            self._register(description)

    def _register(self, description: Description) -> list[Any]:
        overloads = [overload for operator in description.operators for overload in list_overloads(operator)]
        self._descriptions |= {(overload, item): description for item in description.items for overload in overloads}
        return overloads

    def add(self, description: Description) -> None:
        """Adds operators of a user."""
        self._added.update(self._register(description))

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
        spec: one line of the form of `layouts.description.text`, with the names of the operator's schema, and
            `out` for its result. The tensors of a list have numbers after its name: `xs0`, `xs1`.

    Raises:
        PlanError: the text cannot be read, or `operator` is not an operator with one result.
    """
    operator = getattr(operator, "_opoverload", operator)
    if not isinstance(operator, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        raise PlanError(
            f"{operator!r} was described, but is not a torch operator; give one such as torch.ops.mine.scan, or "
            "what torch.library.custom_op returns"
        )
    if [line.result for line in read_lines(spec)] != ["out"]:
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
    REGISTRY.add(Description((operator,), spec))


def find_contradiction(call: OperatorCall, description: Description) -> str:
    """Returns the index along which the parts of a call do not make the whole, on random numbers; '' if all do."""
    with unset_fake_temporarily():  # a layer may be traced without data
        (step,) = Operators(call.shapes, description.spell(call)).steps
        tensors = {name: _draw(tensor) for name, tensor in call.tensors().items()}

        def run_part(ranges: Mapping[str, range]) -> tuple[Box, torch.Tensor]:
            parts = {
                operand.tensor: tensors[operand.tensor][
                    slice_of(find_box(operand, ranges, call.shapes[operand.tensor]))
                ]
                for operand in step.operands
            }
            box = find_box(step.output, ranges, call.shapes["out"])
            return box, description.compute(call, step, parts, tuple(map(len, box)), ranges)

        ranges = {name: range(size) for name, size in step.sizes.items()}
        _, whole = run_part(ranges)
        wide = torch.complex128 if whole.is_complex() else torch.float64
        shapes = [call.shapes[access.tensor] for access in step.accesses]
        for index in step.sizes:
            if len(ranges[index]) > 1 and is_offered(step, shapes, ranges, index):
                try:
                    parts = [run_part(halve_index(ranges, index, second=second)) for second in (False, True)]
                except RuntimeError:
                    return index
                if index in step.reduced:
                    joined = COMBINE[step.reduction](*(part for _, part in parts))
                else:
                    joined = torch.empty_like(whole)
                    for box, part in parts:
                        joined[slice_of(box)] = part
                if not torch.allclose(joined.to(wide), whole.to(wide), rtol=1e-4, atol=1e-5, equal_nan=True):
                    return index
    return ""


def _draw(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.randn(tensor.shape, dtype=tensor.dtype)
    return torch.randint(0, 2, tensor.shape).to(tensor.dtype)


def compare_operands(call: OperatorCall, text: str) -> str:
    """Says which tensors only the call has, or only the description."""
    (line,) = read_lines(text)
    named, present = {operand.tensor for operand in line.operands}, set(call.tensors())
    lacks, odd = (", ".join(sorted(names)) for names in (present - named, named - present))
    parts = [f"it does not name {lacks}" if lacks else "", f"it names {odd}, not among its tensors" if odd else ""]
    return "; ".join(filter(None, parts))
