"""A stage's optimizer in a checkpoint, by parameter names: saved under one plan, restored under any other.

Another partition has other parameter groups: a new group gets the options, and a scheduler's numbers, of the saved
groups that its parameters were in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pipedream.core.checkpoint import ParameterGroup, SavedStage
from pipedream.core.errors import ArtifactError, PipelineError
from pipedream.runtime.data.tensor_json import from_json, to_json
from pipedream.runtime.update.optimizer import Optimizer

_OF_GROUPS = ("base_lrs", "_last_lr", "max_lrs", "min_lrs", "base_momentums", "max_momentums", "lr_lambdas")
"""Attributes of torch's schedulers with one value for each parameter group."""

_MAX_DUE = 100_000
"""Scheduler steps that a stage may have to catch up with; in an intact checkpoint at most the ratio of two replica
counts."""

_NOT_OPTIONS = ("params", "param_names")


def collect_tensors(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Returns ``optimizer/NAME/KEY``, ``compensation/NAME/KEY`` and ``ema/NAME``, without tied weights of others."""
    mine = {name for number, name in enumerate(optimizer.named) if number not in optimizer.counted_elsewhere}
    tensors = {f"ema/{name}": average for name, average in optimizer.ema.items() if name in mine}
    for name, memory in optimizer.compensator.state.items():
        if name in mine:
            tensors |= {f"compensation/{name}/{key}": tensor for key, tensor in memory.items()}
    for name, state in _name_states(optimizer).items():
        if name not in mine:
            continue
        tensors |= {f"optimizer/{name}/{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return tensors


def to_saved_stage(optimizer: Optimizer) -> SavedStage:
    """Returns the state other than tensors. Raises a `PipelineError` if JSON cannot hold it."""
    names = _name_parameters(optimizer)
    kind = type(optimizer.optimizer).__name__
    groups = []
    for group in optimizer.optimizer.param_groups:
        options = {key: _to_plain(value) for key, value in group.items() if key not in _NOT_OPTIONS}
        group_names = tuple(names[id(p)] for p in group["params"] if id(p) in names)
        groups.append(ParameterGroup(group_names, _check_json(options, f"options of {kind}")))
    numbers = {
        name: _check_json({k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}, f"state of {kind}")
        for name, state in _name_states(optimizer).items()
    }
    everything: dict[Any, Any] = optimizer.optimizer.state  # also under keys that are texts
    scheduler = None
    if optimizer.scheduler is not None:
        state = optimizer.scheduler.state_dict()
        scheduler = _check_json(_to_plain(state), f"state of {type(optimizer.scheduler).__name__}")
    return SavedStage(
        tuple(groups),
        {n: s for n, s in numbers.items() if s},
        scheduler,
        optimizer.updates,
        optimizer.scheduled,
        skipped=optimizer.skipped,
        loss_scale=None if optimizer.loss_scale is None else (optimizer.loss_scale.value, optimizer.loss_scale.good),
        rounds_before=optimizer.rounds_before,
        common={
            key: to_json(value, f"the state {key!r} of {kind}")
            for key, value in everything.items()
            if isinstance(key, str)
        },
    )


def restore(
    optimizer: Optimizer, stages: Sequence[SavedStage], tensors: Mapping[str, torch.Tensor], *, stage: int | None
) -> None:
    """Puts a checkpoint's state into a stage's new optimizer and scheduler.

    Args:
        tensors: named as by `collect_tensors`.
        stage: None if plan or method has changed.

    Raises:
        ArtifactError: parameters of one group were saved with different options, or with another scheduler.
    """
    places = {
        name: (s, g) for s, saved in enumerate(stages) for g, group in enumerate(saved.groups) for name in group.names
    }
    inner = optimizer.optimizer
    names = _name_parameters(optimizer)
    whole = inner.state_dict()
    sources: list[tuple[int, int]] = []
    for number, (group, described) in enumerate(zip(inner.param_groups, whole["param_groups"], strict=True)):
        group_names = [names[id(p)] for p in group["params"] if id(p) in names]
        source = _find_source(group_names, places, stages, number)
        sources.append(source)
        options = stages[source[0]].groups[source[1]].options
        described |= {key: _cast_like(group[key], value) for key, value in options.items() if key in group}
        for index, parameter in zip(described["params"], group["params"], strict=True):
            name = names.get(id(parameter))
            if name is not None:
                whole["state"][index] = _collect_state(name, places, stages, tensors)
    # What belongs to a stage: from the same stage, else from the first.
    then = stages[0 if stage is None else stage]
    whole["state"] = {index: state for index, state in whole["state"].items() if state}
    whole["state"] |= {key: from_json(value) for key, value in then.common.items()}
    inner.load_state_dict(whole)
    optimizer.skipped = then.skipped
    if optimizer.loss_scale is not None and optimizer.loss_scale.changes and then.loss_scale is not None:
        optimizer.loss_scale.value, optimizer.loss_scale.good = then.loss_scale
    for name, average in optimizer.ema.items():
        average.copy_(tensors[f"ema/{name}" if f"ema/{name}" in tensors else f"model/{name}"])
    for name in optimizer.compensator.state:
        optimizer.compensator.load(name, _select_beneath(f"compensation/{name}/", tensors))
    _restore_scheduler(optimizer, stages, sources, stage)


def _restore_scheduler(
    optimizer: Optimizer, stages: Sequence[SavedStage], sources: Sequence[tuple[int, int]], stage: int | None
) -> None:
    source = stages[sources[0][0]] if stage is None else stages[stage]
    if (optimizer.scheduler is None) != (source.scheduler is None):
        raise ArtifactError(
            "the checkpoint was saved with"
            f"{'out' if source.scheduler is None else ''} a learning-rate scheduler, this run has "
            f"{'none' if optimizer.scheduler is None else 'one'}; resume with the same optimizer and scheduler"
        )
    if optimizer.scheduler is not None:
        rates = [group["lr"] for group in optimizer.optimizer.param_groups]
        states = [saved.scheduler for saved in stages]
        try:
            state = _remap_groups(source.scheduler, states, sources)
            optimizer.scheduler.load_state_dict(_restore_types(optimizer.scheduler.state_dict(), state))
        except (KeyError, AttributeError, TypeError, IndexError) as error:
            raise ArtifactError(
                f"the checkpoint's scheduler state does not fit {type(optimizer.scheduler).__name__}: {error}; "
                "resume with the same scheduler"
            ) from None
        for group, rate in zip(optimizer.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    if stage is not None:
        optimizer.updates, optimizer.scheduled = source.updates, source.scheduled
        optimizer.rounds_before = source.rounds_before
    due = optimizer.scheduler_steps_due if stage is not None else stages[0].updates - source.scheduled
    if due > _MAX_DUE:
        raise ArtifactError(f"the checkpoint's counts of updates and schedule are {due} apart; it is damaged")
    optimizer.step_scheduler(due)
    if stage is None:
        # Another plan counts its rounds anew. Stage 0 makes one scheduler step per update; the others follow before
        # their next update.
        optimizer.updates = optimizer.scheduled = 0
        optimizer.rounds_before = stages[0].rounds_before + stages[0].updates


def _remap_groups(
    state: Any, states: Sequence[Any], sources: Sequence[tuple[int, int]], path: tuple[Any, ...] = ()
) -> Any:
    """Gives a scheduler's per-group lists the values of the groups' sources."""
    if isinstance(state, dict):
        remapped = {}
        for key, value in state.items():
            here = (*path, key)
            if key in _OF_GROUPS and isinstance(value, list):
                remapped[key] = [_look_up(states[s], here)[g] for s, g in sources]
            else:
                remapped[key] = _remap_groups(value, states, sources, here)
        return remapped
    if isinstance(state, list):
        return [_remap_groups(item, states, sources, (*path, i)) for i, item in enumerate(state)]
    return state


def _restore_types(present: Any, value: Any) -> Any:
    """Restores types that JSON lacks: tuples and integer keys."""
    if isinstance(present, dict) and isinstance(value, dict):
        if any(isinstance(key, int) for key in present):
            value = {int(key): item for key, item in value.items()}
        return type(present)({key: _restore_types(present.get(key), item) for key, item in value.items()})
    if isinstance(present, list) and isinstance(value, list) and len(present) == len(value):
        return [_restore_types(a, b) for a, b in zip(present, value, strict=True)]
    return _cast_like(present, value)


def _look_up(state: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        state = state[step]
    return state


def _find_source(
    names: Sequence[str], places: Mapping[str, tuple[int, int]], stages: Sequence[SavedStage], number: int
) -> tuple[int, int]:
    """The saved (stage, group) whose options a new group gets."""
    sources = list(dict.fromkeys(places[name] for name in names if name in places))
    if not sources:
        return 0, min(number, len(stages[0].groups) - 1)
    options = [stages[s].groups[g].options for s, g in sources]
    if any(other != options[0] for other in options):
        raise ArtifactError(
            f"parameters {', '.join(names[:3])} ... are in one group of the optimizer now, and were in groups with "
            "different options when the checkpoint was saved; make the same groups"
        )
    return sources[0]


def _collect_state(
    name: str,
    places: Mapping[str, tuple[int, int]],
    stages: Sequence[SavedStage],
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    state: dict[str, Any] = _select_beneath(f"optimizer/{name}/", tensors)
    if name in places:
        state |= stages[places[name][0]].numbers.get(name, {})
    return state


def _select_beneath(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}


def _name_parameters(optimizer: Optimizer) -> dict[int, str]:
    return {id(handle): name for name, handle in optimizer.named.items()}


def _name_states(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    names = _name_parameters(optimizer)
    return {names[id(p)]: dict(state) for p, state in optimizer.optimizer.state.items() if id(p) in names}


def _to_plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    return value


def _cast_like(present: Any, value: Any) -> Any:
    if isinstance(present, torch.Tensor):
        return torch.as_tensor(value, dtype=present.dtype, device=present.device)
    if isinstance(present, tuple) and isinstance(value, list):
        return tuple(value)
    return value


def _check_json(value: dict[str, Any], what: str) -> dict[str, Any]:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise PipelineError(
            f"the {what} cannot be kept in a checkpoint: {error}; use numbers, texts, lists and tensors there"
        ) from None
    return value
