"""Hooks on the weights that autograd saves, for the backward rule 'graph'.

An old graph sees new weights if autograd has saved the weights' own storage. If it has saved something computed from a
weight alone (weight_norm, a mask, cuDNN's flattened weights), the backward would silently mix old and new weights. So
the first forward is checked, operation by operation: of what is computed from weights and constants alone, only views
may be saved, and under autocast casts, which the backward makes anew.

With several versions, autograd keeps only a reference to a slice of a weight (parameter and position), which the
backward looks up in the version that it reads. What a Python function keeps on its context, other than by
`save_for_backward`, cannot be redirected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from pipedream.core.errors import ScheduleError
from pipedream.core.schedule.program import Program
from pipedream.runtime.comm.values import tensors_in
from pipedream.runtime.stage.graph_tensors import SavedTensor, find_saving_hook, list_saved_tensors, unpack
from pipedream.runtime.stage.part import PassFacts, RunLayers, StagePart, Task
from pipedream.runtime.stage.stage_module import SavedForward
from pipedream.runtime.stage.versions import WeightChoice, WeightSet
from pipedream.tensors.parts import like_part, local_part, spec_of

_PACKED_OUTPUTS = {"aten::_cudnn_rnn": -1}
"""Operations that copy their weights internally: name -> index of the output that is the copy."""

_USE_RECOMPUTE = "the method's option backward_rule=recompute, as in paci[backward_rule=recompute]"

_CHECKPOINT = CheckpointFunction._backward_cls
"""A node that repeats its forward in its backward."""


class SavedTensorHooks(StagePart):
    """Hooks on the tensors that one stage's forwards save. Only the first forward is checked.

    Args:
        autocasts: the forward runs under autocast, which saves casts of weights.
        redirects: graphs keep references to weights, which backwards look up in another version.
        choice: which one.
    """

    task = Task.USE_NEWER

    def __init__(self, autocasts: bool = False, redirects: bool = False, choice: WeightChoice | None = None) -> None:
        self.redirects = redirects
        self._choice = choice
        self._autocasts = autocasts
        self._checked = False
        self._redirect_checked = False
        self._target: Mapping[str, torch.Tensor] = {}

    @classmethod
    def make(cls, facts: PassFacts, program: Program) -> StagePart | None:
        rules = [other.weights for other in facts.programs]
        # Of the programs whose weights change between a forward and its backward. All are checked by the first forward.
        if not any(
            r.backward_rule == "graph" and (r.staleness(facts.stage) or r.predictions(facts.stage)) for r in rules
        ):
            return None
        rule = program.weights
        redirects = rule.backward_rule == "graph" and rule.held_until is not None
        return cls(facts.module.autocasts, redirects, facts.choice)

    def backward(self, saved: SavedForward) -> AbstractContextManager[None]:
        if not self.redirects or self._choice is None:
            return super().backward(saved)
        assert saved.weights is not None
        return self.redirected_to(self._choice.choose_for_backward(saved.weights))

    def run_layers(self, layers: RunLayers, value: Any, weights: WeightSet) -> Any:
        """Runs the layers. Raises a `ScheduleError` as `watching` does, or if a layer saves tensors in its own way
        (checkpointing, offloading) or a function keeps a weight that cannot be redirected.
        """
        is_checked = self._checked and (self._redirect_checked or not self.redirects)
        try:
            with self.watching(value, weights) as tracker:
                output = layers()
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise ScheduleError(
                "the backward rule 'graph' needs to see what a forward saves for its backward, and this one takes "
                f"derivatives with torch.func, which hides it; take {_USE_RECOMPUTE}, or torch.autograd.grad"
            ) from error
        if not is_checked:
            self._redirect_checked = self.redirects
            self._check_graph(tensors_in(output), _WeightLocator(weights.leaves if self.redirects else {}), tracker)
        return output

    @contextmanager
    def watching(self, value: Any, weights: WeightSet) -> Iterator[_DataflowTracker | None]:
        """Context in which the layers run; the first one yields a tracker of what tensors are computed from.

        Raises:
            ScheduleError: something computed from weights alone was saved, or, with redirection, a part of a weight
                that other versions do not have.
        """
        if self._checked and not (self.redirects or self._autocasts):
            yield None
            return
        tracker = None if self._checked else _DataflowTracker(weights.leaves, tensors_in(value))
        locator = _WeightLocator(weights.leaves if self.redirects else {})

        wrap_other = find_saving_hook() or SavedTensor

        def pack(tensor: torch.Tensor) -> SavedTensor | _WeightSlice | _Cast:
            weight = _find_cast_weight(tensor, weights) if self._autocasts else None
            if weight is not None:
                return _Cast(locator.find_slice(weight) or weight.data, tensor)
            if tracker is not None:
                tracker.note_saved(tensor)
            return locator.find_slice(tensor) or wrap_other(tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack), tracker or nullcontext():
            yield tracker
        self._checked = True
        if tracker is not None and tracker.refused:
            names = "; ".join(f"{name!r} (by {operation})" for name, operation in sorted(tracker.refused.items()))
            raise ScheduleError(
                "the backward rule 'graph' needs layers for which autograd saves the weights themselves; here it saves "
                f"what was computed from {names}, and the backward would use the old weights there. Take "
                f"{_USE_RECOMPUTE}, or a layer that uses the parameter unchanged (no autocast of it, no weight_norm, "
                "no mask)"
            )

    @contextmanager
    def redirected_to(self, weights: WeightSet) -> Iterator[None]:
        self._target = weights.leaves
        try:
            yield
        finally:
            self._target = {}

    def _unpack(self, saved: SavedTensor | _WeightSlice | _Cast) -> torch.Tensor:
        return saved.look_up(self._target) if isinstance(saved, (_WeightSlice, _Cast)) else saved.unpack()

    def _check_graph(
        self, outputs: Iterable[torch.Tensor], locator: _WeightLocator, tracker: _DataflowTracker | None
    ) -> None:
        """Raises a `ScheduleError` if a tensor that a graph needs avoids these hooks; names the operation."""
        for node in _walk_nodes(outputs):
            reason = "the backward rule 'graph' uses the activations of the forward and"
            hooks = [s.unpack_hook for s in list_saved_tensors(node)]
            hooks = [getattr(hook, "around", hook) for hook in hooks]  # of a mesh: they pass on what they do not know
            if isinstance(node, _CHECKPOINT) or any(hook not in (None, self._unpack, unpack) for hook in hooks):
                raise ScheduleError(
                    f"{reason} the newest weights, but {node.name()} recomputes what it has saved, or takes it from "
                    f"elsewhere (checkpoint, save_on_cpu); take {_USE_RECOMPUTE}, or remove that"
                )
            on_context: list[Any] = tree_leaves(vars(node)) if isinstance(node, BackwardCFunction) else []
            for item in (item for item in on_context if isinstance(item, torch.Tensor)):
                names = _quote(locator.find_owners(item))
                origins = {} if tracker is None else tracker.find_origins(item)
                if names or origins:
                    names = names or "what was computed from " + _quote(sorted(origins.items()))
                    raise ScheduleError(
                        f"{reason} the newest weights, but {node.name()} keeps {names} on its context, where it cannot "
                        f"be replaced; let its forward save_for_backward the weight itself, or take {_USE_RECOMPUTE}"
                    )


class _WeightSlice(NamedTuple):
    """A part of a weight, of any version.

    Attributes:
        offset: from the parameter's first element.
        like: on a mesh, the DTensor around it; else None.
    """

    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    like: Any = None

    def look_up(self, leaves: Mapping[str, torch.Tensor]) -> torch.Tensor:
        leaf = leaves[self.name].data
        part = leaf.as_strided(self.size, self.stride, leaf.storage_offset() + self.offset)
        return part if self.like is None else like_part(part, self.like)


class _Cast:
    """A cast of a weight, or a view of it; the backward casts the weight as it is then."""

    def __init__(self, weight: torch.Tensor | _WeightSlice, saved: torch.Tensor) -> None:
        self._weight, self._dtype = weight, saved.dtype
        self._place = saved.size(), saved.stride(), saved.storage_offset()

    def look_up(self, leaves: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weight = self._weight if isinstance(self._weight, torch.Tensor) else self._weight.look_up(leaves)
        return weight.to(self._dtype).as_strided(*self._place)


def _find_cast_weight(tensor: torch.Tensor, weights: WeightSet) -> torch.Tensor | None:
    """Returns the weight of which a tensor is nothing but a cast, or a view of a cast."""
    cast: Any = tensor._base if tensor._is_view() else tensor
    node = cast.grad_fn
    # A cast that was written is another tensor.
    if node is None or node.name() != "ToCopyBackward0" or cast._version:
        return None
    weight: Any = getattr(node.next_functions[0][0], "variable", None)
    is_weight = any(weight is leaf for leaf in weights.leaves.values())
    return weight if is_weight and cast.stride() == weight.stride() else None


class _WeightLocator:
    def __init__(self, leaves: Mapping[str, torch.Tensor]) -> None:
        self._owners: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, leaf in leaves.items():
            self._owners.setdefault(_find_address(leaf), []).append((name, leaf))
        self._owners.pop(0, None)

    def find_slice(self, tensor: torch.Tensor) -> _WeightSlice | None:
        """Returns None if it is no part of a weight; raises a `ScheduleError` if other versions do not have it."""
        owners = self.find_owners(tensor)
        if not owners:
            return None
        saved, tensor = tensor, local_part(tensor)
        for name, leaf in owners:
            offset = int(tensor.storage_offset() - leaf.storage_offset())
            lies_within = offset >= 0 and offset + _count_elements_spanned(tensor) <= _count_elements_spanned(leaf)
            same_kind = tensor.dtype == leaf.dtype and tensor.is_conj() == leaf.is_conj() and not tensor.is_neg()
            # A weight with holes is dense in the other sets.
            if lies_within and same_kind and _count_elements_spanned(leaf) == leaf.numel():
                spec = None if saved is tensor else spec_of(saved)
                return _WeightSlice(name, tensor.size(), tensor.stride(), offset, spec)
        raise ScheduleError(
            "the backward rule 'graph' looks up what autograd saves of a weight in another version of it; here it "
            f"saves a part of {_quote(owners)} that lies across parameters, in one with holes, or is of another type; "
            f"take {_USE_RECOMPUTE}, or a parameter with a storage of its own"
        )

    def find_owners(self, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return self._owners.get(_find_address(tensor), [])


def _quote(owners: Iterable[tuple[str, Any]]) -> str:
    return " or ".join(repr(name) for name, _ in owners)


def _walk_nodes(outputs: Iterable[torch.Tensor]) -> Iterator[Node]:
    to_visit = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    visited = set(to_visit)
    while to_visit:
        node = to_visit.pop()
        yield node
        children = {child for child, _ in node.next_functions if child is not None} - visited
        visited |= children
        to_visit += children


def _count_elements_spanned(tensor: torch.Tensor) -> int:
    """Returns the elements of the storage from a tensor's first to its last one, inclusive."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.size(), tensor.stride(), strict=True))


