"""A stage's optimizer in a checkpoint, by parameter names: saved under one plan, restored under any other.

Another cut has other parameter groups: a new group gets the options, and a scheduler's numbers, of the saved groups
that its parameters were in.
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


def tensors_of(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Returns ``optimizer/NAME/KEY``, ``compensation/NAME/KEY`` and ``ema/NAME``, without tied weights of others."""
    mine = {name for number, name in enumerate(optimizer.named) if number not in optimizer.counted_elsewhere}
    found = {f"ema/{name}": average for name, average in optimizer.ema.items() if name in mine}
    for name, held in optimizer.compensator.state.items():
        if name in mine:
            found |= {f"compensation/{name}/{key}": tensor for key, tensor in held.items()}
    for name, state in _states(optimizer).items():
        if name not in mine:
            continue
        found |= {f"optimizer/{name}/{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return found


def to_saved_stage(optimizer: Optimizer) -> SavedStage:
    """Returns the state other than tensors. Raises a `PipelineError` if JSON cannot hold it."""
    names = _names(optimizer)
    kind = type(optimizer.optimizer).__name__
    groups = []
    for group in optimizer.optimizer.param_groups:
        options = {key: _plain(value) for key, value in group.items() if key not in _NOT_OPTIONS}
        held = tuple(names[id(p)] for p in group["params"] if id(p) in names)
        groups.append(ParameterGroup(held, _checked(options, f"options of {kind}")))
    numbers = {
        name: _checked({k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}, f"state of {kind}")
        for name, state in _states(optimizer).items()
    }
    everything: dict[Any, Any] = optimizer.optimizer.state  # also under keys that are texts
    scheduler = None
    if optimizer.scheduler is not None:
        state = optimizer.scheduler.state_dict()
        scheduler = _checked(_plain(state), f"state of {type(optimizer.scheduler).__name__}")
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
        tensors: named as by `tensors_of`.
        stage: None if plan or method has changed.

    Raises:
        ArtifactError: parameters of one group were saved with different options, or with another scheduler.
    """
    places = {
        name: (s, g) for s, held in enumerate(stages) for g, group in enumerate(held.groups) for name in group.names
    }
    inner = optimizer.optimizer
    names = _names(optimizer)
    whole = inner.state_dict()
    sources: list[tuple[int, int]] = []
    for number, (group, described) in enumerate(zip(inner.param_groups, whole["param_groups"], strict=True)):
        held = [names[id(p)] for p in group["params"] if id(p) in names]
        source = _source(held, places, stages, number)
        sources.append(source)
        options = stages[source[0]].groups[source[1]].options
        described |= {key: _like(group[key], value) for key, value in options.items() if key in group}
        for index, parameter in zip(described["params"], group["params"], strict=True):
            name = names.get(id(parameter))
            if name is not None:
                whole["state"][index] = _state_of(name, places, stages, tensors)
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
        optimizer.compensator.load(name, _beneath(f"compensation/{name}/", tensors))
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
        states = [held.scheduler for held in stages]
        try:
            state = _remapped(source.scheduler, states, sources)
            optimizer.scheduler.load_state_dict(_shaped(optimizer.scheduler.state_dict(), state))
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


def _remapped(state: Any, states: Sequence[Any], sources: Sequence[tuple[int, int]], path: tuple[Any, ...] = ()) -> Any:
    """Gives a scheduler's per-group lists the values of the groups' sources."""
    if isinstance(state, dict):
        found = {}
        for key, value in state.items():
            here = (*path, key)
            if key in _OF_GROUPS and isinstance(value, list):
                found[key] = [_at(states[s], here)[g] for s, g in sources]
            else:
                found[key] = _remapped(value, states, sources, here)
        return found
    if isinstance(state, list):
        return [_remapped(item, states, sources, (*path, i)) for i, item in enumerate(state)]
    return state


def _shaped(present: Any, value: Any) -> Any:
    """Restores types that JSON lacks: tuples and integer keys."""
    if isinstance(present, dict) and isinstance(value, dict):
        if any(isinstance(key, int) for key in present):
            value = {int(key): item for key, item in value.items()}
        return type(present)({key: _shaped(present.get(key), item) for key, item in value.items()})
    if isinstance(present, list) and isinstance(value, list) and len(present) == len(value):
        return [_shaped(a, b) for a, b in zip(present, value, strict=True)]
    return _like(present, value)


def _at(state: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        state = state[step]
    return state


def _source(
    held: Sequence[str], places: Mapping[str, tuple[int, int]], stages: Sequence[SavedStage], number: int
) -> tuple[int, int]:
    """The saved (stage, group) whose options a new group gets."""
    found = list(dict.fromkeys(places[name] for name in held if name in places))
    if not found:
        return 0, min(number, len(stages[0].groups) - 1)
    options = [stages[s].groups[g].options for s, g in found]
    if any(other != options[0] for other in options):
        raise ArtifactError(
            f"parameters {', '.join(held[:3])} ... are in one group of the optimizer now, and were in groups with "
            "different options when the checkpoint was saved; make the same groups"
        )
    return found[0]


def _state_of(
    name: str,
    places: Mapping[str, tuple[int, int]],
    stages: Sequence[SavedStage],
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    state: dict[str, Any] = _beneath(f"optimizer/{name}/", tensors)
    if name in places:
        state |= stages[places[name][0]].numbers.get(name, {})
    return state


def _beneath(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}


def _names(optimizer: Optimizer) -> dict[int, str]:
    return {id(handle): name for name, handle in optimizer.named.items()}


def _states(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    names = _names(optimizer)
    return {names[id(p)]: dict(state) for p, state in optimizer.optimizer.state.items() if id(p) in names}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _like(present: Any, value: Any) -> Any:
    if isinstance(present, torch.Tensor):
        return torch.as_tensor(value, dtype=present.dtype, device=present.device)
    if isinstance(present, tuple) and isinstance(value, list):
        return tuple(value)
    return value


def _checked(value: dict[str, Any], what: str) -> dict[str, Any]:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise PipelineError(
            f"the {what} cannot be kept in a checkpoint: {error}; use numbers, texts, lists and tensors there"
        ) from None
    return value
