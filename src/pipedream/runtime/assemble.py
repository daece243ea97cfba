"""Builds workers from channels, stages and optimizers: all of them, or this process's."""

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
from pipedream.runtime.results.results import Results
from pipedream.runtime.results.scoring import Scorer
from pipedream.runtime.stage.copied_weights import CopiedWeights, CopiesInstalled
from pipedream.runtime.stage.host_store import HostStore, HostVersions, StoreFormat
from pipedream.runtime.stage.part import StageFacts, StagePart
from pipedream.runtime.stage.recompute import Recomputation
from pipedream.runtime.stage.replicas import CopiedAttributes
from pipedream.runtime.stage.stage_module import StageModule
from pipedream.runtime.stage.versions import Versions
from pipedream.runtime.stage_parts import check_parts, make_parts
from pipedream.runtime.stage_passes import StagePasses
from pipedream.runtime.stage_state import StageState
from pipedream.runtime.update.gradients import Gradients
from pipedream.runtime.update.loss_scale import LossScale, LossScaleOptions
from pipedream.runtime.update.optimizer import Optimizer
from pipedream.runtime.update.stepped import LossFactor
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
        programs: one per phase, over the same channels; verified.
        evaluation: a verified program without backwards.
        stages: (name, module) of each stage's layers.
        last_layers: name of each stage's last layer, in the model's graph.
        settings_to_agree: returns settings that must be equal on all ranks, as texts by name.
    """

    programs: Sequence[Program]
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
    def program(self) -> Program:
        return self.programs[0]

    @property
    def placement(self) -> Placement:
        return self.programs[0].placement


@dataclass(frozen=True)
class WorkerChannels:
    """One worker's channel ends by number; for results, by the other rank."""

    senders: dict[int, Sender]
    receivers: dict[int, Receiver]
    result_senders: dict[int, Sender]
    result_receivers: dict[int, Receiver]


def connect(blueprint: Blueprint) -> Connections:
    """Makes and connects the process groups of programs with the same channels; every rank calls it."""
    program, placement = blueprint.program, blueprint.placement
    pairs = dict.fromkeys((c.sender, c.receiver) for c in program.channels)
    holder_ranks = [list(weights.ranks(placement)) for weights in blueprint.tied]
    devices = blueprint.device, blueprint.weights_device
    return connect_groups(list(pairs), placement.ranks, holder_ranks, *devices, blueprint.meshes)


