"""Fills the stages of a process: each weight and buffer is read from a file, drawn, or sent by rank 0."""

import json
import os
from collections.abc import Collection, Iterable, Sequence
from itertools import product

import torch
import torch.distributed as dist

from pipedream.core.errors import CaptureError, PipelineError
from pipedream.runtime.comm.process_group import broadcast_text, gather_texts, peers_may_end
from pipedream.runtime.session.local_workers import LocalWorkers
from pipedream.runtime.weights.parameters import Slots, named_state
from pipedream.services.weights.files import fit_names, open_weights
from pipedream.services.weights.initial_values import materialise
from pipedream.services.weights.memory import prepare_memory
from pipedream.services.weights.transfer import hash_stages, load

Weights = str | os.PathLike[str] | None


def fill_values(workers_here: LocalWorkers, weights: Weights) -> None:
    """Gives this process's parameters and buffers their values, if there is room: read, drawn, or sent by rank 0.

    Args:
        weights: file or folder, of which each rank reads its own; by default the model's values are taken.

    Raises:
        CaptureError: a parameter or buffer is on the meta device and cannot be initialised, or not in `weights`.
        PlanError: the machine has too little memory for what the plan keeps there.
    """
    prepare_memory(workers_here)
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
    with peers_may_end():
        if connections.leaders is None:  # the worker's first rank receives them, and shares them later
            _allocate(workers_here, to_receive & names.local)
        else:
            _share_values(workers_here, connections.leaders, drawn | loaded)
        _broadcast_tied(workers_here, connections.holders)


def _read_weights(workers_here: LocalWorkers, weights: Weights) -> set[str]:
    """Loads this rank's part of a file. Returns the names of all ranks' parts."""
    if weights is None:
        return set()
    model, names, device = workers_here.model, workers_here.names, workers_here.blueprint.weights_device
    file = open_weights(weights)
    requested = [name for owned in names.by_stage for name in owned] + [name for name in names.unused if name in file]
    state = fit_names(model, file, requested, names.shared, weights)
    load(model, state, names.loaded_from(state), names.shared, device)
    return set(state)


def _allocate(workers_here: LocalWorkers, names: Iterable[str]) -> None:
    """Gives memory, without values, to parameters and buffers on the meta device."""
    state, slots = named_state(workers_here.model), Slots(workers_here.model)
    for tensor in {id(state[name]): state[name] for name in names}.values():
        if tensor.is_meta:
            slots.replace(tensor, torch.empty_like(tensor, device=workers_here.blueprint.weights_device))


def _share_values(workers_here: LocalWorkers, group: dist.ProcessGroup, skip: Collection[str]) -> None:
    """Sends rank 0's parameters and buffers to the ranks of each stage that have others, over gloo.

    An owner may have them on the meta device.

    Args:
        skip: names whose values each owner already has; equal on all ranks.
    """
    blueprint, rank = workers_here.blueprint, workers_here.worker_rank
    state, slots = named_state(workers_here.model), Slots(workers_here.model)
    replaced_ids: set[int] = set()
    shared = [[name for name in owned if name not in skip] for owned in workers_here.names.by_stage]
    hashes = hash_stages(shared, state, group)
    for stage, (owned, owners) in enumerate(zip(shared, blueprint.placement.ranks, strict=True)):
        for owner, name in product(owners, owned):
            if owner == 0 or rank not in (0, owner) or hashes[owner][stage] == hashes[0][stage]:
                continue
            tensor = state[name]
            if rank == 0:
                dist.send(tensor.detach().cpu().contiguous(), group=group, group_dst=owner)
                continue
            received = torch.empty(tensor.shape, dtype=tensor.dtype)
            dist.recv(received, group=group, group_src=0)
            if not tensor.is_meta:
                with torch.no_grad():
                    tensor.copy_(received)
            elif id(tensor) not in replaced_ids:
                slots.replace(tensor, received.to(blueprint.weights_device))
                replaced_ids.add(id(tensor))


def _broadcast_tied(workers_here: LocalWorkers, holders: Sequence[dist.ProcessGroup | None]) -> None:
    """Broadcasts the first holder's values of each of the tied weights, whose holders have these groups."""
    placement, by_name = workers_here.blueprint.placement, dict(workers_here.model.named_parameters())
    for weights, group in zip(workers_here.blueprint.tied, holders, strict=True):
        ranks = weights.ranks(placement)
        if workers_here.worker_rank in ranks:
            for name in weights.names:
                first = ranks.index(placement.ranks[weights.stages[0]][0])
                dist.broadcast(by_name[name].data, group=group, group_src=first)
