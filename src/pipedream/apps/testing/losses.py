"""What a loss averages over, as docs/models.md says it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from pipedream.apps.testing.batches import Total, count_samples


def total_of(
    loss: Any, targets: Callable[[Any], Any] | None = None, weight: Callable[[Any], Any] | None = None
) -> Total:
    """Returns the sum and weight of a pipeline's loss: one of torch's own, a user's, or None for the model's.

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
