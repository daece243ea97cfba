"""The weights of all stages as the model's own state dict; every rank calls these functions, at a drain."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pipedream.core.errors import CaptureError
from pipedream.runtime.comm.process_group import gather_json
from pipedream.runtime.session.local_workers import LocalWorkers
from pipedream.runtime.stage_state import StageState
from pipedream.runtime.weights.parameters import named_state
from pipedream.runtime.worker import Worker
from pipedream.services.weights.extra_states import collect_extra_states, find_modules_by_key, key_extra_states
from pipedream.services.weights.transfer import collect_tensors, list_tensors, load


def collect_state_dict(
    workers_here: LocalWorkers, ema: bool = False, predicted: bool = True
) -> dict[str, torch.Tensor]:
    """Returns the whole model's state dict, under the user's names, at rank 0; elsewhere an empty one."""
    with workers_here.activity.at("collecting the weights"):
        state, local_tensors = named_state(workers_here.model), list_tensors(workers_here)
        if ema or not predicted:
            optimizers = [stage_state.optimizer for _, stage_state in workers_here.stage_states]
            replacements = {
                name: tensor
                for optimizer in optimizers
                for name, tensor in (optimizer.ema if ema else optimizer.unpredicted()).items()
            }
            # A shared weight is trained under one name; all its names get the replacement.
            by_id = {id(tensor): replacements[name] for name, tensor in state.items() if name in replacements}
            local_tensors = {name: by_id.get(id(tensor), tensor) for name, tensor in local_tensors.items()}
        state_dict: dict[str, Any] = collect_tensors(workers_here, local_tensors)
        state_dict |= {name: state[name].detach().cpu().clone() for name in workers_here.names.unused}
        for row in gather_json(collect_extra_states(workers_here), workers_here.group):
            for states in row.values() if workers_here.rank == 0 else ():
                state_dict |= key_extra_states(states)
        if workers_here.rank:
            return {}
        names_by_id = {id(tensor): name for name, tensor in state.items()}  # a hook may have changed names
        saved = workers_here.model.state_dict(keep_vars=True)
        saved_names = {name: names_by_id.get(id(value), name) for name, value in saved.items()}
        # A stage has a tied weight only under the names of those modules that it calls.
        aliases = {
            name: (name, *workers_here.names.shared.get(saved_name, (saved_name,)))
            for name, saved_name in saved_names.items()
        }
        sources = {name: next((alias for alias in names if alias in state_dict), "") for name, names in aliases.items()}
        return {name: state_dict[source] for name, source in sources.items() if source}


def save_pretrained(workers_here: LocalWorkers, folder: Path, ema: bool, predicted: bool) -> None:
    """Writes the whole model in its own format, at rank 0."""
    write = getattr(workers_here.model, "save_pretrained", None)
    if write is None:
        raise CaptureError(
            f"{type(workers_here.model).__name__} has no save_pretrained; take the weights from state_dict(), and save "
            "them with torch.save"
        )
    state = collect_state_dict(workers_here, ema, predicted)
    if workers_here.rank == 0:
        first = {name: names[0] for name, names in workers_here.names.shared.items()}
        write(folder, state_dict={name: state.get(first.get(name, name), tensor) for name, tensor in state.items()})


def load_state_dict(workers_here: LocalWorkers, state: Mapping[str, torch.Tensor]) -> None:
    """Loads this process's part of the whole state."""
    names, loaded = workers_here.names.shared, workers_here.names.loaded_from(state)
    for sharding in workers_here.shardings.values():
        tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
        sharding.check_shapes({name: tensor.shape for name, tensor in tensors.items()})
        state = {**state, **{n: sharding.take_part(names.get(n, (n,)), tensor) for n, tensor in tensors.items()}}
    load(workers_here.model, state, loaded, names, workers_here.blueprint.weights_device)
    for key, module in find_modules_by_key(workers_here.model).items():
        if key in state:
            module.set_extra_state(state[key])
    share_with_replicas(workers_here.workers)
    for _, stage_state in workers_here.stage_states:
        stage_state.versions.reload()
        stage_state.optimizer.reducer.adopt()
        for name, average in stage_state.optimizer.ema.items():
            average.copy_(stage_state.versions.handles[name].detach())


def share_with_replicas(workers: Sequence[Worker]) -> None:
    """Copies a stage's weights to its other replicas in this process, and tied weights to the trained copies."""
    ranks, by_rank = workers[0].program.placement.ranks, {worker.rank: worker for worker in workers}
    for worker in workers:
        for stage, stage_state in worker.stage_states.items():
            first_worker = by_rank.get(ranks[stage][0])
            source = stage_state if first_worker is None else first_worker.stage_states[stage]
            if source is not stage_state:
                with torch.no_grad():
                    for tensor, first in zip(_list_tensors(stage_state), _list_tensors(source), strict=True):
                        tensor.copy_(first)
            for name in list_copies(stage_state):
                stage_state.versions.handles[name].data.copy_(stage_state.module.handles[name].detach())


def list_copies(stage_state: StageState) -> list[str]:
    """Returns the names of weights that are copies because another stage trains the user's own."""
    return [
        name for name, handle in stage_state.versions.handles.items() if handle is not stage_state.module.handles[name]
    ]


def _list_tensors(stage_state: StageState) -> list[torch.Tensor]:
    return [t for _, layer in stage_state.module.layers for t in (*layer.parameters(), *layer.buffers())]
