"""Small models trained by a pipeline and by a plain loop, for what the comparison of the first minibatch must find."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import pipedream as pd
from pipedream.core.plan.choices import Choices
from pipedream.planner import manual_plan

SGD = partial(torch.optim.SGD, lr=0.1)
Batch = tuple[Any, Any]


def batches(count: int = 3, samples: int = 8, *, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    return [(draw(samples, 4), draw(samples, 4)) for _ in range(count)]


def plan_of(
    model: nn.Module, sample: Any, cuts: Sequence[int], replicas: Sequence[int] | None = None, recompute: str = "never"
) -> pd.Plan:
    graph = pd.capture.capture(model, sample if isinstance(sample, (tuple, dict)) else (sample,)).graph
    costs = (pd.LayerProfile(1.0, 1.0, 100, 100),) * len(graph.layers)
    counts = tuple(replicas or (1,) * (len(cuts) + 1))
    profile, cluster = pd.Profile("model", graph, costs, 1).without_tied_groups(), pd.Cluster.flat(sum(counts))
    return manual_plan(profile, cluster, tuple(cuts), counts, choices=Choices(recompute=recompute))


def piped(
    model: nn.Module,
    loss: Any,
    data: Sequence[Any],
    *,
    cuts: Sequence[int] = (1,),
    replicas: Sequence[int] | None = None,
    recompute: str = "never",
    sample: Any = None,
    optimizer: Callable[..., Any] = SGD,
    schedule: str = "gpipe",
    **options: Any,
) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    plan = plan_of(model, data[0][0] if sample is None else sample, cuts, replicas, recompute=recompute)
    with pd.Pipeline(
        model, plan, schedule=schedule, loss=loss, optimizer=optimizer, **{"check": True} | options
    ) as pipeline:
        for _ in pipeline.train(data):
            pass
        return pipeline.state_dict()


def plain(model: nn.Module, loss: Callable[[Any, Any], Tensor], data: Sequence[Batch]) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    optimizer = SGD(model.parameters())
    for batch in data:
        optimizer.zero_grad()
        loss(model(batch[0]), batch).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-9, atol=1e-12, msg=name)
