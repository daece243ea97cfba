"""Finds on a sample what a model's own loss is a mean over, so that minibatches can be split.

The loss of the sample must follow from the losses of its parts: as their mean, weighted by what the called losses of
torch are means over or by the samples, or as their sum. Otherwise samples of one batch depend on each other, as in
contrastive losses. If all weights of a sample are equal, or its mask hides nothing, it cannot show that the mean is
over these, so changed ones are tried too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pipedream.runtime.comm.values import map_tensors, tensors_in
from pipedream.services.losses.left_out import is_close
from pipedream.services.losses.loss_calls import Amounts, LossCalls, iterate_leaves
from pipedream.services.losses.losses import LossWeight, find_loss


def probe_weight(
    evaluate: Callable[[Any], Any],
    batch: Any,
    *,
    samples: int | None,
    split: Callable[[Any, int, Sequence[int]], list[Any]],
) -> str:
    """Returns a `LossWeight`; empty if this sample cannot show it: only one sample, no loss, or a random loss.

    Args:
        evaluate: returns the model's output for a batch, with the model in evaluation mode.
        samples: of the batch, if they are known.
        split: ``split(batch, samples, sizes)`` -> parts of these sizes.
    """
    if samples is None or samples < 2:
        return LossWeight.UNKNOWN
    sizes = [samples // 2, 1, samples - samples // 2 - 1] if samples > 2 else [1, 1]

    def make_parts() -> Sequence[Any]:
        return split(batch, samples, sizes)

    try:
        with torch.no_grad():
            weight = _compare_parts(evaluate, batch, make_parts, samples, sizes)
    except Exception:  # a forward may take derivatives, or read the graph
        weight = _compare_parts(evaluate, batch, make_parts, samples, sizes)
    if weight == LossWeight.SAMPLES:
        for changed_batch in _change_equal_inputs(batch, samples):
            with suppress(Exception), torch.no_grad():  # it does not take this input
                parts = partial(split, changed_batch, samples, sizes)
                if _compare_parts(evaluate, changed_batch, parts, samples, sizes) == LossWeight.OTHER:
                    return LossWeight.OTHER
    return weight


def _compare_parts(
    evaluate: Callable[[Any], Any],
    batch: Any,
    make_parts: Callable[[], Sequence[Any]],
    samples: int,
    sizes: Sequence[int],
) -> str:
    calls = LossCalls()
    with _WithoutRandomness():
        second_loss = find_loss(evaluate(batch))
        if second_loss is None:
            return LossWeight.UNKNOWN
        batch_loss, amounts, tolerance = _evaluate_loss(calls, evaluate, batch, samples)
        if not is_close(batch_loss, float(second_loss), tolerance):
            return LossWeight.UNKNOWN if amounts is None else LossWeight.RECOGNISED
        parts = make_parts()
        try:
            evaluations = [_evaluate_loss(calls, evaluate, part, size) for part, size in zip(parts, sizes, strict=True)]
        except Exception as error:
            if isinstance(error, RuntimeError) and not torch.is_grad_enabled():
                raise
            return LossWeight.OTHER  # the model does not take parts of a batch, such as a list with an item per sample
    losses = [loss for loss, _, _ in evaluations]
    all_amounts = [part for part in (amounts, *(part for _, part, _ in evaluations)) if part is not None]
    if amounts is not None and [a.is_sum for a in all_amounts] == [amounts.is_sum] * (len(parts) + 1):
        if not all(first.fits(other) for first in all_amounts for other in all_amounts):
            return LossWeight.OTHER
        shares = [1.0 if part_amounts.is_sum else max(part_amounts.values) for part_amounts in all_amounts[1:]]
        if is_close(batch_loss, sum(losses) if amounts.is_sum else _compute_mean(losses, shares), tolerance):
            return LossWeight.RECOGNISED
    if is_close(batch_loss, _compute_mean(losses, sizes), tolerance):
        return LossWeight.SAMPLES
    if is_close(batch_loss, sum(losses), tolerance):
        return LossWeight.SUM
    return LossWeight.OTHER


def _change_equal_inputs(batch: Any, samples: int) -> Iterator[Any]:
    """Yields for each input of equal numbers (a mask or weights) a batch in which half of its first sample differs."""
    for tensor in tensors_in(batch):
        is_plain = tensor.layout is torch.strided and not tensor.is_complex()
        if not (is_plain and tensor.ndim and len(tensor) == samples and tensor.numel()):
            continue
        value = tensor.detach().reshape(-1)[0]
        other = value / 2 if tensor.is_floating_point() else ~value if tensor.dtype is torch.bool else value * 0
        if (
            not bool((tensor == value).all())
            or other == value
            or not (tensor.is_floating_point() or abs(float(value)) <= 1)
        ):
            continue
        changed_tensor = tensor.detach().clone()
        first = changed_tensor[0].view(-1) if changed_tensor.ndim > 1 else changed_tensor[:1]
        first[len(first) // 2 :] = other
        yield map_tensors(batch, lambda leaf: leaf, replaced={id(tensor): changed_tensor})


def _evaluate_loss(
    calls: LossCalls, evaluate: Callable[[Any], Any], batch: Any, samples: int
) -> tuple[float, Amounts | None, float]:
    """Returns the loss, what it is a mean over, and the relative error that its precision allows."""
    with calls.watch(batch, samples):
        output = evaluate(batch)
    loss = find_loss(output)
    assert loss is not None, "the model computed a loss for the batch, but not for a part of it"
    tensors = (item for item in iterate_leaves(output) if isinstance(item, torch.Tensor) and item.is_floating_point())
    precision = max(torch.finfo(tensor.dtype).eps for tensor in (loss, *tensors))
    return float(loss), calls.amounts(loss), 1e-9 if precision < 1e-10 else max(1e-5, 2 * precision)


def _compute_mean(losses: Sequence[float], weights: Sequence[float]) -> float:
    counted = [(loss * weight, weight) for loss, weight in zip(losses, weights, strict=True) if weight]
    total = sum(weight for _, weight in counted)
    return sum(product for product, _ in counted) / total if total else float("nan")


class _WithoutRandomness(TorchFunctionMode):
    """Replaces random numbers by constants, so that samples do not depend on their batch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("randn", "randn_like", "normal", "normal_"):
            result.zero_()
        elif name in ("rand", "rand_like", "uniform_"):
            result.fill_(0.5)
        return result
