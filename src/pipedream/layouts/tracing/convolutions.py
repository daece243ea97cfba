"""Descriptions of convolutions and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from pipedream.layouts.description.text import spell_function, spell_sum
from pipedream.layouts.tracing.calls import OperatorCall, Part, Rule

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

    Args:
        name_row: spatial dimension -> the indices of input, weight and output there.
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
    Rule((A.convolution,), _spell_convolution, _convolve),
    Rule((A.convolution_backward,), _spell_gradient, _compute_gradient, items=(0, 1)),
    Rule((A.convolution_backward,), _spell_bias_gradient, _sum_bias_gradient, items=(2,)),
)