class _DataflowTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks what is a weight, an activation, or computed from weights and constants alone.

    `refused`: parameter -> operation that computed a saved tensor from it.
    """

    def __init__(self, leaves: Mapping[str, torch.Tensor], inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights: dict[int, list[str]] = {}
        for name, leaf in leaves.items():
            self._weights.setdefault(_find_address(leaf), []).append(name)
        self._activations = {_find_address(tensor) for tensor in inputs}
        # Writing classifies a reused storage anew; a storage in no table is a constant.
        self._origins: dict[int, dict[str, str]] = {}
        self.refused: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # the operations on their local parts come here
        read_addresses = [_find_address(item) for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        origins: dict[str, str] = {}
        for address in read_addresses:
            origins |= dict.fromkeys(self._weights.get(address, ()), name.removeprefix("aten::")) | self._origins.get(
                address, {}
            )
        named_args = zip(args, func._schema.arguments, strict=False)
        written_args = [
            value for value, argument in named_args if argument.alias_info is not None and argument.alias_info.is_write
        ]
        written_tensors = [item for item in tree_leaves((result, written_args)) if isinstance(item, torch.Tensor)]
        is_activation = any(address in self._activations for address in read_addresses)
        for item in written_tensors:
            address = _find_address(item)
            if address in self._weights:
                continue
            self._origins.pop(address, None)
            self._activations.discard(address)
            if is_activation:
                self._activations.add(address)
            elif origins:
                self._origins[address] = origins
        if name in _PACKED_OUTPUTS and _find_address(result[_PACKED_OUTPUTS[name]]) not in self._weights:
            self.refused |= origins
        return result

    def note_saved(self, tensor: torch.Tensor) -> None:
        self.refused |= self.find_origins(tensor)

    def find_origins(self, tensor: torch.Tensor) -> dict[str, str]:
        """Returns parameter -> operation, if a tensor was computed from weights alone."""
        return self._origins.get(_find_address(tensor), {})


def _find_address(tensor: torch.Tensor) -> int:
    tensor = local_part(tensor)
    if isinstance(tensor, FakeTensor):  # DTensor infers sizes with it
        return 0
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided and tensor.numel() else 0
