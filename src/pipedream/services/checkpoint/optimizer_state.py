"""A stage's optimizer in a checkpoint, by parameter names: saved under one plan, restored under any other.

The state dict of the user's optimizer is saved whatever its form. Its *blocks* have the form of torch.optim,
``{"state": ..., "param_groups": ...}``: the whole dict or, in an optimizer that wraps others, parts of it. Their
indices become parameter names. Another partition has other parameter groups: a new group gets the options, and a
scheduler's numbers, of the saved groups that its parameters were in.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter
from torch.random import fork_rng

from pipedream.core.artifact import copy_json, decode, encode
from pipedream.core.checkpoint import ParameterGroup, SavedStage
from pipedream.core.errors import ArtifactError, PipelineError
from pipedream.runtime.data.rng import from_json, to_json
from pipedream.runtime.update.optimizer import Optimizer, make_optimizer
from pipedream.runtime.update.rate_schedule import RateSchedule
from pipedream.runtime.update.stepped import SteppedWeights

_PER_GROUP = ("base_lrs", "_last_lr", "max_lrs", "min_lrs", "base_momentums", "max_momentums", "lr_lambdas")
"""Attributes of torch's schedulers with one value for each parameter group."""

_MAX_STEPS_DUE = 100_000
"""Most scheduler steps that a stage catches up on; an intact checkpoint needs at most the ratio of two replica counts.
"""

_NOT_OPTIONS = ("params", "param_names")
_TENSOR_AT = "__tensor_at__"


class _Block(NamedTuple):
    """A dict in the form of torch.optim's state dicts.

    Attributes:
        path: keys from the optimizer's state dict to it.
        names: index -> parameter name.
    """

    path: tuple[str | int, ...]
    state: Mapping[Any, Any]
    groups: Sequence[Mapping[str, Any]]
    names: Mapping[int, str]

    @property
    def prefix(self) -> str:
        return "".join(f"{step}." for step in self.path)

    def saved_groups(self, what: str) -> tuple[ParameterGroup, ...]:
        groups = []
        for group in self.groups:
            names = tuple(self.names[index] for index in group["params"] if index in self.names)
            options = {
                key: to_json(value, f"the option {key!r} of {what}")
                for key, value in group.items()
                if key not in _NOT_OPTIONS
            }
            groups.append(ParameterGroup(names, options))
        return tuple(groups)


