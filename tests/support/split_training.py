"""Trains a model of `models` twice: in a plain loop without this library, and split into stages by it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from models import Case
from own_models import samples_of
from torch import Tensor, nn

import pipedream as pd

__all__ = ["LENGTHS", "Trained", "batches_of", "check_same", "graph_of", "model_of", "pipelined", "plain_loop"]

LENGTHS = (6, 9, 6, 5)


@dataclass(frozen=True)
class Trained:
    """What a run left.

    Attributes:
        losses: of the minibatches.
        state: whole state dict at the end.
        cuts: names of the layers at which a stage began.
    """

    losses: list[float]
    state: dict[str, Tensor]
    cuts: tuple[str, ...] = ()


def model_of(case: Case, *, dtype: torch.dtype = torch.float64, dropout: bool = False) -> nn.Module:
    """Returns the model of a case, without dropout unless it is asked for."""
    model = case.build().to(dtype)
    if not dropout:
        _without_dropout(model)
    return model


def batches_of(
    case: Case, lengths: Sequence[int] = LENGTHS, *, samples: int = 6, dtype: torch.dtype = torch.float64
) -> list[Any]:
    """Returns one batch for each length; the last one has half of the samples."""
    counts = [samples] * (len(lengths) - 1) + [(samples + 1) // 2]
    return [_cast(case.batch(seed, n, t), dtype) for seed, (n, t) in enumerate(zip(counts, lengths, strict=True))]


def make_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Makes the optimizer of both runs."""
    return torch.optim.SGD([p for _, p in named if p.requires_grad], lr=0.02, momentum=0.9)


def plain_loop(case: Case, batches: Sequence[Any], microbatches: int = 1, *, dtype: Any = torch.float64) -> Trained:
    """Trains in one process: the gradient of a minibatch is the mean of its microbatches', weighted by amount."""
    model = model_of(case, dtype=dtype)
    optimizer = make_optimizer(list(model.named_parameters()))
    losses = []
    for batch in batches:
        parts = [(part, case.amount(part)) for part in split(batch, microbatches)]
        whole = sum(amount for _, amount in parts)
        optimizer.zero_grad()
        total = 0.0
        for part, amount in parts:
            loss = loss_of(case, model, part) * (amount / whole)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return Trained(losses, {name: value.clone() for name, value in model.state_dict().items()})


def loss_of(case: Case, model: nn.Module, batch: Any) -> Tensor:
    """Returns the loss of a batch, as a training loop computes it."""
    inputs = case.inputs(batch)
    if isinstance(inputs, Mapping):
        output = model(**inputs)
    else:
        output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    if case.loss is None:
        return output.loss
    is_torchs = getattr(case.loss, "func", case.loss).__module__ == "torch.nn.functional"
    return case.loss(output, batch[1] if is_torchs else batch)


def graph_of(case: Case, model: nn.Module, batch: Any) -> Any:
    """Profiles a model; seconds do not matter here."""
    return pd.profile(model, case.inputs(batch), warmup=0, runs=1)


def pipelined(
    case: Case,
    batches: Sequence[Any],
    *,
    stages: int,
    schedule: str = "1f1b",
    microbatches: int | None = 1,
    cuts: Sequence[int | str] | None = None,
    seed: int = 0,
    dropout: bool = False,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Trained:
    """Trains in a pipeline of so many stages, through the public face alone.

    Args:
        cuts: by default drawn with the seed from those that the model allows.
        dropout: as the model has it; otherwise there is none.
        options: of `pipedream.Pipeline`.
    """
    model = model_of(case, dtype=dtype, dropout=dropout)
    profile = graph_of(case, model, batches[0])
    if cuts is None:
        cuts = draw_cuts(profile.graph, stages, seed)
    plan = pd.plan(
        profile, pd.Cluster.here(len(cuts) + 1), schedule=schedule, microbatches=microbatches, cuts=tuple(cuts)
    )
    begins = tuple(stage.names[0] for stage in plan.stages[1:])
    with pd.Pipeline(model, plan, loss=case.loss, optimizer=make_optimizer, **options) as pipeline:
        losses = [done.loss for done in pipeline.train(batches)]
        return Trained(losses, pipeline.state_dict(), begins)


def draw_cuts(graph: Any, stages: int, seed: int) -> tuple[int, ...]:
    """Draws places for so many stages, or as many as the model has; tied weights may be parted."""
    allowed = [i for i in range(1, len(graph.layers)) if not _parts_state(graph, i)]
    return tuple(sorted(random.Random(seed).sample(allowed, min(stages - 1, len(allowed)))))


def check_same(wanted: Trained, found: Trained, tolerance: float) -> None:
    """Checks that two runs gave the same losses and the same weights."""
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(wanted.losses), rtol=tolerance, atol=tolerance)
    assert sorted(found.state) == sorted(wanted.state)
    for name, value in wanted.state.items():
        torch.testing.assert_close(
            found.state[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def split(batch: Any, parts: int) -> list[Any]:
    """Splits a batch along its samples into parts as equal as possible, the larger ones first; none is empty."""
    count = samples_of(batch)

    def part(value: Any, index: int) -> Any:
        if isinstance(value, Tensor):
            return torch.tensor_split(value, parts)[index] if len(value) == count else value
        if isinstance(value, Mapping):
            return {key: part(item, index) for key, item in value.items()}
        return tuple(part(item, index) for item in value)

    return [part(batch, index) for index in range(min(parts, count))]


def _parts_state(graph: Any, cut: int) -> bool:
    return any(min(group) < cut <= max(group) for group in graph.whole)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return tuple(_cast(item, dtype) for item in value)


def _without_dropout(model: nn.Module) -> None:
    """Sets every probability of dropping to zero: of modules, of numbers beside them, and in configurations."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(vars(holder).items()) if holder is not None else ():
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)
