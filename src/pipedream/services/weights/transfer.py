"""Copies values into this process's parameters and buffers, and collects those of all ranks."""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import nn

from pipedream.core.errors import CaptureError
from pipedream.runtime.comm.process_group import gather_json
from pipedream.runtime.session.local_workers import LocalWorkers
from pipedream.runtime.weights.parameters import Slots, named_state, saved_names


def list_tensors(workers_here: LocalWorkers) -> dict[str, torch.Tensor]:
    """Returns the parameters and buffers of this process's stages, by name."""
    return {name: t for name, t in named_state(workers_here.model).items() if name in workers_here.names.local}


def hash_stages(
    names_by_stage: Sequence[Sequence[str]], values: Mapping[str, torch.Tensor], group: dist.ProcessGroup
) -> list[list[str]]:
    """Returns for each rank of a group a hash of each stage's values there; '' where it has not all of them.

    What two ranks have alike need not be sent, which takes long over a slow link.
    """
    return gather_json([_hash(names, values) for names in names_by_stage], group)


def _hash(names: Sequence[str], values: Mapping[str, torch.Tensor]) -> str:
    digest = blake2b(digest_size=16)
    for name in names:
        if name not in values or values[name].is_meta:
            return ""
        value = values[name].detach().cpu()
        digest.update(f"{name} {value.dtype} {[*value.shape]}".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def collect_tensors(
    workers_here: LocalWorkers,
    local_tensors: Mapping[str, torch.Tensor],
    to: int = 0,
    dropped: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Returns the whole tensors of all stages on the CPU of the first rank of worker `to`; every rank calls it.

    Each is taken from replica 0 of its stage, a tensor of several stages from the first. Elsewhere the dict is empty.

    Args:
        dropped: values of other stages that worker `to` has kept; a stage whose values are still these is not sent.
    """
    group = None if workers_here.connections is None else workers_here.connections.leaders
    is_first = not workers_here.distributed or group is not None
    if workers_here.shardings:
        local_tensors = _gather(workers_here, local_tensors, keep=is_first)
    if not is_first:
        return {}
    shapes, rank = named_state(workers_here.model), workers_here.worker_rank
    collected: dict[str, torch.Tensor] = {}
    done: set[str] = set()
    by_stage, ranks = workers_here.names.by_stage, workers_here.program.placement.ranks
    values, is_known = local_tensors, [False] * len(by_stage)
    if dropped is not None and group is not None:
        values = {**dropped, **local_tensors}
        hashes = hash_stages(by_stage, values, group)
        is_known = [hashes[owner][stage] == hashes[to][stage] for stage, (owner, *_) in enumerate(ranks)]
    for stage, (owned, (owner, *_)) in enumerate(zip(by_stage, ranks, strict=True)):
        for name in owned:
            if name in done:
                continue
            done.add(name)
            if group is None or (rank == to and (owner == to or is_known[stage])):
                collected[name] = values[name].detach().cpu().clone()
            elif is_known[stage]:
                continue
            elif rank == to:
                received = torch.empty(shapes[name].shape, dtype=shapes[name].dtype)
                dist.recv(received, group=group, group_src=owner)
                collected[name] = received
            elif rank == owner:
                dist.send(local_tensors[name].detach().cpu().contiguous(), group=group, group_dst=to)
    return collected if rank == to else {}


def _gather(workers_here: LocalWorkers, parts: Mapping[str, torch.Tensor], *, keep: bool) -> dict[str, torch.Tensor]:
    """Returns tensors joined from the parts of this worker's ranks, on the CPU; an empty dict without `keep`.

    Only one is whole on the device at a time, because a stage may fit only sharded.
    """
    gathered: dict[str, torch.Tensor] = {}
    for name, tensor in parts.items():
        for sharding in workers_here.shardings.values():
            tensor = sharding.gather(workers_here.names.shared.get(name, (name,)), tensor)
        if keep:
            gathered[name] = tensor.cpu()
    return gathered


def load(
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
    names: Iterable[str],
    shared: Mapping[str, Sequence[str]],
    device: torch.device,
) -> None:
    """Copies values into this rank's parameters and buffers, which may be on the meta device.

    Args:
        state: may lack all but one of the names of a shared parameter.
        shared: `find_shared_names` of the whole model.

    Raises:
        CaptureError: a name is missing or a shape differs.
    """
    tensors, slots, saved = named_state(model), Slots(model), saved_names(model)
    names_to_load, loaded_ids = set(names), set[int]()
    for name, tensor in tensors.items():
        if name not in names_to_load:
            continue
        aliases = (name, *shared.get(name, ()))
        source = next((n for n in (*aliases, *(saved.get(alias) for alias in aliases)) if n in state), None)
        if source is None:
            if name not in saved:
                continue  # a buffer that is not part of state dicts
            other = min(state, default="nothing")
            raise CaptureError(f"the state dict lacks {name!r}, but has {other!r}; give one as from model.state_dict()")
        if source != name and id(tensor) in loaded_ids:
            continue
        value = state[source]
        if value.shape != tensor.shape:
            raise CaptureError(
                f"{name!r} has shape {tuple(value.shape)} in the state dict, {tuple(tensor.shape)} in the model; give "
                "one of this model"
            )
        if value.is_complex() and not tensor.is_complex():
            raise CaptureError(f"{name!r} is complex in the state dict, not in the model; give one of this model")
        loaded_ids.add(id(tensor))
        if tensor.is_meta:
            slots.replace(tensor, value.to(device, copy=True))
        else:
            with torch.no_grad():
                tensor.copy_(value)
