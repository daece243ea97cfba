"""One training run through a pipeline, and what plain PyTorch gives for it; the same in one process and in several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple

import agreements
import delayed
import encoded
import processes
import torch
import zoo
from compensated import Spike
from torch.optim import lr_scheduler

import pipedream as pd
from pipedream.extensions.host_weights.roundpipe import dispatched, homes
from pipedream.runtime.session.phase_order import PhaseEnd, find_phase
from pipedream.services.checkpoint import folders
from pipedream.services.phases.phases import read_phases
from pipedream.testing import (
    CompensationRule,
    MethodRules,
    Reads,
    Trained,
    Training,
    assert_equal,
    assert_near as assert_near,
)

FLUSHING = tuple(name for name in pd.schedules.SCHEDULES if pd.schedules.properties_of(name).flushes)
ASYNCHRONOUS = ("pipedream", "pipedream_vertical_sync", "pipedream_2bw")
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-4, weight_decay=1e-2),
    "nadam": partial(torch.optim.NAdam, lr=0.01, eps=1e-4, betas=(0.99, 0.999), weight_decay=1e-2),
    "muon": partial(torch.optim.Muon, lr=0.02, weight_decay=1e-2),
}


def in_groups(kind: str, named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """Makes an optimizer with a group of its own for biases, so that stages differ in their groups."""
    options = dict(OPTIMIZERS[kind].keywords)
    parts = [
        {"params": [pair for pair in named if pair[0].endswith("bias") is is_bias], "weight_decay": decay}
        for is_bias, decay in {False: options.pop("weight_decay"), True: 0.0}.items()
    ]
    return OPTIMIZERS[kind].func([part for part in parts if part["params"]], **options)


OPTIMIZERS |= {f"{kind} in groups": partial(in_groups, kind) for kind in ("sgd", "adamw")}


def in_steps(optimizer: torch.optim.Optimizer) -> Any:
    """Schedules with a state of their own: warm-up, then steps; in a list, with whole-number keys."""
    warm = lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)
    return lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.MultiStepLR(optimizer, [3, 9])], [5])


SCHEDULERS: dict[bool | str, Callable[[torch.optim.Optimizer], Any]] = {
    True: partial(lr_scheduler.StepLR, step_size=7, gamma=0.7),
    "steps": in_steps,
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=40),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda n: 0.95**n),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=100, cycle_momentum=False),
}


@dataclass(frozen=True)
class Case:
    """A run: the animal, the method, the cut, and what else is asked; most is as a Training or a Pipeline takes it.

    Attributes:
        cuts: the layers before which a stage begins; by default the animal's own.
        epochs: of five minibatches each; `lengthened` gives the run of 35 minibatches, which is slow.
        leave_at: minibatch after which the loop is left, and a second `train` goes on; negative for never.
        depth, update_delay, worker_order: the plan's; None is 0 at every stage.
        recompute: every stage recomputes its activations.
        workers: number of workers, for a method that puts several stages on one; by default half as many as stages.
        options: further arguments of the method; `more` of the pipeline.
    """

    animal: str
    schedule: str
    stages: int
    replicas: tuple[int, ...] | None = None
    depth: Any = "noam"
    dtype: torch.dtype = torch.float64
    optimizer: str = "sgd"
    microbatches: int | None = None
    epochs: int = 2
    evaluate_at: tuple[int, ...] = (3,)
    leave_at: int = -1
    seed: int = 3
    clip_grad_norm: float | None = None
    clip: str = "global"
    scheduled: bool | str = False
    ema: float | None = None
    autocast: torch.dtype | None = None
    update_delay: tuple[int, ...] | None = None
    recompute: bool = False
    workers: int | None = None
    compensation: Any = None
    options: tuple[tuple[str, Any], ...] = ()
    check: bool = False
    messages: Any = None
    activations: str | None = None
    optimizer_state: str | None = None
    phases: str = ""
    cuts: tuple[int, ...] | None = None
    sums: str | None = None
    worker_order: tuple[int, ...] = ()
    more: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        """Returns what differs from the defaults, to name a test."""
        values = [(field.default, getattr(self, field.name)) for field in fields(self)]
        return " ".join(str(value).removeprefix("torch.") for default, value in values if value != default)

    @property
    def minibatches(self) -> int:
        return 5 * self.epochs

    def lengthened(self) -> Case:
        """Returns the case with a run of at least 35 minibatches, the drain in its middle, the first one compared."""
        return replace(self, epochs=max(self.epochs, 7), evaluate_at=(13,) if self.evaluate_at else (), check=True)

    def plan(self) -> pd.Plan:
        layout = pd.schedules.STAGE_ORDERS.get(self.schedule)
        replicas = self.replicas if layout is None else (layout.replicas,) * self.stages
        plan = zoo.plan_of(zoo.make(self.animal, self.dtype), self.stages, replicas, self.depth, self.cuts)
        plan = plan if self.update_delay is None else replace(plan, update_delay=self.update_delay)
        if layout is not None:
            workers = self.workers or max(1, self.stages * layout.replicas // 2)
            if layout is dispatched:  # any number of stages; with two workers none is away from home
                order = homes(self.workers or min(self.stages, 3), self.stages)
            else:
                order = layout.order(workers, self.stages * layout.replicas // workers)
            plan = replace(plan, worker_order=order)
        elif self.worker_order:
            plan = replace(plan, worker_order=self.worker_order)
        return replace(plan, stages=tuple(replace(stage, recompute=self.recompute) for stage in plan.stages))

    def training(self) -> Training:
        animal = zoo.make(self.animal, self.dtype)
        schedule = partial(pd.schedules.SCHEDULES[self.schedule], **dict(self.options)) if self.options else None
        more = {name: getattr(self, name) for name in ("check", "activations", "optimizer_state")} | dict(self.more)
        return Training(
            model=animal.model,
            data=animal.batches,
            test=[*animal.batches[:1], *((x[:3], y[:3]) for x, y in animal.batches[1:])],  # of other sizes
            loss=animal.loss,
            total=lambda output, batch: animal.total(output, batch[1]),
            optimizer=OPTIMIZERS[self.optimizer],
            plan=self.plan(),
            schedule=schedule(self.plan(), self.microbatches) if schedule else self.schedule,
            leave_at=None if self.leave_at < 0 else self.leave_at,
            scheduler=SCHEDULERS[self.scheduled] if self.scheduled else None,
            options={name: value for name, value in more.items() if name not in PASSED_ON},
            on_nan=more.get("on_nan", "error"),
            **{name: getattr(self, name) for name in PASSED_ON if name != "on_nan"},
        )


PASSED_ON = (
    "microbatches", "phases", "epochs", "evaluate_at", "seed", "clip_grad_norm", "clip", "on_nan", "ema", "autocast",
    "compensation", "sums", "messages",
)  # fmt: skip
"""Fields of a case that a training has, too."""


def phased(phases: str, replicas: tuple[int, ...] = (1, 1, 1), animal: str = "mlp", **more: Any) -> Case:
    settings = {"epochs": 11, "evaluate_at": (23,), "scheduled": True, "ema": 0.9, "clip": "local"} | more
    return Case(animal, "", len(replicas), replicas=replicas, phases=phases, **settings)


def stage_states(pipeline: pd.Pipeline) -> list[Any]:
    return [state for worker in pipeline._session.workers_here.workers for state in worker.stage_states.values()]


def make_pipeline(animal: str | zoo.Animal, plan: pd.Plan | Sequence[int] = (1, 1), **options: Any) -> pd.Pipeline:
    animal = zoo.make(animal) if isinstance(animal, str) else animal
    plan = plan if isinstance(plan, pd.Plan) else zoo.plan_of(animal, len(plan), tuple(plan))
    return pd.Pipeline(animal.model, plan, **{"loss": animal.loss, "optimizer": OPTIMIZERS["sgd"]} | options)


def pipeline_of(case: Case) -> pd.Pipeline:
    return case.training().make_pipeline()


class Kept(NamedTuple):
    """Of a stage's weights: distinct storages, most versions at once, versions now."""

    storages: int
    peak: int
    now: int


