"""One training run through a pipeline, and what plain PyTorch gives for it; the same in one process and in several."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import lcm
from pathlib import Path
from typing import Any

import delayed
import encoded
import processes
import reference
import torch
import zoo
from tagged_runs import check_tags
from torch import Tensor
from torch.optim import lr_scheduler

import pipedream as pd
from pipedream.core.schedule.phase import phase_at, read_phases
from pipedream.experimental.roundpipe import dispatched, homes
from pipedream.runtime.checkpoint import folders
from pipedream.schedules import SCHEDULES, STAGE_ORDERS, build, properties_of

FLUSHING = tuple(name for name in SCHEDULES if properties_of(name).flushes)
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
    decays = {False: options.pop("weight_decay"), True: 0.0}
    parts = [
        {"params": [pair for pair in named if pair[0].endswith("bias") is is_bias], "weight_decay": decay}
        for is_bias, decay in decays.items()
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
    """A run: the animal, the method, the cut, and what else is asked.

    Attributes:
        cuts: the layers before which a stage begins; by default the animal's own.
        phases: the methods that the run trains by, one after the other, in place of `schedule`; see `phased`.
        epochs: of five minibatches each; `lengthened` gives the run of 35 minibatches, which is slow.
        evaluate_at: minibatches after which the loop evaluates, and so drains.
        leave_at: minibatch after which the loop is left, and a second `train` goes on; negative for never.
        update_delay: the plan's; None is 0 at every stage.
        recompute: every stage recomputes its activations.
        workers: number of workers, for a method that puts several stages on one; by default half as many as stages.
        compensation: delay compensation, as a Pipeline takes it.
        options: further arguments of the method; `more` of the pipeline.
        sums: how replicas agree; `worker_order` the plan's.
        check: compares the first minibatch with the model.
        messages: their encoding; every cut lies between two workers.
        activations: where they wait.
        optimizer_state: where the optimizer is.
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
        plan = "-".join(map(str, self.replicas or (1,) * self.stages))
        extras = [str(v) for v in (self.microbatches, self.clip_grad_norm, self.ema, self.autocast) if v is not None]
        depth = ("" if self.depth == "noam" else f" {self.depth}") + (
            f" update delay {self.update_delay}" if self.update_delay else ""
        )
        extras += ["recompute"] if self.recompute else []
        extras += [] if self.compensation is None else [str(self.compensation)]
        extras += [str(value) for _, value in self.options]
        extras += [str(value) for value in (self.messages, self.sums) if value is not None]
        words = [
            self.animal,
            self.phases or self.schedule,
            plan + depth,
            str(self.dtype).removeprefix("torch."),
            self.optimizer,
        ]
        return " ".join([*words, *extras])

    def optimize(self, named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        """Makes the optimizer."""
        return OPTIMIZERS[self.optimizer](named)

    @property
    def minibatches(self) -> int:
        """Number of minibatches of the run."""
        return 5 * self.epochs

    def lengthened(self) -> Case:
        """Returns the case with a run of at least 35 minibatches, the drain in its middle, the first one compared."""
        return replace(self, epochs=max(self.epochs, 7), evaluate_at=(13,) if self.evaluate_at else (), check=True)

    @property
    def scheduler(self) -> Callable[[torch.optim.Optimizer], Any] | None:
        """The learning-rate scheduler's factory, if there is one."""
        return SCHEDULERS[self.scheduled] if self.scheduled else None

    def plan(self) -> pd.Plan:
        """Returns the plan."""
        layout = STAGE_ORDERS.get(self.schedule)
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


@dataclass
class Outcome:
    """Results of a run; all of them can travel between processes.

    Attributes:
        dones: in the order in which they came.
        evaluated: minibatches done at the evaluation in the middle -> its loss.
        state, ema: whole state dicts at the end, on rank 0.
        drains, position: the pipeline's, at the end.
        left_at: minibatches that were done when the loop was left.
        trained: phase -> range of its minibatches.
        late: stage -> set of all staleness seen at it, from the timeline's tags; `phase_late` by phase.
        storages: stage -> distinct storages of its weights.
        versions: stage -> most versions alive at once.
        split: m, of the schedule.
    """

    dones: list[pd.Done] = field(default_factory=list)
    evaluated: dict[int, float] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    ema: dict[str, Tensor] = field(default_factory=dict)
    drains: list[int] = field(default_factory=list)
    position: tuple[int, int] = (0, 0)
    left_at: int = 0
    trained: dict[int, tuple[int, int]] = field(default_factory=dict)
    late: dict[int, set[int]] = field(default_factory=dict)
    phase_late: dict[int, dict[int, set[int]]] = field(default_factory=dict)
    storages: dict[int, int] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    split: int = 1


def phased(phases: str, replicas: tuple[int, ...] = (1, 1, 1), animal: str = "mlp", **more: Any) -> Case:
    """Returns a run whose method changes at drains."""
    settings = {"epochs": 11, "evaluate_at": (23,), "scheduled": True, "ema": 0.9, "clip": "local"} | more
    return Case(animal, "", len(replicas), replicas=replicas, phases=phases, **settings)


def stage_states(pipeline: pd.Pipeline) -> list[Any]:
    """Returns the states of the stages of this process's workers."""
    return [state for worker in pipeline._session.workers_here.workers for state in worker.stage_states.values()]


def make_pipeline(animal: str | zoo.Animal, plan: pd.Plan | Sequence[int] = (1, 1), **options: Any) -> pd.Pipeline:
    """Returns a pipeline of an animal, by a plan or with so many workers of each stage; it trains by SGD."""
    animal = zoo.make(animal) if isinstance(animal, str) else animal
    plan = plan if isinstance(plan, pd.Plan) else zoo.plan_of(animal, len(plan), tuple(plan))
    return pd.Pipeline(animal.model, plan, **{"loss": animal.loss, "optimizer": OPTIMIZERS["sgd"]} | options)


PASSED_ON = (
    "compensation", "clip_grad_norm", "clip", "ema", "autocast", "seed", "check", "messages", "activations",
    "optimizer_state", "sums",
)  # fmt: skip
"""Fields of a case that are options of a pipeline."""


def pipeline_of(case: Case) -> pd.Pipeline:
    """Returns the pipeline of a case: in this process alone, or of one rank of a process group."""
    plan, m, options = case.plan(), case.microbatches, dict(case.options)
    return make_pipeline(
        zoo.make(case.animal, case.dtype),
        plan,
        schedule=SCHEDULES[case.schedule](plan, m, **options) if options else case.schedule or None,
        phases=case.phases or None,
        optimizer=case.optimize,
        microbatches=m,
        scheduler=case.scheduler,
        **{name: getattr(case, name) for name in PASSED_ON},
        **dict(case.more),
    )


def run(
    case: Case, folder: Path | None = None, resume: Path | None = None, save_at: Sequence[int] = (), **how: Any
) -> Outcome:
    """Trains, perhaps from a checkpoint, and checks the tags; saves `how` at some minibatches, which drains."""
    batches, outcome = zoo.make(case.animal, case.dtype).batches, Outcome()
    if resume is not None:
        torch.manual_seed(99)  # overwritten: the run continues from the checkpoint's state
    with pipeline_of(case) as pipeline:
        if resume is not None:
            assert pipeline.load(resume) == divmod(pipeline.drain(), len(batches))
        first = pipeline.position[0] * len(batches) + pipeline.position[1]
        # Copies: a network that works in place may write into what it is given.
        for done in pipeline.train(Fresh(batches), epochs=case.epochs - pipeline.position[0]):
            outcome.dones.append(done)
            if done.number in case.evaluate_at:
                loss = pipeline.evaluate(Fresh(odd(batches)))["loss"]
                outcome.evaluated[pipeline.drain()] = loss
                assert {state.versions.kept_count for state in stage_states(pipeline)} == {1}
            if done.number + 1 in save_at:
                pipeline.save(folder, **how)
            if done.number == case.leave_at:
                break
        if case.leave_at >= 0:
            outcome.left_at = pipeline.drain()
            epoch, done_batches = pipeline.position
            assert epoch * len(batches) + done_batches == outcome.left_at
            outcome.dones += list(pipeline.train(Fresh(batches), epochs=case.epochs - epoch))
        outcome.state, outcome.ema = pipeline.state_dict(), pipeline.state_dict(ema=True) if case.ema else {}
        outcome.drains, outcome.position, outcome.trained = pipeline.drains, pipeline.position, pipeline.trained
        for phase, (begin, end) in pipeline.trained.items():
            tags = pipeline.timeline(phase).gradient_versions
            if end > first:
                program = pipeline.prepared[phase].program
                check_tags(tags, program, outcome.drains, batches, max(begin, first), end)
            for tag in tags:
                for late in (outcome.late, outcome.phase_late.setdefault(phase, {})):
                    late.setdefault(tag.stage, set()).add(tag.staleness)
        copies: dict[str, Tensor] = {}
        for name, handle in (item for state in stage_states(pipeline) for item in state.versions.handles.items()):
            assert torch.equal(copies.setdefault(name, handle), handle), f"holders have another {name}"
        for worker in pipeline._session.workers_here.workers:
            for stage, stage_state in worker.stage_states.items():
                outcome.storages[stage] = max(stage_state.versions.storages, outcome.storages.get(stage, 0))
                outcome.versions[stage] = max(stage_state.versions.peak, outcome.versions.get(stage, 0))
        outcome.split = pipeline.schedule.microbatches
    return outcome


def run_all(chosen: list[Case]) -> list[Outcome]:
    """Runs one case after the other."""
    return [run(case) for case in chosen]


def answer(case: Case, outcome: Outcome, rule: reference.Rule | None = None, optimizer: Any = None) -> reference.Answer:
    """Returns what plain PyTorch gives for a case, with the drain points that the run had.

    Args:
        rule: update rule of an asynchronous method.
        optimizer: factory of the optimizer that the rule uses; by default the case's.
    """
    animal, plan = zoo.make(case.animal, case.dtype), case.plan()
    model, total = _reference_model(case, plan, outcome), animal.total
    batches = animal.batches * case.epochs
    names = list(chain.from_iterable(stage.names for stage in plan.stages))
    common: dict[str, Any] = {
        "seed": case.seed,
        "scheduler": case.scheduler,
        "ema": case.ema,
        "autocast": case.autocast,
        "drains": outcome.drains,
        "clip": case.clip_grad_norm,
    }
    if case.schedule.removesuffix("_sc") in delayed.PAPERS:
        return _of_paper(case, plan, outcome)
    owned, statistics = (
        [[n for n, _ in named if any(n.startswith(f"{layer}.") for layer in stage.names)] for stage in plan.stages]
        for named in (list(model.named_parameters()), list(model.named_buffers()))
    )
    if case.phases:
        chosen = read_phases(case.phases)
        phases = {
            begin: _rule(chosen[number].name, chosen[number].microbatches or 1, plan, case.clip)
            for number, (begin, _) in outcome.trained.items()
        }
        return reference.delayed(model, names, batches, total, case.optimize, stages=owned, phases=phases, **common)
    options = dict(case.options)
    m = case.microbatches
    built = SCHEDULES[case.schedule](plan, m, **options) if options else build(case.schedule, plan, m)
    if built.flushes:
        layout = STAGE_ORDERS.get(case.schedule)
        holders = 1 if layout is None else layout.replicas
        common |= {"microbatches": outcome.split, "holders": holders}
        return reference.plain(model, names, batches, total, case.optimize, **common)
    rule_of = "pipedream_2bw" if case.schedule == "roundpipe" else case.schedule  # of its `delay`
    phase = _rule(rule_of, outcome.split, plan)
    return reference.delayed(
        model, names, batches, total, optimizer or case.optimize, rule=rule,
        stages=owned, phases={0: phase}, statistics=statistics, holders=phase.rounds, **common,
    )  # fmt: skip


def _reference_model(case: Case, plan: pd.Plan, outcome: Outcome) -> torch.nn.Module:
    animal = zoo.make(case.animal, case.dtype)
    model = animal.reference or animal.model
    ends = [stage.names[-1] for stage in plan.stages[:-1]]
    of_mean = case.messages is not None and outcome.split == 1 and not properties_of(case.schedule).flushes
    return model if case.messages is None else encoded.sent_after(model, ends, case.messages, of_mean)


def _of_paper(case: Case, plan: pd.Plan, outcome: Outcome) -> reference.Answer:
    animal, options = zoo.make(case.animal, case.dtype), dict(case.options)
    changes = {"rule": options.pop("backward_rule", None), "by": options.pop("by", None)}
    paper = delayed.PAPERS[case.schedule.removesuffix("_sc")](case.stages, outcome.split, **options)
    paper = replace(paper, **{name: value for name, value in changes.items() if value is not None})
    if "timeprest" in case.schedule and case.replicas:
        # The paper has a worker a stage. The warm-up is the schedule's own; the rest is the papers' arithmetic.
        built, m = SCHEDULES[case.schedule](plan, outcome.split), outcome.split
        rows = zip(built.plan.in_flight, case.replicas, strict=True)
        waits = [(in_flight - -(-m // count)) * count for in_flight, count in rows]
        tagged = case.schedule == "timeprest"
        paper = replace(paper, forward=lambda s, k: max(0, (k - waits[0 if tagged else s]) // m))
    elif case.replicas:
        # The papers have a worker a stage. Of r replicas each has W warm-up forwards, its own microbatches alone, and a
        # bellwether of its own.
        r, late = case.replicas, [(n - 1) * count for n, count in zip(plan.in_flight, case.replicas, strict=True)]
        m = [outcome.split if outcome.split > 1 else count for count in r]
        shared = outcome.split if case.schedule == "xpipe" else 1
        first = lambda s, k: k - k % shared + k % shared % r[s]  # noqa: E731
        predicts = bool(paper.ahead(0))
        paper = replace(
            paper,
            forward=lambda s, k: max(0, (first(s, k) - late[s]) // m[s]),
            backward=lambda s, k: k // m[s],
            ahead=lambda s: -(-late[s] // m[s]) if predicts else 0,
        )
    optimizer = OPTIMIZERS[case.optimizer]
    make_optimizer: Callable[[], Any] = partial(delayed.Sgd, **optimizer.keywords)
    if case.optimizer == "adamw":
        make_optimizer = partial(delayed.OfTorch, optimizer, optimizer.keywords["lr"])
    if case.schedule == "pb_lwp_sc":
        delays = iter(2 * (case.stages - 1 - s) for s in range(case.stages))  # one optimizer a stage, in their order
        make_optimizer = lambda: delayed.SpikeSgd(delay=next(delays), **optimizer.keywords)  # noqa: E731
    return delayed.train(
        _reference_model(case, plan, outcome),
        [stage.names for stage in plan.stages],
        animal.batches * case.epochs,
        animal.total,
        paper,
        make_optimizer,
        microbatches=outcome.split,
        replicas=case.replicas,
        rounds=outcome.split == 1,
        seed=case.seed,
        drains=outcome.drains,
        rate_at=(lambda n: 0.7 ** (n // 7)) if case.scheduled else (lambda n: 1.0),
    )


def check(
    case: Case,
    outcome: Outcome,
    tolerance: float | None = None,
    rule: reference.Rule | None = None,
    optimizer: Any = None,
) -> reference.Answer:
    """Checks a run against plain PyTorch: each loss, weight and rate, evaluations, and the whole state."""
    plain = answer(case, outcome, rule, optimizer)
    bound = tolerance or (1e-10 if case.dtype == torch.float64 else 1e-5)
    animal = zoo.make(case.animal, case.dtype)
    # A loop that was left does not hear of what was still in flight.
    unheard = range(case.leave_at + 1, outcome.left_at)
    assert [done.number for done in outcome.dones] == [n for n in range(len(plain.losses)) if n not in unheard]
    size = len(animal.batches)
    for done in outcome.dones:
        loss, weight, rate = plain.losses[done.number], plain.weights[done.number], plain.rates[done.number]
        x, _ = animal.batches[done.number % size]
        assert abs(done.loss - loss) <= bound * max(abs(loss), 1.0), f"loss of {done.number}: {done.loss}, not {loss}"
        assert (done.epoch, done.ends_epoch) == (done.number // size, done.number % size == size - 1)
        assert (done.weight, done.samples) == (weight, len(x))
        assert case.replicas or abs(done.rate - rate) <= 1e-12
    assert set(outcome.evaluated) <= set(outcome.drains)
    for number, loss in outcome.evaluated.items():
        expected = reference.mean_loss(plain.at_drains[number], odd(animal.batches), animal.total)
        assert abs(loss - expected) <= bound * max(abs(expected), 1.0), f"evaluated {loss}, not {expected}"
    assert list(outcome.state) == list(animal.model.state_dict())
    assert_near(outcome.state, plain.state, bound)
    if case.ema is not None:
        assert_near({name: outcome.ema[name] for name in plain.ema}, plain.ema, bound)
    return plain


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """Checks that each tensor lies within `bound` times the norm of the wanted one; whole numbers are equal."""
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        got = actual[name]
        assert got.dtype == tensor.dtype
        if not tensor.is_floating_point():
            assert torch.equal(got, tensor), f"{name}: {got}, not {tensor}"
            continue
        distance, size = (got.double() - tensor.double()).norm(), tensor.double().norm()
        assert distance <= bound * size, f"{name}: {distance / size:.3g} of its norm away"


def check_same(outcome: Outcome, alone: Outcome, rank: int, bound: float = 0.0) -> None:
    """Checks what a rank of several processes gave against what one process with all workers gave.

    Args:
        bound: greatest relative distance of losses and weights; 0 asks for the same bits.
    """
    assert len(outcome.dones) == len(alone.dones)
    for done, alone_done in zip(outcome.dones, alone.dones, strict=True):
        assert replace(done, loss=alone_done.loss) == alone_done
        assert abs(done.loss - alone_done.loss) <= bound * abs(alone_done.loss)
    assert (outcome.drains, outcome.position, outcome.late) == (alone.drains, alone.position, alone.late)
    assert list(outcome.evaluated) == list(alone.evaluated)
    for number, loss in alone.evaluated.items():
        assert abs(outcome.evaluated[number] - loss) <= bound * abs(loss)
    assert outcome.storages
    assert all(outcome.storages[stage] <= alone.storages[stage] for stage in outcome.storages)
    assert all(outcome.versions[stage] <= alone.versions[stage] for stage in outcome.versions)
    if rank:
        assert not outcome.state
        return
    for state, alone_state in ((outcome.state, alone.state), (outcome.ema, alone.ema)):
        assert list(state) == list(alone_state)
        if bound:
            assert_near(state, alone_state, bound)
        else:
            assert all(torch.equal(state[name], alone_state[name]) for name in alone_state)


def odd(batches: list[zoo.Batch]) -> list[zoo.Batch]:
    """Returns the batches in other sizes: the first whole, the others of three samples."""
    return [*batches[:1], *((x[:3], y[:3]) for x, y in batches[1:])]


def per_worker(case: Case) -> Case:
    """Returns a case for a comparison of processes: shorter, as one process is checked against plain PyTorch."""
    if case.phases:
        return case
    return replace(
        case, epochs=2, evaluate_at=tuple(min(4, n) for n in case.evaluate_at), leave_at=min(5, case.leave_at)
    )


def check_resumed(case: Case, folder: Path, save_at: Sequence[int], train: Callable[..., Outcome] = run) -> Outcome:
    """Trains without a stop, and again from each checkpoint but the last; all save at the same minibatches.

    Returns the results of the run without a stop.
    """
    whole = train(case, folder / "a", None, save_at)
    saved = folders.list_checkpoints(folder / "a")
    assert len(saved) >= len(save_at)
    for path in saved[:-1]:
        shutil.copytree(path, folder / "b" / path.name)
        rest, begin = train(case, folder / "b", folder / "b", save_at), folders.parse_minibatches(path.name)
        assert rest.dones == [done for done in whole.dones if done.number >= begin]
        assert rest.drains == whole.drains
        for actual, expected in ((rest.state, whole.state), (rest.ema, whole.ema)):
            assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
        manifest, other = (folders.read_manifest(folders.list_checkpoints(folder / f)[-1]) for f in "ab")
        assert (manifest.stages, manifest.random) == (other.stages, other.random)
        if phases := read_phases(case.phases) if case.phases else ():
            manifest = folders.read_manifest(path)
            assert manifest.phases == case.phases
            assert manifest.schedule == phases[phase_at(phases, begin, manifest.epoch)].name
        shutil.rmtree(folder / "b")
    return whole


def _rule(schedule: str, microbatches: int, plan: pd.Plan, clip: str = "") -> reference.Phase:
    """Returns a method's rule. A delayed global norm is late by what the input stage has in flight, in updates."""
    late = plan.in_flight[0] + plan.update_delay[0] if clip == "delayed_global" else None
    if schedule in FLUSHING:
        return reference.Phase(microbatches=microbatches, norm_delay=None if late is None else 0)
    if late is not None and schedule == "pipedream_2bw":
        late = -(-plan.in_flight[0] * plan.replicas[0] // microbatches)
    return reference.Phase(_versions(schedule, plan), microbatches, plan.replicas if microbatches == 1 else (), late)


def _versions(schedule: str, plan: pd.Plan) -> reference.Versions:
    """Returns the versions that are read as its paper writes it, k counting from the last drain.

    For the straight pipeline of p stages at the paper's depth (SOSP 2019, section 3.3):
    stashing w(t+1) = w(t) - lr grad f(w_0(t-p+1), ..., w_{p-1}(t)), so stage s reads version k - (p-1-s);
    vertical sync grad f(w_0(t-p+1), ..., w_{p-1}(t-p+1)), so each reads k - (p-1);
    2BW (ICML 2021, section 3.1) w(t+1) = w(t) - lr grad f(w(t-1)).
    """
    p = len(plan.stages)
    if schedule == "pipedream_2bw":
        return lambda s, k: max(0, k - 1)
    straight = plan.workers == p and plan.depth_mode == "noam"
    if schedule == "pipedream" and straight:
        return lambda s, k: max(0, k - (p - 1 - s))
    if schedule == "pipedream_vertical_sync" and straight:
        return lambda s, k: max(0, k - (p - 1))
    replicas, late = (
        plan.replicas,
        [n - 1 + update_delay for n, update_delay in zip(plan.in_flight, plan.update_delay, strict=True)],
    )
    if schedule == "pipedream_vertical_sync":
        # The tag is a count of minibatches, a multiple of all replica counts, that every stage has a version for: of
        # the rounds of the input stage, the newest that no stage is later than.
        first, both = replicas[0], lcm(*replicas)
        rounds = max(-(-wait * count // first) for wait, count in zip(late, replicas, strict=True))
        tag = lambda k: both * (first * max(0, k // first - rounds) // both)  # noqa: E731
        return lambda s, k: tag(k) // replicas[s]
    assert schedule == "pipedream"
    return lambda s, k: max(0, k // replicas[s] - late[s])


class Fresh:
    """A loader that gives a copy of each batch."""

    def __init__(self, batches: list[zoo.Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return ((x.clone(), y.clone()) for x, y in self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def check_processes(
    workers: int, chosen: Sequence[Case], run_cases: Callable[[list[Case]], list[Outcome]] = run_all
) -> None:
    """Checks that so many processes, started once for all cases, give to the bit what one gives."""
    short = [per_worker(case) for case in chosen]
    of_ranks = processes.team(workers).results(run_cases, short)
    for number, case in enumerate(short):
        alone = run(case)
        for rank, outcomes in enumerate(of_ranks):
            check_same(outcomes[number], alone, rank)