def collect_tensors(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Returns ``optimizer/NAME/KEY``, ``compensation/NAME/KEY`` and ``ema/NAME``, without weights counted elsewhere.

    Raises:
        PipelineError: the optimizer's state dict cannot be kept in a checkpoint.
    """
    counted_here = optimizer.named.keys() - optimizer.rule.counted_elsewhere
    tensors = {f"ema/{name}": average for name, average in optimizer.ema.items() if name in counted_here}
    for name, memory in optimizer.compensator.state.items():
        if name in counted_here:
            tensors |= {f"compensation/{name}/{key}": tensor for key, tensor in memory.items()}
    tensors_by_name, _ = _split_states(optimizer, _find_blocks(optimizer.optimizer.state_dict(), optimizer))
    for name, state in tensors_by_name.items():
        if name in counted_here:
            tensors |= {f"optimizer/{name}/{key}": tensor for key, tensor in state.items()}
    return tensors


def to_saved_stage(optimizer: Optimizer) -> SavedStage:
    """Returns the state other than tensors. Raises a `PipelineError` if JSON cannot hold it."""
    kind = type(optimizer.optimizer).__name__
    state_dict = optimizer.optimizer.state_dict()
    blocks = _find_blocks(state_dict, optimizer)
    _, numbers = _split_states(optimizer, blocks)
    groups = {block.path: block.saved_groups(kind) for block in blocks}
    common = {
        f"{block.prefix}{key}": to_json(value, f"the state {key!r} of {kind}")
        for block in blocks
        for key, value in block.state.items()
        if key not in block.names and isinstance(key, str)
    }
    scheduler = None
    if optimizer.schedule.scheduler is not None:
        state = _to_plain(optimizer.schedule.scheduler.state_dict())
        scheduler = copy_json(state, f"the state of {type(optimizer.schedule.scheduler).__name__}")
    rest = _drop_blocks(state_dict)
    return SavedStage(
        groups[()] if () in groups else _describe_groups(optimizer).saved_groups(kind),
        {name: state for name, state in numbers.items() if state},
        scheduler,
        optimizer.schedule.updates,
        optimizer.schedule.scheduled,
        skipped=optimizer.skipped,
        loss_scale=optimizer.loss_scale.saved,
        rounds_before=optimizer.schedule.rounds_before,
        since_average=optimizer.reducer.updates,
        common=common,
        nested={block.prefix: groups[block.path] for block in blocks if block.path},
        rest=to_json(rest, f"the state dict of {kind}") if _collect_leaves(rest) else None,
        optimizer_class=kind,
        scheduler_class="" if optimizer.schedule.scheduler is None else type(optimizer.schedule.scheduler).__name__,
    )


def check_after_step(
    optimizer: Optimizer, factory: Callable[[Any], torch.optim.Optimizer], scheduler: Callable[[Any], Any] | None
) -> None:
    """Raises a `PipelineError` if the optimizer's state after a step cannot be saved, or cannot be loaded again.

    Tries it with small parameters; accepts an optimizer that cannot step with these.

    Args:
        factory, scheduler: make the user's optimizer and its scheduler, if any.
    """
    trials = []
    with fork_rng(devices=[]):
        for _ in range(2):
            try:
                small = SteppedWeights({n: _shrink(handle) for n, handle in optimizer.stepped.weights.items()})
                trial = make_optimizer(factory, small)
                schedule = RateSchedule(trial, None if scheduler is None else scheduler(trial))
                trials.append(Optimizer(small, schedule))
            except Exception:
                return
        stepped, fresh = trials
        try:
            stepped.switch_mode("train")
            stepped.optimizer.step()
            stepped.schedule.step_scheduler(1)
            stepped.switch_mode("eval")
        except Exception:
            return
        saved, tensors = to_saved_stage(stepped), collect_tensors(stepped)
        try:
            saved = decode(SavedStage, json.loads(json.dumps(encode(saved))), "the saved state")
            restore(fresh, [saved], {name: tensor.clone() for name, tensor in tensors.items()}, stage=0)
        except Exception as error:
            kind = type(optimizer.optimizer).__name__
            raise PipelineError(
                f"the state of {kind} can be saved, but not loaded again: {type(error).__name__}: {error}; use an "
                "optimizer whose load_state_dict takes what its state_dict gives"
            ) from None


def _shrink(handle: torch.Tensor) -> Parameter:
    size = [min(size, 2) for size in handle.shape]
    small = Parameter(torch.zeros(size, dtype=handle.dtype, device=handle.device), requires_grad=handle.requires_grad)
    if handle.requires_grad:
        small.grad = torch.full_like(small, 0.01)
    return small


def restore(
    optimizer: Optimizer, stages: Sequence[SavedStage], tensors: Mapping[str, torch.Tensor], *, stage: int | None
) -> None:
    """Puts a checkpoint's state into a stage's new optimizer and scheduler.

    Args:
        tensors: named as by `collect_tensors`.
        stage: None if plan or method has changed.

    Raises:
        ArtifactError: the checkpoint has another optimizer or scheduler; parameters of one group were saved with
            different options; or the state dict holds tensors in a form that another plan cannot divide.
    """
    inner, schedule = optimizer.optimizer, optimizer.schedule
    _check_class("optimizer", stages[0].optimizer_class, inner)
    _check_class("scheduler", stages[0].scheduler_class, schedule.scheduler)
    saved_stage = stages[0 if stage is None else stage]
    state_dict = inner.state_dict()
    blocks = _find_blocks(state_dict, optimizer)
    if stage is None:
        _fill_in_common_rest(state_dict, stages, type(inner).__name__)
    elif saved_stage.rest is not None:
        state_dict = from_json(saved_stage.rest)
    own_groups = _describe_groups(optimizer)
    _check_groups(optimizer, own_groups, stages)
    group_options, sources = _restore_groups(own_groups, [saved.groups for saved in stages])
    states = {name: _join_state(name, stages, tensors) for name in optimizer.named}
    common = dict(saved_stage.common)
    for block in sorted(blocks, key=lambda block: -len(block.path)):  # an enclosing block takes the rest
        target = _look_up(state_dict, block.path)
        saved_groups = [saved.nested.get(block.prefix, ()) if block.path else saved.groups for saved in stages]
        target["param_groups"] = _restore_groups(block, saved_groups)[0] if any(saved_groups) else list(block.groups)
        block_states = {index: _pop_prefixed(block.prefix, states[name]) for index, name in block.names.items()}
        target["state"] = {index: state for index, state in block_states.items() if state}
        target["state"] |= {key: from_json(value) for key, value in _pop_prefixed(block.prefix, common).items()}
    if unused := [name for name, state in states.items() if state]:
        raise ArtifactError(
            f"the checkpoint has state of the parameter {unused[0]!r} under {min(states[unused[0]])!r}, which the "
            f"state dict of {type(inner).__name__} does not have; resume with the same optimizer, and the checkpoint's "
            "plan"
        )
    inner.load_state_dict(state_dict)
    if not any(block.path == () for block in blocks):  # the state dict does not have the optimizer's own groups
        for group, options in zip(inner.param_groups, group_options, strict=True):
            group.update({key: value for key, value in options.items() if key not in _NOT_OPTIONS})
    optimizer.skipped = saved_stage.skipped
    optimizer.loss_scale.restore(saved_stage.loss_scale)
    for name, average in optimizer.ema.items():
        average.copy_(tensors[f"ema/{name}" if f"ema/{name}" in tensors else f"model/{name}"])
    for name in optimizer.compensator.state:
        optimizer.compensator.load(name, _pop_prefixed(f"compensation/{name}/", dict(tensors)))
    _restore_scheduler(optimizer, stages, sources, stage)


def _check_class(role: str, saved: str, current: object | None) -> None:
    kind = type(current).__name__
    if saved and current is not None and saved != kind:
        raise ArtifactError(
            f"the checkpoint was saved with the {role} {saved}, this run has {kind}; resume with {saved}, whose "
            "options and state are in the checkpoint, or start a new run from the checkpoint's weights (weights=)"
        )


def _describe_groups(optimizer: Optimizer) -> _Block:
    """Returns the optimizer's own parameter groups as those of a block without state."""
    names = {id(weight): name for name, weight in optimizer.stepped.weights.items()}
    groups, order = [], dict[int, str]()
    index = 0
    for group in optimizer.optimizer.param_groups:
        indices = range(index, index := index + len(group["params"]))
        groups.append({**group, "params": list(indices)})
        order |= {i: names[id(p)] for i, p in zip(indices, group["params"], strict=True) if id(p) in names}
    return _Block((), {}, groups, order)


def _find_blocks(state_dict: Any, optimizer: Optimizer) -> list[_Block]:
    """Returns the blocks of a state dict.

    A block with as many parameters as the optimizer has all of them, in order; any other block has those after the
    previous block's.

    Raises:
        PipelineError: a block has other parameters, or state that belongs to no parameter.
    """
    own_groups = _describe_groups(optimizer)
    count = sum(len(group["params"]) for group in own_groups.groups)
    blocks: list[_Block] = []
    assigned = 0
    for path, value in _walk(state_dict):
        if not _is_block(value):
            continue
        indices = [index for group in value["param_groups"] for index in group["params"]]
        first = 0 if len(indices) == count else assigned
        assigned = first + len(indices)
        if assigned > count:
            raise PipelineError(
                f"the state dict of {type(optimizer.optimizer).__name__} has groups of {assigned} parameters, its "
                f"parameter groups have {count}, so they cannot be named in a checkpoint; let the wrapped optimizers "
                "have the same parameters, in the same order"
            )
        names = {index: own_groups.names[first + i] for i, index in enumerate(indices) if first + i in own_groups.names}
        unknown_keys = [key for key in value["state"] if key not in indices and not isinstance(key, str)]
        if unknown_keys:
            raise PipelineError(
                f"the state dict of {type(optimizer.optimizer).__name__} has state under {unknown_keys[0]!r}, which is "
                "no index of a parameter, so it cannot be kept in a checkpoint; use indices or texts"
            )
        blocks.append(_Block(path, value["state"], value["param_groups"], names))
    return blocks


def _is_block(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list)
        and all(isinstance(group, Mapping) and "params" in group for group in value["param_groups"])
    )


