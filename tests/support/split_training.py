"""Trains a case of the zoo twice: in a plain loop without this library, and split into stages by it.

The stages train as a method and a number of microbatches say (`pipelined`), or with a feature (`train_with`).
"""

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from zoo import CASES, Case, samples_of

import pipedream as pd

LENGTHS = (6, 9, 6, 5)


@dataclass(frozen=True)
class Trained:
    """Results of a run.

    Attributes:
        losses: one per minibatch.
        state: whole state dict at the end.
        evaluated: mean loss over the batches in evaluation mode, after training.
        predicted: the outputs of the trained model for the batches.
        cuts: names of the layers at which a stage begins.
    """

    losses: list[float]
    state: dict[str, Tensor]
    evaluated: float = 0.0
    predicted: list[Any] = field(default_factory=list)
    cuts: tuple[str, ...] = ()


def model_of(case: Case, *, dropout: bool = False) -> nn.Module:
    """Returns the model of a case, without dropout unless it is asked for."""
    model = case.build().to(case.dtype)
    if not dropout:
        _without_dropout(model)
    return model


def batches_of(case: Case, lengths: Sequence[int] = LENGTHS, *, samples: int = 6) -> list[Any]:
    """Returns one batch for each length; the last one has half of the samples."""
    counts = [samples] * (len(lengths) - 1) + [(samples + 1) // 2]
    return [_cast(case.batch(seed, n, t), case.dtype) for seed, (n, t) in enumerate(zip(counts, lengths, strict=True))]


def make_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Makes the optimizer of both runs."""
    return torch.optim.SGD([p for _, p in named], lr=0.02, momentum=0.9)


def plain_loop(
    case: Case,
    batches: Sequence[Any],
    microbatches: int = 1,
    version: Callable[[str, int], int] | None = None,
    scale: float = 1.0,
) -> Trained:
    """Trains in one process: the gradient of a minibatch is the mean of its microbatches', weighted by amount.

    Args:
        version: (parameter, minibatch) -> updates that the weights have had at which the minibatch's gradient is taken;
            by default all before it.
        scale: of the loss in the backward.
    """
    model = model_of(case)
    optimizer = make_optimizer(list(model.named_parameters()))
    losses, versions = [], [_copy_parameters(model)]
    for k, batch in enumerate(batches):
        parts = [(part, case.amount(part)) for part in split(batch, microbatches)]
        whole = sum(amount for _, amount in parts)
        optimizer.zero_grad()
        total = 0.0
        if version is not None:
            _set_parameters(model, {name: versions[version(name, k)][name] for name in versions[0]})
        for part, amount in parts:
            loss = loss_of(case, model, part) * (amount / whole)
            (loss * scale).backward()
            total += loss.item()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= scale
        if version is not None:
            _set_parameters(model, versions[-1])
        optimizer.step()
        losses.append(total)
        versions.append(_copy_parameters(model))
    model.eval()
    with torch.no_grad():
        scored = [(loss_of(case, model, batch).item(), case.amount(batch)) for batch in batches]
        predicted = [output_of(case, model, batch) for batch in batches]
    mean = sum(loss * amount for loss, amount in scored) / sum(amount for _, amount in scored)
    return Trained(losses, {name: value.clone() for name, value in model.state_dict().items()}, mean, predicted)


def _copy_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _set_parameters(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


def output_of(case: Case, model: nn.Module, batch: Any) -> Any:
    """Returns what the model gives for a batch."""
    inputs = case.inputs(batch)
    with case.casting():
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def loss_of(case: Case, model: nn.Module, batch: Any) -> Tensor:
    """Returns the loss of a batch, as a training loop computes it."""
    output = output_of(case, model, batch)
    if case.loss is None:
        return output.loss
    is_torchs = getattr(case.loss, "func", case.loss).__module__ == "torch.nn.functional"
    with case.casting():
        return case.loss(output, batch[1] if is_torchs else batch)


def parts_make_whole(case: Case, batch: Any, microbatches: int) -> bool:
    """Returns whether the mean loss of a batch's parts is that of the batch, in evaluation mode."""
    model, parts = model_of(case).eval(), split(batch, microbatches)
    amounts = [case.amount(part) for part in parts]
    with torch.no_grad():
        whole = loss_of(case, model, batch).item()
        losses = [loss_of(case, model, part).item() for part in parts]
    mean = sum(loss * amount for loss, amount in zip(losses, amounts, strict=True)) / sum(amounts)
    return math.isclose(mean, whole, rel_tol=1e-6)


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
    cuts: Sequence[int | str] | None = None,
    seed: int = 0,
    dropout: bool = False,
    **options: Any,
) -> Trained:
    """Trains in a pipeline, through the public face alone.

    Args:
        profile: profile of the same case; by default it is made from the first batch.
        cuts: by default drawn with the seed, for so many stages, from those that the model allows.
        dropout: as the model has it; otherwise there is none.
        options: further arguments of `pipedream.Pipeline`, which compares the first minibatch unless the model gives
            other numbers for a minibatch than for its parts.
    """
    options.setdefault("check", parts_make_whole(case, batches[0], microbatches or 1))
    model = model_of(case, dropout=dropout)
    profile = profile or profile_of(case, batches[0], dropout=dropout)
    chosen = draw_cuts(profile.graph, stages, seed) if cuts is None else tuple(cuts)
    cluster = pd.Cluster.local(len(chosen) + 1)
    plan = pd.plan(profile, cluster, schedule=schedule, microbatches=microbatches, cuts=chosen)
    begins = tuple(stage.names[0] for stage in plan.stages[1:])
    options.setdefault("autocast", case.autocast)
    with pd.Pipeline(model, plan, loss=case.loss, optimizer=make_optimizer, **options) as pipeline:
        losses = [done.loss for done in pipeline.train(batches)]
        evaluated = pipeline.evaluate(batches)["loss"]
        predicted = list(pipeline.predict(batches))
        return Trained(losses, pipeline.state_dict(), evaluated, predicted, begins)


