"""The checks that each method, encoding, sum and compensation of the library passes; docs/testing.md shows them.

They train tiny models: what a pipeline can get wrong, in a few layers that train in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipedream import schedules
from pipedream.apps.report import claims
from pipedream.apps.testing.passes import Rounding
from pipedream.apps.testing.results import Trained
from pipedream.apps.testing.rules import CompensationRule, Reads, Reducer
from pipedream.apps.testing.training import Training
from pipedream.core.errors import ScheduleError
from pipedream.core.plan.choices import Choices
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.schedule import Schedule
from pipedream.verifier import verify

SIZES = (
    (1, 1), (1, 3), (2, 2), (2, 3), (2, 8), (3, 1), (3, 6), (3, 7), (4, 4), (4, 6), (5, 10), (6, 6),
)  # fmt: skip
"""Stages and microbatches: few of both, m below, at, and beyond p, and multiples of p and others."""
REPLICAS = ((2, 1), (1, 2), (2, 2), (3, 1), (1, 2, 1), (3, 2, 1))
_TIMES = ((1.0, 1.0), (1.0, 2.0), (3.0, 1.25))
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)


def check_schedule(name: str, *, reads: Reads | None = None) -> None:
    """Checks a method, named or in a file: its claims, its proofs, what it trains, and that it resumes.

    Args:
        reads: its paper's rule for the weights, for three stages; by default the method's own.

    Raises:
        AssertionError: says which of them does not hold.
    """
    check_claims(name)
    check_proofs(name)
    trainings = list(small_trainings(name))
    assert trainings, f"{name} can train with none of the small plans"
    for training in trainings:
        training.check(1e-9, reads=reads if training.resolved_plan.replicas == (1, 1, 1) else None)
    with TemporaryDirectory() as folder:
        check_resumes(replace(trainings[0], model=perceptron), Path(folder))


def check_claims(name: str) -> None:
    """Checks a method's closed forms against the simulator, at many depths."""
    tried = list(small_schedules(name))
    assert tried, f"{name} takes none of the sizes {SIZES}"
    for p, m, schedule in tried:
        # Of a split backward the bubble is claimed for f = i = w, which a backward of 2 f is split into.
        seconds = _TIMES[1 if schedule.splits_backward else (p + m) % 3]
        checked = claims.check_claims(name, p, m, seconds=seconds)
        assert not checked.differences, str(checked)
        check_rules(p, schedule)


def small_schedules(name: str) -> Iterator[tuple[int, int, Schedule]]:
    """Yields (p, m, schedule) for the sizes that a method takes."""
    for p, m in SIZES:
        if (schedule := _build(name, p, m)) is not None:
            yield p, m, schedule


def check_rules(p: int, schedule: Schedule) -> None:
    """Checks that the rules give the staleness and the versions that a method claims."""
    rules, placement = schedule.weights, schedule.placement
    m = schedule.microbatches if schedule.flushes else max(3 * schedule.microbatches, 4 * p)  # of the run
    for s in range(p):
        where = f"{schedule.name}, p={p}, m={m}, worker {s}"
        if claim := schedule.claims.staleness:
            assert rules.staleness(s) == claim(p, m, s), f"{where}: staleness {rules.staleness(s)}"
        if claim := schedule.claims.versions:
            versions = sum(rules.versions(stage) for stage, _ in placement.stage_replicas(s))
            versions += min(1, len(placement.passes_on_copies(s, forward=True)))
            assert versions == claim(p, m, s), f"{where}: versions {versions}"


def check_proofs(name: str) -> None:
    """Checks that small programs, with replicas too, are proved to end, with the versions that they promise."""
    programs = [lower(schedule) for _, _, schedule in small_schedules(name)]
    for replicas in REPLICAS if schedules.stage_order_of(name) is None else ():
        try:
            programs.append(lower(schedules.build(name, Plan.uniform(len(replicas), replicas=replicas))))
        except ScheduleError:
            continue
    for program in programs:
        proof = verify(program)
        stages = range(len(program.plan.stages))
        assert all(proof.staleness[stage] <= program.weights.staleness(stage) for stage in stages)


def small_trainings(name: str) -> Iterator[Training]:
    """Yields trainings by a method: three or four stages, with statistics, with replicas, of which it takes some."""
    for model, replicas, m in (
        (perceptron, (1, 1, 1), None),
        (perceptron, (1, 1, 1), 3),
        (with_statistics, (1, 1, 1, 1), None),
        (with_statistics, (1, 1, 1, 1), 4),
        (perceptron, (2, 1), 4),
    ):
        training = tiny(model, plan=replicas, schedule=name, microbatches=m)
        try:
            (schedule,) = training.make_schedules()
        except ScheduleError:
            continue
        if model is perceptron or schedule.microbatches <= 4:  # statistics need two samples
            yield training


