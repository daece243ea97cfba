"""Training: a model, its data and how a pipeline trains it, and the same by the serial rule."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipedream.apps.testing.batches import Total, call_model, clone_batch, count_samples, inputs_of, total_of
from pipedream.apps.testing.passes import Passes, Rounding
from pipedream.apps.testing.processes import run_in_processes
from pipedream.apps.testing.results import Trained, assert_equal
from pipedream.apps.testing.rules import CompensationRule, MethodRules, Reads, Reducer
from pipedream.apps.testing.serial import Loop
from pipedream.apps.testing.tags import check_tags
from pipedream.capture import capture
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import LayerProfile, Profile
from pipedream.core.plan.choices import Choices
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.schedule import Schedule
from pipedream.pipeline import Pipeline
from pipedream.planner import manual_plan
from pipedream.schedules import stage_order_of
from pipedream.services.checkpoint import folders
from pipedream.workflows.prepare import build_phase, read_run_phases

Watch = Callable[[Pipeline], Any]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model, its data, and how a pipeline trains it.

    For several processes all of it must be picklable: functions with a name, no lambdas.

    Attributes:
        model: a module, which is copied, or a function that makes the same one each time.
        data: batches of an epoch. test: batches of an evaluation; by default `data`.
        loss, optimizer: as `pipedream.Pipeline` takes them.
        plan: or workers of each stage, among which the layers are dealt evenly.
        schedule: a method's name or a Schedule, its own `microbatches` if None; phases: in its place, in turn.
        evaluate_at: minibatches after whose result the loop evaluates, which drains.
        leave_at: minibatch after whose result the loop is left, and begun again.
        options: further arguments of the pipeline that change no number: ``check``, ``activations``, ``grad_scaler``.
        total: (output, batch) -> (sum of the losses, their weight); by default what the loss says.
        seed ... messages: options of the pipeline that the serial rule knows, too.
    """

    model: nn.Module | Callable[[], nn.Module]
    data: Sequence[Any]
    loss: Any
    optimizer: Callable[..., torch.optim.Optimizer]
    plan: Plan | Sequence[int] = (1, 1)
    schedule: str | Schedule = ""
    microbatches: int | None = None
    phases: str | Sequence[Any] = ()
    epochs: int = 1
    test: Sequence[Any] = ()
    evaluate_at: Sequence[int] = ()
    leave_at: int | None = None
    total: Total | None = None
    seed: int = 0
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    clip_grad_norm: float | None = None
    clip: str = "global"
    on_nan: str = "error"
    ema: float | None = None
    autocast: torch.dtype | None = None
    compensation: Any = None
    sums: str | None = None
    messages: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def make_model(self) -> nn.Module:
        return copy.deepcopy(self.model) if isinstance(self.model, nn.Module) else self.model()

    @cached_property
    def resolved_plan(self) -> Plan:
        """The plan; of workers alone one whose layers are dealt evenly, on workers in the order of the method."""
        if isinstance(self.plan, Plan):
            return self.plan
        order = stage_order_of(self.schedule) if isinstance(self.schedule, str) and self.schedule else None
        counts = tuple(self.plan) if order is None else (order.replicas,) * len(self.plan)
        plan = even_plan(self.make_model(), self.options.get("inputs", inputs_of)(self.data[0]), counts)
        if order is None:
            return plan
        workers = max(1, len(counts) * order.replicas // 2)
        return replace(plan, worker_order=order.order(workers, len(counts) * order.replicas // workers))

    def make_pipeline(self) -> Pipeline:
        """Returns the pipeline: with all workers in this process, or of one rank of a process group."""
        method: dict[str, Any] = {"phases": self.phases} if self.phases else {"schedule": self.schedule or None}
        method |= {} if self.phases else {"microbatches": self.microbatches}
        shared = ("seed", "scheduler", "clip_grad_norm", "clip", "on_nan", "ema", "autocast", "compensation")
        options = {name: getattr(self, name) for name in (*shared, "sums", "messages")}
        how = {"loss": self.loss, "optimizer": self.optimizer, "check": False} | method | options | {**self.options}
        return Pipeline(self.make_model(), self.resolved_plan, **how)

    # -- by the library --------------------------------------------------------------------------------------------

    def pipeline(
        self,
        processes: int = 1,
        *,
        folder: Path = Path(),
        save_at: Sequence[int] = (),
        resume: Path | None = None,
        watch: Watch | None = None,
        **saving: Any,
    ) -> Trained:
        """Trains with the library, and checks what each gradient says of the weights that it was taken at.

        Args:
            processes: 1 has all workers in this process, or is one rank of a process group that there is.
            save_at: minibatches at which a checkpoint is saved to `folder`, which drains; `saving` are its options.
            resume: folder of checkpoints to resume from.
            watch: called with the pipeline at each evaluation and at the end.
        """
        how = {"folder": folder, "save_at": save_at, "resume": resume, "watch": watch, **saving}
        if processes > 1:
            first, *others = run_in_processes(processes, self.pipeline, how)
            for other in others:
                assert_equal(replace(other, state=first.state, ema=first.ema), first)
                first.optimizer |= other.optimizer
            return cast(Trained, first)
        trained = Trained()
        with self.make_pipeline() as pipeline:
            if resume is not None:
                torch.manual_seed(99)  # overwritten: the run continues from the checkpoint's state
                assert pipeline.load(resume) == divmod(pipeline.drain(), len(self.data))
            begin = pipeline.position[0] * len(self.data) + pipeline.position[1]
            for number in self._train(pipeline, trained):
                if number in self.evaluate_at:
                    loss = pipeline.evaluate(_Fresh(self.test or self.data))["loss"]
                    trained.evaluated[pipeline.drain()] = loss
                    trained.watched += [] if watch is None else [watch(pipeline)]
                if number + 1 in save_at:
                    pipeline.save(folder, **saving)
                if number == self.leave_at:
                    break
            if self.leave_at is not None:
                trained.left_at = pipeline.drain()
                assert divmod(trained.left_at, len(self.data)) == pipeline.position
                for _ in self._train(pipeline, trained):
                    pass
            _collect(pipeline, trained, begin, self.data)
            trained.watched += [] if watch is None else [watch(pipeline)]
        return trained

    def _train(self, pipeline: Pipeline, trained: Trained) -> Iterator[int]:
        size = len(self.data)
        for done in pipeline.train(_Fresh(self.data), epochs=self.epochs - pipeline.position[0]):
            number, batch = done.number, self.data[done.number % size]
            assert (done.epoch, done.ends_epoch) == (number // size, number % size == size - 1)
            assert done.samples == count_samples(batch), f"minibatch {number} has {done.samples} samples"
            trained.losses[number], trained.weights[number], trained.rates[number] = done.loss, done.weight, done.rate
            yield number

    def resumed(
        self,
        folder: Path,
        save_at: Sequence[int],
        other: Training | None = None,
        *,
        bound: float = 0.0,
        train: Callable[..., Trained] | None = None,
    ) -> Trained:
        """Trains without a stop, and again from each checkpoint but the last; all save at the same minibatches.

        Args:
            other: resumes in the place of this one, on another plan; then weights and losses are compared with `bound`.
            train: (training, keywords of `pipeline`) -> what it gives; by default in this process.

        Returns the results of the run without a stop.

        Raises:
            ValueError: nothing would be resumed.
        """
        if other is None and len(save_at) < 2:
            raise ValueError(
                f"save_at={save_at!r} was given, and a run resumes from all checkpoints but the last; give two"
            )
        run = train or (lambda training, **how: training.pipeline(**how))
        whole = run(self, folder=folder / "whole", save_at=save_at)
        saved = folders.list_checkpoints(folder / "whole")
        assert len(saved) >= len(save_at)
        for checkpoint in saved[: -1 if other is None else None]:
            rest_folder = folder / "rest"
            shutil.copytree(checkpoint.locate(""), rest_folder / checkpoint.name)
            rest = run(other or self, folder=rest_folder, resume=rest_folder, save_at=save_at)
            begin = checkpoint.minibatches
            expected = replace(whole, losses={n: loss for n, loss in whole.losses.items() if n >= begin})
            assert_equal(rest, expected, bound)
            if other is None:
                last = [folders.list_checkpoints(path)[-1] for path in (folder / "whole", rest_folder)]
                ours, theirs = map(folders.read_manifest, last)
                assert (ours.stages, ours.random) == (theirs.stages, theirs.random)
            shutil.rmtree(rest_folder)
        return whole

    # -- by the serial rule ----------------------------------------------------------------------------------------

    def loop(
        self,
        like: Trained | None = None,
        *,
        reads: Reads | None = None,
        rules: Mapping[int, MethodRules] | None = None,
        compensation: CompensationRule | None = None,
        optimizer: Any = None,
        reducer: Reducer | None = None,
        rounding: Rounding | None = None,
        model: nn.Module | None = None,
    ) -> Trained:
        """Trains by the serial rule: which versions are read, and what updates contain, the schedule says by default.

        Args:
            like: a pipeline's run, whose drains and phases the loop has, and whose evaluations it repeats.
            reads: the paper's, in place of the schedule's. rules: all of a method's, by the minibatch that begins it.
            compensation: the paper's rule. optimizer: that it steps, by default the pipeline's.
            reducer, rounding: how replicas agree, and what arrives of a message, as docs/less_communication.md says.
            model: in place of `self.model`.
        """
        like, plan = like or Trained(phases={0: (0, 0)}), self.resolved_plan
        schedules = self.make_schedules()
        if rules is None:
            rule = compensation or CompensationRule()
            rules = {begin: self._rules_of(schedules[phase], reads, rule) for phase, (begin, _) in like.phases.items()}
        together = plan.tied_weights or all(schedule.flushes for schedule in schedules)
        skips = self.on_nan == "skip" or self.options.get("grad_scaler") is not None
        assert reducer is not None or self.sums in (None, "full"), (
            f"sums={self.sums}: give the reducer that its page says"
        )
        messages, ranks = Choices.resolve(command={"messages": self.messages}).messages, schedules[0].placement.ranks
        assert rounding is not None or not messages, f"messages={messages}: give the rounding that its page says"
        texts = str(messages).split(",")  # without its extension a choice has only its text
        texts += texts * (len(texts) == 1) + ["full"]
        loop = Loop(
            Passes(
                model if model is not None else self.make_model(),
                name_stages(plan),
                self.total or total_of(self.loss, self.options.get("targets"), self.options.get("weight")),
                self.seed,
                self.options.get("inputs", inputs_of),
                self.autocast,
                (texts[0], texts[1], texts[2]),
                rounding or (lambda tensor, encoding: tensor),
                lambda s: ranks[s][0] != ranks[s + 1][0],
            ),
            list(self.data) * self.epochs,
            optimizer or self.optimizer,
            rules,
            schedules[0].placement.replicas,
            like.drains,
            self.scheduler,
            self.clip_grad_norm,
            ("together" if together else "each") if skips else "",
            self.ema,
            reducer,
        )
        trained = loop.run()
        for number in like.evaluated:
            loop.passes.model.load_state_dict(trained.at[number])
            with loop.passes.evaluating():
                trained.evaluated[number] = mean_loss(
                    loop.passes.model, self.test or self.data, loop.passes.total, loop.passes.inputs
                )
        if any(type(each.compensation) is not CompensationRule for each in rules.values()):
            trained.optimizer = {}  # in the coordinates of the paper
        return trained

    def make_schedules(self) -> tuple[Schedule, ...]:
        """Returns the schedule of each phase."""
        schedule, microbatches = (None, None) if self.phases else (self.schedule, self.microbatches)
        phases = read_run_phases(schedule, microbatches, self.phases)
        return tuple(build_phase(self.resolved_plan, phase) for phase in phases)

    def norm_delay(self, schedule: Schedule) -> int | None:
        """Returns the updates by which the global norm that clips is late, None without one (docs/couplings.md)."""
        if self.clip == "local" or not (schedule.flushes or self.clip == "delayed_global"):
            return None
        plan, per_update = self.resolved_plan, schedule.updates.per_update[0]
        updates_in_flight = -(-plan.in_flight[0] * plan.replicas[0] // per_update)
        return 0 if schedule.flushes else updates_in_flight + plan.update_delay[0]

    def _rules_of(self, schedule: Schedule, reads: Reads | None, compensation: CompensationRule) -> MethodRules:
        updates, delay = schedule.updates, self.norm_delay(schedule)
        how = schedule.microbatches, updates.per_update, updates.mean_of_rounds
        return MethodRules(reads or reads_of(schedule), *how, delay, compensation)

    def check(self, bound: float | None = None, **of_loop: Any) -> Trained:
        """Trains both ways, and checks that they give the same; returns what the pipeline gave."""
        trained = self.pipeline()
        expected = self.assert_serial(trained, bound, **of_loop)
        missing = expected.optimizer.keys() - trained.optimizer.keys()
        assert not missing, f"the pipeline's optimizers have no state of {', '.join(sorted(missing))}"
        return trained

    def assert_serial(self, trained: Trained, bound: float | None = None, **of_loop: Any) -> Trained:
        """Checks that a pipeline's run is what the serial rule gives; returns that.

        Args:
            bound: greatest distance, as a share of the norm; by default that of rounding.
            of_loop: keyword arguments of `loop`.
        """
        expected = self.loop(trained, **of_loop)
        double = all(t.dtype == torch.float64 for t in expected.state.values() if t.is_floating_point())
        assert_equal(trained, expected, bound or (1e-10 if double else 1e-5))
        if not self.phases and set(self.resolved_plan.replicas) == {1}:
            for number, rate in trained.rates.items():
                assert abs(rate - expected.rates[number]) <= 1e-12, f"rate {rate} of minibatch {number}"
        return expected


def even_plan(model: nn.Module, inputs: Any, replicas: Sequence[int]) -> Plan:
    """Returns a plan with as many layers in each stage, as nearly as their number allows; nothing is timed."""
    graph = capture(model, inputs if isinstance(inputs, (tuple, Mapping)) else (inputs,)).graph
    count, stages = len(graph.layers), len(replicas)
    profile = Profile("untimed", graph, (LayerProfile(1.0, 2.0, 8, 8),) * count, 1).without_tied_groups()
    cuts = tuple(stage * count // stages for stage in range(1, stages))
    return manual_plan(profile, Cluster.flat(sum(replicas)), cuts, tuple(replicas))


def name_stages(plan: Plan) -> list[tuple[str, ...]]:
    """Returns what each stage of a plan has: weights and buffers, by name, of a graph of layers; then its layers."""
    layers = () if plan.graph is None else plan.graph.layers
    stages: list[tuple[str, ...]] = []
    for stage in plan.stages:
        named = dict.fromkeys(name for layer in layers[stage.first : stage.last] for name in layer.parameters)
        stages.append((*(name for name in named if not any(name in earlier for earlier in stages)), *stage.names))
    return stages


def reads_of(schedule: Schedule) -> Reads:
    """Returns which weights the passes of a schedule read, as its own rule says it."""
    weights = schedule.weights
    predictions = [weights.forward_prediction, weights.backward_prediction]
    ahead, back = ((lambda s, p=p: p.horizons[s]) if p else (lambda s: 0.0) for p in predictions)
    kinds = {prediction.by: prediction.decay for prediction in predictions if prediction is not None}
    assert len(kinds) < 2, f"predictions by {' and '.join(kinds)}: the serial rule has one kind"
    by, decay = next(iter(kinds.items()), ("velocity", 0.0))
    share = getattr(weights, "share", None)
    return Reads(
        weights.forward_version, weights.backward_version, weights.backward_rule, ahead, back, by, decay, share
    )


def mean_loss(
    model: nn.Module, batches: Sequence[Any], total: Total, inputs: Callable[[Any], Any] = inputs_of
) -> float:
    """Returns the mean loss over batches in evaluation mode."""
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        sums = [total(call_model(model, inputs(clone_batch(batch))), batch) for batch in batches]
    return sum(float(value) for value, _ in sums) / sum(weight for _, weight in sums)


class _Fresh:
    """A loader that gives a copy of each batch, since a model that works in place may write into it."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return map(clone_batch, self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def _collect(pipeline: Pipeline, trained: Trained, begin: int, data: Sequence[Any]) -> None:
    trained.state = pipeline.state_dict()
    trained.ema = pipeline.state_dict(ema=True) if pipeline._options.ema is not None else {}
    trained.drains, trained.position, trained.phases = list(pipeline.drains), pipeline.position, pipeline.trained
    trained.skipped, trained.sent_bytes = pipeline.skipped_updates(), pipeline.sent_bytes()
    for phase, (first, end) in trained.phases.items():
        timeline = pipeline.timeline(phase)
        tags = timeline.gradient_versions
        if end > begin:
            check_tags(tags, pipeline.prepared[phase].program, trained.drains, data, max(first, begin), end)
        for tag in tags:
            for late in (trained.staleness, trained.by_phase.setdefault(phase, {})):
                late.setdefault(tag.stage, set()).add(tag.staleness)
        for rank, peak in enumerate(timeline.peak_versions):
            trained.peak_versions[rank] = max(peak, trained.peak_versions.get(rank, 0))
    for worker in pipeline._session.workers_here.workers:
        for stage, state in worker.stage_states.items():
            is_first = pipeline.program.placement.ranks[stage][0] == worker.rank  # of replicas, which may differ
            stepped = state.optimizer.stepped.weights if is_first and state.optimizer is not None else {}
            for name, parameter in stepped.items():
                items: dict[str, Any] = state.optimizer.optimizer.state.get(parameter, {})
                values = {key: v.detach().clone() if isinstance(v, Tensor) else v for key, v in items.items()}
                trained.optimizer.setdefault(name, values)
