"""Builds workers from channels, stages and optimizers: all of them, or this process's.

What a worker keeps under all programs of a session is made once (`WorkerMaterials`); `build_worker` makes the rest for
one program.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from pipedream.core.errors import ScheduleError
from pipedream.core.plan.layout import Boundary, Layout
from pipedream.core.plan.mesh import Mesh
from pipedream.core.plan.placement import Placement
from pipedream.core.plan.stage import TiedWeights
from pipedream.core.schedule.compensation import BasisRotation
from pipedream.core.schedule.coupling import Policy
from pipedream.core.schedule.program import Program
from pipedream.runtime.comm.channel import Group, LocalChannel, LocalGroup, Receiver, Sender
from pipedream.runtime.comm.connections import Connections, connect_groups
from pipedream.runtime.comm.encoded import with_decoding, with_encoding
from pipedream.runtime.comm.transport import Transport
from pipedream.runtime.data.splitter import BatchDim
from pipedream.runtime.failure.activity import Activity
from pipedream.runtime.results.losses import Loss, Metric
from pipedream.runtime.results.recorder import Recorder
from pipedream.runtime.results.results import Results
from pipedream.runtime.results.scoring import Scorer
from pipedream.runtime.stage.copied_weights import CopiedWeights, CopiesInstalled
from pipedream.runtime.stage.host_store import HostStore, HostVersions, SharedWeights, StoreFormat
from pipedream.runtime.stage.part import StageFacts, StagePart
from pipedream.runtime.stage.recompute import Recomputation
from pipedream.runtime.stage.replicas import CopiedAttributes
from pipedream.runtime.stage.stage_module import StageModule
from pipedream.runtime.stage.versions import Versions, choose_weights
from pipedream.runtime.stage_parts import check_parts, make_parts
from pipedream.runtime.stage_passes import StagePasses
from pipedream.runtime.stage_state import StageState
from pipedream.runtime.update.agreement import make_reducer
from pipedream.runtime.update.gradients import Gradients
from pipedream.runtime.update.loss_scale import LossScale, LossScaleOptions
from pipedream.runtime.update.optimizer import Optimizer, StageUpdates
from pipedream.runtime.update.reducer import Reducer
from pipedream.runtime.update.stepped import LossFactor, SteppedWeights
from pipedream.runtime.update.tied_weights import TiedGradientSum, copy_tied
from pipedream.runtime.update_barrier import UpdateBarrier
from pipedream.runtime.worker import Worker
from pipedream.sharding.stage import StageSharding


@dataclass(frozen=True)
class Settings:
    """The user's choices for the training itself.

    Attributes:
        ema: decay of the averaged weights; None keeps no average.
        autocast: dtype of the forwards; None computes in the dtype of the weights.
        compile: arguments of torch.compile; None does not compile.
        scaling: None does not scale the loss.
        batch_dim: dimension of the samples in the model's inputs, see `data.splitter`.
        planned_samples: of a minibatch in the plan, compared with the first minibatch's; 1 compares nothing.
        layout: of tensors on the mesh of each worker.
        parallelize: shards layers in place of the layout, see `sharding.parallelized`.
    """

    loss: Loss
    optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
    metrics: Mapping[str, Metric]
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    seed: int = 0
    policy: Policy = field(default_factory=Policy)
    ema: float | None = None
    autocast: torch.dtype | None = None
    compile: Mapping[str, Any] | None = None
    scaling: LossScaleOptions | None = None
    batch_dim: BatchDim = 0
    planned_samples: int = 1
    layout: Layout = field(default_factory=Layout)
    parallelize: Callable[[str, nn.Module, Any], Any] | None = None


@dataclass(frozen=True)
class Blueprint:
    """What all workers of a run are built from.

    Attributes:
        program: verified.
        evaluation: a verified program without backwards.
        stages: (name, module) of each stage's layers.
        last_layers: name of each stage's last layer, in the model's graph.
        settings_to_agree: returns settings that must be equal on all ranks, as texts by name.
    """

    program: Program
    evaluation: Program
    stages: Sequence[Sequence[tuple[str, nn.Module]]]
    settings: Settings
    device: torch.device
    tied: Sequence[TiedWeights] = ()
    settings_to_agree: Callable[[], Mapping[str, str]] = dict
    last_layers: Sequence[str] = ()

    @property
    def weights_device(self) -> torch.device:
        """Where weights are updated: the device, or the memory of the machine (`host_store`)."""
        return torch.device("cpu") if self.placement.shares_weights else self.device

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        return self.placement.meshes(self.program.plan.meshes)

    def boundary(self, stage: int) -> Boundary | None:
        """Returns the boundary after a stage; None after the last one, and where no worker is a mesh."""
        meshes = self.program.plan.meshes
        if stage == len(meshes) - 1 or not any(mesh.dimensions for mesh in meshes):
            return None
        return Boundary(self.settings.layout, self.last_layers[stage], meshes[stage], meshes[stage + 1])

    @property
    def placement(self) -> Placement:
        return self.program.placement


@dataclass(frozen=True)
class WorkerChannels:
    """One worker's channel ends by number; for results, by the other rank."""

    senders: dict[int, Sender]
    receivers: dict[int, Receiver]
    result_senders: dict[int, Sender]
    result_receivers: dict[int, Receiver]


