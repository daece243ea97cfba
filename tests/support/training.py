"""Small models, trained in a pipeline and in a plain loop."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipedream as pd
from pipedream.core.plan.choices import Choices
from pipedream.planner import manual_plan

SGD = partial(torch.optim.SGD, lr=0.1)


class Trained(NamedTuple):
    losses: list[float]
    state: dict[str, Tensor]


def mse(output: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(output, batch[1])


def batches(count: int = 3, samples: int = 8, *, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return [(draw(samples, 4), draw(samples, 4)) for _ in range(count)]


def plan_of(
    model: nn.Module, sample: Any, cuts: Sequence[int], replicas: Sequence[int] | None = None, recompute: str = "never"
) -> pd.Plan:
    graph = pd.capture.capture(model, sample if isinstance(sample, (tuple, dict)) else (sample,)).graph
    costs = (pd.LayerProfile(1.0, 1.0, 100, 100),) * len(graph.layers)
    counts = tuple(replicas or (1,) * (len(cuts) + 1))
    profile, cluster = pd.Profile("model", graph, costs, 1).without_tied_groups(), pd.Cluster.flat(sum(counts))
    return manual_plan(profile, cluster, tuple(cuts), counts, choices=Choices(recompute=recompute))


def train(model: nn.Module, plan: pd.Plan, data: Any, *, epochs: int = 1, **options: Any) -> Trained:
    with pd.Pipeline(model, plan, **{"loss": F.cross_entropy, "optimizer": SGD} | options) as pipeline:
        return Trained([done.loss for done in pipeline.train(data, epochs=epochs)], pipeline.state_dict())


def loop(
    model: nn.Module,
    data: Any,
    *,
    loss: Callable[..., Tensor] = F.cross_entropy,
    optimizer: Callable[..., torch.optim.Optimizer] = SGD,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    parts: int = 1,
    targets: Callable[[Any], Any] = itemgetter(1),
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    after_backward: Callable[[nn.Module], object] = id,
    after_step: Callable[[nn.Module], object] = id,
) -> Trained:
    """Trains the model itself for an epoch; the gradients of a minibatch's parts are added up."""
    stepper, losses = optimizer(list(model.named_parameters())), []
    schedule = None if scheduler is None else scheduler(stepper)
    for batch in data:
        stepper.zero_grad()
        total = 0.0
        for part in [batch] if parts == 1 else zip(*(leaf.chunk(parts) for leaf in batch), strict=True):
            share = 1.0 if parts == 1 else len(part[0]) / len(batch[0])
            with forward_context():
                inputs = part[0].clone() if isinstance(part[0], Tensor) else part[0]  # the model may write into it
                output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
                part_loss = loss(output, targets(part)) * share
            part_loss.backward()
            total += float(part_loss.detach())
        after_backward(model)
        stepper.step()
        if schedule is not None:
            schedule.step()
        losses.append(total)
        after_step(model)
    return Trained(losses, {name: value.detach().clone() for name, value in model.state_dict().items()})


def piped(
    model: nn.Module, loss: Any, data: Sequence[Any], *, cuts: Sequence[int] = (1,),
    replicas: Sequence[int] | None = None, recompute: str = "never", sample: Any = None, **options: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Trains a copy of the model by GPipe; the loss gets the whole batch, and the first minibatch is compared."""
    plan = plan_of(model, data[0][0] if sample is None else sample, cuts, replicas, recompute)
    how = {"loss": loss, "schedule": "gpipe", "check": True} | options
    return train(copy.deepcopy(model), plan, data, **how).state


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
