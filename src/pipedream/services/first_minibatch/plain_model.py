"""The user's model, run plainly on a minibatch: the whole of it, by its own forward, without a trace.

Generators are seeded before the same calls as in a pipeline, so that dropout masks are equal.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from pipedream.capture.captured import Captured
from pipedream.capture.slice import ModelSlice, SliceTables
from pipedream.core.errors import CaptureError
from pipedream.runtime.session.local_workers import LocalWorkers
from pipedream.runtime.weights.parameters import named_state
from pipedream.services.losses.losses import Loss, Metric
from pipedream.services.probe.machine import available_bytes


class PlainModel:
    """A model as the user wrote it, and the layers that a pipeline runs of it.

    Args:
        cuts: the first layers of all stages but the first.
        loss, metrics: of its output.

    Attributes:
        whole_bytes: of the model, while this process has all of it; each tensor counts once.
        dropped: weights of other ranks, as the rank that reads the data had them. Those that have not changed since
            need not be sent for the comparison.
        draws: whether a forward has drawn random numbers of torch.
        draws_unseeded: also in a call that drew none when the graph was made, so that no stage seeds before it.
    """

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        loss: Loss,
        metrics: Mapping[str, Metric],
        cuts: Sequence[int] = (),
    ) -> None:
        self.model, self.loss, self.metrics = model, loss, metrics
        self.whole_bytes = sum({id(t): t.numel() * t.itemsize for t in named_state(model).values()}.values())
        self.dropped: dict[str, torch.Tensor] = {}
        self._ends = [0, *cuts, len(captured.graph.layers)]
        self.draws = self.draws_unseeded = False
        self._captured = captured
        self._in_seeded = False
        self._devices: Sequence[int] = ()
        self._hooks: list[Any] = []

    def fits(self, device: torch.device) -> bool:
        """Returns whether a device has room for the whole model, its gradients and as much again."""
        return 4 * self.whole_bytes <= available_bytes(device, 1)

    def keep_dropped(self, workers_here: LocalWorkers) -> None:
        """Keeps the values that this rank is about to drop, if it reads the data and the comparison has room."""
        reader = workers_here.program.placement.readers[0]
        if workers_here.worker_rank == reader and self.fits(workers_here.blueprint.device):
            state, local = named_state(self.model), workers_here.names.local
            self.dropped = {name: tensor.detach() for name, tensor in state.items() if name not in local}

    def begin(self, devices: Sequence[int]) -> None:
        """Begins a run whose tensors are on the CPU and these GPUs."""
        self._devices, self.draws, self.draws_unseeded = devices, False, False

    def forward(self, inputs: Any, reseed: Callable[[str], None], send: Callable[[int, Any], Any] | None = None) -> Any:
        """Runs the model on inputs, which it may write into; call it in `ModelRunner.restoring_state`.

        Args:
            reseed: called with the name of a layer before each call in which it may draw.
            send: called with a stage and what it sends, and returns what arrives; the stages then run in turn.

        Raises:
            CaptureError: the forward calls other layers than those of the pipeline, or draws between them.
        """
        self._seeded = self._read_generators()
        graph = self._captured.graph
        if self._captured.model is None:
            return self._run_chain(inputs, reseed, send)

        def seeded(name: str) -> None:
            self._note_draws()
            reseed(name)
            self._seeded = self._read_generators()
            self._in_seeded = True

        def enter(path: str, *_: Any) -> None:
            self._note_draws()
            self._in_seeded = path in graph.seeded

        tables = SliceTables(self.model, graph)
        ends = self._ends if send is not None else [0, len(graph.layers)]
        slices = [ModelSlice(self.model, graph, first, last, tables) for first, last in pairwise(ends)]
        leaves = dict.fromkeys(call.path for call in tables.leaves)
        hooks = [tables.modules[path].register_forward_pre_hook(partial(enter, path), prepend=True) for path in leaves]
        try:
            output = inputs
            for stage, part in enumerate(slices):
                part.reseed = seeded
                output = part(output if send is None or not stage else send(stage - 1, output))
            self._note_draws()
        finally:
            for hook in hooks:
                hook.remove()
        self._in_seeded = True  # after the forward, a checkpoint repeats calls
        return output

    def _note_draws(self) -> None:
        drawn = self._has_drawn()
        self.draws |= drawn
        self.draws_unseeded |= drawn and not self._in_seeded

    def _read_generators(self) -> list[torch.Tensor]:
        return [torch.default_generator.get_state(), *(torch.cuda.get_rng_state(index) for index in self._devices)]

    def _has_drawn(self) -> bool:
        """Returns whether a generator has drawn since the last call, or since it was seeded."""
        before, self._seeded = self._seeded, self._read_generators()
        return not all(map(torch.equal, before, self._seeded))

    def _run_chain(
        self, inputs: Any, reseed: Callable[[str], None], send: Callable[[int, Any], Any] | None = None
    ) -> Any:
        expected = [layer.name for layer in self._captured.graph.layers]
        ran: list[str] = []
        names: dict[int, list[str]] = {}
        for name, layer in zip(expected, self._captured.layers, strict=True):
            names.setdefault(id(layer), []).append(name)
        calls = {key: iter(calls_of_layer) for key, calls_of_layer in names.items()}
        open_layers: list[nn.Module] = []
        is_model = id(self.model) in names

        def enter(layer: nn.Module, _: Any) -> None:
            if not open_layers:
                if not is_model and self._has_drawn():
                    raise CaptureError(self._describe_draw_outside(ran))
                # After the forward, a checkpoint repeats calls.
                ran.append(next(calls[id(layer)], names[id(layer)][-1]))
                reseed(ran[-1])
                self._seeded = self._read_generators()
            open_layers.append(layer)

        def leave(layer: nn.Module, _: Any, output: Any) -> Any:
            open_layers.pop()
            if not open_layers:
                self.draws |= self._has_drawn()
                if send is not None and len(ran) in self._ends[1:-1]:
                    return send(self._ends.index(len(ran)) - 1, output)
            return output

        for hook in self._hooks:
            hook.remove()
        layers = {id(layer): layer for layer in self._captured.layers}.values()
        # `ModelRunner.restoring_state` removes the last ones.
        self._hooks = [layer.register_forward_pre_hook(enter, prepend=True) for layer in layers]
        self._hooks += [layer.register_forward_hook(leave) for layer in layers]
        several = isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence)  # as a stage calls its layers
        output = self.model(*inputs) if several else self.model(inputs)
        if ran != expected and not is_model:
            raise CaptureError(
                f"the forward of {type(self.model).__name__} runs the layers {_list_from(ran, expected)} where the "
                f"pipeline runs {_list_from(expected, ran)}: it decides so at each call, or it was changed after the "
                "plan was made; put the decision into the module that it concerns, or profile and plan again"
            )
        if not is_model and self._has_drawn():
            raise CaptureError(self._describe_draw_outside(ran))
        return output

    def _describe_draw_outside(self, ran: list[str]) -> str:
        where = f"after its layer {ran[-1]!r}" if ran else "before its first layer"
        return (
            f"the forward of {type(self.model).__name__} draws random numbers {where}, outside of all layers, where a "
            "pipeline draws none; draw them in the module that needs them"
        )


def _list_from(names: list[str], others: list[str]) -> str:
    """The names from the first that differs on."""
    at = next((i for i, (a, b) in enumerate(zip(names, others, strict=False)) if a != b), min(len(names), len(others)))
    shown = [*names[at : at + 3], *["..."] * (len(names) > at + 3)]
    return ", ".join(map(repr, shown)).replace("'...'", "...") or "(no more)"