def look(pipeline: pd.Pipeline) -> dict[int, Kept]:
    """Returns what each stage keeps of its weights; checks that the holders of a weight have the same."""
    copies: dict[str, torch.Tensor] = {}
    kept: dict[int, Kept] = {}
    for worker in pipeline._session.workers_here.workers:
        for stage, state in worker.stage_states.items():
            versions = state.versions
            for name, handle in versions.handles.items():
                assert pipeline.plan.choices.sums.averages_weights or torch.equal(
                    copies.setdefault(name, handle), handle
                ), f"holders have another {name}"
            here = Kept(versions.storages, versions.peak, versions.kept_count)
            kept[stage] = Kept(*map(max, here, kept.get(stage, here)))
    return kept


def run(
    case: Case, folder: Path = Path(), resume: Path | None = None, save_at: Sequence[int] = (), **how: Any
) -> Trained:
    """Trains through a pipeline, perhaps from a checkpoint; each evaluation leaves one version of the weights."""
    trained = case.training().pipeline(folder=folder, resume=resume, save_at=save_at, watch=look, **how)
    assert {kept.now for stages in trained.watched for kept in stages.values()} <= {1}
    return trained


def run_all(chosen: list[Case]) -> list[Trained]:
    return [run(case) for case in chosen]


def answer(
    case: Case, outcome: Trained | None = None, rule: CompensationRule | None = None, optimizer: Any = None
) -> Trained:
    """Returns what the serial rule gives, with the outcome's drains, by the papers' formulas for the weights read."""
    return case.training().loop(outcome, **by_hand(case, outcome, rule, optimizer))


