"""Initial values of a stage whose model was built on the meta device.

A module is initialised as on the CPU: by the model's ``_init_weights(module)`` (Hugging Face) or its own
``reset_parameters()``, then by those of the enclosing modules, which may overwrite it (GPT-2 scales the projections of
a block). Meanwhile all other tensors are on the meta device, where initialisation draws nothing, and the generator is
seeded from (seed, module name). So the values do not depend on partition, device or other parameters.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipedream.core.errors import CaptureError
from pipedream.core.seeds import layer_seed
from pipedream.runtime.weights.parameters import Slots, list_slots, make_like, named_state

_REMEDY = "build the model on the CPU, or start from a file of weights (weights=...)"


def materialise(model: nn.Module, names: Iterable[str], device: torch.device, seed: int) -> None:
    """Moves parameters and buffers to a device; those on the meta device get storage and initial values.

    A parameter that modules share gets the values of the first of them, in the model's order.

    Raises a `CaptureError` if something remains without values.
    """
    state = named_state(model)
    names_by_id: dict[int, str] = {}
    for name in names:
        if name not in state:
            raise CaptureError(
                f"the plan lists {name!r}, but the {type(model).__name__} has no parameter or buffer of that name; "
                "plan again from a profile of this model"
            )
        names_by_id[id(state[name])] = name
    slots = Slots(model)
    names_to_fill: dict[int, str] = {}
    for number, name in names_by_id.items():
        tensor = state[name]
        if tensor.is_meta:
            names_to_fill[number] = name
        elif isinstance(tensor, nn.Parameter):
            tensor.data = tensor.data.to(device)
        elif tensor.device != device:
            slots.replace(tensor, tensor.to(device))
    if not names_to_fill:
        return
    _check_attributes(model)
    holders: dict[str, list[tuple[str, int]]] = {}
    for path, module in model.named_modules():
        for module_slots in list_slots(module):
            for slot, tensor in module_slots.items():
                if tensor is not None and id(tensor) in names_to_fill:
                    del names_to_fill[id(tensor)]
                    holders.setdefault(path, []).append((slot, id(tensor)))
    values_by_id: dict[int, torch.Tensor] = {}
    with torch.random.fork_rng(devices=[]), _restore_slots(model.modules()) as tensors:
        for old_slots, slot, tensor in tensors:
            old_slots[slot] = make_like(tensor, torch.empty_like(tensor, device="meta").detach())
        with torch.no_grad(), torch.device("cpu"):
            for path, module_tensors in holders.items():
                values = _initialise_module(model, path, [slot for slot, _ in module_tensors], seed)
                values_by_id |= {number: values[slot].detach().to(device) for slot, number in module_tensors}
    for number, initial_values in values_by_id.items():
        slots.replace(state[names_by_id[number]], initial_values)


def _check_attributes(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise CaptureError(
                    f"{_join_name(path, name)} of {type(module).__name__} is a tensor on the meta device, but neither "
                    f"a parameter nor a buffer, so that nothing fills it; register it as a buffer, or {_REMEDY}"
                )


@contextmanager
def _restore_slots(modules: Iterable[nn.Module]) -> Iterator[list[tuple[dict[str, Any], str, torch.Tensor]]]:
    """Yields the modules' own parameters and buffers with their slots, and puts them back at the end."""
    originals = [(slots, dict(slots)) for module in modules for slots in list_slots(module)]
    try:
        yield [(slots, name, tensor) for slots, row in originals for name, tensor in row.items() if tensor is not None]
    finally:
        for slots, row in originals:
            slots.clear()
            slots.update(row)


def _initialise_module(
    model: nn.Module, path: str, slots_to_fill: Collection[str], seed: int
) -> dict[str, torch.Tensor]:
    """Returns initial values of a module's own parameters and buffers, by slot."""
    parts = path.split(".") if path else []
    chain = [model.get_submodule(".".join(parts[:count])) for count in range(len(parts), -1, -1)]
    module = chain[0]
    name = path or type(module).__name__
    has_model_rule = _find_rule(chain) is not None
    unfilled: list[str] = []
    values: dict[str, torch.Tensor] = {}
    # If the model's rule alone leaves something unfilled, the module's own rule runs before it, as in its constructor.
    for own_rule in [False, True] if has_model_rule else [True]:
        with _give_storage(module) as versions:
            torch.default_generator.manual_seed(layer_seed(seed, 0, name))
            for i, outer in enumerate(chain):
                reset = _find_method(outer, "reset_parameters") or _find_method(outer, "_reset_parameters")
                rule = _find_rule(chain[i:])
                try:
                    if reset is not None and (i > 0 or own_rule):
                        reset()
                    if rule is not None:
                        rule(outer)
                except Exception as error:
                    where = f"{name!r} is on the meta device, and its initialisation"
                    where += f" by {type(outer).__name__}" if i else ""
                    raise CaptureError(f"{where} raised {type(error).__name__}: {error}; {_REMEDY}") from error
            values = {slot: t for slots in list_slots(module) for slot, t in slots.items() if t is not None}
        unfilled = [slot for slot in slots_to_fill if not _is_filled(values[slot], versions.get(id(values[slot])))]
        if not unfilled:
            return values
    kind = "parameter" if unfilled[0] in module._parameters else "buffer"
    model_rule_text = " nor by the model's _init_weights()" if has_model_rule else ""
    raise CaptureError(
        f"the {kind} {_join_name(path, unfilled[0])!r} is on the meta device and is not filled by reset_parameters() "
        f"of {type(module).__name__}{model_rule_text}; fill it there, or {_REMEDY}"
    )


def _join_name(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@contextmanager
def _give_storage(module: nn.Module) -> Iterator[dict[int, int]]:
    """Temporarily gives a module's own parameters and buffers storage; yields id -> count of writes."""
    with _restore_slots([module]) as tensors:
        versions = {}
        for slots, slot, tensor in tensors:
            new = make_like(tensor, torch.full_like(tensor, _choose_unfilled(tensor.dtype), device="cpu"))
            slots[slot] = new
            versions[id(new)] = new._version
        yield versions


def _choose_unfilled(dtype: torch.dtype) -> float | int:
    """Returns a value that no initialisation would write, if the dtype has one."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _is_filled(tensor: torch.Tensor, version: int | None) -> bool:
    if tensor.is_meta:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return not bool(tensor.isnan().any())
    if tensor.dtype in (torch.bool, torch.uint8, torch.int8):  # any value may be meant
        return version is None or tensor._version > version or not tensor.numel()
    return not bool((tensor == _choose_unfilled(tensor.dtype)).any())


def _find_rule(chain: Sequence[nn.Module]) -> Callable[[nn.Module], object] | None:
    """Returns the first ``_init_weights`` that takes a module, from the innermost module outward."""
    return next(
        (rule for module in chain if (rule := _find_method(module, "_init_weights", chain[0])) is not None), None
    )


def _find_method(module: nn.Module, name: str, *arguments: Any) -> Callable[..., object] | None:
    method = getattr(module, name, None)
    if not callable(method):
        return None
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        return None
    return method  # type: ignore[no-any-return]