@dataclass(frozen=True)
class StageMaterials:
    """What a stage replica keeps under all programs.

    Attributes:
        programs: all that it will run.
        handles: the weights that are trained.
        make_optimizer, make_scheduler: return the same one each time.
        ema: averages of the weights.
        stepped: what the optimizer steps, if not the handles.
        parts: that do not depend on the program; they come first.
    """

    programs: Sequence[Program]
    module: StageModule
    handles: dict[str, nn.Parameter]
    replica_group: Group | None
    make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None
    ema: dict[str, torch.Tensor]
    reducer: Reducer
    loss_scale: LossFactor | None
    stored: SharedWeights | None
    stepped: SteppedWeights | None
    parts: tuple[StagePart, ...]


@dataclass(frozen=True)
class CopyMaterials:
    """What the passes of a stage that copy weights keep under all programs."""

    module: StageModule
    store_format: StoreFormat
    open_stored: Callable[[], SharedWeights]


@dataclass(frozen=True)
class WorkerMaterials:
    """What a worker keeps under all programs.

    Attributes:
        process: this rank among all ranks of the job.
        everyone: the group of all workers.
        tied: weights that stages here share with others, each with the group of its holders.
    """

    rank: int
    process: int
    stages: dict[int, StageMaterials]
    on_copies: dict[int, CopyMaterials]
    channels: WorkerChannels
    everyone: Group
    tied: Sequence[tuple[TiedWeights, Group]]
    recorder: Recorder
    activity: Activity


def connect(blueprint: Blueprint) -> Connections:
    """Makes and connects the process groups; every rank calls it."""
    program, placement = blueprint.program, blueprint.placement
    pairs = dict.fromkeys((c.sender, c.receiver) for c in program.channels)
    holder_ranks = [list(weights.ranks(placement)) for weights in blueprint.tied]
    devices = blueprint.device, blueprint.weights_device
    return connect_groups(list(pairs), placement.ranks, holder_ranks, *devices, blueprint.meshes)


def gather_local_materials(
    blueprint: Blueprint, programs: Sequence[Program], parameters: Sequence[dict[str, nn.Parameter]], store: HostStore
) -> list[WorkerMaterials]:
    """Returns the materials of all workers, joined by queues in one process."""
    program, placement, tied = blueprint.program, blueprint.placement, blueprint.tied
    queues = {number: LocalChannel() for number in range(len(program.channels))}
    owners = placement.scorers
    results = {(owner, rank): LocalChannel() for owner in owners for rank in range(placement.workers) if rank != owner}
    everyone = LocalGroup(placement.workers)
    replica_groups = [LocalGroup(count) for count in placement.replicas]
    holders = [(weights, weights.ranks(placement), LocalGroup(len(weights.ranks(placement)))) for weights in tied]
    channels, messages = list(enumerate(program.channels)), program.plan.choices.messages
    workers = []
    changing: dict[int, set[tuple[int, str]]] = {}  # stage -> attributes that forwards change (`CopiedAttributes`)
    for rank in range(placement.workers):
        stages = {}
        for stage, replica in placement.stage_replicas(rank):
            layers, replica_parameters = blueprint.stages[stage], parameters[stage]
            copied_attributes = []
            if replica:
                layers, replica_parameters = _copy_layers(
                    layers, replica_parameters, chain.from_iterable(blueprint.stages)
                )
            if placement.replicas[stage] > 1:
                modules = _list_modules(blueprint.stages[stage]), _list_modules(layers)
                copied_attributes = [CopiedAttributes(*modules, changing.setdefault(stage, set()))]
            stages[stage] = _gather_stage_materials(
                blueprint,
                programs,
                stage,
                layers,
                replica_parameters,
                replica_groups[stage].member(replica) if placement.replicas[stage] > 1 else None,
                copies=copy_tied(replica_parameters, stage, tied) if not replica else None,
                store=store,
                replica=replica,
                parts=copied_attributes,
            )
        ends = WorkerChannels(
            {n: with_encoding(queues[n], messages, c.carries) for n, c in channels if c.sender == rank},
            {n: with_decoding(queues[n], messages, c.carries) for n, c in channels if c.receiver == rank},
            {other: channel for (owner, other), channel in results.items() if owner == rank},
            {owner: channel for (owner, other), channel in results.items() if other == rank},
        )
        on_copies = gather_materials_on_copies(blueprint, programs, rank, parameters.__getitem__, store)
        groups = [(weights, group.member(ranks.index(rank))) for weights, ranks, group in holders if rank in ranks]
        recorder = Recorder(rank, blueprint.device)
        workers.append(
            WorkerMaterials(rank, rank, stages, on_copies, ends, everyone.member(rank), groups, recorder, Activity())
        )
    return workers


