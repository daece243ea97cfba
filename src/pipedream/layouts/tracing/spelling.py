"""Spells lines of `pipedream.layouts.description.text`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

LETTERS = "abcdefghjklmnpqstuvwxyz"


def name_dimensions(shape: Sequence[int], whole: Sequence[int] = ()) -> list[str]:
    """Returns an index for each dimension: 0 where the size is 1, and : where it is to be whole."""
    chosen = [dim % len(shape) for dim in whole]
    return [":" if at in chosen else LETTERS[at] if size > 1 else "0" for at, size in enumerate(shape)]


def broadcast(indices: Sequence[str], shape: Sequence[int]) -> list[str]:
    """Returns the indices of a tensor of this shape that is broadcast to one with `indices`."""
    aligned = indices[len(indices) - len(shape) :]
    return ["0" if size == 1 else index for index, size in zip(aligned, shape, strict=True)]


def spell_access(tensor: str, indices: Sequence[str]) -> str:
    """Spells a tensor with its indices."""
    return f"{tensor}[{', '.join(indices)}]"


def spell_function(out: Sequence[str], operands: Mapping[str, Sequence[str]], sign: str = "=") -> str:
    """Spells an operator that computes `out` from operands."""
    accesses = ", ".join(spell_access(name, indices) for name, indices in operands.items())
    return f"{spell_access('out', out)} {sign} f({accesses})"


def spell_copy(source: Sequence[str], out: Sequence[str]) -> str:
    """Spells an operator that moves the elements of `self` and computes none."""
    return f"{spell_access('out', out)} = {spell_access('self', source)}"


def spell_sum(*terms: tuple[int, str]) -> str:
    """Spells a sum of indices with their coefficients."""
    return " + ".join(f"{times}*{name}" for times, name in terms)


def rename_tensors(text: str, names: Mapping[str, str]) -> str:
    """Returns a line with other names of tensors."""
    return re.sub(r"\b(\w+)\[", lambda match: f"{names.get(match[1], match[1])}[", text)
