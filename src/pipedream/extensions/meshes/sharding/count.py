"""Counts the collectives of a mesh: kind, number, bytes and dimension."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipedream.core.model.profile import Collective
from pipedream.tensors.parts import local_part

_DTENSOR, _DIRECT = torch.ops._c10d_functional, torch.ops.c10d

# Those of `_DIRECT` are of weights (`shard_weights`) and their gradients.
_KINDS: Mapping[Any, str] = {
    _DTENSOR.all_reduce.default: "all-reduce",
    _DTENSOR.all_reduce_.default: "all-reduce",
    _DTENSOR.all_gather_into_tensor.default: "all-gather",
    _DTENSOR.reduce_scatter_tensor.default: "reduce-scatter",
    _DTENSOR.all_to_all_single.default: "all-to-all",
    torch.ops._dtensor.shard_dim_alltoall.default: "all-to-all",
    _DIRECT.allreduce_.default: "all-reduce",
    _DIRECT._allgather_base_.default: "all-gather",
    _DIRECT._reduce_scatter_base_.default: "reduce-scatter",
}


class CountCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives of a mesh, whose ranks are `group`, while it is active; also of tensors without data."""

    def __init__(self, mesh: DeviceMesh, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        names = mesh.mesh_dim_names or ()
        self._over: dict[str, str] = {mesh.get_group(at).group_name: name for at, name in enumerate(names)}
        if group is not None:
            self._over.setdefault(group.group_name, "+".join(names))
        self._counted: list[Collective] = []

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """One of each kind and dimension."""
        return Collective.sums(self._counted)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(tensor_type, DTensor) for tensor_type in types):
            return NotImplemented  # its operators on parts come here
        result = func(*args, **(kwargs or {}))
        is_exchange = func is torch.ops.pipedream.exchange.default
        if is_exchange or func in _KINDS:
            leaves = tree_leaves((args, kwargs))
            over = next((name for leaf in leaves if (name := self._over.get(_group_name(leaf)))), None)
            if over is not None:
                sizes = [local_part(leaf).nbytes for leaf in (*leaves, *tree_leaves(result)) if torch.is_tensor(leaf)]
                kind = args[-1] if is_exchange else _KINDS[func]
                self._counted.append(Collective(kind, over, 1, max(sizes), func.namespace == "c10d"))
        return result


_PASS_OF = {
    "repeated forward": "backward",
    "weights' backward": "backward",
    "sums": "update",
    "norm": "update",
    "whole weights": "update",
}


class FirstPasses:
    """Counts the collectives of a first forward, backward and update, of a stage or a layer.

    Attributes:
        counted: part of a pass -> one of each kind and dimension.
    """

    def __init__(self, make_counter: Callable[[], CountCollectives]) -> None:
        self._make_counter = make_counter
        self.counted: dict[str, tuple[Collective, ...]] = {}

    @contextmanager
    def counting(self, what: str) -> Iterator[None]:
        """Context of a part of a pass, "forward", "backward" or a key of `_PASS_OF`, the first of which is counted."""
        if what in self.counted:
            yield
            return
        with self._make_counter() as count:
            yield
        self.counted[what] = count.collectives

    @property
    def collectives(self) -> dict[str, tuple[Collective, ...]]:
        """Forward, backward and update -> one of each kind and dimension; empty until all have run."""
        passes = ("forward", "backward", "update")
        parts = [(_PASS_OF.get(what, what), counted) for what, counted in self.counted.items()]
        if {name for name, _ in parts} != set(passes):
            return {}
        return {name: Collective.sums(row for of, rows in parts if of == name for row in rows) for name in passes}


def _group_name(value: Any) -> str:
    if isinstance(value, dist.ProcessGroup):
        return value.group_name
    if isinstance(value, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(value).group_name
        except RuntimeError:  # the reduction, another script object
            return ""
    return value if isinstance(value, str) else ""