def gather_materials(
    blueprint: Blueprint,
    programs: Sequence[Program],
    rank: int,
    parameters: Mapping[int, dict[str, nn.Parameter]],
    on_copies: dict[int, CopyMaterials],
    connections: Connections,
    shardings: Mapping[int, StageSharding],
    store: HostStore,
    activity: Activity,
) -> WorkerMaterials:
    """Returns the materials of this process's worker, joined to the others by torch.distributed.

    Args:
        programs: all that the worker will run, over the same channels.
        shardings: stage -> how the ranks of this worker divide it; empty for a single rank.
    """
    placement, tied = blueprint.placement, blueprint.tied
    transport = Transport(connections, programs, blueprint.device)
    stages = {}
    for stage, _ in placement.stage_replicas(rank):
        group = connections.stages[stage]
        stages[stage] = _gather_stage_materials(
            blueprint,
            programs,
            stage,
            blueprint.stages[stage],
            parameters[stage],
            connections.sum_over(group) if group is not None else None,
            copies=copy_tied(parameters[stage], stage, [weights.among(parameters) for weights in tied]),
            store=store,
            sharding=shardings.get(stage),
            boundary=blueprint.boundary(stage),
        )
    if placement.shares_weights:
        store.exchange()
    tied_groups: list[tuple[TiedWeights, Group]] = [
        (weights, connections.sum_over(group))
        for weights, group in zip(tied, connections.holders, strict=True)
        if group is not None and rank in weights.ranks(placement)
    ]
    return WorkerMaterials(
        rank,
        connections.process,
        stages,
        on_copies,
        WorkerChannels(*transport.open_channels(), *transport.open_result_channels()),
        connections.sum_over(connections.everyone),
        tied_groups,
        Recorder(rank, blueprint.device),
        activity,
    )


def gather_materials_on_copies(
    blueprint: Blueprint,
    programs: Sequence[Program],
    rank: int,
    find_trained: Callable[[int], dict[str, nn.Parameter]],
    store: HostStore,
) -> dict[int, CopyMaterials]:
    """Returns the materials of the stages whose passes on a rank copy weights; to be called before layers that share a
    parameter are separated.

    Args:
        find_trained: returns the trained parameters of a stage.
    """
    on_copies = {}
    settings, placement = blueprint.settings, blueprint.placement
    passes = (placement.passes_on_copies(rank, forward=forward) for forward in (True, False))
    for stage in sorted({stage for row in passes for stage, _ in row}):
        layers = blueprint.stages[stage]
        trained = dict(find_trained(stage))
        module = StageModule(layers, trained, blueprint.device, settings.seed, settings.autocast, settings.compile)
        layout = _make_store_format(blueprint, programs, stage, module)
        if store.is_shared and placement.ranks[stage] != (rank,):
            for name, handle in trained.items():
                module.handles[name] = nn.Parameter(torch.empty_like(handle, device="meta"))
        on_copies[stage] = CopyMaterials(module, layout, partial(store.open, stage, layout))
    return on_copies


def _make_store_format(
    blueprint: Blueprint, programs: Sequence[Program], stage: int, module: StageModule
) -> StoreFormat:
    settings = blueprint.settings
    sets = max(program.weights.versions(stage) for program in programs)
    rotations = blueprint.program.gradient_sets if blueprint.placement.rotates else 0
    gradients = not rotations and blueprint.weights_device != blueprint.device
    return StoreFormat(module, sets, ema=settings.ema is not None, gradients=gradients, rotations=rotations)


