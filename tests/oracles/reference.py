"""The numbers that a pipeline must equal, in plain PyTorch: no class of the library is used, only its seeding rule.

`plain` is one process: a loop over the microbatches, the sum of the gradients divided once. `delayed` is an
asynchronous update rule as its paper writes it: all weights ever made are kept, and the gradient of each
minibatch is taken at the mixture of versions that the rule names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipedream.core.seeds import layer_seed

Total = Callable[[Any, Tensor], tuple[Tensor, float]]
Factory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
Versions = Callable[[int, int], int]
"""(stage, minibatch since the last drain) -> version since the last drain."""


@dataclass
class Answer:
    """Results of a plain run.

    Attributes:
        losses, weights, rates: one of each per minibatch.
        state: the model's at the end.
        at_drains: the whole model at each drain before the end.
        ema: averaged parameters.
    """

    losses: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    at_drains: dict[int, nn.Module] = field(default_factory=dict)
    ema: dict[str, Tensor] = field(default_factory=dict)


class Rule:
    """A paper's update rule beside the optimizer; this one changes nothing. Stages are numbered.

    `y` is what forwards read of a stage, `w` what its optimizer steps: name -> tensor.
    """

    def seen(self, stage: int, stepper: Any, w: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Returns what forwards read from now on."""
        return {name: p.detach().clone() for name, p in w.items()}

    def rate(self, stage: int, k: int) -> float:
        """Returns the factor on the learning rate of update k."""
        return 1.0

    def gradient(self, stage: int, name: str, g: Tensor, y: Tensor, read: Tensor) -> Tensor:
        """Returns what the optimizer gets for a parameter's gradient at `read`, where forwards now read y."""
        return g

    def step(self, stage: int, stepper: Any, w: Mapping[str, nn.Parameter], y: Mapping[str, Tensor]) -> None:
        """Makes the update."""
        stepper.step()


