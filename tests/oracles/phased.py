"""The numbers that a run in phases must equal, in plain PyTorch: each phase by its own rule, with drains between.

One loop over the minibatches, as `reference.delayed`, but its rule changes: which version of a stage a minibatch reads
(a synchronous method: the newest), into how many microbatches it is split, how many minibatches an update holds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from reference import Answer, Factory, Total, Versions, pieces, seeded
from torch import Tensor, nn


@dataclass(frozen=True)
class Rule:
    """One phase.

    Attributes:
        version: (stage, minibatch since the last drain) -> version since the last drain.
        microbatches: number of microbatches per minibatch.
        rounds: minibatches of an update, for each stage.
        norm_delay: updates by which the global norm that clips is late; None clips each stage by its own norm alone.
    """

    version: Versions
    microbatches: int
    rounds: tuple[int, ...]
    norm_delay: int | None = None


def synchronous(microbatches: int, stages: int, norm_delay: int | None = None) -> Rule:
    """Returns the rule of every method that flushes: the newest weights, an update each minibatch."""
    return Rule(lambda s, k: k, microbatches, (1,) * stages, norm_delay)


def phased(
    model: nn.Module,
    names: Sequence[str],
    batches: Sequence[tuple[Tensor, Tensor]],
    total: Total,
    optimizer: Factory,
    *,
    stages: Sequence[Sequence[str]],
    rules: dict[int, Rule],
    drains: Sequence[int],
    seed: int,
    clip: float | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    ema: float | None = None,
) -> Answer:
    """Trains a copy of the model.

    Args:
        stages: for each stage the names of its parameters.
        rules: minibatch number at which a phase begins -> its rule.
        drains: minibatch numbers before which the versions start again, those of the phases among them.
        clip: greatest norm of the gradients.
    """
    model = copy.deepcopy(model)
    model.train()
    newest = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    steppers = [
        optimizer([(name, newest[name]) for name in names_of_stage]) if names_of_stage else None
        for names_of_stage in stages
    ]
    schedules = [scheduler(stepper) if scheduler and stepper else None for stepper in steppers]
    averages = {name: p.detach().clone() for name, p in newest.items()} if ema is not None else {}
    answer, number, numbers = Answer(), [0], range(len(stages))
    clock, steps = 0, [0] * len(stages)  # updates of the input stage before this phase; steps of the schedules made
    base, rule = 0, rules[0]
    updates = [0] * len(stages)  # in this phase
    waiting: list[list[dict[str, Tensor]]] = [[] for _ in stages]
    versions = [[_of(newest, names_of_stage)] for names_of_stage in stages]

    norms: list[float] = []  # over all stages, of each update so far
    norms_at_drain = 0

    def norm(s: int) -> float:
        means = [sum(g[name] for g in waiting[s]) / len(waiting[s]) for name in stages[s]]
        return float(sum((mean**2).sum() for mean in means)) ** 0.5

    def update_all() -> None:
        whole = sum(norm(s) ** 2 for s in numbers) ** 0.5
        bounds = {s: norm(s) for s in numbers}
        if rule.norm_delay == 0:
            bounds = dict.fromkeys(numbers, whole)
        elif rule.norm_delay is not None:
            # Of update n - D since the last drain; the last one before it where there is none.
            late_norm = [0.0, *norms][max(norms_at_drain, len(norms) + 1 - rule.norm_delay)]
            bounds = {s: max(late_norm, stage_norm) for s, stage_norm in bounds.items()}
        norms.append(whole)
        for s in numbers:
            update(s, bounds[s])

    def update(s: int, bound: float) -> None:
        gradients, stepper, rounds = waiting[s], steppers[s], rule.rounds
        waiting[s] = []
        if stepper is not None:
            for name in stages[s]:
                newest[name].grad = sum(g[name] for g in gradients) / len(gradients)
                if clip is not None:
                    newest[name].grad *= min(1.0, clip / (bound + 1e-6))
            while schedules[s] and steps[s] < clock + updates[s] * rounds[s] // rounds[0]:
                schedules[s].step()
                steps[s] += 1
            rate = stepper.param_groups[0]["lr"]
            stepper.param_groups[0]["lr"] = rate * len(gradients) / rounds[0]
            stepper.step()
            stepper.param_groups[0]["lr"] = rate
        updates[s] += 1
        versions[s].append(_of(newest, stages[s]))
        for name in stages[s] if ema is not None else ():
            averages[name].copy_(ema * averages[name] + (1 - ema) * newest[name].detach())

    def end_round(whole: bool = False) -> None:
        due = [s for s in numbers if waiting[s] and (not whole or len(waiting[s]) == rule.rounds[s])]
        if len(due) == len(stages) and len(set(rule.rounds)) == 1:
            update_all()
            return
        assert not due or rule.norm_delay is None, "stages without a common update have no common norm"
        for s in due:
            update(s, norm(s))

    with seeded(model, names, number, seed):
        for k, (x, y) in enumerate(batches):
            if k and (k in drains or k in rules):
                end_round()
                norms_at_drain = len(norms)
                base, versions = k, [[_of(newest, names_of_stage)] for names_of_stage in stages]
                if k in rules:
                    rule, clock, updates = rules[k], clock + updates[0], [0] * len(stages)
            with torch.no_grad():
                for s in numbers:
                    for name, value in versions[s][rule.version(s, k - base)].items():
                        model.get_parameter(name).copy_(value)
            model.zero_grad()
            loss = weight = 0.0
            for part, (xs, ys) in enumerate(pieces(x, y, rule.microbatches)):
                number[0] = k * rule.microbatches + part
                if len(xs):
                    part_loss, amount = total(model(xs.clone()), ys)
                    part_loss.backward()
                    loss, weight = loss + float(part_loss.detach()), weight + amount
            answer.losses.append(loss / weight)
            for s, names_of_stage in enumerate(stages):
                waiting[s].append({name: model.get_parameter(name).grad / weight for name in names_of_stage})
            end_round(whole=True)
        end_round()
    with torch.no_grad():
        for name, value in newest.items():
            model.get_parameter(name).copy_(value)
    answer.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    answer.ema = averages
    return answer


def _of(values: dict[str, nn.Parameter], names: Sequence[str]) -> dict[str, Tensor]:
    return {name: values[name].detach().clone() for name in names}
