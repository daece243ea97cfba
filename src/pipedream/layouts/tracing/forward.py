"""Runs a model's forward for a trace: with other tensors, by simple operators, or to see which layer calls one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode


class Callers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the innermost layer of a model that calls an operator."""

    def __init__(self, model: nn.Module, function: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.innermost: str | None = None
        self._model, self._function = model, function
        self._inside: list[str] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> Callers:
        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._inside.append(name)))
            self._hooks.append(module.register_forward_hook(lambda *_: self._inside.pop() and None))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _read_name(func) == _read_name(self._function) and self.innermost is None and self._inside:
            self.innermost = self._inside[-1]
        return func(*args, **(kwargs or {}))


@contextmanager
def swap_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Context in which a model has other parameters and buffers, also one that does not register its modules."""
    name_of = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    slots = [
        (cast(dict[str, Any], module_slots), key, tensor)
        for module in dict.fromkeys(model.modules())
        for module_slots in (module._parameters, module._buffers)
        for key, tensor in module_slots.items()
        if tensor is not None and name_of.get(id(tensor)) in tensors
    ]
    try:
        for module_slots, key, tensor in slots:
            dict.__setitem__(module_slots, key, tensors[name_of[id(tensor)]])
        yield
    finally:
        for module_slots, key, tensor in slots:
            dict.__setitem__(module_slots, key, tensor)


@contextmanager
def disable_fused_operators() -> Iterator[None]:
    """Context in which attention and recurrent layers call simple operators."""
    mkldnn: Any = torch.backends.mkldnn  # its own context warns where TF32 is not available
    before = mkldnn.set_flags(False, _fp32_precision=None)
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        mkldnn.set_flags(before[0], _fp32_precision=None)


def _read_name(function: Any) -> str:
    """Returns an operator's name, that of its in-place form too."""
    return str(function._schema.name).rstrip("_")


def split_arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and the keyword arguments of a sample."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (sample if isinstance(sample, tuple) else (sample,)), {}
