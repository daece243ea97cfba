"""A model trained in a pipeline, and in a plain loop."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipedream as pd

SGD = partial(torch.optim.SGD, lr=0.1)


class Trained(NamedTuple):
    losses: list[float]
    state: dict[str, Tensor]


def train(model: nn.Module, plan: pd.Plan, data: Any, *, epochs: int = 1, **options: Any) -> Trained:
    with pd.Pipeline(model, plan, **{"loss": F.cross_entropy, "optimizer": SGD} | options) as pipeline:
        losses = [done.loss for done in pipeline.train(data, epochs=epochs)]
        return Trained(losses, pipeline.state_dict())


def loop(
    model: nn.Module,
    data: Any,
    *,
    loss: Callable[..., Tensor] = F.cross_entropy,
    optimizer: Callable[..., torch.optim.Optimizer] = SGD,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    parts: int = 1,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    after_backward: Callable[[nn.Module], object] = id,
) -> Trained:
    """Trains the model itself for an epoch; the gradients of a minibatch's parts, equal in size, are added up."""
    stepper, losses = optimizer(list(model.named_parameters())), []
    schedule = None if scheduler is None else scheduler(stepper)
    for inputs, targets in data:
        stepper.zero_grad()
        total = 0.0
        for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            with forward_context():
                share = loss(model(x.clone()), y) / parts  # which may write into it
            share.backward()
            total += float(share.detach())
        after_backward(model)
        stepper.step()
        if schedule is not None:
            schedule.step()
        losses.append(total)
    return Trained(losses, {name: value.detach().clone() for name, value in model.state_dict().items()})