def _walk(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yields each value in a state dict with its path, skipping blocks' state and groups."""
    yield path, value
    for key, item in _list_items(value):
        yield from _walk(item, (*path, key))


def _list_items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        inner = ("state", "param_groups") if _is_block(value) else ()
        return [(key, item) for key, item in value.items() if key not in inner]
    return list(enumerate(value)) if isinstance(value, list) else []


def _drop_blocks(value: Any) -> Any:
    """Returns a state dict without its blocks' state and groups."""
    if isinstance(value, Mapping):
        return {key: _drop_blocks(item) for key, item in _list_items(value)}
    return [_drop_blocks(item) for item in value] if isinstance(value, list) else value


def _collect_leaves(value: Any) -> dict[tuple[str | int, ...], Any]:
    return {path: leaf for path, leaf in _walk(value) if not isinstance(leaf, dict | list)}


def _fill_in_common_rest(state_dict: Any, stages: Sequence[SavedStage], owner: str) -> None:
    """Copies what is equal in all saved stages into a new stage's state dict."""
    rests = [_collect_leaves({} if saved.rest is None else from_json(saved.rest)) for saved in stages]
    is_large = any(isinstance(value, torch.Tensor) and value.numel() > 1 for rest in rests for value in rest.values())
    if is_large or any(rest != rests[0] for rest in rests):
        raise ArtifactError(
            f"the state dict of {owner} holds state of its stage that belongs to no parameter, so it cannot be divided "
            "among other stages; resume with the plan and the method of the checkpoint"
        )
    for path, value in rests[0].items():
        _look_up(state_dict, path[:-1])[path[-1]] = value


def _split_states(
    optimizer: Optimizer, blocks: Sequence[_Block]
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, dict[str, Any]]]:
    """Returns the tensors of each parameter's state, and the rest of it as JSON, by key."""
    what = f"the state of {type(optimizer.optimizer).__name__}"
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for block in blocks:
        for index, name in block.names.items():
            name_tensors, rest = tensors.setdefault(name, {}), numbers.setdefault(name, {})
            for key, value in block.state.get(index, {}).items():
                key_path = f"{block.prefix}{key}"
                if isinstance(value, torch.Tensor):
                    name_tensors[key_path] = value
                else:
                    rest[key_path] = to_json(_take_tensors(value, key_path, name_tensors), f"{what}, {key!r},")
    return tensors, numbers


