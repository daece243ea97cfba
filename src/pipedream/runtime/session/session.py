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
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from pipedream.core.errors import CaptureError, PeerError, PipelineError, PlanError, WorkerError
from pipedream.core.extensions import find_offer
from pipedream.core.model.graph import LayerGraph
from pipedream.core.plan.plan import check_activations
from pipedream.core.user_code import with_place
from pipedream.runtime.activity import Activity
from pipedream.runtime.assemble import gather_materials, gather_materials_on_copies
from pipedream.runtime.blueprint import Blueprint
from pipedream.runtime.comm.connections import Connections
from pipedream.runtime.comm.process_group import (
    broadcast_text,
    check_same_software,
    gather_json,
    gather_texts,
    join_group,
    peers_may_end,
    read_machine,
)
from pipedream.runtime.comm.same_settings import check_same_settings, describe_optimizer
from pipedream.runtime.data.source import DataSources
from pipedream.runtime.links import connect, join_in_process, join_processes
from pipedream.runtime.residence import find_residence
from pipedream.runtime.results.memory import keep_freed_memory
from pipedream.runtime.session.local_workers import LocalWorkers, ModelNames
from pipedream.runtime.session.measured import ClockOffset
from pipedream.runtime.session.service import SessionService
from pipedream.runtime.session.streams import LOOP, Streams
from pipedream.runtime.unguarded import Unguarded
from pipedream.runtime.weights import parameters
from pipedream.runtime.weights.files import fit_names, open_weights
from pipedream.runtime.weights.initial_values import materialise, named_state
from pipedream.runtime.weights.tied import broadcast_tied

Weights = str | os.PathLike[str] | None
MakeGuard = Callable[[int, int, Activity], Unguarded]


