"""A session: one model trained in one placement, from the first minibatch to the last.

- `Session` joins the other ranks, and makes the workers of this process (`local_workers`) with their initial values.
- `streams` runs them: training, evaluations, predictions.
- `service` is what accompanies them, such as the comparison of their first minibatch with the model, and checkpoints.
- `state` collects and loads their weights.
- `measured` collects what they have measured.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from pipedream.core.errors import CaptureError, PeerError, PipelineError, PlanError, WorkerError
from pipedream.core.extensions import list_offers
from pipedream.core.model.graph import LayerGraph
from pipedream.core.plan.plan import check_activations
from pipedream.core.schedule.program import Program
from pipedream.core.user_code import with_place
from pipedream.runtime.activity import Activity
from pipedream.runtime.assemble import WorkerMaterials, gather_materials, gather_materials_on_copies
from pipedream.runtime.blueprint import Blueprint
from pipedream.runtime.comm.connections import Connections
from pipedream.runtime.comm.process_group import (
    broadcast_text,
    check_same_on_all_ranks,
    check_same_software,
    gather_json,
    gather_texts,
    join_group,
    peers_may_end,
    read_machine,
)
from pipedream.runtime.comm.same_settings import check_same_settings, describe_optimizer
from pipedream.runtime.comm.transport import Transport
from pipedream.runtime.data.source import DataChannels, DataSources
from pipedream.runtime.links import connect, join_in_process, join_processes
from pipedream.runtime.results.memory import keep_freed_memory
from pipedream.runtime.session.local_workers import LocalWorkers, ModelNames
from pipedream.runtime.session.measured import ClockOffset
from pipedream.runtime.session.service import SessionService
from pipedream.runtime.session.streams import LOOP, Streams
from pipedream.runtime.stage.host_store import HostStore
from pipedream.runtime.unguarded import Unguarded
from pipedream.runtime.update.tied_weights import broadcast_tied
from pipedream.runtime.weights import parameters
from pipedream.runtime.weights.files import fit_names, open_weights
from pipedream.runtime.weights.initial_values import materialise, named_state

Weights = str | os.PathLike[str] | None
MakeGuard = Callable[[int, int, Activity], Unguarded]


class Session:
    """Workers around one model; a failure of one rank ends all.

    Args:
        model: in a process group each rank keeps only its stages' parameters.
        programs: one for each phase, over the same channels; verified. The blueprint has the first.
        make_guard: makes what watches the other ranks, from this rank, the number of ranks and this rank's activity.
        weights: file or folder of initial weights, of which each rank reads its own; by default those of the model.
        free_bytes: returns the memory that this process may still take.
        free_host_bytes: returns the memory that the processes of this machine together may still take.

    Attributes:
        services: accompany the session; added once it is built.

    Raises:
        PlanError: the number of processes is not the plan's, the ranks have different plans, or the machine has too
            little memory for weights that are kept there.
        CaptureError: a parameter or buffer is on the meta device and cannot be initialised, or not in `weights`.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: LayerGraph,
        blueprint: Blueprint,
        programs: Sequence[Program],
        *,
        make_guard: MakeGuard,
        weights: Weights = None,
        free_bytes: Callable[[], int] = lambda: sys.maxsize,
        free_host_bytes: Callable[[], int] = lambda: sys.maxsize,
    ) -> None:
        workers_here = self.workers_here = _build_local_workers(
            model, graph, blueprint, programs, weights, make_guard, free_bytes, free_host_bytes
        )
        self.clock = ClockOffset(workers_here.group)
        self.services: list[SessionService] = []
        self.streams = Streams(workers_here, self.services)
        workers_here.activity.describe_op = lambda: workers_here.lead.where
        workers_here.activity.gpu_mark = lambda: workers_here.lead.recorder.oldest_mark()

    def abort(self, error: BaseException) -> None:
        """Reports an error of the user's own code to the other ranks."""
        if not isinstance(error, PipelineError):
            self.workers_here.guard.report(WorkerError(self.workers_here.rank, LOOP, with_place(error)))

    def note_restored(self) -> None:
        """Takes note that a checkpoint was loaded."""
        for service in self.services:
            service.note_restored()

    def close(self, failed: bool) -> None:
        """Waits for the other ranks, unless a failure ended them."""
        workers_here = self.workers_here
        workers_here.activity.doing = "closing the pipeline"
        self.streams.close(failed)
        for worker in workers_here.workers:
            worker.close_parts()
        if not failed:
            for service in self.services:
                service.finish()
        workers_here.leave(failed=failed)
        for service in self.services:
            service.close(failed=failed)
        if not (failed and workers_here.distributed):  # the GPU may wait for another rank
            workers_here.store.close()
        workers_here.guard.end()