def draw_cuts(graph: Any, stages: int, seed: int) -> tuple[int, ...]:
    """Draws places for so many stages, or as many as the model has; tied weights may be separated."""
    whole = [(min(group), max(group)) for group in graph.inseparable]
    allowed = [i for i in range(1, len(graph.layers)) if not any(first < i <= last for first, last in whole)]
    return tuple(sorted(random.Random(seed).sample(allowed, min(stages - 1, len(allowed)))))


def check_same(expected: Trained, actual: Trained, tolerance: float) -> None:
    """Checks that two runs gave the same losses, weights, evaluation and outputs."""
    for name in ("losses", "evaluated"):
        _check_near(name, torch.tensor(getattr(actual, name)), torch.tensor(getattr(expected, name)), tolerance)
    assert sorted(actual.state) == sorted(expected.state), set(actual.state) ^ set(expected.state)
    for name, value in expected.state.items():
        _check_near(name, actual.state[name], value, tolerance)
    assert len(actual.predicted) == len(expected.predicted)
    for a, b in zip(actual.predicted, expected.predicted, strict=True):
        assert type(a) is type(b), f"predict gave a {type(a).__name__}, the model gives a {type(b).__name__}"
        for (name, x), (other, y) in zip(_tensors(a), _tensors(b), strict=True):
            assert name == other
            _check_near(f"output{name}", x, y, tolerance)


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


