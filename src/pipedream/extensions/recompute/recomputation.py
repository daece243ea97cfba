"""Recomputation: a stage keeps only its input between forward and backward, and the backward repeats the forward.

After Chen et al., Training Deep Nets with Sublinear Memory Cost (2016), and GPipe (2019, section 2.3), which recomputes
whole stages, and while the gradients are on their way. The second forward gives the first one's numbers to the bit:

- weights: the same version (newer ones under the backward rule 'recompute');
- dropout: each layer's generator is seeded by microbatch and layer, and the loss draws from the earlier state;
- generators of Python, NumPy and the modules, and plain attributes such as counters: set back to their earlier state
  while the forward is repeated;
- buffers: read in their earlier state; what is written is dropped, so that statistics change once; weights that a
  forward writes are refused where a second run changes them again;
- input: the received one; the first forward used a copy, because a layer may write into it.

The first forward builds a graph that keeps no tensor, so that it takes the same paths through the layers and shows
which outputs require a gradient.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from pipedream.core.schedule.program import Program
from pipedream.runtime.comm.message import Message
from pipedream.runtime.data.rng import read_state, set_state
from pipedream.runtime.stage.part import ForwardFunction, PassFacts, StagePart, Task
from pipedream.runtime.stage.stage_module import SavedForward, StageModule
from pipedream.tensors.outside_func import HooksOutsideFunc


@dataclass(frozen=True)
class _BufferSlot:
    module: nn.Module
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        buffer = self.module._buffers[self.name]
        assert buffer is not None, f"buffer {self.name!r} was removed"
        return buffer

    @property
    def write_mark(self) -> tuple[int, int]:
        """Changes if the buffer is replaced, or written by an operation that autograd sees."""
        return id(self.tensor), 0 if self.tensor.is_inference() else self.tensor._version

    @property
    def tracks_statistics(self) -> bool:
        return isinstance(self.module, _NormBase) and self.module.track_running_stats


class Recomputation(StagePart):
    """The two forwards of one stage that recomputes."""

    task = Task.REPEAT

    def __init__(self, module: StageModule) -> None:
        self._module = module
        modules = {id(m): m for _, layer in module.layers for m in layer.modules()}.values()
        # All buffers, until the first microbatch has shown which ones change.
        self._changing = [_BufferSlot(m, name) for m in modules for name, b in m._buffers.items() if b is not None]
        self._modules = list(modules)
        self._constant: list[_BufferSlot] | None = None
        # All weights, until the first second forward has shown which ones are written.
        self._written = [(m, n, p) for m in self._modules for n, p in m._parameters.items() if p is not None]

    @classmethod
    def make(cls, facts: PassFacts, program: Program) -> StagePart | None:
        if program.placement.runs_backward_elsewhere(facts.stage):
            return ForwardWithoutGraph()
        return cls(facts.module) if program.plan.stages[facts.stage].recompute else None

    def run_forward(self, saved: SavedForward, message: Message, run: ForwardFunction) -> Message:
        """Runs a forward without a graph; `saved.recompute` repeats it.

        Raises:
            RuntimeError: a buffer changes that did not change in the first microbatch.
        """
        state, python_state = self._module.generators.states(), self._read_python_state()
        memo: dict[int, torch.Tensor] = {}
        old_buffers = [_clone(slot.tensor, memo) for slot in self._changing]
        marks = [slot.write_mark for slot in self._constant or ()]
        result = run_without_graph(run, message)
        if self._constant is None:
            changed = [
                slot.tracks_statistics or not torch.equal(slot.tensor.to_dense(), old.to_dense())
                for slot, old in zip(self._changing, old_buffers, strict=True)
            ]
            self._constant = [slot for slot, is_changed in zip(self._changing, changed, strict=True) if not is_changed]
            self._changing = [slot for slot, is_changed in zip(self._changing, changed, strict=True) if is_changed]
            old_buffers = [old for old, is_changed in zip(old_buffers, changed, strict=True) if is_changed]
        for slot, mark in zip(self._constant, marks, strict=False):
            if slot.write_mark != mark:
                raise RuntimeError(
                    f"a stage that recomputes wrote into buffer {slot.name!r}, which its first microbatch did not; "
                    "let the layer write it in every forward, or train this stage without recomputation"
                )
        saved.graph_inputs = ()
        saved.outputs = ()
        saved.recompute = partial(self._repeat, message, run, old_buffers, state, python_state)
        return result

    def _repeat(
        self, message: Message, run: ForwardFunction, buffers: Sequence[torch.Tensor], state: Any, python_state: Any
    ) -> None:
        old_weights = [(w.detach().clone(), w._version, w.data_ptr()) for _, _, w in self._written]
        current_state, current_python_state = self._module.generators.states(), self._read_python_state()
        self._module.generators.restore(state)
        self._set_python_state(python_state)
        try:
            with self._use_buffers(buffers):
                run(message, True)
        finally:
            self._module.generators.restore(current_state)
            self._set_python_state(current_python_state)
        pairs = list(zip(self._written, old_weights, strict=True))
        for (module, name, weight), (old, *_) in pairs:
            if not torch.equal(weight, old):
                raise RuntimeError(
                    f"each forward of {type(module).__name__} writes its weight {name!r}, and recomputation repeats "
                    "it; keep it in a buffer, write it in the optimizer's step, or plan with recompute='never'"
                )
        self._written = [slot for slot, (_, *marks) in pairs if marks != [slot[2]._version, slot[2].data_ptr()]]

    def _read_python_state(self) -> tuple[Any, Any, list[Any], list[dict[str, Any]]]:
        """Returns states of the generators of Python, NumPy and the modules, and the modules' plain attributes."""
        attributes = [{n: v for n, v in m.__dict__.items() if _is_plain(v)} for m in self._modules]
        own_states = [read_state(generator) for generator in self._module.own_generators]
        return random.getstate(), np.random.get_state(), own_states, attributes

    def _set_python_state(self, state: tuple[Any, Any, list[Any], list[dict[str, Any]]]) -> None:
        python_state, numpy_state, own_states, attributes = state
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for generator, own_state in zip(self._module.own_generators, own_states, strict=True):
            set_state(generator, own_state)
        for module, values in zip(self._modules, attributes, strict=True):
            module.__dict__.update(values)

    @contextmanager
    def _use_buffers(self, buffers: Sequence[torch.Tensor]) -> Iterator[None]:
        current_buffers = [slot.tensor for slot in self._changing]
        for slot, tensor in zip(self._changing, buffers, strict=True):
            slot.module._buffers[slot.name] = tensor
        try:
            yield
        finally:
            for slot, tensor in zip(self._changing, current_buffers, strict=True):
                slot.module._buffers[slot.name] = tensor