def make_local_workers(
    blueprint: Blueprint, parameters: Sequence[dict[str, nn.Parameter]], store: HostStore
) -> list[Worker]:
    """Returns all workers, joined by queues in one process."""
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
        stage_states = {}
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
            stage_states[stage] = _make_stage_state(
                blueprint,
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
        on_copies = make_passes_on_copies(blueprint, rank, parameters.__getitem__, store)
        groups = [(weights, group.member(ranks.index(rank))) for weights, ranks, group in holders if rank in ranks]
        workers.append(
            _make_worker(
                blueprint, rank, stage_states, on_copies, ends, everyone.member(rank), groups, rank, Activity()
            )
        )
    return workers


def make_distributed_worker(
    blueprint: Blueprint,
    rank: int,
    parameters: Mapping[int, dict[str, nn.Parameter]],
    on_copies: dict[int, StagePasses],
    connections: Connections,
    shardings: Mapping[int, StageSharding],
    store: HostStore,
    activity: Activity,
) -> Worker:
    """Returns this process's worker, joined to the others by torch.distributed.

    Args:
        shardings: stage -> how the ranks of this worker divide it; empty for a single rank.
    """
    placement, tied = blueprint.placement, blueprint.tied
    transport = Transport(connections, blueprint.programs, blueprint.device)
    stage_states = {}
    for stage, _ in placement.stage_replicas(rank):
        group = connections.stages[stage]
        stage_states[stage] = _make_stage_state(
            blueprint,
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
    return _make_worker(
        blueprint,
        rank,
        stage_states,
        on_copies,
        WorkerChannels(*transport.open_channels(), *transport.open_result_channels()),
        connections.sum_over(connections.everyone),
        tied_groups,
        connections.process,
        activity,
    )


def make_passes_on_copies(
    blueprint: Blueprint, rank: int, find_trained: Callable[[int], dict[str, nn.Parameter]], store: HostStore
) -> dict[int, StagePasses]:
    """Returns the passes of a rank that copy weights, by stage; to be called before layers that share a parameter are
    separated.

    Args:
        find_trained: returns the trained parameters of a stage.
    """
    on_copies = {}
    settings, placement, program = blueprint.settings, blueprint.placement, blueprint.program
    passes = (placement.passes_on_copies(rank, forward=forward) for forward in (True, False))
    for stage in sorted({stage for row in passes for stage, _ in row}):
        layers = blueprint.stages[stage]
        trained = dict(find_trained(stage))
        module = StageModule(layers, trained, blueprint.device, settings.seed, settings.autocast, settings.compile)
        layout = _make_store_format(blueprint, stage, module)
        gradients = Gradients(len(trained))
        loss_scale = LossFactor() if settings.scaling is None else LossScale(settings.scaling)
        if store.is_shared and placement.ranks[stage] != (rank,):
            for name, handle in trained.items():
                module.handles[name] = nn.Parameter(torch.empty_like(handle, device="meta"))
        per_update, open_stored = program.updates.per_update[stage], partial(store.open, stage, layout)
        recomputes = program.plan.stages[stage].recompute and not placement.runs_backward_elsewhere(stage)
        weights = CopiedWeights(layout, per_update, open_stored)
        parts: list[StagePart] = [Recomputation(module)] if recomputes else []
        on_copies[stage] = StagePasses(module, weights, gradients, loss_scale, [*parts, CopiesInstalled(weights)])
    return on_copies


def _make_store_format(blueprint: Blueprint, stage: int, module: StageModule) -> StoreFormat:
    settings = blueprint.settings
    sets = max(program.weights.versions(stage) for program in blueprint.programs)
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


def _make_stage_state(
    blueprint: Blueprint,
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
) -> StageState:
    """`copies` are trained in place of parameters that another stage of this rank holds too."""
    plan, settings, programs = blueprint.program.plan, blueprint.settings, blueprint.programs
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
    stored = None
    if blueprint.placement.shares_weights:
        stored = store.open(stage, _make_store_format(blueprint, stage, module))
    cpu_optimizer = None
    if plan.choices.hosts_optimizers and stored is None:
        _refuse_mesh(sharding)
        layout = StoreFormat(module, 1, ema=False, gradients=blueprint.device.type == "cuda", trained_only=True)
        cpu_optimizer = store.host(stage, replica, parameters, layout)
    counted_elsewhere = [name for weights in blueprint.tied if stage in weights.stages[1:] for name in weights.names]
    versions = (
        HostVersions(parameters, stored)
        if stored is not None
        else Versions(parameters, watched=replica_group is not None)
    )
    optimizer = Optimizer(
        parameters,
        settings.optimizer,
        scheduler=settings.scheduler,
        replicas=plan.replicas[stage],
        replica_group=replica_group,
        choices=plan.choices,
        ema=settings.ema,
        counted_elsewhere=[list(parameters).index(name) for name in counted_elsewhere],
        tied=[name for weights in blueprint.tied if stage in weights.stages for name in weights.names],
        loss_scale=LossScale(settings.scaling) if settings.scaling is not None else None,
        sharding=sharding,
        stepped=cpu_optimizer,
    )
    if stored is not None:
        stored.adopt_averages(optimizer.ema)
    facts = StageFacts(stage, programs, module, versions, optimizer)
    check_parts(facts)
    if optimizer.reducer.averages_weights and hasattr(optimizer.optimizer, "eval"):
        raise ScheduleError(
            f"sums={plan.choices.sums!r} was asked for with {type(optimizer.optimizer).__name__}, which "
            "keeps weights of its own that would not be averaged; use another optimizer, or sums='bfloat16'"
        )
    if sharding is not None:
        rotates = any(isinstance(rule, BasisRotation) for p in programs for rule in p.updates.compensation)
        sharding.adapt_optimizer(optimizer.optimizer, rotates=rotates)
    return StageState(module, versions, optimizer, partial(make_parts, facts), parts)


def _refuse_mesh(sharding: StageSharding | None) -> None:
    if sharding is not None:
        raise ScheduleError(
            "optimizer_state='host' was asked for on a mesh, whose ranks divide weights and state themselves; keep the "
            "optimizer on the device, or plan without a mesh"
        )


def _make_worker(
    blueprint: Blueprint,
    rank: int,
    stage_states: dict[int, StageState],
    on_copies: dict[int, StagePasses],
    channels: WorkerChannels,
    everyone: Group,
    tied: Sequence[tuple[TiedWeights, Group]],
    process: int,
    activity: Activity,
) -> Worker:
    program, placement, settings = blueprint.program, blueprint.placement, blueprint.settings
    trained = {stage: stage_state.optimizer.named for stage, stage_state in stage_states.items()}
    sums = [
        TiedGradientSum(
            weights, {stage: trained[stage] for stage in weights.among(stage_states).stages}, placement.replicas, group
        )
        for weights, group in tied
    ]
    results = Results(
        rank,
        placement,
        channels.result_senders,
        channels.result_receivers,
        list(settings.metrics),
        raises_on_nan=settings.policy.on_nan == "error",
        reads_late=blueprint.device.type == "cuda",
        process=process,
    )
    worker = Worker(
        rank,
        process=process,
        program=program,
        evaluation=blueprint.evaluation,
        stage_states=stage_states,
        stage_passes=stage_states | on_copies,
        senders=channels.senders,
        receivers=channels.receivers,
        results=results,
        scorer=Scorer(settings.loss, settings.metrics, results),
        device=blueprint.device,
        update_barrier=UpdateBarrier(settings.policy, everyone, stage_states, sums),
        activity=activity,
    )
    for stage_state in stage_states.values():
        if stage_state.module.sharding is not None:
            stage_state.module.sharding.sample_memory = worker.recorder.memory.read_heap
    return worker
