"""A session: one model trained in one placement, from the first minibatch to the last.

- `Session` joins the other ranks, and makes the workers of this process (`local_workers`) with their initial values.
- `streams` runs them: training, evaluations, predictions.
- `service` is what accompanies them, such as the comparison of their first minibatch with the model, and checkpoints.
"""

from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import nn

from pipedream.core.errors import PeerError, PipelineError, PlanError, WorkerError
from pipedream.core.extensions import find_offer
from pipedream.core.model.graph import LayerGraph
from pipedream.core.user_code import with_place
from pipedream.runtime.activity import Activity
from pipedream.runtime.assemble import gather_materials, gather_materials_on_copies
from pipedream.runtime.blueprint import Blueprint
from pipedream.runtime.comm.connections import Connections
from pipedream.runtime.data.source import DataSources
from pipedream.runtime.links import connect, join_in_process, join_processes
from pipedream.runtime.residence import find_residence
from pipedream.runtime.session.local_workers import LocalWorkers, ModelNames
from pipedream.runtime.session.service import SessionService
from pipedream.runtime.session.streams import LOOP, Streams
from pipedream.runtime.unguarded import Unguarded
from pipedream.runtime.weights import parameters

MakeGuard = Callable[[int, int, Activity], Unguarded]
Prepare = Callable[[LocalWorkers], None]


class Session:
    """Workers around one model; a failure of one rank ends all.

    Args:
        model: in a process group each rank keeps only its stages' parameters.
        make_guard: makes what watches the other ranks, from this rank, the number of ranks and this rank's activity.
        prepare: prepares this process for its stages, and gives their parameters and buffers their values, which they
            have by default.

    Attributes:
        services: accompany the session; added once it is built.

    Raises:
        PlanError: the number of processes is not the plan's, or the ranks have different plans.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: LayerGraph,
        blueprint: Blueprint,
        *,
        make_guard: MakeGuard,
        prepare: Prepare = lambda workers_here: None,
    ) -> None:
        workers_here = self.workers_here = _build_local_workers(model, graph, blueprint, prepare, make_guard)
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
    model: nn.Module, graph: LayerGraph, blueprint: Blueprint, prepare: Prepare, make_guard: MakeGuard
) -> LocalWorkers:
    rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    workers_here = LocalWorkers(model, blueprint, ModelNames.of(model, graph, blueprint, rank), rank)
    if processes == 1:
        _build(workers_here, graph, None, prepare)
        return workers_here
    workers_here.guard = make_guard(rank, processes, workers_here.activity)
    try:
        _build(workers_here, graph, _connect(workers_here, processes), prepare)
    except BaseException as error:
        first = workers_here.guard.first_cause(error, workers_here.activity.where)
        workers_here.leave(failed=True)
        workers_here.guard.end()
        if isinstance(error, PipelineError) and not isinstance(first, PeerError):
            raise
        raise first from error
    return workers_here


def _build(workers_here: LocalWorkers, graph: LayerGraph, connections: Connections | None, prepare: Prepare) -> None:
    """Builds the workers of this process: all of them without `connections` to others, else one."""
    blueprint, model, names = workers_here.blueprint, workers_here.model, workers_here.names
    placement, settings = blueprint.placement, blueprint.settings
    ranks = range(placement.workers) if connections is None else [connections.worker_number]
    workers_here.worker_rank = ranks[0]
    stages = workers_here.stages = [stage for rank in ranks for stage, _ in placement.stage_replicas(rank)]
    names.local = {name for stage in stages for name in names.by_stage[stage]}
    prepare(workers_here)
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
            f"stage {stage}'s optimizer": stage_state.optimizer.optimizer
            for stage, stage_state in workers_here.stage_states
        }
        workers_here.guard.check_same(optimizers, workers_here.group)
    readers = [] if connections is not None and connections.leaders is None else ranks
    workers_here.data = DataSources(
        blueprint.programs, readers, links[0].data, settings.batch_dim, settings.planned_samples
    )
    for program in blueprint.programs:
        program.plan.choices.check_device(blueprint.device.type, program.plan)


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


def _connect(workers_here: LocalWorkers, processes: int) -> Connections:
    """Connects to the other ranks; raises a `PlanError` if their plans or settings differ."""
    workers_here.guard.check_same_software()
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
    workers_here.guard.check_same({**settings, **blueprint.settings_to_agree()}, workers_here.group)
    return connections
