"""Elements that one cut moves between two halves of the ranks (Tofu, Wang et al., EuroSys 2019, section 5).

A tensor is stored cut along a dimension, or whole in both halves. An operator takes one of its indices: each half
computes half of it, for which it needs a part of each operand, and computes a part of the result, or a partial sum.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipedream.core.box import Box, count_elements, overlap
from pipedream.extensions.meshes.layouts.description.operators import find_box
from pipedream.extensions.meshes.layouts.description.text import Access, Operator

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
    """Whether an operator may be halved along an index.

    Not where the halves would compute the same elements of the result, or need more in common than of their own.

    Args:
        shapes: shapes of the tensors in `Operator.accesses`.
    """
    for access, shape in zip(step.accesses, shapes, strict=True):
        if not any(expression and expression.plain is None for expression in access.indices):
            continue
        is_result = access is step.line.result
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
