"""Losses and metrics with their exact weights.

A minibatch's loss is a mean over samples, counted tokens or elements, and the mean of its parts' means is not the mean
of the whole. So each microbatch has a *weight*, the amount that its mean is over; gradients and losses are summed as
weight x mean and divided once by the summed weight.

If the model returns its own loss, the weight is what the called loss is a mean over (`LossCalls`). A loss that is not
made of torch's is taken for a mean over samples; `probe_weight` checks that on a sample of the data.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from pipedream.core.errors import PipelineError
from pipedream.runtime.comm.values import map_tensors, tensors_in
from pipedream.services.losses.left_out import WEIGHT_ADVICE, PartsCheck
from pipedream.services.losses.loss_calls import Amounts, LossCalls, LossNote, unwrap_loss

Metric = Callable[[Any, Any], Any]
"""(output, batch) -> a mean over samples, or (sum, weight)."""


class LossWeight(enum.StrEnum):
    """The kinds of amount that a model's own loss is a mean over."""

    UNKNOWN = ""
    RECOGNISED = "recognised"  # what torch's losses, which it calls, are means over
    SAMPLES = "samples"
    SUM = "sum"  # it is a sum over samples
    OTHER = "other"  # the losses of a batch's parts do not give the loss of the batch


def is_torch_loss(loss: Any) -> bool:
    """Returns whether a loss is PyTorch's own, called with (output, targets)."""
    function, _ = unwrap_loss(loss)
    if isinstance(function, nn.Module):
        return type(function).__module__ == "torch.nn.modules.loss"
    return getattr(function, "__module__", "") == "torch.nn.functional"


def find_module(loss: Any) -> nn.Module | None:
    """Returns a loss if it is a module."""
    function, _ = unwrap_loss(loss)
    return function if isinstance(function, nn.Module) else None


