"""Putting workers together: channels, stages, optimizers; all in one process, or this process's own one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipedream.core.schedule.coupling import Policy
from pipedream.core.schedule.occupancy import most_in_flight
from pipedream.core.schedule.program import Program
from pipedream.runtime.comm.channel import Group, LocalChannel, LocalGroup, Receiver, Sender
from pipedream.runtime.comm.distributed import ChannelEndpoint, DistributedGroup, DistributedReceiver, DistributedSender
from pipedream.runtime.results.losses import Loss, Metric
from pipedream.runtime.results.results import Results
from pipedream.runtime.results.scoring import Scorer
from pipedream.runtime.stage.remote_forward import RemoteForward, WeightPacket
from pipedream.runtime.stage.saved_tensors import SavedTensorHooks
from pipedream.runtime.stage.stage_module import StageModule, low_precision_weights
from pipedream.runtime.stage.versions import Versions
from pipedream.runtime.stage_state import StageState
from pipedream.runtime.update.loss_scale import LossScale, LossScaleOptions
from pipedream.runtime.update.optimizer import Gradients, Optimizer
from pipedream.runtime.update.tied_weights import TiedGradientSum, TiedWeights, copies_of_tied
from pipedream.runtime.update_barrier import UpdateBarrier
from pipedream.runtime.worker import Worker

__all__ = [
    "Connections",
    "Settings",
    "connect",
    "data_channels",
    "distributed_worker",
    "local_workers",
    "remote_forwards_of",
]


@dataclass(frozen=True)
class Settings:
    """What the user chose for the training itself.

    Attributes:
        loss, metrics, optimizer, scheduler: of the user.
        seed: of the run.
        policy: on what couples the stages.
        ema: decay of the average of the weights; None keeps none.
        autocast: low-precision type; None computes as the weights are.
        scaling: of the loss; None does not scale it.
    """

    loss: Loss
    optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
    metrics: Mapping[str, Metric]
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    seed: int = 0
    policy: Policy = field(default_factory=Policy)
    ema: float | None = None
    autocast: torch.dtype | None = None
    scaling: LossScaleOptions | None = None


@dataclass(frozen=True)
class Connections:
    """Process groups of a run.

    Attributes:
        everyone: gloo group of all ranks: headers, results, sums of small numbers.
        stages: for each stage the group of its replicas, None where there is one.
        holders: of each of the shared weights the group of all that hold them, None where this rank does not.
        pairs: channel number -> group of its payloads.
    """

    everyone: dist.ProcessGroup
    stages: tuple[dist.ProcessGroup | None, ...]
    holders: tuple[dist.ProcessGroup | None, ...]
    pairs: Mapping[int, dist.ProcessGroup]


def connect(program: Program, device: torch.device, shared: Sequence[TiedWeights] = ()) -> Connections:
    """Makes the process groups of a program, or of several over the same channels; every rank calls it.

    Args:
        shared: weights that several stages hold.
    """
    world = dist.group.WORLD
    assert world is not None
    on_gpu = device.type == "cuda"
    everyone = world if dist.get_backend(world) == "gloo" else dist.new_group(backend="gloo")
    backend = "nccl" if on_gpu else "gloo"
    stages = tuple(
        dist.new_group(list(row), backend=backend) if len(row) > 1 else None for row in program.placement.ranks
    )
    pairs = {
        number: dist.new_group([c.sender, c.receiver], backend="nccl") if on_gpu else everyone
        for number, c in enumerate(program.channels)
    }
    holders = tuple(dist.new_group(list(one.ranks(program.placement)), backend=backend) for one in shared)
    return Connections(everyone, stages, holders, pairs)


def local_workers(
    programs: Sequence[Program],
    evaluation: Program,
    layers: Sequence[tuple[str, nn.Module]],
    handles: Sequence[dict[str, nn.Parameter]],
    settings: Settings,
    device: torch.device,
    shared: Sequence[TiedWeights] = (),
) -> list[Worker]:
    """Returns all workers, joined by queues.

    Args:
        programs: of each phase of the run, over the same channels; verified.
        evaluation: verified.
        layers: (name, module) of the whole model.
        handles: for each stage, its trained parameters.
        settings: the user's choices.
        device: of all workers.
        shared: weights that several stages hold.
    """
    program, placement = programs[0], programs[0].placement
    channels = {number: LocalChannel() for number in range(len(program.channels))}
    owners = placement.ranks[-1]
    results = {(owner, rank): LocalChannel() for owner in owners for rank in range(placement.workers) if rank != owner}
    norm = LocalGroup(placement.workers)
    sums = [LocalGroup(count) for count in placement.replicas]
    holders = [(one, one.ranks(placement), LocalGroup(len(one.ranks(placement)))) for one in shared]
    crew = []
    for rank in range(placement.workers):
        stage_states = {}
        for stage, replica in placement.stage_replicas(rank):
            own_layers, own_handles = layers, handles[stage]
            if replica:
                own_layers, own_handles = _copied(layers, handles[stage])
            stage_states[stage] = _stage_state(
                programs,
                stage,
                own_layers,
                own_handles,
                settings,
                device,
                sums[stage].member(replica) if placement.replicas[stage] > 1 else None,
                shared,
                copies=copies_of_tied(own_handles, stage, shared) if not replica else None,
            )
        crew.append(
            _worker(
                rank,
                program,
                evaluation,
                stage_states,
                remote_forwards_of(rank, program, layers, dict(enumerate(handles)), settings, device),
                {n: channels[n] for n, c in enumerate(program.channels) if c.sender == rank},
                {n: channels[n] for n, c in enumerate(program.channels) if c.receiver == rank},
                {other: channel for (owner, other), channel in results.items() if owner == rank},
                {owner: channel for (owner, other), channel in results.items() if other == rank},
                settings,
                device,
                norm.member(rank),
                [(one, group.member(ranks.index(rank))) for one, ranks, group in holders if rank in ranks],
            )
        )
    return crew


def distributed_worker(
    rank: int,
    programs: Sequence[Program],
    evaluation: Program,
    layers: Sequence[tuple[str, nn.Module]],
    handles: Mapping[int, dict[str, nn.Parameter]],
    settings: Settings,
    device: torch.device,
    wires: Connections,
    remote_forwards: dict[int, RemoteForward],
    shared: Sequence[TiedWeights] = (),
) -> Worker:
    """Returns this process's worker, joined to the others by torch.distributed.

    Args:
        programs, evaluation, layers, settings, device, shared: as of `local_workers`.
        remote_forwards: of `remote_forwards_of`, for this rank.
        handles: stage -> its trained parameters, for the stages of this rank.
        wires: of `connect`.
    """
    program, placement = programs[0], programs[0].placement
    max_unread = _most_out(programs)
    in_flight = [max(counts) for counts in zip(*map(most_in_flight, programs), strict=True)]
    senders: dict[int, Sender] = {}
    receivers: dict[int, Receiver] = {}
    for number, channel in enumerate(program.channels):
        if rank not in (channel.sender, channel.receiver):
            continue
        peer = channel.receiver if rank == channel.sender else channel.sender
        line = ChannelEndpoint(peer, number, channel.depth, wires.everyone, wires.pairs[number], device)
        if rank == channel.sender:
            # A replica that begins a forward has ended all backwards but those of what it has in flight: their
            # activations were taken by the stage behind, whose gradients were taken here. The end of a stream is one
            # more message. Waiting for an older one thus waits for nothing that is still to be done.
            # Of weights two may be unread: those of an update that turned out not to be, and the word of the end.
            most = 1 if channel.carries == "weights" else in_flight[min(channel.source, channel.target)]
            senders[number] = DistributedSender(line, most + 1)
        else:
            receivers[number] = DistributedReceiver(line)
    result_senders: dict[int, Sender] = {}
    result_receivers: dict[int, Receiver] = {}
    cpu = torch.device("cpu")
    for owner in placement.ranks[-1]:
        for other in range(placement.workers):
            number = len(program.channels) + owner * placement.workers + other
            if owner == other or rank not in (owner, other):
                continue
            peer = other if rank == owner else owner
            line = ChannelEndpoint(peer, number, 2, wires.everyone, wires.everyone, cpu)
            if rank == owner:
                result_senders[other] = DistributedSender(line, max_unread)
            else:
                result_receivers[owner] = DistributedReceiver(line)
    stage_states = {
        stage: _stage_state(
            programs,
            stage,
            layers,
            handles[stage],
            settings,
            device,
            DistributedGroup(group) if (group := wires.stages[stage]) is not None else None,
            shared,
            copies=copies_of_tied(handles[stage], stage, [one.among(handles) for one in shared]),
        )
        for stage, _ in placement.stage_replicas(rank)
    }
    return _worker(
        rank,
        program,
        evaluation,
        stage_states,
        remote_forwards,
        senders,
        receivers,
        result_senders,
        result_receivers,
        settings,
        device,
        DistributedGroup(wires.everyone),
        [
            (one, DistributedGroup(group))
            for one, group in zip(shared, wires.holders, strict=True)
            if group is not None and rank in one.ranks(placement)
        ],
    )


def data_channels(
    rank: int, programs: Sequence[Program], everyone: dist.ProcessGroup
) -> tuple[dict[int, DistributedSender], DistributedReceiver | None]:
    """Returns the channels on which replica 0 of the input stage hands the others their data.

    Returns: replica -> sender, at replica 0; the receiver, at the others. Nothing at other stages.
    """
    program, placement = programs[0], programs[0].placement
    first, *others = placement.readers
    senders: dict[int, DistributedSender] = {}
    receiver = None
    for replica, other in enumerate(others, start=1):
        if rank not in (first, other):
            continue
        number = len(program.channels) + placement.workers**2 + replica  # behind those of the results
        line = ChannelEndpoint(other if rank == first else first, number, 2, everyone, everyone, torch.device("cpu"))
        if rank == first:
            senders[replica] = DistributedSender(line, _most_out(programs))
        else:
            receiver = DistributedReceiver(line)
    return senders, receiver


def _most_out(programs: Sequence[Program]) -> int:
    """Returns the messages that may be unread: what the input stage has in flight, or one minibatch."""
    return max(max(*p.plan.in_flight, p.microbatches) * max(p.placement.replicas) + 2 for p in programs)


def _copied(
    layers: Sequence[tuple[str, nn.Module]], handles: dict[str, nn.Parameter]
) -> tuple[list[tuple[str, nn.Module]], dict[str, nn.Parameter]]:
    """Returns a further replica's own layers and handles; in one process the user's model has but one."""
    memo: dict[int, Any] = {}
    copied = [(name, copy.deepcopy(layer, memo)) for name, layer in layers]
    return copied, {name: memo[id(handle)] for name, handle in handles.items()}


def _stage_state(
    programs: Sequence[Program],
    stage: int,
    layers: Sequence[tuple[str, nn.Module]],
    handles: dict[str, nn.Parameter],
    settings: Settings,
    device: torch.device,
    replica_group: Group | None,
    shared: Sequence[TiedWeights],
    copies: dict[str, nn.Parameter] | None = None,
) -> StageState:
    """Returns a seat; `copies` are trained in the place of the handles, where another seat has some of these too."""
    plan = programs[0].plan
    mine = layers[plan.stages[stage].first : plan.stages[stage].last]
    module = StageModule(mine, handles, device, settings.seed, settings.autocast)
    low = low_precision_weights(mine, handles, settings.autocast)
    handles = copies or handles
    versions = Versions(handles, low, watched=replica_group is not None)
    # Weights change between forward and backward.
    moves = [p.weights for p in programs if p.weights.staleness(stage) > 0 or p.weights.predictions(stage)]
    stage_state = StageState(
        module=module,
        versions=versions,
        gradients=Gradients([handle.dtype for handle in handles.values()]),
        optimizer=Optimizer(
            handles,
            settings.optimizer,
            scheduler=settings.scheduler,
            replicas=plan.replicas[stage],
            replica_group=replica_group,
            ema=settings.ema,
            counted_elsewhere=[
                list(handles).index(name) for one in shared if stage in one.stages[1:] for name in one.names
            ],
            loss_scale=LossScale(settings.scaling) if settings.scaling is not None else None,
        ),
        saved=SavedTensorHooks() if any(rule.backward_rule == "graph" for rule in moves) else None,
    )
    stage_state.check(programs, stage)
    return stage_state


def remote_forwards_of(
    rank: int,
    program: Program,
    layers: Sequence[tuple[str, nn.Module]],
    handles: Mapping[int, dict[str, nn.Parameter]],
    settings: Settings,
    device: torch.device,
) -> dict[int, RemoteForward]:
    """Returns stage -> guest, for the stages whose forwards a rank runs on weights that live elsewhere.

    Args:
        program, layers, settings, device: as of `local_workers`.
        handles: stage -> its trained parameters; while layers that share one still do.
    """
    found = {}
    for stage, _ in program.placement.remote_forwards(rank):
        mine = layers[program.plan.stages[stage].first : program.plan.stages[stage].last]
        module = StageModule(mine, dict(handles[stage]), device, settings.seed, settings.autocast)
        found[stage] = RemoteForward(
            module, WeightPacket(module, low_precision_weights(mine, handles[stage], settings.autocast))
        )
    return found


def _worker(
    rank: int,
    program: Program,
    evaluation: Program,
    stage_states: dict[int, StageState],
    remote_forwards: dict[int, RemoteForward],
    senders: Mapping[int, Sender],
    receivers: Mapping[int, Receiver],
    result_senders: Mapping[int, Sender],
    result_receivers: Mapping[int, Receiver],
    settings: Settings,
    device: torch.device,
    everyone: Group,
    tied: Sequence[tuple[TiedWeights, Group]] = (),
) -> Worker:
    replicas = program.placement.replicas
    trained = {stage: stage_state.optimizer.named for stage, stage_state in stage_states.items()}
    sums = [
        TiedGradientSum(one, {stage: trained[stage] for stage in one.among(stage_states).stages}, replicas, group)
        for one, group in tied
    ]
    results = Results(rank, program.placement.ranks[-1], result_senders, result_receivers, list(settings.metrics))
    return Worker(
        rank,
        program=program,
        evaluation=evaluation,
        stage_states=stage_states,
        remote_forwards=remote_forwards,
        weight_packets={
            stage: WeightPacket(
                stage_state.module,
                low_precision_weights(stage_state.module.layers, stage_state.module.handles, settings.autocast),
            )
            for stage, stage_state in stage_states.items()
            if program.placement.is_remote(stage)
        },
        senders=dict(senders),
        receivers=dict(receivers),
        results=results,
        scorer=Scorer(settings.loss, settings.metrics, results, settings.policy.on_nan),
        device=device,
        coupling=UpdateBarrier(settings.policy, everyone, stage_states, sums),
    )
