"""Finds out what a user's loss leaves out: padding, ignored labels, what a mask hides.

A loss that is written by hand is taken to be a mean over samples, which the first minibatch confirms. If it leaves
something out, that holds only while all parts of a minibatch have as much of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from pipedream.runtime.comm.values import map_tensors, tensors_in

MARKS = (0, -1, -100, 255)
"""Values of labels and masks that losses leave out."""


class LeftOut(NamedTuple):
    """A value of the targets that a loss does not count like others.

    Attributes:
        leaf: number of the tensor.
        share: how often it is in the tensor, per sample.
    """

    leaf: int
    value: int
    share: float


def find_left_out(evaluate: Callable[[Any, Any], Any], output: Any, targets: Any, samples: int) -> list[LeftOut]:
    """Returns the values that stop a loss from being a mean over samples.

    A part is joined with a copy in which half of a tensor's elements have the value. The loss should be the mean of the
    losses of both.

    Args:
        evaluate: from output and targets to the loss.
        samples: of the part; tensors with another size in dimension 0 are shared.
    """
    left_out: list[LeftOut] = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        twice = _join(output, output, samples)
        try:
            first = float(evaluate(output, targets))
            if not _is_close(float(evaluate(twice, _join(targets, targets, samples))), first):
                return []  # the samples depend on each other, as the first minibatch shows
        except Exception:  # it takes parts of this size only
            return []
        for number, leaf in enumerate(tensors_in(targets)):
            for value in MARKS if _may_be_marked(leaf, samples) else ():
                changed = leaf.clone()
                changed.view(-1)[: max(1, leaf.numel() // 2)] = value
                others = map_tensors(targets, partial(_replace, leaf, changed))
                try:
                    second = float(evaluate(output, others))
                    both = float(evaluate(twice, _join(targets, others, samples)))
                except Exception:  # the loss does not know the value
                    continue
                if math.isfinite(both) and not _is_close(both, (first + second) / 2):
                    left_out.append(LeftOut(number, value, count_share(targets, number, value, samples)))
    return left_out


def _replace(old: torch.Tensor, new: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return new if tensor is old else tensor


def count_share(targets: Any, leaf: int, value: int, samples: int) -> float:
    """Returns how often a tensor of the targets has a value, per sample."""
    return float((list(tensors_in(targets))[leaf] == value).sum()) / samples


def _may_be_marked(leaf: torch.Tensor, samples: int) -> bool:
    """Returns whether a tensor holds whole numbers, or a mask."""
    if not leaf.ndim or len(leaf) != samples or leaf.is_complex():
        return False
    return not leaf.is_floating_point() or bool(((leaf == 0) | (leaf == 1)).all())


def _join(value: Any, other: Any, samples: int) -> Any:
    pairs = {id(a): b for a, b in zip(tensors_in(value), tensors_in(other), strict=True)}
    return map_tensors(value, lambda t: torch.cat([t, pairs[id(t)]]) if t.ndim and len(t) == samples else t)


def _is_close(value: float, other: float) -> bool:
    return abs(value - other) <= 1e-5 * max(abs(value), abs(other))
