"""Checks a description on random numbers: along each index, the parts must make the whole."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from pipedream.layouts.description.operator import Operator
from pipedream.layouts.description.operators import Operators, find_box
from pipedream.layouts.description.text import read_lines
from pipedream.layouts.search.cost import halve_index, is_offered
from pipedream.layouts.tracing.calls import COMBINE, Description, OperatorCall, Part, fill_tensors


def find_contradiction(call: OperatorCall, description: Description) -> str:
    """Returns the index along which the parts of a call do not make the whole, on random numbers; '' if all do."""
    with unset_fake_temporarily():  # a layer may be traced without data
        (step,) = Operators(call.shapes, description.spell(call)).steps
        tensors = {name: _draw(tensor) for name, tensor in call.tensors().items()}
        ranges = {name: range(size) for name, size in step.sizes.items()}
        whole = _run_part(call, description, step, tensors, ranges)
        shapes = [call.shapes[access.tensor] for access in step.accesses]
        for index in step.sizes:
            if len(ranges[index]) > 1 and is_offered(step, shapes, ranges, index):
                halves = [halve_index(ranges, index, second=second) for second in (False, True)]
                try:
                    parts = [_run_part(call, description, step, tensors, half) for half in halves]
                except RuntimeError:
                    return index
                if not _is_close(_join(step, index, halves, parts, whole), whole):
                    return index
    return ""


def _join(
    step: Operator, index: str, halves: list[dict[str, range]], parts: list[torch.Tensor], whole: torch.Tensor
) -> torch.Tensor:
    if index in step.reduced:
        return COMBINE[step.line.reduction](*parts)
    joined = torch.empty_like(whole)
    for half, part in zip(halves, parts, strict=True):
        box = find_box(step.line.result, half, tuple(whole.shape))
        joined[tuple(slice(values.start, values.stop) for values in box)] = part
    return joined


def _is_close(joined: torch.Tensor, whole: torch.Tensor) -> bool:
    wide = torch.complex128 if whole.is_complex() else torch.float64
    return torch.allclose(joined.to(wide), whole.to(wide), rtol=1e-4, atol=1e-5, equal_nan=True)


def _draw(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.randn(tensor.shape, dtype=tensor.dtype)
    return torch.randint(0, 2, tensor.shape).to(tensor.dtype)


def _run_part(
    call: OperatorCall,
    description: Description,
    step: Operator,
    tensors: Mapping[str, torch.Tensor],
    ranges: Mapping[str, range],
) -> torch.Tensor:
    parts = {}
    for operand in step.line.operands:
        box = find_box(operand, ranges, tuple(tensors[operand.tensor].shape))
        parts[operand.tensor] = tensors[operand.tensor][tuple(slice(values.start, values.stop) for values in box)]
    shape = tuple(map(len, find_box(step.line.result, ranges, tuple(call.out.shape))))
    return description.run(Part(call, fill_tensors(call.values, parts), shape, step, ranges))


def compare_operands(call: OperatorCall, text: str) -> str:
    """Returns in words which tensors a description names that a call does not have, or the other way round."""
    (line,) = read_lines(text)
    named, present = {operand.tensor for operand in line.operands}, set(call.tensors())
    lacks, odd = (", ".join(sorted(names)) for names in (present - named, named - present))
    parts = [f"it does not name {lacks}" if lacks else "", f"it names {odd}, not among its tensors" if odd else ""]
    return "; ".join(filter(None, parts))