class Loss:
    """A user's loss, with its weight for each microbatch.

    Args:
        loss: ``loss(output, batch)`` -> scalar tensor or (sum, weight); one of torch's own losses; or None if the
            model's output has a ``.loss``.
        weight: ``weight(batch)`` -> the amount that the loss is a mean over.
        of_model: what `probe_weight` found for the model's own loss; empty if it was not called.

    Attributes:
        function, weight: the arguments `loss` and `weight`.
    """

    def __init__(
        self, loss: Any = None, weight: Callable[[Any], Any] | None = None, *, of_model: LossWeight | str = ""
    ) -> None:
        self.function = loss
        self.weight = weight
        self._is_torch_loss = is_torch_loss(loss)
        self._of_model = LossWeight(of_model)
        watches = loss is None and weight is None and self._of_model in (LossWeight.UNKNOWN, LossWeight.RECOGNISED)
        self._calls = LossCalls() if watches else None
        self._user_calls = LossCalls() if loss is not None and weight is None and not self._is_torch_loss else None
        self._torch_calls = LossCalls()
        self._is_watched = False
        self._first_part: tuple[int, Amounts] | None = None  # of the minibatch
        self._has_checked_pair = False
        self._parts_check = PartsCheck(self._evaluate)

    def copy_unused(self) -> Loss:
        """Returns the same loss in its initial state."""
        return Loss(self.function, self.weight, of_model=self._of_model)

    def check_split(self) -> None:
        """Raises a PipelineError if the loss of a minibatch does not follow from the losses of its parts."""
        if self.function is None and self.weight is None and self._of_model is LossWeight.OTHER:
            raise PipelineError(
                "the minibatches are to be split into parts, but the model's own loss is not a mean over samples: on "
                "the sample, the losses of parts do not give the loss of the whole (as with a contrastive loss, which "
                "compares the samples of a batch, or a mean over weights or a mask that parts may have unlike); train "
                "with microbatches=1 and one replica of the last stage, or give weight=..., a function from a batch to "
                "the amount that its loss is a mean over"
            )

    def watching(self, inputs: Any, samples: int) -> AbstractContextManager[Any]:
        """Context of the last stage's forward; from it the next call finds the weight of the model's own loss."""
        if self._calls is None or (self._calls.recognised is False and self._of_model is LossWeight.UNKNOWN):
            return nullcontext()
        self._is_watched = True
        return self._calls.watch(inputs, samples)

    def __call__(
        self, output: Any, batch: Any, samples: int, share: float, minibatch: int | None = None, *, received: Any = None
    ) -> tuple[torch.Tensor, float, bool]:
        """Returns (value, weight, is_sum): the value is a mean over `weight`, or a sum to be divided by it.

        Args:
            batch: the targets for torch's own losses.
            share: its fraction of the minibatch's samples.
            minibatch: number of the minibatch, whose parts' weights must fit together; None if they need not.
            received: the batch on the CPU, from which the weight is found without waiting for a GPU; None if `batch`
                is on the CPU.

        Raises:
            TypeError: the loss returned neither a scalar tensor nor a pair.
            ValueError: the weight of the model's own loss is unknown.
        """
        received = batch if received is None else received
        calls = self._user_calls
        if minibatch is None or (calls is not None and calls.recognised is False):
            calls = None
        targets = zip(tensors_in(batch), tensors_in(received), strict=True) if calls is not None else ()
        with nullcontext() if calls is None else calls.watch((), samples, targets):
            result = self._evaluate(output, batch)
        if isinstance(result, tuple):
            if calls is not None:
                calls.end()
            return *self._check_pair(result, output, batch), True
        value = self._check_scalar(result)
        if minibatch is not None and self._user_calls is not None:
            weight, is_sum = float(samples), False
            if calls is not None:
                weight, is_sum = self._weigh_user_loss(calls, value, samples, share, minibatch)
            if self._user_calls.recognised is False:
                self._parts_check.check(output, batch, received, samples, minibatch)
            return value, weight, is_sum
        if self.function is None and self.weight is None:
            return value, *self._weigh_model_loss(result, samples, share, minibatch)
        if self.weight is not None:
            return value, float(self.weight(received)), False
        note = self._note_torch_loss(output, received)
        if note is not None and note.kind == "sum":
            return value, share, True  # the minibatch's loss is the sum of its parts: their weights sum to one
        return value, float(samples) if note is None or not note.amounts else note.amounts[0](), False

    def _note_torch_loss(self, output: Any, targets: Any) -> LossNote | None:
        """Returns what one of torch's own losses is a mean over; None for another loss."""
        if not self._is_torch_loss or not isinstance(targets, torch.Tensor):
            return None
        return self._torch_calls.note_torch_loss(self.function, output, targets)

    def _weigh_user_loss(
        self, calls: LossCalls, loss: torch.Tensor, samples: int, share: float, minibatch: int
    ) -> tuple[float, bool]:
        """Returns the weight of the user's own loss, and whether the loss is a sum.

        The weight is the number of samples without those that the called losses of torch ignore, or the divisor of the
        loss.
        """
        amounts = calls.amounts(loss)
        if amounts is not None and amounts.is_sum:
            return share, True
        if amounts is None or not max(amounts.full, default=1.0):
            return float(samples), False
        first = self._find_first_part(minibatch, amounts)
        per_sample_before, per_sample = (max(part.full, default=0.0) / part.samples for part in (first, amounts))
        if not first.fits(amounts) or abs(per_sample_before - per_sample) > 1e-9 * per_sample_before:
            text, first_text = (", ".join(f"{v:g}" for v in part.values) for part in (amounts, first))
            raise ValueError(
                f"the loss is a mean over {text} in a part of {samples} samples, and over {first_text} in a part of "
                f"{first.samples} of the same minibatch, so that its parts do not count by their samples; "
                f"{WEIGHT_ADVICE}"
            )
        full, values = amounts.full or (float(samples),) * len(amounts.values), amounts.values
        largest = max(range(len(full)), key=lambda i: (full[i], values[i]))
        return samples * values[largest] / full[largest], False

    def _weigh_model_loss(
        self, loss: torch.Tensor, samples: int, share: float, minibatch: int | None
    ) -> tuple[float, bool]:
        """Returns the weight of the model's own loss, and whether the loss is a sum."""
        if self._of_model is LossWeight.SUM:
            return share, True
        if self._calls is None or not self._is_watched:
            return float(samples), False
        self._is_watched = False
        amounts = self._calls.amounts(loss)
        if amounts is None:
            if minibatch is not None and (self._calls.recognised or self._of_model is LossWeight.RECOGNISED):
                raise ValueError(
                    "the model computed its loss in another way than before, so that it is unknown what it is a mean "
                    "over; give weight=..., a function from a batch to this amount"
                )
            return float(samples), False
        if amounts.is_sum:
            return share, True
        if minibatch is None:
            mixed = min(amounts.values) != max(amounts.values) or amounts.read_terms()
            return float(samples) if mixed else amounts.values[0], False
        if not self._find_first_part(minibatch, amounts).fits(amounts):
            amounts_here = ", ".join(f"{value:g}" for value in amounts.values) + f" for {samples} samples"
            raise ValueError(
                f"the model's own loss is a sum of means over different amounts (here {amounts_here}), in a ratio that "
                "differs between the parts of a minibatch; train with microbatches=1 and one replica of the last "
                "stage, or give weight=..., a function from a batch to the amount by which its loss is to count"
            )
        return max(amounts.values), False

    def _find_first_part(self, minibatch: int, amounts: Amounts) -> Amounts:
        """Returns the amounts of the first part of a minibatch in which something counts; else these, of this part."""
        if self._first_part is None or self._first_part[0] != minibatch or not max(self._first_part[1].values):
            self._first_part = minibatch, amounts
        return self._first_part[1]

    def weight_from_shapes(self, output: Any, batch: Any, samples: int, share: float) -> float:
        """Returns the weight that follows from shapes alone, whatever the targets' values."""
        note = self._note_torch_loss(output, batch) if self.weight is None else None
        if note is not None and note.kind == "sum":
            return share
        count = note.full[0]() if note is not None and note.full else 0.0
        return count if count and count % samples == 0 else float(samples)

    def value(self, output: Any, batch: Any) -> torch.Tensor:
        """Returns the value without the weight, which would need reading the targets."""
        result = self._evaluate(output, batch)
        return result[0] if isinstance(result, tuple) else self._check_scalar(result)

    def _evaluate(self, output: Any, batch: Any) -> Any:
        if self.function is not None:
            return _call_function(self.function, "loss", output, batch)
        loss = find_loss(output)
        if loss is None:
            kind = type(output).__name__
            raise TypeError(f"loss=None needs a model whose output has .loss, but the output is a {kind}; give a loss")
        return loss

    @staticmethod
    def _check_scalar(loss: Any) -> torch.Tensor:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise TypeError(f"the loss returned {_describe(loss)}; let it return a scalar tensor, or (sum, weight)")
        return loss if not loss.ndim else loss.reshape(())

    def _check_pair(self, pair: tuple[Any, ...], output: Any, batch: Any) -> tuple[torch.Tensor, float]:
        """Returns the sum and the weight of a pair; checks once that the weight does not depend on the output."""
        total: Any
        weight: Any
        total, weight = pair if len(pair) == 2 else (None, None)
        if not isinstance(total, torch.Tensor) or total.numel() != 1 or not _is_amount(weight):
            raise TypeError(
                f"the loss returned {_describe(pair)}; let it return a scalar tensor, or (sum, weight) with "
                "the number of samples or tokens as the weight; log other numbers with metrics=..."
            )
        if not self._has_checked_pair:
            self._has_checked_pair = True
            other: Any = None
            with torch.no_grad(), torch.random.fork_rng(devices=[]), suppress(Exception):
                other = self._evaluate(map_tensors(output, torch.zeros_like), batch)
            if isinstance(other, tuple) and _is_amount(other[1]) and float(other[1]) != float(weight):
                raise TypeError(
                    f"the loss returned {_describe(pair)}, taken as (sum, weight), but the second value depends on the "
                    "model's output, as an accuracy does; let the loss return a scalar tensor, and log other numbers "
                    "with metrics=..."
                )
        return total.reshape(()), float(weight)