def check(
    case: Case,
    outcome: Trained,
    tolerance: float | None = None,
    rule: CompensationRule | None = None,
    optimizer: Any = None,
) -> Trained:
    """Checks a run against the serial rule; returns what this gave."""
    unheard = range(case.leave_at + 1, outcome.left_at or 0)  # a loop that was left does not hear of what was in flight
    minibatches = range(len(zoo.make(case.animal).batches) * case.epochs)
    assert list(outcome.losses) == [n for n in minibatches if n not in unheard]
    assert set(outcome.evaluated) <= set(outcome.drains)
    assert outcome.drains[-1] == len(minibatches)
    if case.schedule == "pipedream" and not case.update_delay:
        for stage, in_flight in enumerate(case.plan().in_flight):
            assert max(outcome.staleness[stage]) == in_flight - 1
            assert outcome.watched[-1][stage].storages <= in_flight
    assert list(outcome.state) == list(zoo.make(case.animal, case.dtype).model.state_dict())
    return case.training().assert_serial(outcome, tolerance, **by_hand(case, outcome, rule, optimizer))


def by_hand(case: Case, outcome: Trained | None, rule: CompensationRule | None, optimizer: Any) -> dict[str, Any]:
    training, rules = case.training(), {}
    schedules = training.make_schedules()
    for number, (begin, _) in (outcome.phases if outcome else {0: (0, 0)}).items():
        name = read_phases(case.phases)[number].name if case.phases else case.schedule
        rules[begin] = rules_of(case, name, schedules[number].microbatches, rule or CompensationRule())
        rules[begin] = replace(rules[begin], norm_delay=training.norm_delay(schedules[number]))
    reducer = agreements.PUBLISHED.get(case.sums or "")
    reference = zoo.make(case.animal, case.dtype).reference
    how = {"rules": rules, "reducer": reducer, "rounding": encoded.rounded, "model": reference}
    return how | {"optimizer": optimizer or OPTIMIZERS[case.optimizer]}


