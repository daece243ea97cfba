"""Late gradients of a model that is run as a whole: each stage's parameters in the version that the method says.

No class of the library is used. For k, the number of a minibatch, and s, that of a stage of p, the versions are

    PipeDream (SOSP 2019, section 3.3)   w(k+1) = w(k) - lr grad f(w_0(k-p+1), ..., w_{p-1}(k))
    2BW (ICML 2021, section 3.1)         w(k+1) = w(k) - lr grad f(w(k-1))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from models import Case
from split_training import make_optimizer, model_of, split
from torch import Tensor
from torch.func import functional_call

Version = Callable[[int, int], int]
"""(stage, minibatch) -> updates that the weights have had."""


def of_pipedream(stages: int) -> Version:
    return lambda s, k: max(0, k - (stages - 1 - s))


def of_2bw(stages: int) -> Version:
    return lambda s, k: max(0, k - 1)


def train(
    case: Case, batches: Sequence[Any], owned: Sequence[Sequence[str]], version: Version, microbatches: int = 1
) -> tuple[list[float], dict[str, Tensor]]:
    """Returns the losses of the minibatches and the state at the end.

    Args:
        owned: the parameters of each stage; of a tied one any holder's version is read, as all are the same.
    """
    model = model_of(case)
    optimizer = make_optimizer(list(model.named_parameters()))
    stage_of = {name: s for s, names in enumerate(owned) for name in names}
    versions = [_copied(model)]
    losses = []
    for k, batch in enumerate(batches):
        parts = [(part, case.amount(part)) for part in split(batch, microbatches)]
        whole, total = sum(amount for _, amount in parts), 0.0
        leaves = {name: versions[version(stage_of[name], k)][name].clone().requires_grad_() for name in versions[0]}
        for part, amount in parts:
            inputs = case.inputs(part)
            args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
            output = functional_call(model, leaves, args if isinstance(args, tuple) else (args,), kwargs)
            loss = output.loss if case.loss is None else case.loss(output, part[1])
            (loss * (amount / whole)).backward()
            total += loss.item() * amount / whole
        for name, parameter in model.named_parameters():
            parameter.grad = leaves[name].grad
        optimizer.step()
        versions.append(_copied(model))
        losses.append(total)
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def _copied(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