def _build_local_workers(
    model: nn.Module,
    graph: LayerGraph,
    blueprint: Blueprint,
    programs: Sequence[Program],
    weights: Weights,
    make_guard: MakeGuard,
    free_bytes: Callable[[], int],
    free_host_bytes: Callable[[], int],
) -> LocalWorkers:
    rank, processes = join_group(blueprint.device, check_software=False)
    workers_here = LocalWorkers(model, blueprint, programs, ModelNames.of(model, graph, blueprint, rank), rank)
    if blueprint.device.type == "cpu":
        ranks = range(blueprint.placement.workers) if processes == 1 else (workers_here.worker_rank,)
        stages = [stage for rank in ranks for stage, _ in blueprint.placement.stage_replicas(rank)]
        share_bytes = free_host_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        peak_bytes = sum(blueprint.program.plan.stages[stage].peak_bytes for stage in stages)
        keep_freed_memory(peak_bytes, min(free_bytes(), share_bytes))
    if processes == 1:
        _check_host_memory(workers_here, free_host_bytes, range(blueprint.placement.workers))
        _build_all(workers_here, weights)
        _check_activations(workers_here)
        return workers_here
    workers_here.guard = make_guard(rank, processes, workers_here.activity)
    try:
        _join_others(workers_here, graph, processes, weights, free_host_bytes)
        _check_activations(workers_here)
    except BaseException as error:
        first = workers_here.guard.first_cause(error, workers_here.activity.where)
        workers_here.leave(failed=True)
        workers_here.guard.end()
        if isinstance(error, PipelineError) and not isinstance(first, PeerError):
            raise
        raise first from error
    return workers_here


def _check_activations(workers_here: LocalWorkers) -> None:
    for program in workers_here.programs:
        check_activations(program.plan.choices, workers_here.blueprint.device.type, program.plan)


def _build_all(workers_here: LocalWorkers, weights: Weights) -> None:
    blueprint, model, names = workers_here.blueprint, workers_here.model, workers_here.names
    names.local = {name for stage_names in names.by_stage for name in stage_names}
    _read_weights(workers_here, weights)
    materialise(model, names.local, blueprint.weights_device, blueprint.settings.seed)
    workers_here.store = HostStore(None, blueprint.device, blueprint.placement.workers)
    trained = [parameters.select_trained(model, stage_names) for stage_names in names.by_stage]
    programs, store = workers_here.programs, workers_here.store
    workers_here.build(
        [
            gather_materials(
                blueprint,
                programs,
                links,
                gather_materials_on_copies(blueprint, programs, links.rank, trained.__getitem__, store),
                store,
            )
            for links in join_in_process(blueprint, trained)
        ]
    )
    settings = blueprint.settings
    workers_here.data = DataSources(
        workers_here.programs,
        range(blueprint.placement.workers),
        batch_dim=settings.batch_dim,
        planned_samples=settings.planned_samples,
    )


def _check_host_memory(workers_here: LocalWorkers, free_bytes: Callable[[], int], ranks: Sequence[int]) -> None:
    """Raises a `PlanError` if this machine has too little memory for what a plan keeps there.

    `ranks`: workers of this process.
    """
    blueprint, plan = workers_here.blueprint, workers_here.blueprint.program.plan
    stages, versions = plan.stages, None
    if blueprint.placement.shares_weights:
        rules = [program.weights for program in workers_here.programs]
        versions = [max(rule.versions(stage) for rule in rules) for stage in range(len(stages))]
    elif plan.choices.activations or plan.choices.hosts_optimizers:
        local_stages = [stage for rank in ranks for stage, _ in blueprint.placement.stage_replicas(rank)]
        stages = tuple(stages[stage] for stage in _list_stages_here(workers_here, local_stages))
    else:
        return
    plan.choices.check_machine(stages, free_bytes(), versions, blueprint.program.gradient_sets)


def _list_stages_here(workers_here: LocalWorkers, stages: Sequence[int]) -> list[int]:
    """Returns the given stages of all processes of this machine. Every rank calls it."""
    rows = gather_json([read_machine(), list(stages)], workers_here.group)
    return [stage for machine, stages_there in rows for stage in stages_there if machine == read_machine()]


def _join_others(
    workers_here: LocalWorkers, graph: LayerGraph, processes: int, weights: Weights, free_host_bytes: Callable[[], int]
) -> None:
    blueprint = workers_here.blueprint
    connections = _connect(workers_here, processes)
    _check_host_memory(workers_here, free_host_bytes, [connections.worker_number])
    workers_here.worker_rank = connections.worker_number
    workers_here.build([_gather_materials(workers_here, graph, connections, weights)])
    optimizers = {
        f"stage {stage}'s optimizer": describe_optimizer(stage_state.optimizer.optimizer)
        for stage, stage_state in workers_here.stage_states
    }
    check_same_settings(optimizers, workers_here.group)
    transport = Transport(connections, workers_here.programs, blueprint.device)
    channels = DataChannels(workers_here.worker_rank, connections.leaders, *transport.open_data_channels())
    if workers_here.worker_rank in blueprint.placement.readers:
        mesh_senders, mesh_receiver = transport.open_mesh_data_channels()
        channels = replace(channels, mesh_senders=mesh_senders, mesh_receiver=mesh_receiver)
    reads = [] if connections.leaders is None else [workers_here.worker_rank]
    settings = blueprint.settings
    workers_here.data = DataSources(
        workers_here.programs, reads, channels, settings.batch_dim, settings.planned_samples
    )


