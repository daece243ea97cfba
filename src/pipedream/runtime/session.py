"""A session: one model trained in one placement, from the first minibatch to the last.

It owns this process's workers, runs them on the right clock, and lets a failure of one rank end all.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipedream.core.checkpoint import Checkpoint, Position, RunRequest
from pipedream.core.errors import ArtifactError, CaptureError, PeerError, PipelineError, PlanError, WorkerError
from pipedream.core.model.collective import StageCollectives
from pipedream.core.model.graph import LayerGraph
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.timeline import Timeline
from pipedream.core.user_code import with_place
from pipedream.runtime import measured
from pipedream.runtime.assemble import (
    Blueprint,
    connect,
    make_distributed_worker,
    make_local_workers,
    make_remote_forwards,
)
from pipedream.runtime.checkpoint import parameters
from pipedream.runtime.checkpoint.files import fit_names, open_weights
from pipedream.runtime.checkpoint.initial_values import materialise, named_state
from pipedream.runtime.checkpoint.parameters import key_extra_states, modules_by_key
from pipedream.runtime.checkpoint.remote import AnyPath
from pipedream.runtime.checkpointing import Checkpointer, share_with_replicas
from pipedream.runtime.clock import run_in_process
from pipedream.runtime.comm.channel import Receiver, Sender, drain
from pipedream.runtime.comm.connections import Connections
from pipedream.runtime.comm.message import StopReason
from pipedream.runtime.comm.process_group import (
    broadcast_text,
    check_same_on_all_ranks,
    check_same_software,
    gather_texts,
    join_group,
    leave_group,
    peers_may_end,
    wait_for_all,
    world_group,
)
from pipedream.runtime.comm.same_settings import CALL, check_same_settings, describe_data, describe_optimizer
from pipedream.runtime.comm.transport import Transport
from pipedream.runtime.data.batch_adapter import AdaptBatch
from pipedream.runtime.data.microbatches import (
    LocalMicrobatches,
    MeshMicrobatches,
    Microbatches,
    ReceivedMicrobatches,
)
from pipedream.runtime.data.reader import EpochRange
from pipedream.runtime.data.source import DataSource
from pipedream.runtime.failure.activity import Activity, Interrupts
from pipedream.runtime.failure.guard import Guard
from pipedream.runtime.first_minibatch.reference_run import ReferenceRun, UserModel
from pipedream.runtime.first_minibatch.stage_check import LayersCheck, StageCheck
from pipedream.runtime.results.memory import keep_freed_memory
from pipedream.runtime.results.results import Done, Output
from pipedream.runtime.stage_state import StageState, evaluating
from pipedream.runtime.update.tied_weights import broadcast_tied
from pipedream.runtime.worker import Worker
from pipedream.sharding.parallelized import parallelize_layers
from pipedream.sharding.stage import StageSharding

_LOOP = "the training loop"
_log = logging.getLogger("pipedream")


class Session:
    """Workers around one model.

    Args:
        model: in a process group each rank keeps only its stages' parameters.
        stuck_after_s: limit for one op or the loader; 0 for none.
        weights: file or folder of initial weights, of which each rank reads its own; by default those of the model.
        plain: the model as the user wrote it, with which the first minibatch is compared; None compares nothing.
        free_bytes: returns the memory that this process may still take.

    Raises:
        PlanError: the number of processes is not the plan's, or the ranks disagree on the plan.
        CaptureError: a parameter or buffer is on the meta device and cannot be initialised, or not in `weights`.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: LayerGraph,
        blueprint: Blueprint,
        *,
        stuck_after_s: float,
        weights: str | os.PathLike[str] | None = None,
        plain: UserModel | None = None,
        free_bytes: Callable[[], int] = lambda: sys.maxsize,
    ) -> None:
        self.model = model
        self._graph = graph
        self._free_bytes = free_bytes
        self._plain = plain
        self._blueprint = blueprint
        if blueprint.device.type == "cpu":
            keep_freed_memory()
        self.rank, processes = join_group(blueprint.device, check_software=False)
        self._worker_rank = 0
        stages, batch_dim = blueprint.program.plan.stages, blueprint.settings.batch_dim
        self._whole_bytes = sum({id(tensor): tensor.nbytes for tensor in named_state(model).values()}.values())
        self._stage_names = [parameters.stage_names(graph, stage.first, stage.last) for stage in stages]
        self._shared_names = parameters.shared_names(model)
        self._unused: list[str] = []
        self._guard: Guard | None = None
        self._activity = Activity()
        self._group: dist.ProcessGroup | None = None
        self._connections: Connections | None = None
        self._shardings: dict[int, StageSharding] = {}
        self._microbatches: dict[int, Microbatches] = {}
        self._mesh_senders: Sequence[Sender] = ()
        self._mesh_receiver: Receiver | None = None
        self._data_channels: list[Sender | Receiver] = []
        if self.rank == 0:
            every = [name for names in self._stage_names for name in names]
            self._unused = parameters.unused_names(model, every)
        if processes == 1:
            self.workers = self._build_all(weights)
            self._data = DataSource(blueprint.programs, range(blueprint.placement.workers), batch_dim=batch_dim)
        else:
            self._guard = Guard.of_session(self.rank, processes, self._activity, stuck_after_s)
            try:
                self._join_others(processes, weights)
            except BaseException as error:
                first = self._guard.first_cause(error, self._activity.where)
                self._guard.end()
                if isinstance(error, PipelineError) and not isinstance(first, PeerError):
                    raise
                raise first from error
        self._clock = measured.ClockOffset(self._group)
        self._writer_group = dist.new_group(backend="gloo") if self.distributed else None
        self.checkpointer = Checkpointer(
            model,
            self.workers,
            self._stage_names,
            world_group() if self.distributed else None,
            self._writer_group,
            blueprint.device,
            unused=self._unused,
            loss=blueprint.settings.loss.module,
            shardings=self._shardings,
        )
        self.interrupts = Interrupts(patient=self.distributed)
        self._interrupts_before = 0
        for worker in self.workers:
            worker.stop_requested = self._stop_requested
        self._activity.interrupts = lambda: self.interrupts.count
        self._activity.describe_op = lambda: self.lead.where
        if self.distributed:
            self.lead.activity = self._activity
        self._activity.place = _LOOP

    def _build_all(self, weights: str | os.PathLike[str] | None) -> list[Worker]:
        blueprint, model = self._blueprint, self.model
        self._names_here = {name for names in self._stage_names for name in names}
        self._read_weights(weights)
        materialise(model, self._names_here, blueprint.device, blueprint.settings.seed)
        return make_local_workers(blueprint, [parameters.select_trained(model, names) for names in self._stage_names])

    def _read_weights(self, weights: str | os.PathLike[str] | None) -> set[str]:
        """Loads this rank's part of a file. Returns the names of all ranks' parts."""
        if weights is None:
            return set()
        file = open_weights(weights)
        names = [name for owned in self._stage_names for name in owned] + [n for n in self._unused if n in file]
        state = fit_names(self.model, file, names, self._shared_names, weights)
        here = self._names_here | (set(self._unused) & set(state))
        parameters.load(self.model, state, here, self._shared_names, self._blueprint.device)
        return set(state)

    def _join_others(self, processes: int, weights: str | os.PathLike[str] | None) -> None:
        blueprint = self._blueprint
        connections = self._connections = self._connect(processes)
        self._worker_rank = connections.rank
        self.workers = [self._build_own(connections, weights)]
        stage_states = self.workers[0].stage_states
        optimizers = {
            f"stage {n}'s optimizer": describe_optimizer(stage_states[n].optimizer.optimizer) for n in stage_states
        }
        check_same_settings(optimizers, self._group)
        transport = Transport(connections, blueprint.programs, blueprint.device)
        senders, receiver = transport.open_data_channels()
        self._mesh_senders, self._mesh_receiver = transport.open_mesh_data_channels()
        channels = [*senders.values(), receiver, *self._mesh_senders, self._mesh_receiver]
        self._data_channels = [end for end in channels if end is not None]
        leaders = connections.leaders
        reads = [] if leaders is None else [self._worker_rank]
        self._data = DataSource(blueprint.programs, reads, leaders, senders, receiver, blueprint.settings.batch_dim)

    def _connect(self, processes: int) -> Connections:
        """Connects to the other ranks; all must be asked to do the same."""
        check_same_software()
        blueprint = self._blueprint
        program, ranks = blueprint.program, blueprint.program.plan.ranks
        if processes != ranks:
            raise PlanError(
                f"the plan {program.plan.config} needs {ranks} processes, but {processes} were started; start {ranks} "
                f"(--workers or --nproc-per-node), or plan for {processes}"
            )
        connections = connect(program, blueprint.device, blueprint.shared, blueprint.meshes)
        self._group = connections.everyone
        check_same_on_all_ranks("plan or schedule", "\n".join(p.to_json() for p in blueprint.programs), self._group)
        check_same_settings(blueprint.settings_to_agree(), self._group)
        return connections

    def _build_own(self, connections: Connections, weights: str | os.PathLike[str] | None) -> Worker:
        blueprint, model, placement = self._blueprint, self.model, self._blueprint.placement
        own_stages = [stage for stage, _ in placement.stage_replicas(self._worker_rank)]
        self._names_here = {name for stage in own_stages for name in self._stage_names[stage]}
        here = {name for name, tensor in named_state(model).items() if tensor.is_meta}
        # Rank 0's model counts: what it has on the meta device each owner draws, and the others get what it has.
        drawn = set(json.loads(broadcast_text(json.dumps(sorted(here)), connections.everyone)))
        read: set[str] = set()
        failure: PipelineError | None = None
        try:
            read = self._read_weights(weights)
            if alone := sorted(drawn & self._names_here - here - read):
                raise CaptureError(
                    f"{alone[0]!r} is on the meta device at rank 0 and has values at rank {self.rank}; give every rank "
                    "the same model, or the values to rank 0"
                )
            arriving = here - drawn - read
            materialise(model, self._names_here - arriving, blueprint.device, blueprint.settings.seed)
        except PipelineError as error:
            failure = error
        texts = gather_texts("" if failure is None else str(failure), connections.everyone)
        if any(texts):
            raise failure or CaptureError(next(filter(None, texts)))
        with peers_may_end():
            if connections.leaders is None:  # the worker's first rank has the values
                parameters.allocate(model, arriving & self._names_here, blueprint.device)
            else:
                parameters.share_initial(
                    model,
                    self._stage_names,
                    placement,
                    self._worker_rank,
                    connections.leaders,
                    drawn | read,
                    blueprint.device,
                )
            broadcast_tied(model, blueprint.shared, connections.holders, placement, self._worker_rank)
        visited = {
            stage: parameters.select_trained(model, self._stage_names[stage])
            for stage, _ in placement.remote_forwards(self._worker_rank)
        }
        remote_forwards = make_remote_forwards(blueprint, self.rank, visited)
        parameters.drop_foreign(model, self._names_here | set(self._unused))
        for remote_forward in remote_forwards.values():
            remote_forward.empty()
        handles = {stage: parameters.select_trained(model, self._stage_names[stage]) for stage in own_stages}
        for stage, owned in handles.items():
            if connections.mesh is None:
                continue
            sharding = self._shardings[stage] = StageSharding(
                blueprint.settings.layout, connections.mesh, connections.mesh_group
            )
            sharding.share_initial(
                [tensor for name, tensor in named_state(model).items() if name in self._stage_names[stage]]
            )
            parallelize, parallelized_layers = blueprint.settings.parallelize, {}
            if parallelize is not None:
                modules, place = dict(model.named_modules()), blueprint.program.plan.stages[stage]
                names = [layer.name for layer in self._graph.layers[place.first : place.last]]
                layers = [(name, modules[name]) for name in names if name in modules]
                parallelized_layers = parallelize_layers(parallelize, layers, connections.mesh)
            sharding.shard_parameters(owned, parallelized_layers)
        return make_distributed_worker(
            blueprint, self._worker_rank, handles, remote_forwards, connections, self._shardings
        )

    @property
    def program(self) -> Program:
        return self.workers[0].program

    @property
    def trained(self) -> dict[int, tuple[int, int]]:
        """Phase -> (begin, end) in minibatches."""
        return self.workers[0].trained

    def switch_to(self, phase: int) -> None:
        for worker in self.workers:
            worker.switch_to(self._blueprint.programs[phase], phase)

    @property
    def distributed(self) -> bool:
        return self._group is not None

    @property
    def lead(self) -> Worker:
        """The worker that represents this process."""
        return self.workers[self.program.placement.readers[0] if len(self.workers) > 1 else 0]

    @property
    def stop_reason(self) -> StopReason:
        """Why the last stream ended."""
        return self.lead.stop_reason

    def note_call(self, name: str, minibatches: int) -> None:
        """Notes a call that every rank must make, after its loop was given so many minibatches."""
        self._activity.calls.append((name, minibatches))

    def meet(self, settings: Mapping[str, str] | None = None) -> None:
        """Waits until every rank has made the call that was noted last, with the same settings."""
        name, minibatches = self._activity.calls[-1] if self._activity.calls else ("calibration", 0)
        call = {CALL: f"{name} after {minibatches} minibatches"}
        try:
            check_same_settings(call | dict(settings or {}), self._group)
        except (PipelineError, RuntimeError) as error:
            assert self._guard is not None, "a single process has nobody to differ from"
            raise self._guard.first_cause(error, self.lead.where) from error

    def note_given(self, minibatches: int) -> None:
        self._activity.loop_minibatches = minibatches

    # -- data in, results out -----------------------------------------------------------------------

    def open_feed(
        self,
        loader: Any,
        adapt: AdaptBatch,
        *,
        first_epoch: int = 0,
        epochs: int = 1,
        skip: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepares to read a loader for training; every rank calls it.

        A map-style DataLoader finds a position without loading what lies before it, and a loader with its own
        state_dict by that; other iterables are iterated up to it.

        Args:
            adapt: batch -> (inputs, targets).
            first_epoch, epochs: reads first_epoch <= epoch < epochs.
            skip: finished minibatches of the first epoch.
            state: from `data_state` for this position; None keeps the data's order.
        """
        settings = {"epochs": f"{first_epoch} to {epochs}", "finished minibatches of the epoch": str(skip)}
        if self._worker_rank in self.program.placement.readers and self._mesh_receiver is None:
            # Others may have a loader that is never read.
            settings["the training data"] = describe_data(loader)
        self.meet(settings)
        try:
            self._microbatches = self._share_over_mesh(
                self._data.open_training(loader, adapt, EpochRange(first_epoch, epochs, skip), state)
            )
        except PipelineError as error:
            raise self._report(error) from error.__cause__
        except Exception as error:
            if state is None:
                raise
            text = f"the data cannot continue from the saved position: {type(error).__name__}: {error}"
            raise self._report(
                ArtifactError(f"{text}; give the loader that was saved, or another checkpoint")
            ) from error

    def _share_over_mesh(self, microbatches: dict[int, Microbatches]) -> dict[int, Microbatches]:
        """Returns the microbatches of all ranks of a worker, from those of its first rank."""
        if self._worker_rank not in self.program.placement.readers:
            return microbatches
        if self._mesh_receiver is not None:
            return {self._worker_rank: ReceivedMicrobatches(self._mesh_receiver)}
        if self._mesh_senders:
            return {rank: MeshMicrobatches(source, self._mesh_senders) for rank, source in microbatches.items()}
        return microbatches

    def data_state(self, epoch: int, batches: int) -> dict[str, Any]:
        """Returns, as JSON, what `open_feed` needs to continue after `batches` minibatches of an epoch.

        All ranks call it at a drain; rank 0's result counts.
        """
        try:
            return self._data.state(epoch, batches)
        except PipelineError as error:
            raise self._report(error) from error.__cause__

    def train(self, until: int | None = None) -> Iterator[Done]:
        """Trains until the data ends, `stop`, or a total of `until` minibatches; see `Worker.train`."""
        check = self._begin_comparison()
        streams = [worker.train(self._microbatches.get(worker.rank), until) for worker in self.workers]
        for done in self._run(streams):
            if check is not None:
                try:
                    check.comparer.compare_loss(done.loss)
                except PipelineError as error:
                    raise self._report(error) from error
                check = None
            yield done

    def _begin_comparison(self) -> ReferenceRun | None:
        """Begins to compare the first minibatch with the model; None after it."""
        plain, self._plain = self._plain, None
        program = self.program
        if plain is None or min(program.updates.per_update) < program.microbatches:
            return None
        reader, values, key = program.placement.readers[0], dict[str, torch.Tensor](), ""
        publish, receive = None, lambda: ""
        if self._group is not None and not self._fits(reader):
            self._compare_each_stage(plain)
            return None
        if self._group is not None:
            store = dist.distributed_c10d._get_default_store()
            key = "pipedream/first/" + broadcast_text(uuid.uuid4().hex, self._group)
            with self._activity.at("collecting the weights"):
                state = named_state(self.model)
                local_tensors = {name: tensor for name, tensor in state.items() if name in self._names_here}
                values = self._collect_tensors(self._gather_wholes(local_tensors), state, reader)
                values |= {
                    name: values[first_name]
                    for name in values
                    for first_name in self._shared_names.get(name, ())[:1]
                    if first_name in values
                }
            publish, receive = partial(store.set, key), lambda: store.get(key).decode()
        check = self._make_reference_run(plain, values=values, publish=publish, receive=receive)
        for worker in self.workers:
            for stage, replica in program.placement.stage_replicas(worker.rank):
                self._compare_stage(check, stage, replica, worker.stage_states[stage])
        microbatches = self._microbatches.get(reader)
        if isinstance(microbatches, MeshMicrobatches):
            microbatches = microbatches.source
        if isinstance(microbatches, LocalMicrobatches):
            microbatches.on_first = check.read
        return check

    def _make_reference_run(self, plain: UserModel, **how: Any) -> ReferenceRun:
        settings = self._blueprint.settings
        return ReferenceRun(
            plain,
            settings.loss,
            rank=self.rank,
            split=self.program.microbatches,
            base=self.lead.done_minibatches,
            seed=settings.seed,
            device=self._blueprint.device,
            autocast=settings.autocast,
            compiles=settings.compile is not None,
            **how,
        )

    def _fits(self, reader: int) -> bool:
        """Returns whether the whole model, its gradients and as much again fit the rank that reads the data."""
        fits = self._worker_rank != reader or 4 * self._whole_bytes <= self._free_bytes()
        return not self.any_rank(not fits)

    def _compare_each_stage(self, plain: UserModel) -> None:
        """Lets each stage of this rank compare its first microbatch with its own layers."""
        if self.rank == 0:
            how = "not compared with the model's own" if self._shardings else "compared stage by stage"
            _log.warning("the first minibatch is %s: the whole model does not fit the worker that reads it", how)
        if self._shardings:
            return
        program = self.program
        for stage, replica in program.placement.stage_replicas(self._worker_rank):
            stage_state = self.lead.stage_states[stage]
            if not replica and not program.placement.is_remote(stage):
                names = list(stage_state.versions.handles)
                stage_state.check = LayersCheck(self._make_reference_run(plain), stage, stage_state.module, names)

    def _compare_stage(self, check: ReferenceRun, stage: int, replica: int, stage_state: StageState) -> None:
        alone = self.program.updates.per_update[stage] == check.split
        buffers: list[str] = []
        if not self.program.placement.is_remote(stage) and (
            self.program.placement.replicas[stage] == 1 or (check.split == 1 and not replica)
        ):
            here = dict(self.model.named_buffers(remove_duplicate=False))
            buffers = [name for name in self._stage_names[stage] if name in here]
        sharding = self._shardings.get(stage)
        if alone or (check.split == 1 and not replica and sharding is None):
            names = list(stage_state.versions.handles)
            stage_state.check = StageCheck(check, stage, buffers, names, alone=alone, sharding=sharding)

    def _stop_requested(self) -> bool:
        # A signal may have been sent to one worker alone, which need not be one that reads the data.
        return self.interrupts.heard or (self._guard is not None and self._guard.interrupts > self._interrupts_before)

    def forget_interrupt(self) -> None:
        """Forgets one that was raised: the caller may still want to evaluate or save."""
        self.interrupts.heard = False
        self._interrupts_before = 0 if self._guard is None else self._guard.interrupts

    def stop(self, stop_reason: StopReason = StopReason.DRAIN) -> None:
        """Ends the stream after the admitted minibatches; at a rank that does not read the data, does nothing."""
        for microbatches in self._microbatches.values():
            microbatches.stop(stop_reason)

    def resume(self) -> None:
        for microbatches in self._microbatches.values():
            microbatches.resume()

    def evaluate(self, loader: Iterable[Any], adapt: AdaptBatch, ema: bool = False) -> Done:
        """Returns the means over a loader, equal on every rank."""
        with self._open_evaluation_data(loader, adapt) as data, self._enter_evaluation():
            streams = [worker.evaluate(data.get(worker.rank), ema) for worker in self.workers]
            results = [event for event in self._run(streams) if isinstance(event, Done)]
        return results[-1]

    @property
    def follows_evaluations(self) -> bool:
        """Whether the learning-rate schedule steps at evaluations."""
        return any(state.optimizer.follows_evaluations for state in self.lead.stage_states.values())

    def evaluated(self, value: float) -> None:
        """Steps such a schedule; every rank calls it with the same value."""
        for worker in self.workers:
            for stage_state in worker.stage_states.values():
                stage_state.optimizer.evaluated(value)

    def predict(self, loader: Iterable[Any], adapt: AdaptBatch, ema: bool = False) -> Iterator[Output]:
        """Yields the outputs, at rank 0 only."""
        with self._open_evaluation_data(loader, adapt) as data, self._enter_evaluation():
            for output in self._run([worker.predict(data.get(worker.rank), ema) for worker in self.workers]):
                if self.rank == 0:
                    yield output

    def _enter_evaluation(self) -> AbstractContextManager[None]:
        return evaluating([state for worker in self.workers for state in worker.stage_states.values()])

    @contextmanager
    def _open_evaluation_data(self, loader: Any, adapt: AdaptBatch) -> Iterator[dict[int, Microbatches]]:
        try:
            try:
                data = self._share_over_mesh(self._data.open_evaluation(loader, adapt))
            except PipelineError as error:
                raise self._report(error) from error.__cause__
            yield data
        finally:
            self._data.close_evaluation()

    def _run(self, streams: Sequence[Generator[Any, None, None]]) -> Iterator[Any]:
        events: Iterator[Any] = streams[0]
        if len(streams) > 1:
            events = run_in_process(streams, self.program.placement.readers)
        self._activity.place = None
        try:
            for event in events:
                self._activity.place = _LOOP
                yield event
                self._activity.place = None
            self._drain()
        except PipelineError as error:
            raise self._report(error) from error.__cause__
        except GeneratorExit:
            raise
        except BaseException as error:  # e.g. of the user's loader
            if isinstance(error, KeyboardInterrupt) and self._guard is None and self.interrupts.may_raise:
                raise
            raise self._report(WorkerError(self.rank, self.lead.where, with_place(error))) from error
        finally:
            self._activity.place = _LOOP

    def _drain(self) -> None:
        """Leaves no message and no posted receive between two streams."""
        channels: list[Sender | Receiver] = list(self._data_channels)
        for worker in self.workers:
            channels += [*worker.senders.values(), *worker.results.senders.values()]
            channels += [*worker.receivers.values(), *worker.results.receivers.values()]
        drain(channels)

    def _report(self, error: PipelineError) -> PipelineError:
        """Returns the error to raise here: it, or its cause elsewhere."""
        self._activity.stop()
        return error if self._guard is None else self._guard.first_cause(error, self.lead.where)

    # -- weights ------------------------------------------------------------------------------------

    def state_dict(self, ema: bool = False, predicted: bool = True) -> dict[str, torch.Tensor]:
        """Returns the whole model's, under the user's names, at rank 0; elsewhere an empty one."""
        with self._activity.at("collecting the weights"):
            state = named_state(self.model)
            local_tensors = {name: tensor for name, tensor in state.items() if name in self._names_here}
            if ema or not predicted:
                optimizers = [s.optimizer for worker in self.workers for s in worker.stage_states.values()]
                others = {
                    n: t
                    for optimizer in optimizers
                    for n, t in (optimizer.ema if ema else optimizer.unpredicted()).items()
                }
                same = {id(tensor): others[name] for name, tensor in state.items() if name in others}
                local_tensors = {name: same.get(id(tensor), tensor) for name, tensor in local_tensors.items()}
            whole: dict[str, Any] = self._collect_tensors(self._gather_wholes(local_tensors), state)
            whole |= {name: state[name].detach().cpu().clone() for name in self._unused}
            for text in gather_texts(json.dumps(self.checkpointer.extra_states()), self._group):
                for states in json.loads(text).values() if self.rank == 0 else ():
                    whole |= key_extra_states(states)
            if self.rank:
                return {}
            return {name: whole[name] for name in self.model.state_dict() if name in whole}

    def _gather_wholes(self, parts: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Returns whole tensors from the parts of this worker's ranks, which all call it."""
        for sharding in self._shardings.values():
            parts = {name: sharding.gather(self._shared_names.get(name, (name,)), part) for name, part in parts.items()}
        return parts

    def _collect_tensors(
        self, local_tensors: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], to: int = 0
    ) -> dict[str, torch.Tensor]:
        """Returns all tensors of the model at the first rank of a worker, from the first ranks of all."""
        leaders = None if self._connections is None else self._connections.leaders
        if self.distributed and leaders is None:
            return {}
        placement, rank = self.program.placement, self._worker_rank
        return parameters.collect(local_tensors, state, self._stage_names, placement, rank, leaders, to)

    def save_pretrained(self, folder: Path, ema: bool, predicted: bool) -> None:
        """Writes the whole model in its own format, at rank 0; every rank calls it."""
        write = getattr(self.model, "save_pretrained", None)
        if write is None:
            raise CaptureError(
                f"{type(self.model).__name__} has no save_pretrained; take the weights from state_dict(), and save "
                "them with torch.save"
            )
        state = self.state_dict(ema, predicted)
        if self.rank == 0:
            first = {name: names[0] for name, names in self._shared_names.items()}
            write(folder, state_dict={name: state.get(first.get(name, name), tensor) for name, tensor in state.items()})

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Each rank reads its part of the whole state."""
        here = self._names_here | (set(self._unused) & set(state))
        for sharding in self._shardings.values():
            names, tensors = self._shared_names, {n: value for n, value in state.items() if torch.is_tensor(value)}
            sharding.check_shapes({name: tensor.shape for name, tensor in tensors.items()})
            state = {**state, **{n: sharding.take_part(names.get(n, (n,)), tensor) for n, tensor in tensors.items()}}
        parameters.load(self.model, state, here, self._shared_names, self._blueprint.device)
        for key, module in modules_by_key(self.model).items():
            if key in state:
                module.set_extra_state(state[key])
        share_with_replicas(self.workers)
        for worker in self.workers:
            for stage_state in worker.stage_states.values():
                stage_state.versions.reload()
                for name, average in stage_state.optimizer.ema.items():
                    average.copy_(stage_state.versions.handles[name].detach())

    def save(self, folder: AnyPath, request: RunRequest, position: Position, **options: Any) -> AnyPath:
        """See `Checkpointer.save`."""
        try:
            with self._activity.at("saving a checkpoint"):
                return self.checkpointer.save(folder, request, position, **options)
        except PipelineError as error:
            raise self._report(error) from error.__cause__

    def newest_checkpoint(self, folder: AnyPath) -> AnyPath | None:
        with self._activity.at("looking for a checkpoint"):
            return self.checkpointer.newest(folder)

    def read_checkpoint(self, path: AnyPath) -> Checkpoint:
        with self._activity.at("reading a checkpoint"):
            return self.checkpointer.read(path)

    def restore(self, path: AnyPath, manifest: Checkpoint) -> None:
        self._plain = None
        with self._activity.at("reading a checkpoint"):
            self.checkpointer.restore(path, manifest)

    def check_saved(self, *, wait: bool) -> None:
        try:
            if wait:
                with self._activity.at("saving a checkpoint"):
                    self.checkpointer.writer.finish()
            else:
                self.checkpointer.writer.check()
        except PipelineError as error:
            raise self._report(error) from error.__cause__

    # -- what happened ------------------------------------------------------------------------------

    def timeline(self, phase: int, batch: int) -> Timeline:
        return measured.timeline(self._blueprint.programs, phase, self.workers, self._group, batch, self._clock)

    def _gather_counts(self, counts: Mapping[int, int]) -> dict[int, int]:
        rows = [json.loads(text) for text in gather_texts(json.dumps(counts), self._group)]
        return {int(number): count for row in reversed(rows) for number, count in row.items()}

    def any_rank(self, wish: bool) -> bool:
        """Returns whether a rank asks for something; every rank calls it."""
        return "yes" in gather_texts("yes" if wish else "", world_group() if self.distributed else None)

    def sent_bytes(self) -> dict[int, int]:
        """Returns worker -> payload bytes, of its first rank; every rank calls it."""
        return self._gather_counts(
            {worker.rank: sum(sender.sent_bytes for sender in worker.senders.values()) for worker in self.workers}
        )

    def collectives(self) -> tuple[StageCollectives | None, ...]:
        """Returns each stage's; every rank calls it, after training. None: on a single rank, or without an update."""
        mine: dict[int, Any] = {}
        for worker in self.workers:
            for stage, stage_state in worker.stage_states.items():
                sharding = stage_state.module.sharding
                if sharding is not None and sharding.is_first and sharding.collectives:
                    program, needs_norms = (
                        self._blueprint.programs[min(self.trained)],
                        worker.update_barrier.needs_norms,
                    )
                    mine[stage] = stage_state.collectives(program, stage, needs_norms).to_json()
        by_stage: dict[int, StageCollectives] = {}
        for text in gather_texts(json.dumps(mine), self._group):
            for stage, data in json.loads(text).items():
                by_stage.setdefault(int(stage), StageCollectives.from_json(data))
        for stage, collectives in sorted(by_stage.items()) if self.rank == 0 else ():
            if collectives.predicted is None:
                _log.warning(
                    "stage %d cannot run without data to predict its collectives: %s", stage, collectives.problem
                )
        return tuple(by_stage.get(stage) for stage in range(self.program.placement.stages))

    def skipped_updates(self) -> tuple[int, ...]:
        """Returns each stage's number; every rank calls it."""
        states = [item for worker in self.workers for item in worker.stage_states.items()]
        skipped = self._gather_counts({stage: state.optimizer.skipped for stage, state in states})
        return tuple(skipped[stage] for stage in sorted(skipped))

    def rate(self) -> tuple[float, int]:
        """Returns the learning rate, before the stages' factors, and the input stage's rounds."""
        return self.lead.rate, self.lead.stage_states[min(self.lead.stage_states)].optimizer.rounds

    def status(self, reader: str = "") -> dict[int, dict[str, float]]:
        return measured.status(self.workers, self.program.placement.workers, self.distributed, reader)

    def abort(self, error: BaseException) -> None:
        """Reports an error of the user's own code to the other ranks."""
        if self._guard is not None and not isinstance(error, PipelineError):
            self._guard.report(WorkerError(self.rank, _LOOP, with_place(error)))

    def close(self, failed: bool) -> None:
        """Waits for the other ranks, unless a failure ended them."""
        self._activity.place = "closing the pipeline"
        self.interrupts.stop()
        self._data.close()
        if not failed:
            self.check_saved(wait=True)
            if self._connections is not None:
                wait_for_all()
                self._connections.close()
                leave_group(self._writer_group)
                self._connections = None
        self.checkpointer.writer.close()
        if self._guard is not None:
            self._guard.end()
