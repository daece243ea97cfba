"""What a model's forward leaves on its modules for the next one."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from pipedream.capture.preserve_state import MODULE_ATTRIBUTES, Attributes, Objects, read_attributes


class CarriedState:
    """What a forward may leave on modules for the next one: attributes, and buffers whose shape changes.

    Buffers of one shape, such as running statistics, are not part of it, nor are generators.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._attributes = Attributes(modules.values())
        self._old = self._read()
        values = (v for m in modules.values() for name, v in m.__dict__.items() if name not in MODULE_ATTRIBUTES)
        self._objects = Objects(values, generators=False)
        self._buffers = [(module._buffers, dict(module._buffers)) for module in modules.values()]

    def list_changed(self) -> list[str]:
        """Returns the paths of attributes and buffers that have changed; what was written in place may be missing."""
        new = self._read()
        return [name for name in new if name not in self._old or self._old[name] != new[name]]

    def restore(self) -> None:
        self._attributes.restore()
        self._objects.restore()
        for buffers, old in self._buffers:
            changed = [n for n, b in old.items() if getattr(b, "shape", n) != getattr(buffers.get(n), "shape", n)]
            buffers |= {name: old[name] for name in changed}

    def _read(self) -> dict[str, Any]:
        buffers = ((p, {n: getattr(b, "shape", None) for n, b in m._buffers.items()}) for p, m in self._modules.items())
        attributes = ((path, read_attributes(module)) for path, module in self._modules.items())
        pairs = [(f"{path}.{name}".lstrip("."), v) for path, row in (*buffers, *attributes) for name, v in row.items()]
        return dict(pairs)
