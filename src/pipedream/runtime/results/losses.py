"""Losses and metrics with their exact weights.

A minibatch's loss is a mean over samples, counted tokens or elements, and the mean of its parts' means is not the mean
of the whole. So each microbatch has a *weight*, the amount that its mean is over; gradients and losses are summed as
weight x mean and divided once by the summed weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Loss", "Metric", "is_torch_loss", "metric_sums"]

Metric = Callable[[Any, Any], Any]
"""(output, batch) -> a mean over samples, or (sum, weight)."""

_CLASS_LOSSES = (F.cross_entropy, F.nll_loss)
_CLASS_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
_ELEMENT_LOSSES = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.poisson_nll_loss, F.gaussian_nll_loss, F.kl_div, F.soft_margin_loss, F.hinge_embedding_loss,
)  # fmt: skip
_ELEMENT_MODULES = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss,
    nn.GaussianNLLLoss, nn.KLDivLoss, nn.SoftMarginLoss, nn.HingeEmbeddingLoss,
)  # fmt: skip


def is_torch_loss(loss: Any) -> bool:
    """Returns whether a loss is PyTorch's own, called with (output, targets)."""
    function, _ = _unwrapped(loss)
    if isinstance(function, nn.Module):
        return type(function).__module__ == "torch.nn.modules.loss"
    return getattr(function, "__module__", "") == "torch.nn.functional"


class Loss:
    """A user's loss, with its weight for each microbatch.

    Args:
        loss: ``loss(output, batch)`` -> scalar tensor or (sum, weight); one of torch's own losses; or None if the
            model's output has a ``.loss``.
        weight: ``weight(batch)`` -> the amount that the loss is a mean over.
    """

    def __init__(self, loss: Any = None, weight: Callable[[Any], Any] | None = None) -> None:
        self._loss = loss
        self._weight = weight
        self._function, self._keywords = _unwrapped(loss)

    def __call__(self, output: Any, batch: Any, samples: int, share: float) -> tuple[torch.Tensor, float, bool]:
        """Returns (value, weight, is_sum): the value is a mean over `weight`, or a sum to be divided by it.

        Args:
            batch: the targets for torch's own losses.
            share: of the minibatch's samples.

        Raises:
            TypeError: the loss returned neither a scalar tensor nor a pair.
        """
        found = self._evaluated(output, batch)
        if isinstance(found, tuple):
            total, weight = found
            return total, float(weight), True
        found = self._scalar(found)
        if self._weight is not None:
            return found, float(self._weight(batch)), False
        reduction = self._option("reduction", "mean")
        if reduction == "sum" and is_torch_loss(self._loss):
            # The minibatch's loss is the sum of its parts: their weights sum to one.
            return found, share, True
        weight = self._torch_weight(output, batch, reduction)
        return found, float(samples if weight is None else weight), False

    def weight_from_shapes(self, output: Any, batch: Any, samples: int, share: float) -> float:
        """Returns the weight that follows from shapes alone, whatever the targets hold."""
        if self._weight is not None or not is_torch_loss(self._loss):
            return float(samples)
        reduction = self._option("reduction", "mean")
        if reduction == "sum":
            return share
        count = self._torch_count(output, batch, reduction) or 0
        return float(count if count and count % samples == 0 else samples)

    def value(self, output: Any, batch: Any) -> torch.Tensor:
        """Returns the value alone: for the weight, the targets would have to be read."""
        found = self._evaluated(output, batch)
        return found[0] if isinstance(found, tuple) else self._scalar(found)

    def _evaluated(self, output: Any, batch: Any) -> Any:
        return _loss_of_output(output) if self._loss is None else self._loss(output, batch)

    @staticmethod
    def _scalar(found: Any) -> torch.Tensor:
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            what = (
                f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
            )
            raise TypeError(f"the loss returned {what}; let it return a scalar tensor, or (sum, weight)")
        return found.reshape(())

    def _torch_weight(self, output: Any, targets: Any, reduction: str) -> float | None:
        count = self._torch_count(output, targets, reduction)
        if count is None or not self._is_of_classes or targets.is_floating_point():
            return None if count is None else float(count)
        counted = targets[targets != self._option("ignore_index", -100)]
        classes = self._option("weight", None)
        return float(counted.numel() if classes is None else classes[counted].sum())

    def _torch_count(self, output: Any, targets: Any, reduction: str) -> int | None:
        function = self._function
        if not is_torch_loss(self._loss) or not isinstance(targets, torch.Tensor):
            return None
        if self._is_of_classes:
            if targets.is_floating_point():
                return targets.numel() // targets.shape[1] if targets.ndim > 1 else 1
            return targets.numel()
        if function in _ELEMENT_LOSSES or isinstance(function, _ELEMENT_MODULES):
            return None if reduction == "batchmean" else max(output.numel(), targets.numel())
        return None

    @property
    def _is_of_classes(self) -> bool:
        return self._function in _CLASS_LOSSES or isinstance(self._function, _CLASS_MODULES)

    def _option(self, name: str, default: Any) -> Any:
        if isinstance(self._function, nn.Module):
            return getattr(self._function, name, default)
        return self._keywords.get(name, default)


def metric_sums(
    metrics: Mapping[str, Metric], output: Any, batch: Any, samples: int
) -> tuple[tuple[float, float], ...]:
    """Returns (sum, weight) of each metric."""
    found = []
    with torch.no_grad():
        for metric in metrics.values():
            value = metric(output, batch)
            if isinstance(value, tuple):
                found.append((float(value[0]), float(value[1])))
            else:
                found.append((float(value) * samples, float(samples)))
    return tuple(found)


def _unwrapped(loss: Any) -> tuple[Any, dict[str, Any]]:
    keywords: dict[str, Any] = {}
    while isinstance(loss, functools.partial):
        keywords = {**loss.keywords, **keywords}
        loss = loss.func
    return loss, keywords


def _loss_of_output(output: Any) -> torch.Tensor:
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if found is None and isinstance(output, torch.Tensor) and output.numel() == 1:
        found = output
    if found is None:
        raise TypeError(
            f"loss=None needs a model whose output has .loss, but the output is a {type(output).__name__}; give a loss"
        )
    assert isinstance(found, torch.Tensor)
    return found
