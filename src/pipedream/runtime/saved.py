"""What a forward saves of its weights, checked once: the backward rule 'graph' rests on it.

An old graph sees new weights where autograd has saved the weights' own storage, which the optimizer writes. Where it
has saved something that was computed from a weight alone (a cast under autocast, weight_norm, a mask on the weight, the
buffer in which cuDNN flattens a recurrent layer's), the graph would go on with the old one, silently, and what a
backward gives would be a mixture. So the first forward is watched, operation by operation: what comes of weights and
constants alone, and is no view of a weight, must not be saved. What comes of activations is an activation, and stays
as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..core.errors import ScheduleError
from .batches import flatten
from .versions import Versions

__all__ = ["Saved"]

_PACKING = {"aten::_cudnn_rnn": -1}
"""Operations that copy their weights inside, by their name, and which output is the copy."""


class Saved:
    """The check of one stage. Life: the first forward through `watching` is checked, further ones are not.

    Args:
        versions: of the stage's weights.
    """

    def __init__(self, versions: Versions) -> None:
        self._versions: Versions | None = versions

    @contextmanager
    def watching(self, value: Any) -> Iterator[None]:
        """Watches the layers run on a value, if they are the first.

        Raises:
            ScheduleError: autograd has saved what was computed from weights alone; names the parameters.
        """
        if self._versions is None:
            yield
            return
        flow = _Flow(self._versions.peek().leaves, flatten(value)[1])
        with torch.autograd.graph.saved_tensors_hooks(flow.pack, lambda tensor: tensor), flow:
            yield
        self._versions = None
        if flow.refused:
            told = "; ".join(f"{name!r} (by {operation})" for name, operation in sorted(flow.refused.items()))
            raise ScheduleError(
                "the backward rule 'graph' needs layers of which autograd saves the weights themselves; here it saves "
                f"what was computed from {told}, and would go on with the old weights there. Take "
                "backward_rule='recompute', or a layer that uses the parameter as it is (no autocast of it, no "
                "weight_norm, no mask)"
            )


class _Flow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows through the operations what is a weight, an activation, or computed from weights and constants alone.

    Attributes:
        refused: parameter -> operation that made of it what was saved.
    """

    def __init__(self, leaves: Mapping[str, torch.Tensor], inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights: dict[int, list[str]] = {}
        for name, leaf in leaves.items():
            self._weights.setdefault(_place(leaf), []).append(name)
        self._activations = {_place(tensor) for tensor in inputs}
        # A storage that is freed and taken again is told anew where it is written; what is nowhere is a constant.
        self._made: dict[int, dict[str, str]] = {}
        self.refused: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [_place(item) for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        made: dict[str, str] = {}
        for place in read:
            made |= dict.fromkeys(self._weights.get(place, ()), name.removeprefix("aten::")) | self._made.get(place, {})
        written = [item for item in tree_leaves(result) if isinstance(item, torch.Tensor)]
        is_activation = any(place in self._activations for place in read)
        for item in written:
            place = _place(item)
            if place in self._weights:
                continue
            self._made.pop(place, None)
            self._activations.discard(place)
            if is_activation:
                self._activations.add(place)
            elif made:
                self._made[place] = made
        if name in _PACKING and _place(result[_PACKING[name]]) not in self._weights:
            self.refused |= made
        return result

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Takes what autograd saves."""
        self.refused |= self._made.get(_place(tensor), {})
        return tensor


def _place(tensor: torch.Tensor) -> int:
    """Returns where a tensor's storage is; 0 where it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided and tensor.numel() else 0