@contextmanager
def seeded(model: nn.Module, names: Sequence[str], number: list[int], seed: int) -> Iterator[None]:
    """Seeds the generator before each layer from (run seed, microbatch, layer's name): the rule for masks."""

    def before(name: str) -> Callable[..., None]:
        return lambda module, args: void(torch.default_generator.manual_seed(layer_seed(seed, number[0], name)))

    modules = dict(model.named_modules())
    hooks = [modules[name].register_forward_pre_hook(before(name)) for name in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def void(_: Any) -> None:
    """Returns None, whatever it gets: a forward pre-hook that returns something replaces the inputs."""


def pieces(x: Tensor, y: Tensor, parts: int) -> list[tuple[Tensor, Tensor]]:
    """Returns the microbatches of a minibatch; those without a sample too, as they have a number."""
    return list(zip(torch.tensor_split(x, parts), torch.tensor_split(y, parts), strict=True))


def plain(
    model: nn.Module,
    names: Sequence[str],
    batches: Sequence[tuple[Tensor, Tensor]],
    total: Total,
    optimizer: Factory,
    *,
    microbatches: int = 1,
    seed: int = 0,
    clip: float | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    ema: float | None = None,
    autocast: torch.dtype | None = None,
    drains: Sequence[int] = (),
    holders: int = 1,
) -> Answer:
    """Trains a copy of the model in one process.

    Args:
        names: names of the layers, as they are seeded.
        total: (output, targets) -> (sum, weight).
        drains: minibatch numbers at which the model is noted; nothing else happens there.
        holders: workers that hold each stage and take its microbatches in turn. Gradients do not depend on their
            number; each has buffers of its own, which are averaged at drains, and counts are added up.
    """
    model = copy.deepcopy(model)
    model.train()
    stepper = optimizer(list(model.named_parameters()))
    schedule = scheduler(stepper) if scheduler else None
    averages = {name: p.detach().clone() for name, p in model.named_parameters()} if ema is not None else {}
    answer, number = Answer(), [0]
    buffers = [name for name, _ in model.named_buffers()] if holders > 1 else []
    holder_buffers = [_of(model.state_dict(), buffers) for _ in range(holders)]
    before = holder_buffers[0]

    def average_buffers() -> None:
        nonlocal holder_buffers, before
        for name in buffers:
            seen = torch.stack([values[name] for values in holder_buffers])
            whole = seen.mean(0) if seen.is_floating_point() else seen.sum(0) - (holders - 1) * before[name]
            model.get_buffer(name).copy_(whole)
        before = _of(model.state_dict(), buffers)
        holder_buffers = [dict(before) for _ in range(holders)]

    with seeded(model, names, number, seed):
        for k, (x, y) in enumerate(batches):
            if k in drains:
                average_buffers()
                answer.at_drains[k] = _frozen(model)
            stepper.zero_grad()
            loss = weight = 0.0
            for part, (xs, ys) in enumerate(pieces(x, y, microbatches)):
                number[0] = k * microbatches + part
                if not len(xs):
                    continue
                model.load_state_dict(holder_buffers[number[0] % holders], strict=False)
                with torch.autocast("cpu", autocast) if autocast else nullcontext():
                    part_loss, amount = total(model(xs.clone()), ys)
                part_loss.backward()
                holder_buffers[number[0] % holders] = _of(model.state_dict(), buffers)
                loss, weight = loss + float(part_loss.detach()), weight + amount
            for p in model.parameters():
                if p.grad is not None:
                    p.grad /= weight
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            answer.rates.append(stepper.param_groups[0]["lr"])
            stepper.step()
            if schedule:
                schedule.step()
            for name, average in averages.items():
                average.copy_(ema * average + (1 - ema) * model.get_parameter(name).detach())
            answer.losses.append(loss / weight)
            answer.weights.append(weight)
    average_buffers()
    answer.state, answer.ema = _values(model.state_dict()), averages
    return answer


def delayed(
    model: nn.Module,
    names: Sequence[str],
    batches: Sequence[tuple[Tensor, Tensor]],
    total: Total,
    optimizer: Factory,
    *,
    stages: Sequence[Sequence[str]],
    version: Versions,
    drains: Sequence[int] = (),
    replicas: Sequence[int] | None = None,
    statistics: Sequence[Sequence[str]] = (),
    microbatches: int = 1,
    seed: int = 0,
    clip: float | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    ema: float | None = None,
    autocast: torch.dtype | None = None,
    rule: Rule | None = None,
) -> Answer:
    """Trains a copy of the model by an asynchronous rule, one minibatch after the other.

    Args:
        stages: for each stage the names of its parameters.
        version: the rule: which version of a stage minibatch k (both since the last drain) reads.
        drains: minibatch numbers before which the versions start again: all stages at their newest.
        replicas: r_s; an update of stage s is the mean over r_s minibatches, at r_s / r_0 times the rate.
        statistics: for each stage the names of its buffers; each replica has its own, averaged at drains, and
            counts are added up.
        clip: greatest norm of each stage's gradients by themselves.
        rule: the update rule.
    """
    rule = rule or Rule()
    counts = tuple(replicas or (1,) * len(stages))
    model = copy.deepcopy(model)
    model.train()
    newest = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    steppers = [optimizer([(name, newest[name]) for name in stage]) if stage else None for stage in stages]
    schedules = [scheduler(stepper) if scheduler and stepper else None for stepper in steppers]
    averages = {name: p.detach().clone() for name, p in newest.items()} if ema is not None else {}
    answer, number, base = Answer(), [0], 0
    versions = [[_of(newest, stage)] for stage in stages]
    taken_at: list[dict[str, Tensor]] = [{} for _ in stages]
    rounds: list[list[dict[str, Tensor]]] = [[] for _ in stages]
    updates, scheduled = [0] * len(stages), [0] * len(stages)

    def update(s: int) -> None:
        gradients, stepper = rounds[s], steppers[s]
        for name in stages[s]:
            newest[name].grad = sum(g[name] for g in gradients) / len(gradients)
        rounds[s] = []
        if stepper is not None:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_([newest[name] for name in stages[s]], clip)
            w, y = {name: newest[name] for name in stages[s]}, versions[s][-1]
            for name, p in w.items():
                p.grad = rule.gradient(s, name, p.grad, y[name], taken_at[s][name])
            # One clock for all stages, that of the input stage's rounds.
            while schedules[s] and scheduled[s] < updates[s] * counts[s] // counts[0]:
                schedules[s].step()
                scheduled[s] += 1
            rate = stepper.param_groups[0]["lr"]
            scale = (
                counts[s] / counts[0] * len(gradients) / counts[s] * rule.rate(s, updates[s] * counts[s] // counts[0])
            )
            stepper.param_groups[0]["lr"] = rate * scale
            rule.step(s, stepper, w, y)
            versions[s].append(rule.seen(s, stepper, w))
            stepper.param_groups[0]["lr"] = rate
            updates[s] += 1
        else:
            versions[s].append({})
        for name in stages[s]:
            if ema is not None:
                averages[name].copy_(ema * averages[name] + (1 - ema) * versions[s][-1][name])

    def average() -> None:
        for s, replica_buffers in enumerate(buffers):
            for name in replica_buffers[0]:
                seen = torch.stack([replica[name] for replica in replica_buffers])
                whole = seen.mean(0) if seen.is_floating_point() else seen.sum(0) - (counts[s] - 1) * before[s][name]
                for replica in replica_buffers:
                    replica[name] = whole.clone()
            before[s] = dict(replica_buffers[0])
            model.load_state_dict(replica_buffers[0], strict=False)

    state = model.state_dict()
    buffers = [[_of(state, names_of_stage) for _ in range(counts[s])] for s, names_of_stage in enumerate(statistics)]
    before = [dict(replica_buffers[0]) for replica_buffers in buffers]
    with seeded(model, names, number, seed):
        for k, (x, y) in enumerate(batches):
            if k and k in drains:
                average()
                for s in range(len(stages)):
                    if rounds[s]:
                        update(s)
                base, versions = k, [versions[-1:] for versions in versions]
                _load(model, _newest(versions))
                answer.at_drains[k] = _frozen(model)
            mixed = {n: v for s, _ in enumerate(stages) for n, v in versions[s][version(s, k - base)].items()}
            _load(model, mixed)
            model.zero_grad()
            for s, replica_buffers in enumerate(buffers):
                model.load_state_dict(replica_buffers[k % counts[s]], strict=False)
            loss = weight = 0.0
            for part, (xs, ys) in enumerate(pieces(x, y, microbatches)):
                number[0] = k * microbatches + part
                if not len(xs):
                    continue
                with torch.autocast("cpu", autocast) if autocast else nullcontext():
                    part_loss, amount = total(model(xs.clone()), ys)
                part_loss.backward()
                loss, weight = loss + float(part_loss.detach()), weight + amount
            for s, replica_buffers in enumerate(buffers):
                replica_buffers[k % counts[s]] = _of(model.state_dict(), statistics[s])
            answer.losses.append(loss / weight)
            answer.weights.append(weight)
            for s, stage in enumerate(stages):
                taken_at[s] = versions[s][version(s, k - base)]
                rounds[s].append({name: model.get_parameter(name).grad / weight for name in stage})
                if len(rounds[s]) == counts[s]:
                    update(s)
            answer.rates.append(next(s.param_groups[0]["lr"] for s in steppers if s))
        for s in range(len(stages)):
            if rounds[s]:
                update(s)
    average()
    _load(model, _newest(versions))
    answer.state, answer.ema = _values(model.state_dict()), averages
    return answer


def mean_loss(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], total: Total) -> float:
    """Returns the loss over a loader in evaluation mode."""
    model = copy.deepcopy(model)
    model.eval()
    with torch.no_grad():
        sums = [total(model(x.clone()), y) for x, y in batches]
    return sum(float(value) for value, _ in sums) / sum(weight for _, weight in sums)


def _of(values: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    return {name: values[name].detach().clone() for name in names}


def _newest(versions: Sequence[Sequence[Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    return {name: value for versions in versions for name, value in versions[-1].items()}


def _load(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            model.get_parameter(name).copy_(value)


def _frozen(model: nn.Module) -> nn.Module:
    frozen = copy.deepcopy(model)
    for module in frozen.modules():
        module._forward_pre_hooks.clear()
    return frozen


def _values(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}