def rules_of(case: Case, name: str, m: int, rule: CompensationRule) -> MethodRules:
    plan = case.plan()
    flushes = pd.schedules.properties_of(name).flushes and not dict(case.options).get("delay")
    rounds = m == 1 and not flushes
    per_update = plan.replicas if rounds else ()
    if name.removesuffix("_sc") in delayed.PAPERS:
        reads = delayed.reads_of(name.removesuffix("_sc"), plan, m, case.replicas, dict(case.options))
        if name == "pb_lwp_sc":
            settings = OPTIMIZERS["sgd"].keywords
            rule = Spike(settings["weight_decay"], settings["momentum"], lambda s: 2 * (case.stages - 1 - s))
    elif flushes:
        reads = Reads(lambda s, k: k // m)
    else:
        reads = _read_versions("pipedream_2bw" if name == "roundpipe" else name, plan, m)  # of its `delay`
    return MethodRules(reads, m, per_update, rounds, compensation=rule)


def check_same(outcome: Trained, alone: Trained, rank: int, bound: float = 0.0) -> None:
    """Checks what a rank of several processes gave against one process, within a relative `bound` or to the bit."""
    if rank:
        assert not outcome.state
        alone = replace(alone, state={}, ema={})
    assert (outcome.position, outcome.staleness) == (alone.position, alone.staleness)
    assert list(outcome.evaluated) == list(alone.evaluated)
    assert list(outcome.losses) == list(alone.losses)
    assert_equal(outcome, alone, bound)
    kept, of_all = outcome.watched[-1], alone.watched[-1]
    assert kept
    for stage, (storages, peak, _) in kept.items():
        assert storages <= of_all[stage].storages
        assert peak <= of_all[stage].peak


def per_worker(case: Case) -> Case:
    """Returns a case for a comparison of processes: shorter, as one process is checked against plain PyTorch."""
    if case.phases:
        return case
    evaluate_at = tuple(min(4, n) for n in case.evaluate_at)
    return replace(case, epochs=2, evaluate_at=evaluate_at, leave_at=min(5, case.leave_at))


def check_resumed(case: Case, folder: Path, save_at: Sequence[int], train: Callable[..., Trained] = run) -> Trained:
    """Trains without a stop, and again from each checkpoint but the last; see `Training.resumed`."""

    def again(_: Training, *, folder: Path, save_at: Sequence[int], resume: Path | None = None) -> Trained:
        return train(case, folder, resume, save_at)

    whole = case.training().resumed(folder, save_at, train=again)
    phases = read_phases(case.phases) if case.phases else ()
    for checkpoint in folders.list_checkpoints(folder / "whole")[:-1] if phases else ():
        manifest = folders.read_manifest(checkpoint)
        assert manifest.phases == case.phases
        ends = [PhaseEnd(str(phase), phase.until, phase.until_epoch) for phase in phases]
        assert manifest.schedule == phases[find_phase(ends, checkpoint.minibatches, manifest.epoch)].name
    return whole


def _read_versions(schedule: str, plan: pd.Plan, m: int) -> Reads:
    """Returns the versions that are read as its paper writes it, k counting microbatches from the last drain.

    For the straight pipeline of p stages at the paper's depth (SOSP 2019, section 3.3):
    stashing w(t+1) = w(t) - lr grad f(w_0(t-p+1), ..., w_{p-1}(t)), so stage s reads version k - (p-1-s);
    vertical sync grad f(w_0(t-p+1), ..., w_{p-1}(t-p+1)), so each reads k - (p-1);
    2BW (ICML 2021, section 3.1) w(t+1) = w(t) - lr grad f(w(t-1)).
    """
    p = len(plan.stages)
    if schedule == "pipedream_2bw":
        return Reads(lambda s, k: max(0, k // m - 1))
    straight = plan.workers == p and plan.depth_mode == "noam"
    if schedule == "pipedream" and straight:
        return Reads(lambda s, k: max(0, k - (p - 1 - s)))
    if schedule == "pipedream_vertical_sync" and straight:
        return Reads(lambda s, k: max(0, k - (p - 1)))
    replicas = plan.replicas
    late = [n - 1 + delay for n, delay in zip(plan.in_flight, plan.update_delay, strict=True)]
    if schedule == "pipedream_vertical_sync":
        # The tag is a count of minibatches, a multiple of all replica counts, that every stage has a version for: of
        # the rounds of the input stage, the newest that no stage is later than.
        first, both = replicas[0], lcm(*replicas)
        rounds = max(-(-wait * count // first) for wait, count in zip(late, replicas, strict=True))
        tag = lambda k: both * (first * max(0, k // first - rounds) // both)  # noqa: E731
        return Reads(lambda s, k: tag(k) // replicas[s])
    assert schedule == "pipedream"
    return Reads(lambda s, k: max(0, k // replicas[s] - late[s]))


class Fresh:
    def __init__(self, batches: list[zoo.Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return ((x.clone(), y.clone()) for x, y in self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def check_processes(
    workers: int, chosen: Sequence[Case], run_cases: Callable[[list[Case]], list[Trained]] = run_all
) -> None:
    """Checks that so many processes, started once for all cases, give to the bit what one gives."""
    short = [per_worker(case) for case in chosen]
    of_ranks = processes.team(workers).results(run_cases, short)
    for number, case in enumerate(short):
        alone = run(case)
        for rank, outcomes in enumerate(of_ranks):
            check_same(outcomes[number], alone, rank)