class Session:
    """Workers around one model; a failure of one rank ends all.

    Args:
        model: in a process group each rank keeps only its stages' parameters.
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
        *,
        make_guard: MakeGuard,
        weights: Weights = None,
        free_bytes: Callable[[], int] = lambda: sys.maxsize,
        free_host_bytes: Callable[[], int] = lambda: sys.maxsize,
    ) -> None:
        workers_here = self.workers_here = _build_local_workers(
            model, graph, blueprint, weights, make_guard, free_bytes, free_host_bytes
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
            workers_here.residence.close()
        workers_here.guard.end()


def _build_local_workers(
    model: nn.Module,
    graph: LayerGraph,
    blueprint: Blueprint,
    weights: Weights,
    make_guard: MakeGuard,
    free_bytes: Callable[[], int],
    free_host_bytes: Callable[[], int],
) -> LocalWorkers:
    rank, processes = join_group(blueprint.device, check_software=False)
    workers_here = LocalWorkers(model, blueprint, ModelNames.of(model, graph, blueprint, rank), rank)
    if processes == 1:
        _build(workers_here, graph, None, weights, free_bytes, free_host_bytes)
        return workers_here
    workers_here.guard = make_guard(rank, processes, workers_here.activity)
    try:
        _build(workers_here, graph, _connect(workers_here, processes), weights, free_bytes, free_host_bytes)
    except BaseException as error:
        first = workers_here.guard.first_cause(error, workers_here.activity.where)
        workers_here.leave(failed=True)
        workers_here.guard.end()
        if isinstance(error, PipelineError) and not isinstance(first, PeerError):
            raise
        raise first from error
    return workers_here


def _build(
    workers_here: LocalWorkers,
    graph: LayerGraph,
    connections: Connections | None,
    weights: Weights,
    free_bytes: Callable[[], int],
    free_host_bytes: Callable[[], int],
) -> None:
    """Builds the workers of this process: all of them without `connections` to others, else one."""
    blueprint, model, names = workers_here.blueprint, workers_here.model, workers_here.names
    placement, settings = blueprint.placement, blueprint.settings
    ranks = range(placement.workers) if connections is None else [connections.worker_number]
    stages = [stage for rank in ranks for stage, _ in placement.stage_replicas(rank)]
    workers_here.worker_rank = ranks[0]
    if blueprint.device.type == "cpu":
        share_bytes = free_host_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        peak_bytes = sum(blueprint.program.plan.stages[stage].peak_bytes for stage in stages)
        keep_freed_memory(peak_bytes, min(free_bytes(), share_bytes))
    _check_host_memory(workers_here, free_host_bytes, stages)
    names.local = {name for stage in stages for name in names.by_stage[stage]}
    _fill_initial_values(workers_here, weights)
    residence = workers_here.residence = find_residence(blueprint, workers_here.group)

    def find_trained(stage: int) -> dict[str, nn.Parameter]:
        return parameters.select_trained(model, names.by_stage[stage])

    # First: once foreign parameters are dropped, layers of different stages no longer share them.
    on_copies = [gather_materials_on_copies(blueprint, rank, find_trained, residence) for rank in ranks]
    if connections is not None:
        parameters.drop_foreign(model, names.local | set(names.unused))
    trained = {stage: find_trained(stage) for stage in stages}
    if connections is None:
        links = list(join_in_process(blueprint, trained))
    else:
        _divide_stages(workers_here, graph, connections, trained)
        divisions, activity = workers_here.divisions, workers_here.activity
        links = [join_processes(blueprint, connections, trained, divisions, activity)]
    rows = zip(links, on_copies, strict=True)
    materials = [gather_materials(blueprint, row, copies, residence) for row, copies in rows]
    residence.exchange()
    workers_here.build(materials)
    if connections is not None:
        optimizers = {
            f"stage {stage}'s optimizer": describe_optimizer(stage_state.optimizer.optimizer)
            for stage, stage_state in workers_here.stage_states
        }
        check_same_settings(optimizers, workers_here.group)
    readers = [] if connections is not None and connections.leaders is None else ranks
    workers_here.data = DataSources(
        blueprint.programs, readers, links[0].data, settings.batch_dim, settings.planned_samples
    )
    for program in blueprint.programs:
        check_activations(program.plan.choices, blueprint.device.type, program.plan)


def _divide_stages(
    workers_here: LocalWorkers,
    graph: LayerGraph,
    connections: Connections,
    trained: Mapping[int, dict[str, nn.Parameter]],
) -> None:
    """Divides the stages of this process over the ranks of its worker, if a worker has several."""
    if not any(mesh.dimensions for mesh in workers_here.blueprint.meshes):
        return
    offer = find_offer("division", "the plan has meshes")
    for stage, handles in trained.items():
        workers_here.divisions[stage] = offer.divide_stage(workers_here, graph, connections, stage, handles)


def _check_host_memory(workers_here: LocalWorkers, free_bytes: Callable[[], int], local_stages: Sequence[int]) -> None:
    """Raises a `PlanError` if this machine has too little memory for what a plan keeps there.

    `local_stages`: of this process.
    """
    blueprint, plan = workers_here.blueprint, workers_here.blueprint.program.plan
    stages, versions = plan.stages, None
    if blueprint.placement.shares_weights:
        rules = [program.weights for program in blueprint.programs]
        versions = [max(rule.versions(stage) for rule in rules) for stage in range(len(stages))]
    elif plan.choices.activations or plan.choices.hosts_optimizers:
        rows = gather_json([read_machine(), list(local_stages)], workers_here.group)
        stages = tuple(stages[s] for machine, stages_there in rows for s in stages_there if machine == read_machine())
    else:
        return
    plan.choices.check_machine(stages, free_bytes(), versions, blueprint.program.gradient_sets)


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
    programs = "\n".join(program.to_json() for program in blueprint.programs)
    settings = {"the plan or schedule, which rank 0 makes or one file holds": programs}
    check_same_settings({**settings, **blueprint.settings_to_agree()}, workers_here.group)
    return connections


def _fill_initial_values(workers_here: LocalWorkers, weights: Weights) -> None:
    """Gives this process's parameters and buffers their values: read, drawn, or sent by rank 0."""
    blueprint, model, names = workers_here.blueprint, workers_here.model, workers_here.names
    connections, group = workers_here.connections, workers_here.group
    on_meta = {name for name, tensor in named_state(model).items() if tensor.is_meta}
    # Rank 0's model decides: each owner draws what rank 0 has on the meta device, and receives the rest from it.
    drawn = set(json.loads(broadcast_text(json.dumps(sorted(on_meta)), group)))
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
    texts = gather_texts("" if failure is None else str(failure), group)
    if any(texts):
        raise failure or CaptureError(next(filter(None, texts)))
    if connections is None:
        return
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
