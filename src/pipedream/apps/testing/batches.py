"""Batches as a pipeline takes them: the model's input, the microbatches, and what a loss averages over."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

Total = Callable[[Any, Any], tuple[Tensor, float]]
"""(output, batch) -> (sum of the losses, their weight)."""


def inputs_of(batch: Any) -> Any:
    """Returns the first of a pair, else the batch."""
    return batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Calls a model with a tuple of inputs, a mapping of named ones, or a single one."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def count_samples(batch: Any) -> int:
    """Returns the length of the first tensor."""
    return next((len(value) for value in tree_leaves(batch) if isinstance(value, Tensor)), 0)


def split_batch(batch: Any, parts: int) -> list[tuple[Any, int]]:
    """Returns the microbatches of a batch and their samples; those without a sample too, as they have a number."""
    samples = count_samples(batch)

    def take(value: Any, part: int) -> Any:
        is_split = isinstance(value, Tensor) and value.dim() and len(value) == samples
        return torch.tensor_split(value, parts)[part] if is_split else value

    pieces = [tree_map(lambda value, part=part: take(value, part), batch) for part in range(parts)]
    return [(piece, count_samples(piece)) for piece in pieces]


def clone_batch(batch: Any) -> Any:
    """Returns a copy: a model may write into what it is given."""
    return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, batch)


def total_of(
    loss: Any, targets: Callable[[Any], Any] | None = None, weight: Callable[[Any], Any] | None = None
) -> Total:
    """Returns the sum and weight of a pipeline's loss, as docs/models.md says: torch's own, a user's, or the model's.

    Args:
        targets, weight: as in a pipeline's options.
    """
    function, options = (loss.func, loss.keywords) if isinstance(loss, partial) else (loss, {})
    if isinstance(function, nn.Module):
        is_torchs, options = type(function).__module__ == "torch.nn.modules.loss", {**vars(function)}
        classes = isinstance(function, (nn.CrossEntropyLoss, nn.NLLLoss))
    else:
        is_torchs = getattr(function, "__module__", "") == "torch.nn.functional"
        classes = function in (F.cross_entropy, F.nll_loss)

    def total(output: Any, batch: Any) -> tuple[Tensor, float]:
        chosen = targets(batch) if targets else batch[1] if is_torchs else batch
        value = output.loss if loss is None else loss(output, chosen)
        if isinstance(value, tuple):
            return value[0], float(value[1])
        if weight is not None:
            amount = float(weight(batch))
        elif is_torchs and classes:
            amount = float((chosen != options.get("ignore_index", -100)).sum())
        else:
            amount = float(chosen.numel() if is_torchs else count_samples(batch))
        return (value * amount if amount else output.sum() * 0.0), amount

    return total
