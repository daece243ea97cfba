"""Trains a case of the zoo in a pipeline, and in a plain loop without this library."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from zoo import Case

import pipedream as pd
from pipedream.apps.testing.batches import call_model, split_batch
from pipedream.capture.structure import walk

LENGTHS = (6, 9, 6, 5)


class Trained(NamedTuple):
    """A loss per minibatch, the state at the end, and then the mean loss and the outputs of the evaluated batches."""

    losses: list[float]
    state: dict[str, Tensor]
    evaluated: float
    predicted: list[dict[str, Tensor]]


def model_of(case: Case, *, dropout: bool = False) -> nn.Module:
    """Returns the model of a case, without dropout unless it is asked for."""
    model = case.build().to(case.dtype)
    for module in () if dropout else model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(vars(holder).items()) if holder is not None else ():
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)
    return model


def batches_of(case: Case, lengths: Sequence[int] = LENGTHS, *, samples: int = 6) -> list[Any]:
    """Returns one batch for each length; the last one has half of the samples."""

    def cast(value: Any) -> Any:
        return value.to(case.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    counts = [samples] * (len(lengths) - 1) + [(samples + 1) // 2]
    return [tree_map(cast, case.batch(seed, n, t)) for seed, (n, t) in enumerate(zip(counts, lengths, strict=True))]


def make_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.02, momentum=0.9)


def plain_loop(case: Case, batches: Sequence[Any], microbatches: int = 1, scale: float = 1.0) -> Trained:
    """Trains in one process: a gradient is the mean of microbatches', weighted by amount; `scale` is the loss's."""
    model, losses = model_of(case), []
    optimizer = make_optimizer(list(model.named_parameters()))
    for batch in batches:
        parts = [(part, case.amount(part)) for part in split(batch, microbatches)]
        whole = sum(amount for _, amount in parts)
        optimizer.zero_grad()
        losses.append(0.0)
        for part, amount in parts:
            loss = loss_of(case, model, part) * (amount / whole)
            (loss * scale).backward()
            losses[-1] += loss.item()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= scale
        optimizer.step()
    model.eval()
    with torch.no_grad():
        scored = [(loss_of(case, model, batch).item(), case.amount(batch)) for batch in batches]
        with case.casting():
            predicted = [tensors_of(call_model(model, case.inputs(batch))) for batch in batches]
    mean = sum(loss * amount for loss, amount in scored) / sum(amount for _, amount in scored)
    return Trained(losses, {name: value.clone() for name, value in model.state_dict().items()}, mean, predicted)


def split(batch: Any, parts: int) -> list[Any]:
    return [part for part, samples in split_batch(batch, parts) if samples]


def loss_of(case: Case, model: nn.Module, batch: Any) -> Tensor:
    with case.casting():
        return case.mean_loss(call_model(model, case.inputs(batch)), batch)


def tensors_of(output: Any) -> dict[str, Tensor]:
    """Returns the tensors of an output; what else a model returns (such as its cache) is left out."""
    kind = type(output).__name__
    return {f"{kind} {path}": leaf for path, leaf in walk(output) if isinstance(leaf, Tensor)}


def parts_make_whole(case: Case, batch: Any, microbatches: int) -> bool:
    """Returns whether the mean loss of a batch's parts is that of the batch, in evaluation mode."""
    model, parts = model_of(case).eval(), split(batch, microbatches)
    amounts = [case.amount(part) for part in parts]
    with torch.no_grad():
        whole = loss_of(case, model, batch).item()
        losses = [loss_of(case, model, part).item() * amount for part, amount in zip(parts, amounts, strict=True)]
    return math.isclose(sum(losses) / sum(amounts), whole, rel_tol=1e-6)


def profile_of(case: Case, batch: Any, *, dropout: bool = False) -> pd.Profile:
    """Profiles the model of a case; seconds do not matter here."""
    return pd.profile(model_of(case, dropout=dropout), case.inputs(batch), warmup=0, runs=1, autocast=case.autocast)


