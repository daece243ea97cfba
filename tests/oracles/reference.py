"""The numbers that a pipeline must equal, in plain PyTorch: no class of the library is used, only its seeding rule.

`delayed` is an asynchronous update rule as its paper writes it, or several in turn: all weights ever made are kept, and
the gradient of each minibatch is taken at the mixture of versions that the rule names. `plain` is one process: each
minibatch reads the newest weights.
"""

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
        skipped: updates that each stage skipped.
    """

    losses: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    at_drains: dict[int, nn.Module] = field(default_factory=dict)
    ema: dict[str, Tensor] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)


class Rule:
    """A paper's update rule beside the optimizer; this one changes nothing. Stages are numbered.

    `y` is what forwards read of a stage, `w` what its optimizer steps: name -> tensor.
    """

    def predict(self, stage: int, stepper: Any, w: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
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


@dataclass(frozen=True)
class Phase:
    """The rule of an asynchronous method, or of all that flush.

    Attributes:
        version: version that a minibatch reads.
        microbatches: number of microbatches per minibatch.
        rounds: minibatches of an update, for each stage; by default one. The rate is that of the input stage's rounds.
        norm_delay: updates by which the global norm that clips is late; None clips each stage by its own norm alone.
    """

    version: Versions = lambda s, k: k
    microbatches: int = 1
    rounds: Sequence[int] = ()
    norm_delay: int | None = None


def plain(
    model: nn.Module,
    names: Sequence[str],
    batches: Sequence[tuple[Tensor, Tensor]],
    total: Total,
    optimizer: Factory,
    *,
    microbatches: int = 1,
    holders: int = 1,
    **options: Any,
) -> Answer:
    """Trains a copy of the model in one process.

    Args:
        holders: workers that hold each stage and take its microbatches in turn.
        options: further arguments of `delayed`.
    """
    if holders > 1:
        options |= {"statistics": [[name for name, _ in model.named_buffers()]], "holders": [holders]}
    stages, phases = [[name for name, _ in model.named_parameters()]], {0: Phase(microbatches=microbatches)}
    return delayed(model, names, batches, total, optimizer, stages=stages, phases=phases, **options)


def delayed(
    model: nn.Module,
    names: Sequence[str],
    batches: Sequence[tuple[Tensor, Tensor]],
    total: Total,
    optimizer: Factory,
    *,
    stages: Sequence[Sequence[str]],
    phases: Mapping[int, Phase],
    drains: Sequence[int] = (),
    statistics: Sequence[Sequence[str]] = (),
    holders: Sequence[int] = (),
    seed: int = 0,
    clip: float | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    ema: float | None = None,
    autocast: torch.dtype | None = None,
    rule: Rule | None = None,
    skips: str = "",
) -> Answer:
    """Trains a copy of the model by asynchronous rules, one minibatch after the other.

    Args:
        names: names of the layers, as they are seeded.
        total: (output, targets) -> (sum, weight).
        stages: for each stage the names of its parameters.
        phases: minibatch number at which a phase begins -> the phase.
        drains: minibatch numbers before which the versions start again: all stages at their newest.
        statistics: for each stage the names of its buffers.
        holders: for each stage the workers that hold it. Each has buffers of its own, which are averaged at drains,
            and counts are added up.
        clip: greatest norm of the gradients.
        rule: the update rule.
        skips: an update whose gradients are not finite is skipped by all stages 'together', or by 'each' itself. The
            schedule counts it, the average does not.
    """
    rule = rule or Rule()
    model = copy.deepcopy(model)
    model.train()
    newest = {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    steppers = [optimizer([(name, newest[name]) for name in stage]) if stage else None for stage in stages]
    schedules = [scheduler(stepper) if scheduler and stepper else None for stepper in steppers]
    averages = {name: p.detach().clone() for name, p in newest.items()} if ema is not None else {}
    answer, number, numbers, base = Answer(skipped=[0] * len(stages)), [0], range(len(stages)), 0
    versions = [[_of(newest, stage)] for stage in stages]
    taken_at: list[dict[str, Tensor]] = [{} for _ in stages]
    waiting: list[list[dict[str, Tensor]]] = [[] for _ in stages]
    clock, scheduled = 0, [0] * len(stages)  # updates of the input stage before this phase; steps of the schedules
    updates = [0] * len(stages)  # in this phase
    norms: list[float] = []  # over all stages, of each update so far
    norms_at_drain = 0

    def norm(s: int) -> float:
        means = [sum(g[name] for g in waiting[s]) / len(waiting[s]) for name in waiting[s][0]]
        return float(sum((mean.abs() ** 2).sum() for mean in means)) ** 0.5

    def end_round(whole: bool = False) -> None:
        """Makes the updates whose minibatches are there, at a drain also of those that are not `whole`."""
        due = [s for s in numbers if waiting[s] and (not whole or len(waiting[s]) == rounds[s])]
        bounds = {s: norm(s) for s in due} if clip is not None else {}
        if due and clip is not None and phase.norm_delay is not None:
            assert len(due) == len(stages), "stages without a common update have no common norm"
            assert len(set(rounds)) == 1
            norms.append(sum(bound**2 for bound in bounds.values()) ** 0.5)
            # Of update n - D since the last drain; the last one before it where there is none.
            late = [0.0, *norms][max(norms_at_drain, len(norms) - phase.norm_delay)] if phase.norm_delay else norms[-1]
            bounds = {s: late if phase.norm_delay == 0 else max(late, bound) for s, bound in bounds.items()}
        finite = {s: all(bool(g.isfinite().all()) for part in waiting[s] for g in part.values()) for s in due}
        for s in due:
            if skips and not (all(finite.values()) if skips == "together" else finite[s]):
                waiting[s] = []
                versions[s].append(versions[s][-1])
                updates[s] += 1
                answer.skipped[s] += 1
            else:
                update(s, bounds.get(s, 0.0))

    def update(s: int, bound: float) -> None:
        gradients, stepper = waiting[s], steppers[s]
        waiting[s] = []
        for name in stages[s]:
            parts = [g[name] for g in gradients if name in g]
            newest[name].grad = sum(parts) / len(gradients) if parts else None
            if clip is not None and parts:
                newest[name].grad *= min(1.0, clip / (bound + 1e-6))
        if stepper is not None:
            w, y = {name: newest[name] for name in stages[s]}, versions[s][-1]
            for name, p in w.items():
                if p.grad is not None:
                    p.grad = rule.gradient(s, name, p.grad, y[name], taken_at[s][name])
            # One clock for all stages, that of the input stage's rounds.
            while schedules[s] and scheduled[s] < clock + updates[s] * rounds[s] // rounds[0]:
                schedules[s].step()
                scheduled[s] += 1
            rate = stepper.param_groups[0]["lr"]
            scale = len(gradients) / rounds[0] * rule.rate(s, updates[s] * rounds[s] // rounds[0])
            stepper.param_groups[0]["lr"] = rate * scale
            rule.step(s, stepper, w, y)
            versions[s].append(rule.predict(s, stepper, w))
            stepper.param_groups[0]["lr"] = rate
            updates[s] += 1
        else:
            versions[s].append({})
        for name in stages[s] if ema is not None else ():
            averages[name].copy_(ema * averages[name] + (1 - ema) * versions[s][-1][name])

    def average() -> None:
        for s, holder_buffers in enumerate(buffers):
            for name in holder_buffers[0]:
                rows = torch.stack([holder[name] for holder in holder_buffers])
                whole = rows.mean(0) if rows.is_floating_point() else rows.sum(0) - (len(rows) - 1) * before[s][name]
                for holder in holder_buffers:
                    holder[name] = whole.clone()
            before[s] = dict(holder_buffers[0])
            model.load_state_dict(holder_buffers[0], strict=False)

    state = model.state_dict()
    buffers = [
        [_of(state, names_of_stage) for _ in range(count)]
        for names_of_stage, count in zip(statistics, holders or [1] * len(statistics), strict=True)
    ]
    before = [dict(holder_buffers[0]) for holder_buffers in buffers]
    with seeded(model, names, number, seed):
        for k, (x, y) in enumerate(batches):
            if k and (k in drains or k in phases):
                average()
                end_round()
                norms_at_drain = len(norms)
                base, versions = k, [versions[-1:] for versions in versions]
                _load(model, _newest(versions))
                answer.at_drains[k] = _frozen(model)
            if k in phases:
                phase, clock, updates = phases[k], clock + updates[0], [0] * len(stages)
                rounds = tuple(phase.rounds) or (1,) * len(stages)
            _load(model, {n: v for s in numbers for n, v in versions[s][phase.version(s, k - base)].items()})
            model.zero_grad()
            loss = weight = 0.0
            for part, (xs, ys) in enumerate(pieces(x, y, phase.microbatches)):
                number[0] = k * phase.microbatches + part
                if not len(xs):
                    continue
                for holder_buffers in buffers:
                    model.load_state_dict(holder_buffers[number[0] % len(holder_buffers)], strict=False)
                with torch.autocast("cpu", autocast) if autocast else nullcontext():
                    part_loss, amount = total(model(xs.clone()), ys)
                part_loss.backward()
                loss, weight = loss + float(part_loss.detach()), weight + amount
                for s, holder_buffers in enumerate(buffers):
                    holder_buffers[number[0] % len(holder_buffers)] = _of(model.state_dict(), statistics[s])
            answer.losses.append(loss / weight)
            answer.weights.append(weight)
            for s, stage in enumerate(stages):
                taken_at[s] = versions[s][phase.version(s, k - base)]
                gradients = {name: model.get_parameter(name).grad for name in stage}
                waiting[s].append({name: g / weight for name, g in gradients.items() if g is not None})
            end_round(whole=True)
            answer.rates.append(next(s.param_groups[0]["lr"] for s in steppers if s))
        end_round()
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