def _copy_layers(
    layers: Sequence[tuple[str, nn.Module]],
    parameters: dict[str, nn.Parameter],
    others: Iterable[tuple[str, nn.Module]],
) -> tuple[list[tuple[str, nn.Module]], dict[str, nn.Parameter]]:
    """Copies layers for a further replica in one process, because the user's model has each only once.

    Tensors that share memory share it in the copy too. Modules of `others`, which the layers refer to, are not copied.
    """
    modules = {id(m): m for _, layer in layers for m in layer.modules()}
    memo: dict[int, Any] = {id(m): m for _, layer in others for m in layer.modules() if id(m) not in modules}
    for module in modules.values():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = _copy_parameter(parameter, memo)
        for value in module.__dict__.values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:  # the last forward's result, as of weight_norm
                memo.setdefault(id(value), value.detach().clone())
    copied = [(name, copy.deepcopy(layer, memo)) for name, layer in layers]
    return copied, {name: memo[id(handle)] for name, handle in parameters.items()}


def _list_modules(layers: Sequence[tuple[str, nn.Module]]) -> list[nn.Module]:
    return list({id(module): module for _, layer in layers for module in layer.modules()}.values())


def _copy_parameter(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """Copies a parameter's storage and attributes; torch's deepcopy of it does neither."""
    data = copy.deepcopy(parameter.data, memo)
    duplicate: nn.Parameter = torch.Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
    duplicate.__dict__.update(copy.deepcopy(parameter.__dict__, memo))
    return duplicate


def _gather_stage_materials(
    blueprint: Blueprint,
    programs: Sequence[Program],
    stage: int,
    layers: Sequence[tuple[str, nn.Module]],
    parameters: dict[str, nn.Parameter],
    replica_group: Group | None,
    copies: dict[str, nn.Parameter] | None,
    store: HostStore,
    replica: int = 0,
    sharding: StageSharding | None = None,
    boundary: Boundary | None = None,
    parts: Sequence[StagePart] = (),
) -> StageMaterials:
    """`copies` are trained in place of parameters that another stage of this rank holds too."""
    plan, settings = blueprint.program.plan, blueprint.settings
    module = StageModule(
        layers,
        parameters,
        blueprint.device,
        settings.seed,
        settings.autocast,
        settings.compile,
        sharding,
        boundary,
        replicated=replica_group is not None,
    )
    parameters = copies or parameters
    ema = {} if settings.ema is None else {name: handle.detach().clone() for name, handle in parameters.items()}
    stored = None
    if blueprint.placement.shares_weights:
        stored = store.open(stage, _make_store_format(blueprint, programs, stage, module))
        stored.adopt_averages(ema)
    cpu_optimizer = None
    if plan.choices.hosts_optimizers and stored is None:
        _refuse_mesh(sharding)
        layout = StoreFormat(module, 1, ema=False, gradients=blueprint.device.type == "cuda", trained_only=True)
        cpu_optimizer = store.host(stage, replica, parameters, layout)
    tied = [name for weights in blueprint.tied if stage in weights.stages for name in weights.names]
    return StageMaterials(
        programs=programs,
        module=module,
        handles=parameters,
        replica_group=replica_group,
        make_optimizer=_call_once(settings.optimizer),
        make_scheduler=None if settings.scheduler is None else _call_once(settings.scheduler),
        ema=ema,
        reducer=make_reducer(plan.choices.sums, parameters, ema, replica_group, plan.replicas[stage], tied),
        loss_scale=LossScale(settings.scaling) if settings.scaling is not None else None,
        stored=stored,
        stepped=cpu_optimizer,
        parts=tuple(parts),
    )


def _call_once(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that calls `make` once, and returns its result each time."""
    results: list[Any] = []

    def make_or_return(argument: Any) -> Any:
        if not results:
            results.append(make(argument))
        return results[0]

    return make_or_return


def _refuse_mesh(sharding: StageSharding | None) -> None:
    if sharding is not None:
        raise ScheduleError(
            "optimizer_state='host' was asked for on a mesh, whose ranks divide weights and state themselves; keep the "
            "optimizer on the device, or plan without a mesh"
        )


def build_worker(blueprint: Blueprint, materials: WorkerMaterials) -> Worker:
    """Returns the worker of the blueprint's program."""
    program, placement, settings = blueprint.program, blueprint.placement, blueprint.settings
    stage_states = {stage: _build_stage_state(blueprint, stage, row) for stage, row in materials.stages.items()}
    on_copies = {stage: _build_passes_on_copies(blueprint, stage, row) for stage, row in materials.on_copies.items()}
    trained = {stage: stage_state.optimizer.named for stage, stage_state in stage_states.items()}
    sums = [
        TiedGradientSum(
            weights, {stage: trained[stage] for stage in weights.among(stage_states).stages}, placement.replicas, group
        )
        for weights, group in materials.tied
    ]
    results = Results(
        materials.rank,
        placement,
        materials.channels.result_senders,
        materials.channels.result_receivers,
        list(settings.metrics),
        raises_on_nan=settings.policy.on_nan == "error",
        reads_late=blueprint.device.type == "cuda",
        process=materials.process,
    )
    materials.recorder.max_queued = (max(program.plan.in_flight) + 2) * len(stage_states)
    return Worker(
        materials.rank,
        process=materials.process,
        program=program,
        evaluation=blueprint.evaluation,
        stage_states=stage_states,
        stage_passes=stage_states | on_copies,
        senders=materials.channels.senders,
        receivers=materials.channels.receivers,
        results=results,
        scorer=Scorer(settings.loss, settings.metrics, results, program),
        device=blueprint.device,
        update_barrier=UpdateBarrier(settings.policy, program, materials.everyone, stage_states, sums),
        recorder=materials.recorder,
        activity=materials.activity,
    )


def _build_stage_state(blueprint: Blueprint, stage: int, materials: StageMaterials) -> StageState:
    program, settings, module = blueprint.program, blueprint.settings, materials.module
    rule, handles, replica_group = program.weights, materials.handles, materials.replica_group
    counted_elsewhere = [name for weights in blueprint.tied if stage in weights.stages[1:] for name in weights.names]
    single = rule.held_until is None or rule.kept_until(stage) is not None
    versions = (
        Versions(handles, watched=replica_group is not None, single=single)
        if materials.stored is None
        else HostVersions(handles, materials.stored, single=single)
    )
    optimizer = Optimizer(
        handles,
        materials.make_optimizer,
        StageUpdates.of(program, stage),
        scheduler=materials.make_scheduler,
        replicas=program.placement.replicas[stage],
        reducer=materials.reducer,
        ema=materials.ema,
        ema_decay=settings.ema or 0.0,
        counted_elsewhere=[list(handles).index(name) for name in counted_elsewhere],
        loss_scale=materials.loss_scale,
        sharding=module.sharding,
        stepped=materials.stepped,
    )
    facts = StageFacts(stage, materials.programs, module, versions, optimizer, replica_group)
    choice, parts = choose_weights(rule, versions), (*materials.parts, *make_parts(facts, program))
    return StageState(module, versions, optimizer, parts, choice)


def _build_passes_on_copies(blueprint: Blueprint, stage: int, materials: CopyMaterials) -> StagePasses:
    program, scaling, module = blueprint.program, blueprint.settings.scaling, materials.module
    loss_scale = LossFactor() if scaling is None else LossScale(scaling)
    weights = CopiedWeights(materials.store_format, program.updates.per_update[stage], materials.open_stored)
    recomputes = program.plan.stages[stage].recompute and not program.placement.runs_backward_elsewhere(stage)
    parts: list[StagePart] = [Recomputation(module)] if recomputes else []
    gradients = Gradients(len(module.handles))
    return StagePasses(module, weights, gradients, loss_scale, [*parts, CopiesInstalled(weights)])


def check_programs(workers: Sequence[Worker], programs: Sequence[Program]) -> None:
    """Raises a `ScheduleError` before a run if a stage does not fit one of the programs that it will run."""
    for worker in workers:
        for stage, stage_state in worker.stage_states.items():
            optimizer, sharding = stage_state.optimizer, stage_state.module.sharding
            check_parts(StageFacts(stage, programs, stage_state.module, stage_state.versions, optimizer))
            if optimizer.reducer.averages_weights and hasattr(optimizer.optimizer, "eval"):
                raise ScheduleError(
                    f"sums={worker.program.plan.choices.sums!r} was asked for with "
                    f"{type(optimizer.optimizer).__name__}, which keeps weights of its own that would not be averaged; "
                    "use another optimizer, or sums='bfloat16'"
                )
            if sharding is not None:
                rotates = any(isinstance(rule, BasisRotation) for p in programs for rule in p.updates.compensation)
                sharding.adapt_optimizer(optimizer.optimizer, rotates=rotates)
                sharding.sample_memory = worker.recorder.memory.read_heap
