"""How the worker of a rank is joined to the others: by queues in one process, or by torch.distributed."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from pipedream.core.plan.stage import TiedWeights
from pipedream.runtime.activity import Activity
from pipedream.runtime.blueprint import Blueprint
from pipedream.runtime.comm.channel import Group, LocalChannel, LocalGroup, Receiver, Sender
from pipedream.runtime.comm.connections import Connections, connect_groups
from pipedream.runtime.comm.transport import Transport
from pipedream.runtime.data.source import DataChannels
from pipedream.runtime.division import Division
from pipedream.runtime.stage.part import StagePart
from pipedream.runtime.stage.replicas import CopiedAttributes


@dataclass(frozen=True)
class WorkerChannels:
    """One worker's channel ends by number; for results, by the other rank."""

    senders: dict[int, Sender]
    receivers: dict[int, Receiver]
    result_senders: dict[int, Sender]
    result_receivers: dict[int, Receiver]


@dataclass(frozen=True)
class StageSource:
    """A stage replica as a rank has it.

    Attributes:
        parameters: that are trained, as they are in the layers.
        handles: the same; copies of those that another stage of this rank trains too.
        replica_group: None for a single replica.
        division: how the ranks of its worker divide it; None if no worker has several.
        parts: that the way of joining needs; they come first.
    """

    stage: int
    replica: int
    layers: Sequence[tuple[str, nn.Module]]
    parameters: dict[str, nn.Parameter]
    handles: dict[str, nn.Parameter]
    replica_group: Group | None
    division: Division | None = None
    parts: tuple[StagePart, ...] = ()


@dataclass(frozen=True)
class RankLinks:
    """How the worker of a rank is joined to the others.

    Attributes:
        process: this rank among all ranks of the job.
        sources: of its stages.
        everyone: the group of all workers.
        tied: weights that stages here share with others, each with the group of its holders.
        data: how data travels to ranks that do not read it.
    """

    rank: int
    process: int
    sources: Sequence[StageSource]
    channels: WorkerChannels
    everyone: Group
    tied: Sequence[tuple[TiedWeights, Group]]
    activity: Activity
    data: DataChannels = field(default_factory=DataChannels)


def connect(blueprint: Blueprint) -> Connections:
    """Makes and connects the process groups; every rank calls it."""
    program, placement = blueprint.program, blueprint.placement
    pairs = dict.fromkeys((c.sender, c.receiver) for c in program.channels)
    holder_ranks = [list(weights.ranks(placement)) for weights in blueprint.tied]
    devices = blueprint.device, blueprint.weights_device
    return connect_groups(list(pairs), placement.ranks, holder_ranks, *devices, blueprint.meshes)


def join_in_process(blueprint: Blueprint, parameters: Mapping[int, dict[str, nn.Parameter]]) -> Iterator[RankLinks]:
    """Yields the links of all workers, which are joined by queues in one process.

    Args:
        parameters: stage -> what it trains.
    """
    program, placement, tied = blueprint.program, blueprint.placement, blueprint.tied
    queues = {number: LocalChannel() for number in range(len(program.channels))}
    owners = placement.scorers
    results = {(owner, rank): LocalChannel() for owner in owners for rank in range(placement.workers) if rank != owner}
    everyone = LocalGroup(placement.workers)
    replica_groups = [LocalGroup(count) for count in placement.replicas]
    holders = [(weights, weights.ranks(placement), LocalGroup(len(weights.ranks(placement)))) for weights in tied]
    channels, messages = list(enumerate(program.channels)), program.plan.choices.messages
    changing: list[set[tuple[int, str]]] = [set() for _ in replica_groups]  # attributes that forwards change
    for rank in range(placement.workers):
        sources = []
        for stage, replica in placement.stage_replicas(rank):
            layers, trained = blueprint.stages[stage], parameters[stage]
            if replica:
                layers, trained = _copy_layers(layers, trained, chain.from_iterable(blueprint.stages))
            handles = trained if replica else _copy_tied(trained, stage, tied)
            if placement.replicas[stage] == 1:
                sources.append(StageSource(stage, replica, layers, trained, handles, None))
                continue
            modules = _list_modules(blueprint.stages[stage]), _list_modules(layers)
            parts = (CopiedAttributes(*modules, changing[stage]),)
            member = replica_groups[stage].member(replica)
            sources.append(StageSource(stage, replica, layers, trained, handles, member, parts=parts))
        ends = WorkerChannels(
            {n: messages.wrap_sender(queues[n], c.carries) for n, c in channels if c.sender == rank},
            {n: messages.wrap_receiver(queues[n], c.carries) for n, c in channels if c.receiver == rank},
            {other: channel for (owner, other), channel in results.items() if owner == rank},
            {owner: channel for (owner, other), channel in results.items() if other == rank},
        )
        groups = [(weights, group.member(ranks.index(rank))) for weights, ranks, group in holders if rank in ranks]
        yield RankLinks(rank, rank, sources, ends, everyone.member(rank), groups, Activity())


def join_processes(
    blueprint: Blueprint,
    connections: Connections,
    parameters: Mapping[int, dict[str, nn.Parameter]],
    divisions: Mapping[int, Division],
    activity: Activity,
) -> RankLinks:
    """Returns the links of this process's worker, which torch.distributed joins to the others.

    Args:
        parameters: stage of this rank -> what it trains.
        divisions: stage -> how the ranks of this worker divide it; empty if no worker has several.
    """
    placement, rank = blueprint.placement, connections.worker_number
    tied = [weights.among(parameters) for weights in blueprint.tied]
    transport = Transport(connections, blueprint.programs, blueprint.device)
    sources = []
    for stage, replica in placement.stage_replicas(rank):
        layers, trained, group = blueprint.stages[stage], parameters[stage], connections.stages[stage]
        handles, member = _copy_tied(trained, stage, tied), connections.sum_over(group) if group is not None else None
        sources.append(StageSource(stage, replica, layers, trained, handles, member, divisions.get(stage)))
    holders: list[tuple[TiedWeights, Group]] = [
        (weights, connections.sum_over(group))
        for weights, group in zip(blueprint.tied, connections.holders, strict=True)
        if group is not None and rank in weights.ranks(placement)
    ]
    ends = WorkerChannels(*transport.open_channels(), *transport.open_result_channels())
    everyone = connections.sum_over(connections.everyone)
    data = DataChannels(rank, connections.leaders, *transport.open_data_channels())
    if rank in placement.readers:
        mesh_senders, mesh_receiver = transport.open_mesh_data_channels()
        data = replace(data, mesh_senders=mesh_senders, mesh_receiver=mesh_receiver)
    return RankLinks(rank, connections.process, sources, ends, everyone, holders, activity, data)


def _copy_tied(handles: Mapping[str, nn.Parameter], stage: int, tied: Sequence[TiedWeights]) -> dict[str, nn.Parameter]:
    """Returns a stage's handles, with copies in place of weights that an earlier stage of this process holds."""
    foreign = {name for weights in tied if stage in weights.stages[1:] for name in weights.names}
    return {
        name: nn.Parameter(handle.detach().clone()) if name in foreign else handle for name, handle in handles.items()
    }


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
