"""Pipeline: training from the user's own loop.

    with pipedream.Pipeline(model, plan, schedule="pipedream", loss=F.cross_entropy,
                            optimizer=partial(torch.optim.SGD, lr=0.1)) as pipeline:
        for done in pipeline.train(loader, epochs=10):
            print(done.number, done.loss)

Training is a stream, because asynchronous methods return results late: each minibatch is yielded, as a `Done`, once
its gradients are in the weights. Under torchrun every rank runs the same script and its loop drives its worker; in a
plain process all workers take turns in one thread.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

from pipedream.capture import Captured, describe_surplus, list_cuda_devices, preserve_state
from pipedream.core.artifact import copy_json
from pipedream.core.checkpoint import PipelineRequest
from pipedream.core.errors import PipelineError, ScheduleError
from pipedream.core.extensions import find_offer
from pipedream.core.model.graph import LayerGraph
from pipedream.core.model.profile import StageCollectives
from pipedream.core.plan.choices import Choices
from pipedream.core.plan.plan import Plan, with_choices
from pipedream.core.plan.ranks import TensorLayout, choose_layout
from pipedream.core.schedule.delay_compensation import compensations
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.schedule.timeline import Timeline
from pipedream.core.schedule.update_policy import Policy
from pipedream.options import PipelineOptions, keywords, plain
from pipedream.profiler import dtype_of
from pipedream.runtime.blueprint import Blueprint, Settings
from pipedream.runtime.data.splitter import BatchAdapter
from pipedream.runtime.results import Done
from pipedream.runtime.session.local_workers import LocalWorkers
from pipedream.runtime.session.session import Session
from pipedream.runtime.session.training import Training
from pipedream.runtime.update.stepped import LossFactor
from pipedream.runtime.weights.parameters import list_stage_names, select_trained
from pipedream.services.callbacks.callbacks import FollowedEvaluations, load_states, states_of
from pipedream.services.checkpoint.checkpointer import Checkpointer
from pipedream.services.checkpoint.stores import Folder, open_store
from pipedream.services.checkpoint.stores.store import CheckpointStore
from pipedream.services.epochs.watching import watching_epochs
from pipedream.services.failure.guard import Guard
from pipedream.services.failure.same_settings import describe_model, describe_value
from pipedream.services.first_minibatch.comparison import Comparison
from pipedream.services.first_minibatch.plain_model import PlainModel
from pipedream.services.joining.joining import is_distributed, join_group, process_device
from pipedream.services.loggers.loggers import Loggers
from pipedream.services.losses.finite_weights import FiniteWeights
from pipedream.services.losses.losses import Loss, find_module, is_torch_loss
from pipedream.services.losses.scoring import LossScorer, needs_weights
from pipedream.services.optimizer_trial.trial import check_steps_apart
from pipedream.services.phases.phases import Phase, phases_text
from pipedream.services.probe.probe import warn_of_loopback
from pipedream.services.results.measurements import Measurements
from pipedream.services.results.recorder import SpanRecorder
from pipedream.services.weights.fill import Weights, fill_values
from pipedream.services.weights.state import collect_state_dict, load_state_dict, save_pretrained
from pipedream.services.weights.tied import find_tied_weights
from pipedream.workflows.prepare import (
    Prepared,
    add_compensation,
    build_evaluation,
    follow_moves,
    prepare,
    read_run_phases,
)
from pipedream.workflows.profile import find_plan_layers

_OWN_TO_RANKS = {"callbacks", "loggers", "weights", "device", "stuck_after_s", "sample"}
_IN_PROGRAMS = {"schedule", "microbatches", "phases", "compensation", "seed"}


class Pipeline:
    """One model, partitioned by a plan: ``Pipeline(model, plan, loss=..., optimizer=..., **options)``.

    Args:
        model: any module (docs/models.md); on several processes, parameters of other ranks' stages become meta tensors.
        options: keyword arguments, see `PipelineOptions`.

    Attributes:
        phases: with their compensation; one if the method does not change.
        prepared: each phase's schedule, program and proof; schedule, program, proof: of the current phase.
        rank: of this process; 0 if it has all workers. distributed: the workers are several processes.
        followed: what callbacks and ReduceLROnPlateau get of the evaluations.
        ready, drains: drained results that `train` has yet to yield; minibatch numbers of drains.
        extra: given to `save`, or loaded from a checkpoint.
        is_saving: returns whether this rank's part of a checkpoint is being written in the background.
        check_savable: raises a PipelineError if the optimizer or scheduler could not be saved after a step.

    Raises:
        PlanError: the plan does not fit the model, the number of processes or, with its compensation, the memory.
        ScheduleError: the method does not work with this plan or with one of the options.
        PipelineError: an option that makes no sense.
    """

    @keywords(PipelineOptions)
    def __init__(self, model: Any, plan: Plan, options: PipelineOptions) -> None:
        phases = read_run_phases(options.schedule, options.microbatches, options.phases)
        choices = Choices.resolve(command=options, plan=Plan.check_is(plan).choices)
        plan = follow_moves(with_choices(plan, choices), plan, phases)
        self.phases = add_compensation(plan, phases, options.compensation)
        self._request = _make_run_request(plan, phases, options)
        captured, scaling = find_plan_layers(model, plan, options.sample), _read_scaling(options.grad_scaler)
        shared = find_tied_weights(model, captured.graph, plan.stages)
        self.plan = replace(plan, tied_weights=shared).with_layout(options.layout)
        policy = options.policy(scaling="" if scaling is None else scaling.kind)
        self.prepared = prepare(self.plan, self.phases, policy)
        self._session = _build_session(model, captured, self.plan, self.prepared, options, policy, scaling)
        self._saver = Checkpointer(self._session.workers_here, find_module(options.loss))
        self._session.services.append(self._saver)
        self._local, self._streams = self._session.workers_here, self._session.streams
        self._measured = Measurements(self._local)
        self._training = Training(self._session, [p.end for p in self.prepared], self._report_done, self._report_phase)
        self._report_phase(0)
        self.ready, self.drains = self._training.ready, self._training.drains
        self._options, self._adapt_batch = options, _make_batch_adapter(model, options)
        self._checkpoint: CheckpointStore | None = None
        self.check_savable, self.is_saving = self._saver.check_savable, self._saver.writer.is_writing
        self._callbacks, self.extra = tuple(options.callbacks), cast(Mapping[str, Any], {})
        self.rank, self.distributed = self._local.rank, self._local.distributed
        self.followed = FollowedEvaluations(self, self._callbacks, self._local, options.monitor)
        warn_of_loopback(self.plan, self.rank)
        self._loggers = Loggers(
            options.loggers, self.rank, self.program.placement.workers, lambda: self._measured.status("loggers")
        )

    def train(self, loader: Iterable[Any], *, epochs: int = 1, until_epoch: int | None = None) -> Iterator[Done]:
        """Trains; yields each minibatch once its gradients are in the weights, the same on every rank.

        It is one stream, not drained between epochs. After a `break` the minibatches in flight finish (the loggers see
        them, the loop does not), and the next call continues from `position`, with the rest of that epoch first.

        Args:
            loader: batches, iterated once per epoch, only by the input stage's workers.
            epochs: to train now, on top of those done.
            until_epoch: instead, the total, including those before a `load`.

        Raises:
            WorkerError: a worker failed; names rank, stage, op and cause.
            KeyboardInterrupt: Ctrl-C or SIGTERM, after the minibatches in flight have finished.
        """
        training, local = self._training, self._local
        _check_counts(epochs=epochs, until_epoch=until_epoch)
        continues = training.is_running or training.epoch_batches > 0
        self._loggers.begin(lambda: _list_hyperparameters(self._options, self.plan, self.schedule, local.rate[0]))
        self._finish()
        local.note_call("train()", training.number)
        training.begin()
        with watching_epochs(loader, lambda: training.position, lambda: local.data.begun, local.report):
            for done in training.run(loader, self._adapt_batch, epochs, until_epoch, continues=continues):
                yield done
                self.followed.report()

    def _report_done(self, done: Done) -> None:
        self._loggers.minibatch(done)
        for callback in self._callbacks:
            callback.on_minibatch(self, done)

    def _report_phase(self, phase: int) -> None:
        prepared = self.prepared[phase]
        self.schedule, self.program, self.proof = prepared.schedule, prepared.program, prepared.proof

    def drain(self) -> int:
        """Finishes the minibatches in flight; returns the total so far. Every rank calls it."""
        self._training.drain()
        self._loggers.pause()
        return self._training.number

    def _begin_collective_call(self, name: str, ema: bool = False) -> None:
        """Begins a collective call: drains, and waits for the other ranks."""
        _check_average(self._options, ema)
        self.followed.report(waits=name == "evaluate()")
        self._local.note_call(name, self._training.number - len(self.ready))
        self.drain()
        self._local.await_same_call()

    def _finish(self) -> None:
        """Ends a stream that its loop has left by a `break`."""
        self.followed.report()
        self._training.finish()
        self._loggers.pause()

    def evaluate(self, loader: Iterable[Any], *, ema: bool = False, name: str | None = None) -> dict[str, float]:
        """Returns the means of loss and metrics over a loader, on every rank; drains first. Batches may have any size.

        Args:
            ema: use the averaged weights.
            name: loggers get ``NAME/loss`` and so on; callbacks and ReduceLROnPlateau follow the evaluations named
                'test', or 'test_ema' while there are none of that name. By default 'test', or with `ema` 'test_ema'.
        """
        self._begin_collective_call("evaluate()", ema)
        done = self._streams.evaluate(loader, self._adapt_batch, ema)
        self._training.raise_interrupt()
        means, name = {"loss": done.loss, **done.metrics}, name or ("test_ema" if ema else "test")
        self._loggers.evaluation(name, means, max(self._training.number - 1, 0))
        self.followed.add(name, means)
        return means

    def predict(self, loader: Iterable[Any], *, ema: bool = False) -> Iterator[Any]:
        """Yields the model's output for each batch, in the model's own type, at rank 0 only; drains first.

        Every rank must iterate it to its end. The loader may yield pairs or bare inputs. Objects in the output that
        cannot be sent, such as a cache of keys and values, are None.
        """
        self._begin_collective_call("predict()", ema)
        for output in self._streams.predict(loader, lambda batch: (self._adapt_batch.input_of(batch), None), ema):
            yield output.value
        self._training.raise_interrupt()

    def state_dict(self, *, ema: bool = False, predicted: bool = True) -> dict[str, Any]:
        """Returns the whole model's state dict under the user's names at rank 0, an empty one elsewhere; drains.

        If a compensation trains predicted weights, these are returned, as they are evaluated and averaged; with
        `predicted=False` the weights they are predicted from, w of `core.schedule.delay_compensation` (SpecTrain, LWP).
        """
        self._begin_collective_call("state_dict()", ema)
        return collect_state_dict(self._local, ema, predicted)

    def save_pretrained(self, folder: str | os.PathLike[str], *, ema: bool = False, predicted: bool = True) -> None:
        """Writes the whole model in its own format, by its ``save_pretrained`` at rank 0; drains. Every rank calls it.

        Args:
            ema, predicted: which weights, see `state_dict`.

        Raises:
            CaptureError: the model has no ``save_pretrained``.
        """
        self._begin_collective_call("save_pretrained()", ema)
        save_pretrained(self._local, Path(folder), ema, predicted)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads weights from a plain state dict; drains. Optimizer state stays.

        For a parameter with several names, one is enough.

        Raises:
            CaptureError: a name is missing or a shape differs.
        """
        self._begin_collective_call("load_state_dict()")
        load_state_dict(self._local, state)

    def save(
        self,
        folder: Folder,
        *,
        keep: int | None = None,
        wait: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> Path | str:
        """Writes weights, optimizers, schedules, averages, random states and position into a new folder in `folder`.

        Drains first. An incomplete checkpoint is never visible. Every rank calls it, in or after its loop. A machine
        that does not see rank 0's folder keeps its own part in one of the same name. Returns the path or the address.

        Args:
            folder: of this run's checkpoints alone; or a URL of fsspec, such as ``s3://bucket/run``.
            keep: newest checkpoints to keep; None keeps all.
            wait: until it is complete; otherwise training continues meanwhile, and a later call raises its error.
            extra: numbers, texts, lists and dicts of the loop, by default those in `self.extra`, which `load` sets.

        Raises:
            WorkerError: this checkpoint or the one before could not be written; names the rank.
            ArtifactError: another run has a checkpoint of that name, or uses the folder; or `extra` cannot be kept.
        """
        self.extra = self.extra if extra is None else dict(extra)
        self._begin_collective_call("save()")
        saved_extra = copy_json(self.extra, "extra")  # the loop's own lists grow while it is written
        position = replace(self._training.save(), callbacks=states_of(self._callbacks))
        listening = [callback for callback in self._callbacks if callback.follows_checkpoints]
        options: dict[str, Any] = {"keep": keep, "wait": wait or bool(listening), "extra": saved_extra}
        checkpoint = self._saver.save(open_store(folder), self._request, position, **options)
        if checkpoint != self._checkpoint and listening:
            self._local.any_rank(False)  # rank 0 has completed it
            for callback in listening:
                callback.on_checkpoint(self, cast(Path, checkpoint.locate("")))
        self._checkpoint = checkpoint
        return checkpoint.locate("")

    def load(self, folder: Folder) -> tuple[int, int]:
        """Loads a checkpoint of this model, saved under any plan and schedule. Returns the position.

        With the same plan, schedule and data, training continues bit for bit like a run that was only drained there.

        Args:
            folder: a checkpoint, or a folder whose newest is taken, or the URL of one.

        Raises:
            ArtifactError: no checkpoint, or one that is damaged or of another model, optimizer or scheduler.
        """
        self._begin_collective_call("load()")
        checkpoint, manifest = self._saver.read_newest(open_store(folder))
        self._training.enter_phase_at(manifest.minibatches, manifest.epoch)
        self._session.note_restored()
        self._saver.restore(checkpoint, manifest)
        self._training.restore(manifest)
        self.extra, self._checkpoint = manifest.extra, checkpoint
        load_states(self._callbacks, manifest.callbacks)
        return self.position

    @property
    def position(self) -> tuple[int, int]:
        """Where the data continues: (epoch, minibatches of that epoch done)."""
        return self._training.position

    @property
    def should_stop(self) -> bool:
        """Set to True, by a callback or in the loop, to end `train` after the minibatches in flight."""
        self.followed.report()
        return self._training.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self._training.should_stop = value

    @property
    def trained(self) -> dict[int, tuple[int, int]]:
        """Phase -> (begin, end) in minibatches, for the phases trained so far."""
        return dict(self._measured.trained)

    def timeline(self, phase: int | None = None) -> Timeline:
        """Returns a phase's measured timeline, on all ranks; drains. Every rank calls it.

        Args:
            phase: by default the last one trained. All phases have the same zero of time.

        Raises:
            PipelineError: no such phase.
        """
        self._begin_collective_call("timeline()")
        return self._measured.collect_timeline(self.plan.batch, phase)

    def status(self) -> dict[int, dict[str, float]]:
        """Returns rank -> (recent busy share, peak bytes of its process), as far as known here, without waiting."""
        return self._measured.status()

    def sent_bytes(self) -> dict[int, int]:
        """Returns worker -> bytes sent, of its first rank. Every rank calls it."""
        return self._measured.count_sent_bytes()

    def collectives(self) -> tuple[StageCollectives | None, ...]:
        """Returns what the ranks of each stage exchange, counted in its first microbatch and update, and predicted.

        None for a stage of a single rank, or without an update yet. Every rank calls it.
        """
        return self._measured.collect_collectives()

    def skipped_updates(self) -> tuple[int, ...]:
        """Returns each stage's skipped updates. Every rank calls it."""
        return self._measured.count_skipped_updates()

    def learning_rates(self) -> tuple[float, ...]:
        """Returns each stage's learning rate: the user's, times r_s / r_0 if a round is an update, times T1's."""
        return self._measured.learning_rates(self.schedule)

    def __enter__(self) -> Self:
        self._streams.interrupts.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or (isinstance(error, KeyboardInterrupt) and self._training.is_interrupted):
            self.followed.end(self._training.number)
            self._finish()
            self._local.note_call("close()", self._training.number)
            self._local.await_same_call()
            self._session.close(failed=False)
            self._loggers.finalize("success")
        else:
            self._session.abort(error)
            self._training.abandon()
            self._session.close(failed=True)
            with suppress(Exception):  # the error that is raised already says more
                self._loggers.finalize("failed")


def _check_counts(**counts: int | None) -> None:
    """Raises a PipelineError for a count that is not a whole number from 1 on."""
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise PipelineError(f"{name}={count!r} was asked for; give a whole number from 1 on")


def _check_average(options: PipelineOptions, ema: bool) -> None:
    if ema and options.ema is None:
        raise PipelineError("ema=True was asked for, but there are no averaged weights: give ema=..., such as 0.99")


def _make_run_request(plan: Plan, phases: Sequence[Phase], options: PipelineOptions) -> PipelineRequest:
    changes, compensation = len(phases) > 1, options.compensation
    return PipelineRequest(
        seed=options.seed or 0,
        plan=plan,
        phases=phases_text(phases) if changes else "",
        phases_compensation=compensations(compensation) if changes and compensation is not None else None,
    )


def _read_scaling(scaler: Any) -> Any:
    """Returns how losses are scaled (`extensions.loss_scale`); None if they are not."""
    return None if scaler is None else find_offer("scaler", "grad_scaler= was given").LossScaleOptions.of(scaler)


def _read_compiler(compile: bool | str | Mapping[str, Any]) -> Callable[[Any], Callable[..., Any]] | None:
    """Returns what compiles layers; None if they are not compiled."""
    return None if compile is False else find_offer("compiler", "compile= was given").make_compiler(compile)


def _build_session(
    model: Any,
    captured: Captured,
    plan: Plan,
    phases: Sequence[Prepared],
    options: PipelineOptions,
    policy: Policy,
    scaling: Any,
) -> Session:
    loss = Loss(options.loss, options.weight, of_model=captured.graph.loss_weight)
    if any(needs_weights(phase.program) for phase in phases):
        loss.check_split()
    if any(phase.program.microbatches > 1 for phase in phases):
        _check_gradients_split(model)
    shapes = partial(_list_summed_shapes, plan, model, captured.graph)
    for choice in plan.choices.named.values():
        choice.check(plan, [phase.program for phase in phases], options, shapes)
    settings = Settings(
        make_scorer=partial(LossScorer, loss, dict(options.metrics), raises_on_nan=policy.on_nan == "error"),
        optimizer=options.optimizer,
        metrics=list(options.metrics),
        scheduler=options.scheduler,
        seed=options.seed or 0,
        policy=policy,
        ema=options.ema,
        autocast=dtype_of(options.autocast),
        compile=_read_compiler(options.compile),
        make_loss_scale=LossFactor if scaling is None else scaling.make,
        batch_dim=options.batch_dim,
        planned_samples=plan.batch if options.check else 1,
        layout=_fit_layout(options, phases[0].program.plan, model, captured.graph),
        parallelize=options.parallelize,
    )
    blueprint = Blueprint(
        programs=[phase.program for phase in phases],
        evaluation=build_evaluation(phases[0].schedule),
        stages=[captured.stage(stage.first, stage.last) for stage in plan.stages],
        settings=settings,
        device=process_device(options.device),
        make_recorder=SpanRecorder,
        settings_to_agree=lambda: _list_settings_to_agree(model, options),
        last_layers=[captured.graph.layers[stage.last - 1].name for stage in plan.stages],
    )
    check_steps_apart(
        options.optimizer,
        [select_trained(model, list_stage_names(captured.graph, stage.first, stage.last)) for stage in plan.stages],
        blueprint.weights_device,
        partial(preserve_state, (), list_cuda_devices(model, ()), others=[options.optimizer]),
    )
    # Before the session, in which a rank keeps only its stages.
    plain_model = _make_plain_model(model, captured, plan, options, loss)
    join_group(blueprint.device, check_software=False)  # the session does, under its guard
    session = Session(
        model,
        captured.graph,
        blueprint,
        make_guard=partial(Guard.of_session, stuck_after_s=options.stuck_after_s),
        prepare=partial(_prepare, weights=options.weights, plain_model=plain_model),
    )
    if plain_model is not None:
        session.services.append(Comparison(session.workers_here, plain_model))
    if policy.on_nan == "error":
        session.services.append(FiniteWeights(session.workers_here))
    return session


def _prepare(workers_here: LocalWorkers, weights: Weights, plain_model: PlainModel | None) -> None:
    """Gives this process's weights their values, before those of other stages are dropped."""
    fill_values(workers_here, weights)
    if plain_model is not None:
        plain_model.keep_dropped(workers_here)


def _make_plain_model(
    model: Any, captured: Captured, plan: Plan, options: PipelineOptions, loss: Loss
) -> PlainModel | None:
    """Returns the model with which the first minibatch is to be compared, if it is."""
    # In a single process a mesh is one rank.
    styles_apply = options.parallelize is not None and plan.ranks > plan.workers and is_distributed()
    if not options.check or styles_apply:
        return None
    return PlainModel(model, captured, loss, dict(options.metrics), [stage.first for stage in plan.stages[1:]])


def _check_gradients_split(model: Any) -> None:
    """Raises a `ScheduleError` if gradients of microbatches do not add up to that of their minibatch."""
    for name, module in model.named_modules():
        if getattr(module, "scale_grad_by_freq", False) and any(p.requires_grad for p in module.parameters()):
            raise ScheduleError(
                f"{name!r} has scale_grad_by_freq=True: it divides a gradient by how often an index occurs, which "
                "would be counted in each microbatch, not in the minibatch; train with microbatches=1, or without it"
            )


def _make_batch_adapter(model: Any, options: PipelineOptions) -> BatchAdapter:
    def take_batch(batch: Any) -> Any:
        arguments = tuple(batch) if type(batch) is list else batch
        if surplus := describe_surplus(model, arguments):
            raise PipelineError(
                f"loss is None, so the model gets the whole batch of {len(arguments)}, but {surplus}; give loss=..., "
                "such as torch.nn.functional.cross_entropy"
            )
        return arguments

    return BatchAdapter(
        take_batch if options.inputs is None and options.loss is None else options.inputs,
        options.targets,
        is_torch_loss(options.loss),
        own_loss=options.loss is None,
        reads_batch=bool(options.metrics or options.weight),
    )


def _fit_layout(options: PipelineOptions, plan: Plan, model: Any, graph: LayerGraph) -> TensorLayout | None:
    """Returns the layout of the model's tensors, if any are divided. Raises a `PlanError` if it does not fit."""
    if options.layout is None and not any(mesh.dimensions for mesh in plan.meshes):
        return None
    layout, layers = options.layout or choose_layout(None, None, None), [layer.name for layer in graph.layers]
    return layout.of_plan(plan, model, layers, compiles=options.compile, parallelizes=options.parallelize is not None)


def _list_settings_to_agree(model: Any, options: PipelineOptions) -> dict[str, str]:
    names = {option.name for option in fields(options)} - _OWN_TO_RANKS - _IN_PROGRAMS
    texts = {name: describe_value(getattr(options, name)) for name in sorted(names)}
    return texts | {"seed": str(options.seed or 0), "the model": describe_model(model)}


def _list_summed_shapes(plan: Plan, model: Any, graph: LayerGraph) -> list[tuple[int, ...]]:
    """Returns the shapes of the trained weights of the stages with replicas."""
    stages = [stage for stage in plan.stages if stage.replicas > 1]
    names = [name for stage in stages for name in list_stage_names(graph, stage.first, stage.last)]
    return [tuple(parameter.shape) for parameter in select_trained(model, names).values()]


def _list_hyperparameters(options: PipelineOptions, plan: Plan, schedule: Schedule, rate: float) -> dict[str, Any]:
    return plain(vars(options)) | {
        "schedule": schedule.name,
        "microbatches": schedule.microbatches,
        "plan": plan.config,
        "workers": plan.workers,
        "batch": plan.batch,
        "rate": rate,
    }