def pipelined(
    case: Case,
    batches: Sequence[Any],
    *,
    stages: int = 2,
    schedule: str = "1f1b",
    microbatches: int | None = 1,
    profile: pd.Profile | None = None,
    seed: int = 0,
    dropout: bool = False,
    **options: Any,
) -> Trained:
    """Trains in a pipeline that is cut at random places, through the public face alone.

    Args:
        profile: of the same case; by default it is made from the first batch.
        dropout: as the model has it; otherwise there is none.
        options: further arguments of `pipedream.Pipeline`, which compares the first minibatch unless the model gives
            other numbers for a minibatch than for its parts.
    """
    profile = profile or profile_of(case, batches[0], dropout=dropout)
    whole = [(min(group), max(group)) for group in profile.graph.inseparable]  # tied weights may be separated
    allowed = [i for i in range(1, len(profile.layers)) if not any(first < i <= last for first, last in whole)]
    cuts = tuple(sorted(random.Random(seed).sample(allowed, min(stages - 1, len(allowed)))))
    plan = pd.plan(profile, pd.Cluster.local(len(cuts) + 1), schedule=schedule, microbatches=microbatches, cuts=cuts)
    options.setdefault("check", parts_make_whole(case, batches[0], microbatches or 1))
    return train_on(case, plan, batches, dropout=dropout, **options)


def train_on(case: Case, plan: pd.Plan, batches: Sequence[Any], *, dropout: bool = False, **options: Any) -> Trained:
    """Trains by a plan, in this process alone or as one rank of a process group."""
    options = {"loss": case.loss, "optimizer": make_optimizer, "autocast": case.autocast} | options
    with pd.Pipeline(model_of(case, dropout=dropout), plan, **options) as pipeline:
        losses = [done.loss for done in pipeline.train(batches)]
        evaluated = pipeline.evaluate(batches)["loss"]
        predicted = [tensors_of(output) for output in pipeline.predict(batches)]
        return Trained(losses, pipeline.state_dict(), evaluated, predicted)


def check_same(expected: Trained, actual: Trained, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@dataclass(frozen=True)
class Feature:
    """What a run uses: workers of each stage, stages per worker (`chunks`), dropout, options of the pipeline."""

    schedule: str = "1f1b"
    microbatches: int = 2
    config: tuple[int, ...] = (1, 1)
    chunks: int = 1
    recompute: bool = False
    dropout: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def workers(self) -> int:
        return sum(self.config) // self.chunks

    def plan(self, profile: pd.Profile) -> pd.Plan:
        count, stages = len(profile.graph.layers), len(self.config)
        shape: dict[str, Any] = {"shape": "any", "chunks": self.chunks}
        if self.chunks == 1:
            shape = {"shape": self.config, "cuts": tuple(i * count // stages for i in range(1, stages))}
        m = self.microbatches if self.microbatches > 1 else None
        plan = pd.plan(profile, pd.Cluster.local(self.workers), schedule=self.schedule, microbatches=m, **shape)
        return replace(plan, stages=tuple(replace(stage, recompute=self.recompute) for stage in plan.stages))


FLUSHING = {
    "interleaved": Feature("interleaved_1f1b", 4, (1, 1, 1, 1), chunks=2),
    "zero bubble": Feature("zb_h1", 4),
    "recompute": Feature(recompute=True),
    "recompute split": Feature("zb_h1", 4, recompute=True),
    "replicas": Feature("1f1b", 4, (2, 1)),
    "loss scale": Feature(options={"grad_scaler": 1024.0}),
}
"""With the numbers of a plain loop."""

FEATURES = FLUSHING | {
    "2bw replicas": Feature("pipedream_2bw", 4, (2, 1)),
    "pipedream": Feature("pipedream", 1),
    "autocast": Feature(options={"autocast": torch.bfloat16}, recompute=True, dropout=True),
    "dropout": Feature("zb_h1", 4, dropout=True, recompute=True),
    "phases": Feature(options={"phases": "gpipe/2:2,pipedream_2bw/2"}),
}


def train_with(case: Case, profile: pd.Profile, feature: Feature) -> Trained:
    if (autocast := feature.options.get("autocast")) is not None:  # which casts float32 alone
        case = replace(case, dtype=torch.float32, autocast=autocast)
    options = {"schedule": None if "phases" in feature.options else feature.schedule, "seed": 3} | feature.options
    trained = train_on(case, feature.plan(profile), batches_of(case), dropout=feature.dropout, **options)
    if autocast is not None and trained.predicted:  # at rank 0
        assert any(tensor.dtype == autocast for tensor in trained.predicted[0].values()), "nothing was cast"
    return trained