def _take_tensors(value: Any, key_path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Moves the tensors within a value to `tensors`; returns the value with their keys in their place."""
    if isinstance(value, torch.Tensor):
        tensors[key_path] = value
        return {_TENSOR_AT: key_path}
    if isinstance(value, Mapping):
        return {key: _take_tensors(item, f"{key_path}.{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_take_tensors(item, f"{key_path}.{i}", tensors) for i, item in enumerate(value))
    return value


def _put_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Puts the tensors that `_take_tensors` moved back into a value; removes them from `tensors`."""
    if isinstance(value, Mapping):
        if set(value) == {_TENSOR_AT}:
            return tensors.pop(value[_TENSOR_AT])
        return {key: _put_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_put_tensors(item, tensors) for item in value)
    return value


def _check_groups(optimizer: Optimizer, own_groups: _Block, stages: Sequence[SavedStage]) -> None:
    """Raises an `ArtifactError` if a parameter that was saved in a group is in none of the new optimizer's."""
    saved = {name for stage in stages for group in stage.groups for name in group.names}
    ungrouped = [name for name in optimizer.named if name in saved and name not in own_groups.names.values()]
    if ungrouped and own_groups.names:
        raise ArtifactError(
            f"the checkpoint's {type(optimizer.optimizer).__name__} has the parameter {ungrouped[0]!r} in a group, "
            "this run's has it in none, perhaps because it adds the group later; make all groups when the optimizer is "
            "made"
        )


def _restore_groups(
    block: _Block, saved: Sequence[Sequence[ParameterGroup]]
) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    """Returns the block's groups with saved options, and the (stage, group) from which each has them."""
    places = {name: (s, g) for s, groups in enumerate(saved) for g, group in enumerate(groups) for name in group.names}
    restored, sources = [], []
    for number, group in enumerate(block.groups):
        names = [block.names[index] for index in group["params"] if index in block.names]
        origins = list(dict.fromkeys(places[name] for name in names if name in places))
        if any(saved[s][g].options != saved[origins[0][0]][origins[0][1]].options for s, g in origins):
            raise ArtifactError(
                f"parameters {', '.join(names[:3])} ... are in one group of the optimizer now, and were in groups with "
                "different options when the checkpoint was saved; make the same groups"
            )
        if not origins:
            stage = next(s for s, groups in enumerate(saved) if groups)
            origins = [(stage, min(number, len(saved[stage]) - 1))]
        s, g = origins[0]
        options = {key: _cast_like(group.get(key), from_json(value)) for key, value in saved[s][g].options.items()}
        restored.append({**group, **options})
        sources.append((s, g))
    return restored, sources


def _restore_scheduler(
    optimizer: Optimizer, stages: Sequence[SavedStage], sources: Sequence[tuple[int, int]], stage: int | None
) -> None:
    source, schedule = stages[sources[0][0]] if stage is None else stages[stage], optimizer.schedule
    if (schedule.scheduler is None) != (source.scheduler is None):
        raise ArtifactError(
            "the checkpoint was saved with"
            f"{'out' if source.scheduler is None else ''} a learning-rate scheduler, this run has "
            f"{'none' if schedule.scheduler is None else 'one'}; resume with the same optimizer and scheduler"
        )
    if schedule.scheduler is not None:
        rates = [group["lr"] for group in optimizer.optimizer.param_groups]
        kind = type(schedule.scheduler).__name__
        current = schedule.scheduler.state_dict()
        try:
            state = source.scheduler
            if stage is None or len(source.groups) != len(sources):
                state = _RemappedGroups(stages, sources, kind).remap(current, state)
            schedule.scheduler.load_state_dict(_restore_types(current, state))
        except (KeyError, AttributeError, TypeError, IndexError) as error:
            raise ArtifactError(
                f"the checkpoint's scheduler state does not fit {kind}: {error}; resume with the same scheduler"
            ) from None
        for group, rate in zip(optimizer.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    if stage is not None:
        schedule.updates, schedule.scheduled = source.updates, source.scheduled
        schedule.rounds_before = source.rounds_before
    due = schedule.steps_due if stage is not None else stages[0].updates - source.scheduled
    if due > _MAX_STEPS_DUE:
        raise ArtifactError(f"the checkpoint's counts of updates and schedule are {due} apart; it is damaged")
    schedule.step_scheduler(due)
    if stage is None:
        # Another plan counts its rounds from 0. Stage 0 makes one scheduler step per update; the other stages catch up
        # before their next update.
        schedule.updates = schedule.scheduled = 0
        schedule.rounds_before = stages[0].rounds_before + stages[0].updates


class _RemappedGroups(NamedTuple):
    """Remaps a scheduler's lists of one value per parameter group to the groups of a new plan.

    Such a list has as many entries as its stage has groups, in every stage, saved or new. Other lists, such as
    milestones, must be equal in all stages.
    """

    stages: Sequence[SavedStage]
    sources: Sequence[tuple[int, int]]
    kind: str

    def remap(self, current: Any, state: Any, path: tuple[Any, ...] = ()) -> Any:
        """Raises ArtifactError for lists that differ between stages and cannot be divided."""
        if isinstance(state, dict):
            items = current if isinstance(current, dict) else {}
            return {key: self.remap(items.get(key), value, (*path, key)) for key, value in state.items()}
        if not isinstance(state, list):
            return state
        lists = [_look_up(saved.scheduler, path) for saved in self.stages]
        counts = [len(saved.groups) for saved in self.stages]
        size = len(current) if isinstance(current, list | tuple) else -1
        are_equal, has_dicts = all(values == lists[0] for values in lists), any(isinstance(v, dict) for v in state)
        fits = not has_dicts and size == len(self.sources) and list(map(len, lists)) == counts
        if path[-1] in _PER_GROUP or (fits and not (are_equal and size == len(state))):
            return [lists[s][g] for s, g in self.sources]
        if not are_equal and not has_dicts:
            raise ArtifactError(
                f"the checkpoint's {self.kind} has a different list {path[-1]!r} in each stage, and its entries are "
                "not those of parameter groups, so other stages cannot use it; resume with the checkpoint's plan"
            )
        inner = current if size == len(state) else [None] * len(state)
        return [self.remap(old, item, (*path, i)) for i, (old, item) in enumerate(zip(inner, state, strict=True))]


def _restore_types(current: Any, value: Any) -> Any:
    """Restores types that JSON lacks: tuples and integer keys."""
    if isinstance(current, dict) and isinstance(value, dict):
        if any(isinstance(key, int) for key in current):
            value = {int(key): item for key, item in value.items()}
        return type(current)({key: _restore_types(current.get(key), item) for key, item in value.items()})
    if isinstance(current, list) and isinstance(value, list) and len(current) == len(value):
        return [_restore_types(a, b) for a, b in zip(current, value, strict=True)]
    return _cast_like(current, value)


def _look_up(state: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        state = state[step]
    return state


def _join_state(name: str, stages: Sequence[SavedStage], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Returns a parameter's state in all blocks."""
    name_tensors = _pop_prefixed(f"optimizer/{name}/", dict(tensors))
    numbers = next((saved.numbers[name] for saved in stages if name in saved.numbers), {})
    return {key: _put_tensors(from_json(value), name_tensors) for key, value in numbers.items()} | name_tensors


def _pop_prefixed(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(prefix): state.pop(key) for key in list(state) if key.startswith(prefix)}


def _to_plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    return value


def _cast_like(current: Any, value: Any) -> Any:
    if isinstance(current, torch.Tensor):
        return torch.as_tensor(value, dtype=current.dtype, device=current.device)
    if isinstance(current, tuple) and isinstance(value, list):
        return tuple(value)
    return value
