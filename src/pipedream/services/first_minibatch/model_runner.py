"""Runs the user's model plainly on parts of a minibatch, and records its numbers."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import nan, sqrt
from types import CellType, MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from pipedream.capture.compare import fingerprint
from pipedream.capture.preserve_state import preserve_state, read_python_generators
from pipedream.core.errors import PipelineError
from pipedream.core.fingerprint import Fingerprint
from pipedream.runtime.comm.message import Message
from pipedream.runtime.comm.values import map_tensors, tensors_in, to_device
from pipedream.runtime.data.generators import find_values
from pipedream.runtime.data.rng import read_state
from pipedream.runtime.data.splitter import Parts
from pipedream.runtime.session.local_workers import LocalWorkers
from pipedream.runtime.stage.generators import LayerGenerators, list_own_generators
from pipedream.services.first_minibatch.carried_state import CarriedState
from pipedream.services.first_minibatch.comparer import Reference
from pipedream.services.first_minibatch.metric_means import Row
from pipedream.services.first_minibatch.plain_model import PlainModel
from pipedream.services.losses.losses import Loss
from pipedream.services.losses.scoring import choose_unit, has_units, needs_weights
from pipedream.tensors.auxiliary_loss import auxiliary_loss_scale
from pipedream.tensors.collectives import refusing_collectives

_MIN_TOLERANCE = 1e-6  # a part of the model may compute in single precision


@dataclass
class Run:
    """The numbers of the model on parts of a minibatch.

    Attributes:
        numbers: the loss, buffers, and gradients if there was a backward.
        draws: whether the forwards have drawn random numbers of torch.
        weight: of the parts, summed.
        losses: of the parts; sums if the loss is a sum.
        outputs: of the parts: the size and the fingerprint of each tensor.
        changed: kind of state -> names of what the forwards have changed: "python" generators, "generators" of
            replicated stages, "buffers", "weights", numbers of the "loss", and "attributes" of isolated modules.
        weights: after the run. They and their changes are noted of a backward, if there are several microbatches or
            passes read copies of them.
        norm: of the gradient.
        others: trained parameters that the loss reads, and that the model lacks.
    """

    numbers: Reference = field(default_factory=Reference)
    draws: bool = False
    weight: float = 0.0
    losses: list[float] = field(default_factory=list)
    outputs: list[list[tuple[int, Fingerprint]]] = field(default_factory=list)
    changed: dict[str, list[str]] = field(default_factory=dict)
    weights: dict[str, Fingerprint] = field(default_factory=dict)
    norm: float = 0.0
    others: list[nn.Parameter] = field(default_factory=list)


class ModelRunner:
    """Runs the model, as the workers of a process are to run it.

    Args:
        values: parameters and buffers that are on another device in the model, or on the meta device.

    Attributes:
        modules_of_loss: those that the loss is or holds.
        modules: of the model, by path.
        in_replicas: those of which the replicas of a stage have one each.
        replicated: names of the buffers there that are not averaged.
        shares_weights: passes read copies of weights.
        keeps_graph: also without a backward, as a forward that takes derivatives needs.
    """

    def __init__(self, plain: PlainModel, workers_here: LocalWorkers, values: Mapping[str, torch.Tensor]) -> None:
        settings, self._program = workers_here.blueprint.settings, workers_here.program
        self.plain, self.model, self.loss, self.values = plain, plain.model, plain.loss, values
        self.device, self.microbatches = workers_here.blueprint.device, self._program.microbatches
        self.modules_of_loss = _list_modules(self.loss.function)
        self._autocast, self.keeps_graph = settings.autocast, False
        self.shares_weights = self._program.placement.shares_weights
        self._scale = settings.make_loss_scale().value
        self._is_of_mean = self._program.updates.mean_of_rounds or not needs_weights(self._program)
        self._generators = LayerGenerators(settings.seed, self.device)
        self._first_microbatch = workers_here.lead.done_minibatches * self.microbatches
        self._dtypes = set() if self._autocast is None else {self._autocast}
        replicated = [stage for stage, count in enumerate(self._program.placement.replicas) if count > 1]
        every, self.modules = self.model.named_modules(remove_duplicate=False), dict(self.model.named_modules())
        buffers = {f"{p}.{n}".lstrip(".") for p, m in every if not isinstance(m, _NormBase) for n in m._buffers}
        self.replicated = [n for stage in replicated for n in workers_here.names.by_stage[stage] if n in buffers]
        self._reseeded = list_own_generators(self.modules.values()) if replicated else []
        layers = (layer for stage in replicated for _, layer in workers_here.blueprint.stages[stage])
        ids = {id(module) for layer in layers for module in layer.modules()}
        self.in_replicas = {path: module for path, module in self.modules.items() if id(module) in ids}

    @contextmanager
    def restoring_state(self, *others: Any, copies_on_cpu: bool = False) -> Iterator[None]:
        """A context in which the model has its missing weights, and no gradients; then all is as before.

        That is the model, the loss, generators, and other objects that may change.

        Args:
            copies_on_cpu: weights are copied there, which takes no memory of a GPU.
        """
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        # Shared tensors stay shared; runs write buffers.
        placed = {id(v): v.to(self.device, copy=name in buffers) for name, v in self.values.items()}
        function = self.loss.function
        others = (*others, function, getattr(function, "__self__", None), *self.modules_of_loss)
        modules = [self.model, *(other for other in others if isinstance(other, nn.Module))]
        devices = sorted({p.device.index for root in modules for p in root.parameters() if p.is_cuda})
        self.plain.begin(devices)
        with preserve_state(modules, devices, None, others, copies_on_cpu=copies_on_cpu):
            _fill(self.model, {name: placed[id(value)] for name, value in self.values.items()})
            yield

    def run(
        self,
        parts: Parts,
        *,
        backward: bool = False,
        training: bool = True,
        isolated: Mapping[str, nn.Module] = MappingProxyType({}),
        auxiliary: bool = True,
        moves_weights: bool = False,
        encodes: bool = False,
        rows: list[Row] | None = None,
    ) -> Run:
        """Runs the model on each part, and leaves no trace.

        Args:
            isolated: modules that begin each part with the attributes that they had before the first one.
            auxiliary: auxiliary losses count.
            moves_weights: weights are others first, as an average of weights may equal them so far.
            encodes: the model runs stage by stage, and what one sends to another worker is encoded.
            rows: gets what a metric gets of each part.
        """
        run, loss, total, divisor = Run(), self.loss.copy_unused(), 0.0, 0.0
        # cuDNN's recurrent layers have no backward in evaluation mode.
        without_cudnn = nullcontext() if training else torch.backends.cudnn.flags(enabled=False)
        alone = refusing_collectives("the forward or the loss")
        with self.restoring_state(), torch.set_grad_enabled(backward or self.keeps_graph), without_cudnn, alone:
            for module in self.modules.values():
                module.training = module.training and training
            if moves_weights:
                _move_weights(self.model)
            attributes, before = CarriedState(isolated), self._read_state(backward)
            for message, target in parts:
                attributes.restore()
                part_loss, weight, is_sum, output, targets = self._run_part(loss, message, target, backward, encodes)
                factor = 1.0 if is_sum else weight
                run.weight += weight
                run.losses.append(float(part_loss.detach()))
                if rows is not None:
                    rows.append((map_tensors(output, torch.detach), to_device(targets, self.device), message.samples))
                tensors = (tensor for tensor in tensors_in(output) if not tensor.is_nested)
                run.outputs.append([(tensor.numel(), fingerprint(tensor)) for tensor in tensors])
                total += run.losses[-1] * factor if weight else 0.0
                if backward and weight and part_loss.requires_grad:
                    unit = 1 / weight if self._is_of_mean else 1.0
                    if encodes:  # others might be rounded differently
                        has_unit = has_units(self._program) and not self._is_of_mean
                        unit *= self._scale / (choose_unit(loss, message, output, targets) if has_unit else 1.0)
                    with auxiliary_loss_scale(weight * unit if auxiliary else 0.0):
                        part_loss.backward(torch.full_like(part_loss, factor * unit))  # type: ignore[no-untyped-call]
                    divisor += weight * unit
                run.others = self._list_other_parameters(part_loss, output) if backward else []
                del output, part_loss
            after = self._read_state(backward)
            run.changed = {kind: [n for n, v in after[kind].items() if old.get(n) != v] for kind, old in before.items()}
            run.changed["attributes"], run.draws = attributes.list_changed(), self.plain.draws
            run.weights = {name: numbers[0] for name, numbers in after["weights"].items()}
            run.numbers.loss = total / run.weight if run.weight else nan
            run.numbers.tolerance, run.numbers.buffers = self.choose_tolerance(), after["buffers"]
            self._note_gradients(run, divisor)
        return run

    def _run_part(
        self, loss: Loss, message: Message, target: Message, backward: bool, encodes: bool
    ) -> tuple[torch.Tensor, float, bool, Any, Any]:
        """Returns the loss, its weight, whether it is a sum, the output, and the targets."""
        value = to_device(map_tensors(message.value(), _clone), self.device)
        targets = map_tensors(target.value(), _clone)  # on the CPU, where the loss finds its weight
        reseed = partial(self._generators.seed, self._first_microbatch + message.microbatch)
        send = partial(self._send, message.microbatch) if encodes else None
        with nullcontext() if self._autocast is None else torch.autocast(self.device.type, self._autocast):
            with loss.watching(value, message.samples):
                output = self.plain.forward(value, reseed, send)
            with torch.enable_grad():  # a loss may take derivatives
                output = output if backward or loss.function is None else map_tensors(output, _track)
                part_loss, weight, is_sum = self.compute_loss(loss, output, message, targets, message.minibatch)
        self.note_dtypes((part_loss, *tensors_in(output), *tensors_in(value)))
        return part_loss, weight, is_sum, output, targets

    def compute_loss(
        self, loss: Loss, output: Any, message: Message, targets: Any, minibatch: int | None = None
    ) -> tuple[torch.Tensor, float, bool]:
        """Returns the loss for an output, its weight, and whether it is a sum."""
        on_device = to_device(map_tensors(targets, _clone), self.device)
        return loss(output, on_device, message.samples, message.share, minibatch, received=targets)

    def _send(self, microbatch: int, stage: int, value: Any) -> Any:
        """Returns a value as the next stage receives it."""
        messages = self._program.plan.choices.messages
        sender, receiver = (self._program.placement.rank_of(s, microbatch) for s in (stage, stage + 1))
        if sender == receiver:
            return value
        tensors = tensors_in(value)
        if not any(map(torch.is_floating_point, tensors)):
            kinds = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors) or "no tensor"
            raise PipelineError(
                f"messages={messages} was asked for, but stage {stage} sends no floating-point numbers, only "
                f"{kinds}; choose other cuts, or leave messages out"
            )
        return map_tensors(value, messages.imitate_message)

    def _note_gradients(self, run: Run, divisor: float) -> None:
        named = [(n, p.grad) for n, p in self.model.named_parameters(remove_duplicate=False) if p.requires_grad]
        run.numbers.note_gradients(named, divisor)
        gradients = {id(gradient): gradient.to_dense() for _, gradient in named if gradient is not None}
        run.norm = float(torch.nn.utils.get_total_norm(list(gradients.values()))) / (divisor or 1.0)

    def _read_state(self, reads_weights: bool) -> dict[str, dict[str, Any]]:
        """Returns what a run may change, by the kinds of `Run.changed`, in numbers that are equal if it does not."""
        buffers = [(n, b) for n, b in self.model.named_buffers(remove_duplicate=False) if not b.is_meta]
        # A loss is not asked for what it holds of the model.
        model_ids = {id(part) for part in (*self.modules.values(), *self.model.buffers())}
        of_loss = find_values({"": self.loss.function}, (int, float), model_ids)
        for root in self.modules_of_loss:
            of_loss |= {name: buffer.tolist() for name, buffer in root.named_buffers() if id(buffer) not in model_ids}
        reads_weights = reads_weights and (self.microbatches > 1 or self.shares_weights)
        weights = self.model.named_parameters() if reads_weights else ()
        return {
            "python": {"": read_python_generators()},
            "generators": {str(i): read_state(generator) for i, generator in enumerate(self._reseeded)},
            "buffers": {name: fingerprint(buffer) for name, buffer in buffers},
            "weights": {n: (fingerprint(p), p._version, p.data_ptr()) for n, p in weights if not p.is_meta},
            "loss": of_loss,
        }

    def note_dtypes(self, tensors: Iterable[torch.Tensor]) -> None:
        """Records dtypes that were computed with, which determine the tolerance."""
        self._dtypes |= {tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()}

    def choose_tolerance(self) -> float:
        self.note_dtypes(self.model.parameters())
        return max([_MIN_TOLERANCE, *(sqrt(torch.finfo(dtype).eps) for dtype in self._dtypes)])

    def _list_other_parameters(self, loss: torch.Tensor, output: Any) -> list[nn.Parameter]:
        """Returns the trained parameters that the loss reads beside the model's output, and that the model lacks."""
        visited: set[Any] = {None, *(tensor.grad_fn for tensor in tensors_in(output))}
        nodes: set[Any] = {loss.grad_fn}
        while nodes := nodes - visited:
            visited |= nodes
            nodes = {earlier for node in nodes for earlier, _ in node.next_functions}
        ids = {id(parameter) for parameter in self.model.parameters()}
        variables = (getattr(node, "variable", None) for node in visited)
        return [v for v in variables if isinstance(v, nn.Parameter) and id(v) not in ids]


def _fill(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Puts values into the slots of meta tensors, of a rank's parts, and of tensors on another device; the context
    restores the slots.
    """
    replacements: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for slots in both:
            for name, tensor in slots.items():
                value = values.get(f"{path}.{name}" if path else name)
                if tensor is None or value is None:
                    continue
                if not tensor.is_meta and (tensor.shape, tensor.device) == (value.shape, value.device):
                    continue
                if id(value) not in replacements:
                    is_parameter = isinstance(tensor, nn.Parameter)
                    replacements[id(value)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
                slots[name] = replacements[id(value)]


def _move_weights(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.is_floating_point() and not weight.is_meta and weight.itemsize > 1:
            weight.data *= 1 + torch.rand(weight.shape, generator=generator).to(weight.device) / 10


def _list_modules(function: Any) -> list[nn.Module]:
    """Returns the modules that a loss is, is a method of, or reads through a closure or its arguments."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != CellType()]
    arguments = [*function.args, *function.keywords.values()] if isinstance(function, partial) else []
    inner = [getattr(function, "func", None), getattr(function, "__self__", None)]
    return [candidate for candidate in (function, *inner, *cells, *arguments) if isinstance(candidate, nn.Module)]


def _track(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex()).clone()


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
