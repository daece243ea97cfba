"""Checks that a hand-written loss is a mean over samples, so that parts of minibatches count by their samples.

The first minibatch confirms it, and later ones may refute it. If the loss leaves something out (padding, ignored
labels, masked elements), all parts must have the same share of it. If it weights samples or tokens, which the first
minibatch cannot show if all its weights are equal, no later part may weigh more than its samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pipedream.runtime.comm.values import map_tensors, tensors_in

MARKS = (0, -1, -100, 255)
"""Values of labels and masks that losses leave out."""

_ALWAYS_COMPARED = 8  # the first parts; after them those whose number is a power of two
_MAX_RANGE_COMPARISONS = 64  # of parts with numbers in a new range: some numbers grow from batch to batch
_MAX_DOUBLE_ELEMENTS = 2**24  # of an output that is computed in double precision
WEIGHT_ADVICE = (
    "give weight=..., a function from a batch to the amount that the loss is a mean over, let the loss return "
    "(sum, weight), or train with microbatches=1"
)


class PartsCheck:
    """Checks the parts of minibatches one after the other; those of the first minibatch are not compared.

    A part is joined with the targets of an earlier one: the loss should be the mean of both losses, weighted by their
    samples. This costs three calls of the loss, so it is done for the first parts, then ever more rarely, and for parts
    with a new extreme among whole numbers and masks, or among numbers that were all equal.

    Args:
        evaluate: returns the loss for output and targets.
    """

    def __init__(self, evaluate: Callable[[Any, Any], Any]) -> None:
        self._evaluate = evaluate
        self._left_out: dict[tuple[int, int], float] | None = None  # tensor and value -> how many per sample
        self._first_minibatch = -1
        self._parts = 0
        self._range_comparisons = 0
        self._is_due = False
        self._ranges: dict[int, tuple[float, float]] = {}
        self._earlier: list[tuple[Any, int]] = []  # targets and samples of the first part and of the one before

    def check(self, output: Any, targets: Any, received: Any, samples: int, minibatch: int) -> None:
        """Raises ValueError if a part does not count by its samples; `received`: the targets on the CPU."""
        output = map_tensors(output, torch.Tensor.detach)
        if self._left_out is None:
            left_out = find_left_out(self._evaluate, output, targets, samples)
            self._left_out = {place: _count_share(received, *place, samples) for place in left_out}
            self._first_minibatch = minibatch
            self._ranges = _choose_ranges(received, samples)
            outputs = tensors_in(output)
            if all(len(t) == samples for t in outputs if t.ndim):
                joined = self._join_losses(output, targets, samples, targets, samples)
                self._earlier = [(targets, samples)] * 2 if joined is not None and joined.is_mean else []
        for (leaf, value), share in self._left_out.items():
            share_here = _count_share(received, leaf, value, samples)
            if share_here != share:
                raise ValueError(
                    f"the loss leaves out targets that are {value}, and there are {share_here:g} of them per sample in "
                    f"this part of a minibatch but {share:g} in the first part, so parts cannot be weighted by their "
                    f"numbers of samples; {WEIGHT_ADVICE}"
                )
        if not self._earlier:
            return
        is_new = self._widen_ranges(received)
        if minibatch != self._first_minibatch:
            self._parts += 1
            is_new = is_new and self._range_comparisons < _MAX_RANGE_COMPARISONS
            self._range_comparisons += is_new
            self._is_due |= is_new or self._parts <= _ALWAYS_COMPARED or not self._parts & (self._parts - 1)
            self._is_due = self._is_due and not self._compare(output, targets, samples)
        self._earlier[1] = targets, samples

    def _widen_ranges(self, received: Any) -> bool:
        """Returns whether a part has numbers beyond those before."""
        tensors, is_wider = tensors_in(received), False
        for number, (old_low, old_high) in self._ranges.items():
            low, high = _measure_range(tensors[number]) if number < len(tensors) else (old_low, old_high)
            is_wider |= low < old_low or high > old_high
            self._ranges[number] = min(low, old_low), max(high, old_high)
        return is_wider

    def _compare(self, output: Any, targets: Any, samples: int) -> bool:
        """Returns whether an earlier part could be joined; raises ValueError if this part does not count by samples."""
        for earlier_targets, earlier_samples in self._earlier:
            if _list_shapes(earlier_targets) != _list_shapes(targets):  # as of other lengths
                continue
            joined = self._join_losses(output, targets, samples, earlier_targets, earlier_samples)
            if joined is not None and not joined.is_mean:
                raise ValueError(
                    f"the loss is taken for a mean over samples, as in the first minibatch, but a part of {samples} "
                    f"samples counts otherwise: together with the targets of an earlier part its loss is "
                    f"{joined.loss:.7g}, and the samples' mean is {joined.mean:.7g}, as where samples or tokens have "
                    f"weights that differ, or masks; {WEIGHT_ADVICE}"
                )
            return True
        return False

    def _join_losses(self, output: Any, targets: Any, samples: int, others: Any, other_samples: int) -> _Joined | None:
        """Joins a part with other targets; returns None if the loss cannot be computed for them.

        If rounding may decide, the loss is computed in double precision where possible.
        """
        count = min(samples, other_samples)
        is_narrow = any(t.is_floating_point() and torch.finfo(t.dtype).eps > 1e-5 for t in tensors_in(output))
        can_widen = sum(tensor.numel() for tensor in tensors_in(output)) <= _MAX_DOUBLE_ELEMENTS
        joined = None
        for change in (torch.Tensor.detach, _widen)[is_narrow and can_widen : 1 + can_widen]:
            a, b, c = (map_tensors(value, change) for value in (output, targets, others))
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    first, other = _take_first(a, samples, count), _take_first(c, other_samples, count)
                    pairs = [(a, b), (first, other), (_join(a, first, samples), _join(b, other, samples))]
                    losses = [self._evaluate(*pair) for pair in pairs]
                part_loss, other_loss, joined_loss = map(float, losses)
            except Exception:
                continue
            if math.isfinite(part_loss + other_loss + joined_loss):
                mean = (samples * part_loss + count * other_loss) / (samples + count)
                joined = _Joined(joined_loss, mean, _choose_tolerance(losses[0]) * max(abs(part_loss), abs(other_loss)))
                if joined.is_mean:
                    break
        return joined


class _Joined(NamedTuple):
    """The loss of two joined parts, the mean of their losses by samples, and how far the two may differ."""

    loss: float
    mean: float
    tolerance: float

    @property
    def is_mean(self) -> bool:
        return abs(self.loss - self.mean) <= self.tolerance


def _choose_tolerance(loss: torch.Tensor) -> float:
    return max(1e-5, 4 * torch.finfo(loss.dtype).eps) if loss.is_floating_point() else 1e-5


def _list_shapes(value: Any) -> list[torch.Size]:
    return [tensor.shape[1:] for tensor in tensors_in(value)]


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _take_first(value: Any, samples: int, count: int) -> Any:
    return map_tensors(value, lambda t: t[:count] if t.ndim and len(t) == samples else t)


def _choose_ranges(targets: Any, samples: int) -> dict[int, tuple[float, float]]:
    """Returns the least and the greatest number of each tensor of whole numbers, and of each with equal ones."""
    ranges = {}
    for number, tensor in enumerate(tensors_in(targets)):
        if tensor.ndim and len(tensor) == samples and tensor.layout is torch.strided and not tensor.is_complex():
            low, high = _measure_range(tensor)
            if low == high or not tensor.is_floating_point():
                ranges[number] = low, high
    return ranges


def _measure_range(tensor: torch.Tensor) -> tuple[float, float]:
    low, high = tensor.detach().aminmax() if tensor.numel() else (0.0, 0.0)
    return float(low), float(high)


def find_left_out(
    evaluate: Callable[[Any, Any], Any], output: Any, targets: Any, samples: int
) -> list[tuple[int, int]]:
    """Returns the values that keep a loss from being a mean over samples, each after the index of its tensor.

    A part is joined with a copy in which half of a tensor's elements have the value. The loss should be the mean of
    both losses.

    Args:
        evaluate: returns the loss for output and targets.
        samples: of the part; tensors with another size in dimension 0 are shared.
    """
    left_out: list[tuple[int, int]] = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        doubled_output = _join(output, output, samples)
        try:
            loss = evaluate(output, targets)
            first, tolerance = float(loss), _choose_tolerance(loss)
            if not is_close(float(evaluate(doubled_output, _join(targets, targets, samples))), first, tolerance):
                return []  # the samples depend on each other, as the first minibatch shows
        except Exception:  # it takes parts of this size only
            return []
        for number, leaf in enumerate(tensors_in(targets)):
            for value in MARKS if _may_be_marked(leaf, samples) else ():
                marked = leaf.clone()
                marked.view(-1)[: max(1, leaf.numel() // 2)] = value
                marked_targets = map_tensors(targets, lambda tensor: tensor, replaced={id(leaf): marked})
                try:
                    second = float(evaluate(output, marked_targets))
                    joined = float(evaluate(doubled_output, _join(targets, marked_targets, samples)))
                except Exception:  # the loss does not know the value
                    continue
                if math.isfinite(joined) and not is_close(joined, (first + second) / 2, tolerance):
                    left_out.append((number, value))
    return left_out


def _count_share(targets: Any, leaf: int, value: int, samples: int) -> float:
    """Returns how often a tensor of the targets has a value, per sample."""
    return float((tensors_in(targets)[leaf] == value).sum()) / samples


def _may_be_marked(leaf: torch.Tensor, samples: int) -> bool:
    """Returns whether a tensor holds whole numbers, or a mask."""
    if not leaf.ndim or len(leaf) != samples or leaf.is_complex():
        return False
    return not leaf.is_floating_point() or bool(((leaf == 0) | (leaf == 1)).all())


def _join(value: Any, other: Any, samples: int) -> Any:
    pairs = {id(a): b for a, b in zip(tensors_in(value), tensors_in(other), strict=True)}
    return map_tensors(value, lambda t: torch.cat([t, pairs[id(t)]]) if t.ndim and len(t) == samples else t)


def is_close(value: float, other: float, tolerance: float) -> bool:
    """Returns whether two losses differ by rounding alone."""
    return abs(value - other) <= tolerance * max(abs(value), abs(other))
