"""A trial of the user's optimizer: does a gradient of one stage change what another stage's weights become?

Each stage has an optimizer of its own, so an estimate or a norm of all weights would be one of the stage's.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import Parameter

from pipedream.capture.preserve_state import read_python_generators
from pipedream.core.errors import ScheduleError, WorkerError
from pipedream.tensors.collectives import refusing_collectives
from pipedream.tensors.elementwise import steps_each_element

_STEPS = 12  # some estimates change only after a few


def check_steps_apart(
    factory: Callable[[Any], torch.optim.Optimizer],
    stages: Sequence[Mapping[str, Parameter]],
    device: torch.device,
    preserving: Callable[[], AbstractContextManager[None]],
) -> None:
    """Raises a `ScheduleError` if one optimizer for all stages would step otherwise than one for each.

    For each pair of stages there is a run in which one has other gradients and the other has not, and one in which it
    is not there. `preserving` gives all runs the same random numbers, and restores the factory. An optimizer that
    cannot step copies is accepted.
    """
    trained = [stage for stage in stages if stage]
    handles = {name: handle for stage in trained for name, handle in stage.items()}
    sides = [(bit, side) for bit in range((len(trained) - 1).bit_length()) for side in (0, 1)]
    changes = [{name for s, stage in enumerate(trained) for name in stage if s >> b & 1 == side} for b, side in sides]
    reference: dict[str, torch.Tensor] = {}
    if len(trained) > 1:
        _check_options(factory, trained, handles, device, preserving)
    none = set[str]()
    runs = [(none, none), *((names, none) for names in changes), *((none, names) for names in changes)]
    for changed, missing in runs if len(trained) > 1 else ():
        try:
            with preserving(), refusing_collectives("the optimizer"):
                kind, weights = _step_copies(factory, handles, changed, missing, device)
        except WorkerError:
            raise
        except Exception:
            return
        if not weights:
            return
        reference = reference or weights
        for name in [name for name in weights if name not in changed]:
            if not torch.allclose(weights[name], reference[name], rtol=1e-9, atol=1e-12, equal_nan=True):
                what = "weights" if missing else "gradients"
                raise ScheduleError(
                    f"{kind} lets {what} of other stages change the step of {name!r}, but each stage has its own "
                    "optimizer; use one stage (shape='data-parallel'), clip_grad_norm= to clip, or another optimizer"
                )


def _check_options(
    factory: Callable[[Any], Any],
    stages: Sequence[Mapping[str, Parameter]],
    handles: Mapping[str, Parameter],
    device: torch.device,
    preserving: Callable[[], AbstractContextManager[None]],
) -> None:
    """Raises a `ScheduleError` if weights get other options among their stage's than among all, as by their place."""

    def read_options(some: Mapping[str, Parameter]) -> dict[str, str]:
        with preserving():
            copies = _copy_small(some, device)
            names, groups = {id(copy): name for name, copy in copies.items()}, factory([*copies.items()]).param_groups
        options = ({k: v for k, v in group.items() if k not in ("params", "param_names")} for group in groups)
        return {names[id(p)]: repr(row) for group, row in zip(groups, options, strict=True) for p in group["params"]}

    try:
        whole, alone = read_options(handles), [read_options(stage) for stage in stages]
    except Exception:
        return
    for name, options in ((name, options) for stage in alone for name, options in stage.items()):
        if whole.get(name) != options:
            raise ScheduleError(
                f"the optimizer's factory gives {name!r} other options in its stage than among all weights; choose "
                "groups by name or attribute, not by place or number"
            )


def _copy_small(handles: Mapping[str, Parameter], device: torch.device) -> dict[str, Parameter]:
    """Returns a small parameter for each, with its attributes."""
    generator, copies = torch.Generator().manual_seed(0), dict[str, Parameter]()
    for name, handle in handles.items():
        options: Any = {"dtype": torch.promote_types(handle.dtype, torch.float64)}  # estimates may begin at 1e-6
        values = torch.rand([min(size, 2) for size in handle.shape], generator=generator, **options)
        copies[name] = Parameter(values.to(device))
        copies[name].__dict__.update(handle.__dict__)  # by which a factory may make groups
    return copies


def _read_generators(device: torch.device) -> tuple[Any, ...]:
    on_cuda = [torch.cuda.get_rng_state(device).tolist()] if device.type == "cuda" else []
    return torch.get_rng_state().tolist(), *on_cuda, *read_python_generators()


def _step_copies(
    factory: Callable[[Any], Any],
    handles: Mapping[str, Parameter],
    changed: set[str],
    missing: set[str],
    device: torch.device,
) -> tuple[str, dict[str, torch.Tensor]]:
    """Returns the optimizer's class, and small weights after its steps.

    None if it steps each element by itself, or if weights are missing and it draws random numbers for each in turn.
    """
    copies = _copy_small(handles, device)
    directions = {name: torch.randn_like(copy) for name, copy in copies.items()}
    copies = {name: copy for name, copy in copies.items() if name not in missing}
    optimizer, ids = factory(list(copies.items())), {id(copy) for copy in copies.values()}
    before = _read_generators(device)
    if steps_each_element(optimizer) or any(
        id(p) not in ids for group in optimizer.param_groups for p in group["params"]
    ):
        return "", {}
    getattr(optimizer, "train", lambda: None)()
    for step in range(_STEPS):
        for name, copy in copies.items():
            usual, other = (1 + step / 10) * 10.0 ** -(step % 3), (-1) ** step * 100.0 ** (step % 5 - 2)
            copy.grad = directions[name] * (other if name in changed else usual)
        optimizer.step()
    if missing and before != _read_generators(device):
        return "", {}
    return type(optimizer).__name__, {name: copy.detach() for name, copy in copies.items()}
