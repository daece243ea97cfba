"""What a model's forward leaves on its modules for the next one."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pipedream.capture.preserve_state import (
    GENERATORS,
    Attributes,
    Objects,
    copy_back,
    list_values,
    mark,
    read_attributes,
)


class CarriedState:
    """What a forward may leave on modules for the next one: attributes, and buffers.

    What normalisations of torch keep, statistics and vectors of `spectral_norm`, is not part of it, nor are generators.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._attributes = Attributes(modules.values())
        self._old = self._read()
        every = modules.values()
        self._objects = Objects(list_values(every), every, lambda value: isinstance(value, GENERATORS))
        pairs = [(module._buffers, _list_buffers(module)) for module in modules.values()]
        copies = [{n: b.detach().clone() for n, b in old.items() if b is not None} for _, old in pairs]
        self._buffers = [(*pair, copy) for pair, copy in zip(pairs, copies, strict=True)]

    def list_changed(self) -> list[str]:
        """Returns the paths of attributes and buffers that have changed; what was written in place may be missing."""
        new = self._read()
        return [name for name in new if name not in self._old or self._old[name] != new[name]]

    def restore(self) -> None:
        self._attributes.restore()
        self._objects.restore()
        for buffers, old, copies in self._buffers:
            buffers.update(old)
            for name, copy in copies.items():
                if (buffer := old[name]) is not None:
                    copy_back(buffer, copy)

    def _read(self) -> dict[str, Any]:
        buffers = ((path, {n: mark(b) for n, b in _list_buffers(m).items()}) for path, m in self._modules.items())
        attributes = ((path, read_attributes(module)) for path, module in self._modules.items())
        pairs = [(f"{path}.{name}".lstrip("."), v) for path, row in (*buffers, *attributes) for name, v in row.items()]
        return dict(pairs)


def _list_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns a module's buffers, without those of torch's own modules and hooks."""
    names = [hook.name for hook in module._forward_pre_hooks.values() if hasattr(hook, "name")]
    of_hooks = {f"{name}_{end}" for name in names for end in "uv"}
    if type(module).__module__.startswith("torch.nn."):
        return {}
    return {name: buffer for name, buffer in module._buffers.items() if name not in of_hooks}