def check_resumes(training: Training, folder: Path) -> Trained:
    """Checks that a run resumes to the bit on its plan and, if it flushes, to rounding on another one."""
    training = replace(training, evaluate_at=())
    whole, (schedule, *_) = training.resumed(folder / "same", (3, 7)), training.make_schedules()
    if schedule.flushes:  # microbatches have the same numbers, from which masks are drawn
        other = replace(training, plan=(1,), schedule="1f1b", microbatches=schedule.microbatches)
        training.resumed(folder / "other", (3, 7), other, bound=1e-10)
    return whole


def check_encoding(encoding: str, rounding: Rounding) -> None:
    """Checks messages: they round as they should, and send the bytes that plans count.

    Args:
        encoding: as in ``messages=``.
        rounding: (tensor, encoding) -> what arrives of it, as its paper says.
    """
    width, samples = 64, 16
    how: dict[str, Any] = {"data": make_batches(4, samples, samples), "epochs": 1, "evaluate_at": ()}
    for name, m in (("1f1b", 2), ("pipedream", None)):
        training = tiny(
            partial(perceptron, width), plan=(1, 1, 1), schedule=name, microbatches=m, messages=encoding, **how
        )
        sent = training.check(1e-8, rounding=rounding).sent_bytes
        full = replace(training, messages=None).pipeline().sent_bytes
        # Two cuts, in both directions, and the targets that the first worker sends the last one.
        values = 4 * samples * width * 8
        shares = replace(Choices.resolve(command={"messages": encoding}).messages, value_bits=64).shares
        assert sum(full.values()) - sum(sent.values()) == 2 * values * (2 - sum(shares)), f"{name} sent {sent}"


def check_sums(sums: str, reducer: Reducer) -> None:
    """Checks how replicas agree: in methods that flush, in rounds, and with accumulation.

    Args:
        sums: as in ``sums=``.
        reducer: what its paper says.
    """
    for name, replicas, m in (("1f1b", (2, 1), 4), ("pipedream", (2,), None), ("pipedream_2bw", (2, 2), None)):
        tiny(plan=replicas, schedule=name, microbatches=m, sums=sums).check(1e-9, reducer=reducer)


def check_compensation(
    compensation: Any, rule: Callable[[Sequence[int]], CompensationRule], optimizer: Any, of_paper: Any = None
) -> None:
    """Checks a compensation of delay in PipeDream and 2BW.

    Args:
        compensation: as in ``compensation=``.
        rule: from the stages' staleness to what its paper says.
        optimizer: of the pipeline; of_paper: that the rule steps, by default the same.
    """
    for name, m in (("pipedream", None), ("pipedream_2bw", 3)):
        training = tiny(plan=(1, 1, 1), schedule=name, microbatches=m, compensation=compensation, optimizer=optimizer)
        weights = training.make_schedules()[0].weights
        late = [weights.staleness(stage) for stage in range(3)]
        training.check(1e-9, compensation=rule(late), optimizer=of_paper)


def perceptron(width: int = 16) -> nn.Module:
    """Returns linear layers with dropout, and work in place."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = [nn.Linear(6, width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(width, width), nn.ReLU(inplace=True)]
        return nn.Sequential(*first, nn.Dropout(0.2), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)).double()


def with_statistics() -> nn.Module:
    """Returns layers with running statistics; a bias before a norm would have a gradient of rounding alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = [nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8, bias=False)]
        return nn.Sequential(*first, nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def make_batches(count: int = 5, samples: int = 12, last: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Returns samples of three classes; the last batch is a short one."""
    generator = torch.Generator().manual_seed(1)
    sizes = [samples] * (count - 1) + [last]
    return [
        (torch.randn(n, 6, generator=generator).double(), torch.randint(3, (n,), generator=generator)) for n in sizes
    ]


def tiny(model: Callable[[], nn.Module] = perceptron, **options: Any) -> Training:
    """Returns a training of two epochs of five minibatches, with an evaluation within an epoch."""
    batches = make_batches(last=8 if model is with_statistics else 2)
    odd = [batches[0], *((x[:3], y[:3]) for x, y in batches[1:])]
    how: dict[str, Any] = {"model": model, "data": batches, "test": odd, "epochs": 2, "evaluate_at": (3,), "seed": 3}
    how |= {"loss": F.cross_entropy, "optimizer": SGD}
    return Training(**how | options)


def _build(name: str, p: int, m: int) -> Schedule | None:
    """Returns a method's schedule, m microbatches a minibatch where it splits one; None where it refuses."""
    try:
        return schedules.build(name, schedules.uniform(name, p), m)
    except ScheduleError:
        return None