def _connect(workers_here: LocalWorkers, processes: int) -> Connections:
    """Connects to the other ranks; raises a `PlanError` if their plans or settings differ."""
    check_same_software()
    blueprint = workers_here.blueprint
    program, ranks = blueprint.program, blueprint.program.plan.ranks
    if processes != ranks:
        raise PlanError(
            f"the plan {program.plan.config} needs {ranks} processes, but {processes} were started; start {ranks} "
            f"(--workers or --nproc-per-node), or plan for {processes}"
        )
    connections = workers_here.connections = connect(blueprint)
    workers_here.group = connections.everyone
    check_same_on_all_ranks(
        "plan or schedule", "\n".join(p.to_json() for p in workers_here.programs), workers_here.group
    )
    check_same_settings(blueprint.settings_to_agree(), workers_here.group)
    return connections


def _gather_materials(
    workers_here: LocalWorkers, graph: LayerGraph, connections: Connections, weights: Weights
) -> WorkerMaterials:
    blueprint, model, by_stage = workers_here.blueprint, workers_here.model, workers_here.names.by_stage
    local_stages = [stage for stage, _ in blueprint.placement.stage_replicas(workers_here.worker_rank)]
    workers_here.names.local = {name for stage in local_stages for name in by_stage[stage]}
    _fill_initial_values(workers_here, connections, weights)
    workers_here.store = HostStore(
        connections.everyone if blueprint.placement.shares_weights else None, blueprint.device
    )
    # First: once foreign parameters are dropped, layers of different stages no longer share them.
    on_copies = gather_materials_on_copies(
        blueprint,
        workers_here.programs,
        workers_here.worker_rank,
        lambda stage: parameters.select_trained(model, by_stage[stage]),
        workers_here.store,
    )
    parameters.drop_foreign(model, workers_here.names.local | set(workers_here.names.unused))
    trained = {stage: parameters.select_trained(model, by_stage[stage]) for stage in local_stages}
    if any(mesh.dimensions for mesh in blueprint.meshes):
        if not (offers := list_offers("division")):
            raise PlanError(
                "the plan has meshes, and no extension here divides tensors over several ranks; plan without meshes"
            )
        for stage in trained:
            workers_here.divisions[stage] = offers[0].divide_stage(
                workers_here, graph, connections, stage, trained[stage]
            )
    divisions, activity = workers_here.divisions, workers_here.activity
    links = join_processes(blueprint, workers_here.programs, connections, trained, divisions, activity)
    return gather_materials(blueprint, workers_here.programs, links, on_copies, workers_here.store)


def _fill_initial_values(workers_here: LocalWorkers, connections: Connections, weights: Weights) -> None:
    """Gives this process's parameters and buffers their values: read, drawn, or sent by rank 0."""
    blueprint, model, names = workers_here.blueprint, workers_here.model, workers_here.names
    on_meta = {name for name, tensor in named_state(model).items() if tensor.is_meta}
    # Rank 0's model decides: each owner draws what rank 0 has on the meta device, and receives the rest from it.
    drawn = set(json.loads(broadcast_text(json.dumps(sorted(on_meta)), connections.everyone)))
    loaded: set[str] = set()
    failure: PipelineError | None = None
    try:
        loaded = _read_weights(workers_here, weights)
        if unmatched := sorted(drawn & names.local - on_meta - loaded):
            raise CaptureError(
                f"{unmatched[0]!r} is on the meta device at rank 0 and has values at rank {workers_here.rank}; give "
                "every rank the same model, or the values to rank 0; after a Pipeline, which leaves each rank its own "
                "stages' weights, build the model again and load them (state_dict, or a checkpoint)"
            )
        to_receive = on_meta - drawn - loaded
        materialise(model, names.local - to_receive, blueprint.weights_device, blueprint.settings.seed)
    except PipelineError as error:
        failure = error
    # All ranks stop if one has failed; otherwise they would wait for its values.
    texts = gather_texts("" if failure is None else str(failure), connections.everyone)
    if any(texts):
        raise failure or CaptureError(next(filter(None, texts)))
    placement, rank = blueprint.placement, workers_here.worker_rank
    with peers_may_end():
        if connections.leaders is None:  # the worker's first rank receives them, and shares them later
            parameters.allocate(model, to_receive & names.local, blueprint.weights_device)
        else:
            parameters.share_initial(
                model, names.by_stage, placement, rank, connections.leaders, drawn | loaded, blueprint.weights_device
            )
        broadcast_tied(model, blueprint.tied, connections.holders, placement, rank)


def _read_weights(workers_here: LocalWorkers, weights: Weights) -> set[str]:
    """Loads this rank's part of a file. Returns the names of all ranks' parts."""
    if weights is None:
        return set()
    file, names = open_weights(weights), workers_here.names
    requested = [name for owned in names.by_stage for name in owned] + [name for name in names.unused if name in file]
    state = fit_names(workers_here.model, file, requested, names.shared, weights)
    parameters.load(
        workers_here.model, state, names.loaded_from(state), names.shared, workers_here.blueprint.weights_device
    )
    return set(state)