def metric_scores(
    metrics: Mapping[str, Metric], output: Any, batch: Any, samples: int
) -> list[tuple[float | torch.Tensor, float]]:
    """Returns for each metric its sum and its weight, each as value and factor; a value on a GPU is not read."""
    scores: list[tuple[float | torch.Tensor, float]] = []
    with torch.no_grad():
        for name, metric in metrics.items():
            value = _call_function(metric, f"metric {name!r}", output, batch)
            is_pair = isinstance(value, tuple)
            parts = value if is_pair else (value,)
            if len(parts) != 1 + is_pair or not all(map(_is_amount, parts)):
                raise TypeError(
                    f"the metric {name!r} returned {_describe(value)}; let it return a number or a scalar tensor, a "
                    "mean over the samples, or (sum, weight)"
                )
            scores += [(part, 1.0) for part in value] if is_pair else [(value, float(samples)), (float(samples), 1.0)]
    return scores


def _call_function(function: Callable[[Any, Any], Any], name: str, output: Any, batch: Any) -> Any:
    """Calls a loss or a metric; if it fails, adds a note, as it may have expected targets instead of the batch."""
    try:
        return function(output, batch)
    except Exception as error:
        if not isinstance(batch, torch.Tensor):
            size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
            error.add_note(
                f"the {name} was called with the output and what targets=... returns, by default the whole batch, here "
                f"a {type(batch).__name__}{size}; with targets=lambda batch: batch[1] it gets (output, targets)"
            )
        else:
            error.add_note(f"the {name} was called with (output, targets)")
        raise


def _is_amount(value: Any) -> bool:
    """Returns whether a value is a number that is not part of a graph."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.requires_grad
    return hasattr(value, "__float__") and getattr(value, "size", 1) == 1


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        graph = ", with a gradient" if value.requires_grad else ""
        return f"a tensor of shape {tuple(value.shape)}{graph}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))})"
    return type(value).__name__


def find_loss(output: Any) -> torch.Tensor | None:
    """Returns the loss that a model has computed itself, if it has."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None and isinstance(output, torch.Tensor) and output.numel() == 1:
        loss = output
    return loss