def _check_near(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape, f"{name} has the shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{name} is of {actual.dtype}, not {expected.dtype}"
    if not expected.numel() or actual.equal(expected):
        return
    difference = (actual.double() - expected.double()).abs().max().item()
    size = expected.double().abs().max().item()
    assert difference <= tolerance * max(1.0, size), f"{name} differs by {difference:.1e}, its size is {size:.1e}"


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of an output; what else a model returns (such as its cache) is left out."""
    if isinstance(value, Tensor):
        yield name, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        for data_field in dataclasses.fields(value):
            yield from _tensors(getattr(value, data_field.name), f"{name}.{data_field.name}")
    elif isinstance(value, (Mapping, tuple, list)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _tensors(item, f"{name}[{key!r}]")


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


# -- features of a pipeline -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Feature:
    """Features that a run uses.

    Attributes:
        config: workers of each stage.
        chunks: stages per worker.
        dropout: as the model has it.
        saves: in the middle, and continues from there on another plan.
        options: further arguments of `pipedream.Pipeline`.
    """

    schedule: str = "1f1b"
    microbatches: int = 2
    config: tuple[int, ...] = (1, 1)
    chunks: int = 1
    recompute: bool = False
    dropout: bool = False
    saves: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def workers(self) -> int:
        return sum(self.config) // self.chunks


FLUSHING = {
    "interleaved": Feature("interleaved_1f1b", 4, (1, 1, 1, 1), chunks=2),
    "zero bubble": Feature("zb_h1", 4),
    "recompute": Feature(recompute=True),
    "recompute split": Feature("zb_h1", 4, recompute=True),
    "replicas": Feature("1f1b", 4, (2, 1)),
    "loss scale": Feature(options={"grad_scaler": 1024.0}),
    "another plan": Feature(saves=True),
}
"""With the numbers of a plain loop."""

FEATURES = FLUSHING | {
    "2bw": Feature("pipedream_2bw", 4, (1, 1)),
    "2bw recompute": Feature("pipedream_2bw", 4, recompute=True),
    "2bw replicas": Feature("pipedream_2bw", 4, (2, 1)),
    "pipedream": Feature("pipedream", 1, (1, 1)),
    "average": Feature(options={"ema": 0.9}),
    "clip": Feature(options={"clip_grad_norm": 0.1}),
    "autocast": Feature(options={"autocast": torch.bfloat16}),
    "autocast recompute": Feature(options={"autocast": torch.bfloat16}, recompute=True, dropout=True),
    "dropout": Feature("zb_h1", 4, dropout=True, recompute=True),
    "phases": Feature(options={"phases": "gpipe/2:2,pipedream_2bw/2"}),
}


def plan_with(profile: pd.Profile, feature: Feature, shift: int = 0) -> pd.Plan:
    """Returns the plan of a feature, cut evenly, `shift` layers later."""
    count, stages = len(profile.graph.layers), len(feature.config)
    cuts = tuple(i * count // stages + shift for i in range(1, stages)) if feature.chunks == 1 else None
    plan = pd.plan(
        profile,
        pd.Cluster.local(feature.workers),
        schedule=feature.schedule,
        microbatches=feature.microbatches if feature.microbatches > 1 else None,
        cuts=cuts,
        shape=feature.config if feature.chunks == 1 else "any",
        chunks=feature.chunks if feature.chunks > 1 else None,
    )
    return replace(plan, stages=tuple(replace(stage, recompute=feature.recompute) for stage in plan.stages))


def train_with(name: str, profile: pd.Profile, feature: Feature, folder: Path) -> Trained:
    """Trains in this process alone, or as one rank of a process group; the folder is for a checkpoint."""
    case = CASES[name]
    if "autocast" in feature.options:  # which casts float32 alone
        case = replace(case, dtype=torch.float32, autocast=feature.options["autocast"])
    batches, losses = batches_of(case), []
    options = {"schedule": None if "phases" in feature.options else feature.schedule} | feature.options

    def pipeline_of(shift: int) -> pd.Pipeline:
        model, plan = model_of(case, dropout=feature.dropout), plan_with(profile, feature, shift)
        return pd.Pipeline(model, plan, loss=case.loss, optimizer=make_optimizer, seed=3, **options)

    if feature.saves:
        with pipeline_of(0) as pipeline:
            for done in pipeline.train(batches):
                losses.append(done.loss)
                if done.number == 1:
                    break
            pipeline.save(folder)
    with pipeline_of(1) as pipeline:
        if feature.saves:
            pipeline.load(folder)
        losses += [done.loss for done in pipeline.train(batches)]
        evaluated, predicted = pipeline.evaluate(batches)["loss"], list(pipeline.predict(batches))
        state = pipeline.state_dict()
        if case.autocast is not None and predicted:  # at rank 0
            dtypes = {tensor.dtype for output in predicted for _, tensor in _tensors(output)}
            assert case.autocast in dtypes, "nothing was cast"
        if "ema" in options:
            state |= {f"average {name}": value for name, value in pipeline.state_dict(ema=True).items()}
    return Trained(losses, state, evaluated, predicted)


def train_with_each(name: str, profile: str, chosen: dict[str, Feature], folder: Path) -> dict[str, Trained]:
    """Trains once for each feature."""
    read = pd.Profile.from_json(profile)
    return {word: train_with(name, read, feature, folder / word) for word, feature in chosen.items()}