class ForwardWithoutGraph(StagePart):
    """The forwards of a stage whose backwards run on another rank, which repeats them."""

    def run_forward(self, saved: SavedForward, message: Message, run: ForwardFunction) -> Message:
        return run_without_graph(run, message)


def _is_plain(value: Any) -> bool:
    """Returns whether a value is immutable, or a tensor outside of a graph."""
    return isinstance(value, (int, float, str, NoneType)) or (
        isinstance(value, torch.Tensor) and not value.requires_grad
    )


def run_without_graph(run: ForwardFunction, message: Message) -> Message:
    """Runs a forward on a copy of the message, by the same paths as in training; keeps none of its tensors."""
    memo: dict[int, torch.Tensor] = {}
    copy = replace(message, tensors=tuple(None if t is None else _clone(t, memo) for t in message.tensors))
    with HooksOutsideFunc(lambda _: None, _refuse_unpack):
        result = run(copy, False)
    return replace(result, tensors=tuple(None if t is None else t.detach() for t in result.tensors))


def _clone(tensor: torch.Tensor, memo: dict[int, torch.Tensor]) -> torch.Tensor:
    return memo.setdefault(id(tensor), tensor.detach().clone())


def _refuse_unpack(_: None) -> torch.Tensor:
    raise RuntimeError(
        "the forward computes a derivative (by autograd.grad or backward), and recomputation keeps no graph for it; "
        "plan with recompute='never', and not with roundpipe, which always recomputes"
    )
