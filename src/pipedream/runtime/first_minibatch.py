"""Compares the first minibatch of a pipeline with the user's model, run plainly on the same data.

1. When the first minibatch is read, the input stage's first worker runs the whole model on it, in the microbatches of
   the pipeline: `ReferenceRun.read`. It also compares the loss of the whole minibatch with those of its parts.
2. Loss, gradients and buffers become fingerprints, which all ranks get.
3. The pipeline trains. Each stage compares its buffers after the minibatch's last forward, and its gradients before its
   first update. Each rank compares the loss.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import isfinite, sqrt
from types import CellType, MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from pipedream.core.errors import PipelineError, WorkerError
from pipedream.core.user_code import with_place
from pipedream.runtime.comm.message import Content, Message
from pipedream.runtime.comm.values import flatten, map_tensors, tensors_in, to_device, unflatten
from pipedream.runtime.results.losses import Loss
from pipedream.runtime.stage.auxiliary import auxiliary_loss_scale
from pipedream.runtime.stage.generators import LayerGenerators
from pipedream.runtime.stage.stage_module import SavedForward
from pipedream.sharding.stage import StageSharding

_log = logging.getLogger("pipedream")

Numbers = tuple[float, ...]
"""Fingerprint of a tensor: sum, weighted sum, sum of sizes."""

_LEAST = 1e-6  # a part of the model may compute in single precision
_FLOOR = 0.01
"""Of the greatest mean gradient: what is smaller by this factor may be a sum that cancels, and differ by rounding."""


class UserModel(Protocol):
    """The user's model, see `pipedream.capture.plain_model`."""

    model: nn.Module
    draws: bool
    draws_unseeded: bool

    def forward(self, inputs: Any, reseed: Callable[[str], None]) -> Any: ...

    def restoring_state(
        self, values: Mapping[str, torch.Tensor], others: Iterable[Any] = ()
    ) -> AbstractContextManager[None]: ...

    def python_draws(self) -> Callable[[], bool]: ...

    def fingerprint(self, tensor: torch.Tensor) -> Numbers: ...


@dataclass
class _Reference:
    """What the model gives.

    Attributes:
        gradients: by each name of a parameter; None where it has none.
        tolerance: relative difference that the precision allows.
        scale: greatest mean of the sizes of a gradient.
        incomparable: why the numbers of the pipeline may be others; empty if they may not.
        parts: why the loss of the minibatch may be another than that of its parts; empty if it may not.
    """

    loss: float = 0.0
    gradients: dict[str, Numbers | None] = field(default_factory=dict)
    buffers: dict[str, Numbers] = field(default_factory=dict)
    tolerance: float = 0.0
    scale: float = 0.0
    incomparable: str = ""
    parts: str = ""


@dataclass(frozen=True)
class _Run:
    """The numbers of a forward over all parts.

    Attributes:
        loss: of the minibatch.
        weight: of its parts, summed.
        losses: of the parts; sums if the loss says that it is a sum.
        outputs: of the parts.
    """

    loss: float
    weight: float
    losses: tuple[float, ...]
    outputs: tuple[Any, ...]


class ReferenceRun:
    """The comparison of one run of a pipeline, on one rank.

    Args:
        split: microbatches of a minibatch.
        base: minibatches before.
        values: parameters and buffers that are on the meta device here, where `read` is called.
        publish: hands a text to all ranks; None in one process.
        receive: returns that text elsewhere.
    """

    def __init__(
        self,
        plain: UserModel,
        loss: Loss,
        *,
        rank: int,
        split: int,
        base: int,
        seed: int,
        device: torch.device,
        autocast: torch.dtype | None,
        compiles: bool,
        values: Mapping[str, torch.Tensor] = MappingProxyType({}),
        publish: Callable[[str], None] | None = None,
        receive: Callable[[], str] = str,
    ) -> None:
        self._plain = plain
        self._loss = loss
        self._rank = rank
        self.split = split
        self._base = base
        self._generators = LayerGenerators(seed, device)
        self._device = device
        self._autocast = autocast
        self._compiles = compiles
        self._values = values
        self._publish = publish
        self._receive = receive
        self._reference: _Reference | None = None
        self._modules_of_loss = _list_modules(loss.function)
        self._kinds = set() if autocast is None else {autocast}  # of floating-point numbers

    # -- the model --------------------------------------------------------------------------------------

    def read(self, inputs: Any, targets: Any, parts: Sequence[tuple[Message, Message]]) -> None:
        """Runs the model on the first minibatch; `parts` are its microbatches, inputs and targets.

        Raises:
            WorkerError: the parts do not give the loss of the whole, or the model cannot be trained as it is.
        """
        try:
            self._reference = self._run(inputs, targets, [pair for pair in parts if pair[0].content is Content.DATA])
        except PipelineError as error:
            raise error if isinstance(error, WorkerError) else self._make_error(str(error)) from error
        except Exception as error:  # which the pipeline should raise itself, at the stage that it concerns
            self._reference = _Reference(incomparable=f"the model raised {with_place(error)}")
        self._values = {}
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)  # the reported peak is that of training
        if self._publish is not None:
            self._publish(json.dumps(asdict(self._reference)))

    def _run(self, inputs: Any, targets: Any, parts: Sequence[tuple[Message, Message]]) -> _Reference:
        plain, model = self._plain, self._plain.model
        placed = {id(value): value.to(self._device) for value in self._values.values()}
        values = {name: placed[id(value)] for name, value in self._values.items()}  # shared ones stay so
        with plain.restoring_state(values, [self._loss.function, *self._modules_of_loss]), torch.enable_grad():
            drawn = plain.python_draws()
            run = self._forward(parts, backward=True)
            reference = _Reference(run.loss, tolerance=self._choose_tolerance(inputs))
            draws = plain.draws
            if draws and self._compiles:
                reference.incomparable = "compiled modules draw other random numbers"
            elif plain.draws_unseeded:
                reference.incomparable = (
                    "the model draws random numbers where it drew none when it was profiled, so that they depend on "
                    "the cuts; profile it as it is trained"
                )
            elif drawn():
                reference.incomparable = "the forward draws from the generators of Python or NumPy"
            self._check_training(run)
            self._note(reference, model, run.weight)
        if len(parts) > 1:
            try:
                reference.parts = self._compare_parts(inputs, targets, parts, values, draws)
            except PipelineError:
                raise
            except Exception as error:  # in evaluation mode, for instance
                reference.parts = f"the whole minibatch raised {with_place(error)}"
        return reference

    def _check_training(self, run: _Run) -> None:
        """Raises a WorkerError if the loss trains nothing, or what no stage trains."""
        model_parameters = {id(parameter) for parameter in self._plain.model.parameters()}
        trained = [parameter for parameter in self._plain.model.parameters() if parameter.requires_grad]
        if trained and isfinite(run.loss) and run.weight and all(p.grad is None for p in trained):
            raise self._make_error(
                "the loss gives no parameter of the model a gradient, so nothing would be trained; compute it from the "
                "model's output, without detach(), .item(), torch.no_grad() or a tensor made anew"
            )
        for module in self._modules_of_loss:
            for name, parameter in module.named_parameters():
                if parameter.grad is not None and id(parameter) not in model_parameters:
                    raise self._make_error(
                        f"the loss has a trained parameter of its own, {name!r}, which no stage would train; let the "
                        "model hold and use it, or freeze it: requires_grad_(False)"
                    )

    def _note(self, reference: _Reference, model: nn.Module, weight: float) -> None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                gradient = parameter.grad
                numbers = None if gradient is None else self._take_fingerprint(gradient, weight)
                reference.gradients[name] = numbers
                if numbers is not None and gradient is not None and gradient.numel():
                    reference.scale = max(reference.scale, numbers[2] / gradient.numel())
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if not buffer.is_meta:
                reference.buffers[name] = self._take_fingerprint(buffer)

    def _forward(self, parts: Sequence[tuple[Message, Message]], *, backward: bool) -> _Run:
        loss = self._loss.anew()
        total = weights = 0.0
        losses, outputs = [], []
        for message, aim in parts:
            value = to_device(map_tensors(_unpack_value(message), _clone), self._device)
            targets = map_tensors(_unpack_value(aim), _clone)
            with self._enter_autocast():
                with loss.watching(value, message.samples):
                    output = self._plain.forward(value, self._reseed(message.microbatch))
                placed = to_device(targets, self._device)
                part_loss, weight, is_sum = loss(
                    output, placed, message.samples, message.share, message.minibatch, received=targets
                )
            self._kinds |= {tensor.dtype for tensor in (part_loss, *tensors_in(output)) if tensor.is_floating_point()}
            factor = 1.0 if is_sum else weight
            weights += weight
            if weight:
                total += float(part_loss.detach()) * factor
                if backward and part_loss.requires_grad:
                    with auxiliary_loss_scale(weight):
                        part_loss.backward(torch.full_like(part_loss, factor))  # type: ignore[no-untyped-call]
            losses.append(float(part_loss.detach()))
            if not backward:
                outputs.append(output)
            del output, part_loss
        return _Run(total / weights if weights else float("nan"), weights, tuple(losses), tuple(outputs))

    def _reseed(self, microbatch: int) -> Callable[[str], None]:
        return lambda layer: self._generators.seed(self._base * self.split + microbatch, layer)

    def _enter_autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._autocast is None else torch.autocast(self._device.type, self._autocast)

    def _take_fingerprint(self, tensor: torch.Tensor, weight: float = 1.0) -> Numbers:
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        return tuple(number / weight if weight else number for number in self._plain.fingerprint(tensor))

    def _choose_tolerance(self, inputs: Any) -> float:
        tensors = [*self._plain.model.parameters(), *tensors_in(inputs)]
        kinds = self._kinds | {tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()}
        return max([_LEAST, *(sqrt(torch.finfo(kind).eps) for kind in kinds)])

    # -- the whole and its parts --------------------------------------------------------------------------

    def _compare_parts(
        self,
        inputs: Any,
        targets: Any,
        parts: Sequence[tuple[Message, Message]],
        values: Mapping[str, torch.Tensor],
        draws: bool,
    ) -> str:
        """Compares the loss of the whole minibatch with those of its parts; returns why it cannot be, or "".

        In evaluation mode, if random numbers or the statistics of a batch may tell them apart.
        """
        if self._loss.function is None and self._loss.weight is not None:
            return ""  # by which the user has said how much each part counts
        samples, model = sum(message.samples for message, _ in parts), self._plain.model
        for name, module in model.named_modules():
            if getattr(module, "mixes_samples", False):
                return f"{name!r} computes with several samples at once, as its mixes_samples says"
        first = replace(parts[0][0], samples=samples, share=1.0)
        whole = [(first.with_tensors(*flatten(inputs)), first.with_tensors(*flatten(targets)))]
        for training in (False,) if draws else (True, False):
            others = [self._loss.function, *self._modules_of_loss]
            with self._plain.restoring_state(values, others), torch.no_grad():
                for module in model.modules():
                    module.training = module.training and training
                undivided = self._forward(whole, backward=False)
                split = self._forward(parts, backward=False)
                limit = self._choose_tolerance(inputs) * max(map(abs, (undivided.loss, *split.losses)))
                if not isfinite(undivided.loss) or abs(undivided.loss - split.loss) <= limit:
                    return ""
                again = self._forward([(replace(whole[0][0], microbatch=-1), whole[0][1])], backward=False)
        if abs(undivided.loss - again.loss) > limit:
            return "its loss is another each time"
        raise self._make_error(
            f"the loss of a minibatch of {samples} samples is {undivided.loss:.7g}, but the losses of its {len(parts)} "
            f"microbatches make {split.loss:.7g}; {self._explain_parts(undivided, split, limit)}"
        )

    def _explain_parts(self, undivided: _Run, split: _Run, limit: float) -> str:
        if not _are_parts(undivided.outputs[0], split.outputs, self._choose_tolerance(())):
            return (
                "the model's outputs for the microbatches are not those for the minibatch, so that its samples are not "
                "along dimension 0 of each input, or it computes with several samples at once; say where the samples "
                "are (batch_dim=...), give tensors with one entry per sample instead of lists, or train with "
                "microbatches=1 and one replica of the last stage"
            )
        alone = "or, if it compares samples with each other or broadcasts over them, train with microbatches=1"
        if abs(undivided.losses[0] - sum(split.losses)) <= limit:
            return f"the loss is a sum: let it return (sum, weight), for instance (loss, len(targets)), {alone}"
        if self._loss.weight is not None:
            return f"weight=... does not give what the loss is a mean over; correct it, {alone}"
        return (
            "the loss is not a mean over samples; give weight=..., a function from a batch to the amount that the loss "
            f"is a mean over (such as the number of counted targets), let the loss return (sum, weight), {alone}"
        )

    # -- one stage alone ----------------------------------------------------------------------------------

    def restoring_state(self) -> AbstractContextManager[None]:
        """A context after which the layers here, the loss and the generators are as before."""
        return self._plain.restoring_state({}, [self._loss.function, *self._modules_of_loss])

    def loss_of(self, output: Any, message: Message, targets: Any) -> torch.Tensor:
        """Returns the loss of the last stage's output, computed anew; the model's own loss is what it returned."""
        placed = to_device(map_tensors(targets, _clone), self._device)
        return self._loss.anew()(output, placed, message.samples, message.share, received=targets)[0]

    def note_kinds(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes numbers that were computed with, by which the tolerance is chosen."""
        self._kinds |= {tensor.dtype for tensor in tensors if tensor.is_floating_point()}

    def refer_to(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Takes a stage's own gradients as those that `compare_gradients` wants."""
        fingerprints = {name: None if g is None else self._take_fingerprint(g) for name, g in gradients.items()}
        sizes = [self._take_fingerprint(g)[2] / g.numel() for g in gradients.values() if g is not None and g.numel()]
        self._reference = _Reference(
            gradients=fingerprints, tolerance=self._choose_tolerance(()), scale=max(sizes, default=0.0)
        )

    def compare_values(
        self, stage: int, what: str, expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]
    ) -> None:
        """Compares tensors that leave a stage with those that its layers give for the same input."""
        self._reference = self._reference or _Reference(tolerance=self._choose_tolerance(()))
        for number, pair in enumerate(zip(expected, actual, strict=False)):
            rows = [self._take_fingerprint(tensor.detach()) for tensor in pair]
            if not self._close(rows[0], rows[1], 0.0):
                raise self._make_error(
                    f"for its first microbatch stage {stage} has another {what} {number} than its layers give for the "
                    f"same input ({_format_numbers(rows[1])} in the pipeline, {_format_numbers(rows[0])} by the "
                    f"layers); {_CAUSES}"
                )

    # -- the pipeline -------------------------------------------------------------------------------------

    @property
    def reference(self) -> _Reference:
        if self._reference is None:
            fields = json.loads(self._receive())
            gradients = {n: None if row is None else tuple(row) for n, row in fields.pop("gradients").items()}
            buffers = {n: tuple(row) for n, row in fields.pop("buffers").items()}
            self._reference = _Reference(**fields, gradients=gradients, buffers=buffers)
        return self._reference

    def compare_gradients(self, stage: int, gradients: Mapping[str, torch.Tensor | None], factor: float = 1.0) -> None:
        """Compares a stage's gradients, divided by `factor`, before its first update."""
        reference = self.reference
        if reference.incomparable or not isfinite(reference.loss):
            return
        for name, gradient in gradients.items():
            expected = reference.gradients.get(name)
            actual = None if gradient is None else self._take_fingerprint(gradient, factor)
            count = 0 if gradient is None else gradient.numel()
            if actual is not None and not all(map(isfinite, actual)):
                continue  # of a scaled loss
            if not self._close(expected, actual, count * reference.scale * _FLOOR):
                raise self._make_error(
                    f"at its first update stage {stage} has another gradient of {name!r} than the model itself "
                    f"({_format_numbers(actual)} in the pipeline, {_format_numbers(expected)} in the model); "
                    f"{_explain_gradient(expected, actual)}"
                )

    def compare_buffers(self, stage: int, names: Iterable[str]) -> None:
        """Compares a stage's buffers after the minibatch's last forward."""
        reference = self.reference
        if reference.incomparable:
            return
        for name in names:
            expected = reference.buffers.get(name)
            if expected is None:
                continue
            actual = self._take_fingerprint(self._plain.model.get_buffer(name))
            if not self._close(expected, actual, 0.0):
                raise self._make_error(
                    f"after the first minibatch the buffer {name!r} of stage {stage} is another than in the model "
                    f"itself ({_format_numbers(actual)} in the pipeline, {_format_numbers(expected)} in the model); a "
                    "buffer should be written only by the module that holds it, and not be shared with modules of "
                    "other stages"
                )

    def compare_loss(self, loss: float) -> None:
        """Compares the loss of the minibatch; says what could not be compared."""
        reference = self.reference
        if self._rank == 0 and reference.incomparable:
            _log.warning("the first minibatch was not compared with the model's own: %s", reference.incomparable)
        if self._rank == 0 and reference.parts:
            _log.warning("the loss of the first minibatch was not compared with its microbatches': %s", reference.parts)
        if reference.incomparable or not isfinite(reference.loss) or not isfinite(loss):
            return
        if abs(loss - reference.loss) > reference.tolerance * max(abs(loss), abs(reference.loss)):
            raise self._make_error(
                f"the loss of the first minibatch is {loss:.7g} in the pipeline and {reference.loss:.7g} in the model "
                f"itself; {_CAUSES}"
            )

    def _close(self, expected: Numbers | None, actual: Numbers | None, floor: float) -> bool:
        if expected is None or actual is None:
            return expected is actual
        limit = self.reference.tolerance * (max(expected[2], actual[2]) + floor)
        return all(a == b or abs(a - b) <= limit or (a != a and b != b) for a, b in zip(expected, actual, strict=True))

    def _make_error(self, cause: str) -> WorkerError:
        return WorkerError(
            self._rank,
            "the comparison of the first minibatch with the model",
            cause,
            "to train regardless, turn the comparison off: check=False (on the command line --no-check)",
        )


class StageCheck:
    """What one stage compares, at its own ops.

    Args:
        buffers: names of the stage's, of which no other replica has moved others.
        names: of its trained parameters, in the order of the handles.
        alone: its first update holds the minibatch alone; otherwise the gradients of the minibatch's only microbatch,
            0, are compared before they are summed over the replicas.
        sharding: of a mesh, whose ranks compare whole gradients.
    """

    def __init__(
        self,
        check: ReferenceRun,
        stage: int,
        buffers: Sequence[str],
        names: Sequence[str],
        *,
        alone: bool,
        sharding: StageSharding | None = None,
    ) -> None:
        self._check = check
        self._stage = stage
        self._buffers = buffers
        self._names = names
        self._alone = alone
        self._sharding = sharding
        self._ready: dict[int, torch.Tensor] = {}

    def loss_of(self, output: Any, message: Message, targets: Any) -> torch.Tensor:
        """See `ReferenceRun.loss_of`."""
        return self._check.loss_of(output, message, targets)

    def after_forward(self, index: int) -> None:
        if index == self._check.split - 1:
            self._check.compare_buffers(self._stage, self._buffers)

    def before_forward(self, value: Any, microbatch: int, first: bool, finish: Callable[[Any], Any] | None) -> None:
        """Called with the value of the first microbatch."""

    def before_backward(self, saved: SavedForward, gradients: Sequence[torch.Tensor | None]) -> None:
        """Called with the gradients of a stage's outputs."""

    def sent_back(self, index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Called with the gradients of the received tensors."""

    def gradient_ready(self, index: int, gradient: torch.Tensor) -> None:
        """Takes a gradient that leaves for the other replicas."""
        if not self._alone:
            self._ready[index] = gradient.clone()

    def after_backward(self, index: int, gradients: Sequence[torch.Tensor | None], factor: float) -> None:
        """`factor`: of the gradients."""
        if self._alone or index or not factor:
            return
        gradients_here = {i: gradient for i, gradient in enumerate(gradients) if gradient is not None} | self._ready
        self._check.compare_gradients(
            self._stage, {n: gradients_here.get(i) for i, n in enumerate(self._names)}, factor
        )
        self._ready.clear()

    def before_update(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for name, gradient in zip(self._names, gradients, strict=True) if self._alone else ():
            if gradient is not None and self._sharding is not None:
                gradient = self._sharding.whole([name], gradient)
            self._check.compare_gradients(self._stage, {name: gradient})


_CAUSES = (
    "the forward does something that the pipeline cannot see: it passes values on through Python objects, decides anew "
    "at each call, or was changed after the plan was made"
)


def _explain_gradient(expected: Numbers | None, actual: Numbers | None) -> str:
    if actual is None:
        return (
            "it is read where the pipeline does not see it: through a list, a dict, a closure or a reference in "
            "another module, or by the loss. Read it in the forward of the module that holds it, and pass tensors on"
        )
    if expected is None:
        return "the model itself does not use it on this data"
    return f"perhaps it is also read by the loss or through a reference in another module, or {_CAUSES}"


def _format_numbers(numbers: Numbers | None) -> str:
    return "none" if numbers is None else f"sum {numbers[0]:.6g}, of sizes {numbers[2]:.6g}"


def _list_modules(function: Any) -> list[nn.Module]:
    """Returns the modules that a loss is, belongs to, or reads through a closure."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != CellType()]
    arguments = [*function.args, *function.keywords.values()] if isinstance(function, partial) else []
    inner = [getattr(function, "func", None), getattr(function, "__self__", None)]
    return [candidate for candidate in (function, *inner, *cells, *arguments) if isinstance(candidate, nn.Module)]


def _are_parts(whole: Any, parts: Sequence[Any], tolerance: float) -> bool:
    """Returns whether the outputs of parts, one after the other, are those of the whole, as far as this can be seen."""
    for index, tensor in enumerate(tensors_in(whole)):
        pieces = [tensors_in(part)[index] for part in parts if index < len(tensors_in(part))]
        for dim in range(tensor.ndim):
            if sum(piece.shape[dim] if piece.ndim > dim else 0 for piece in pieces) != tensor.shape[dim]:
                continue
            try:
                joined = torch.cat(pieces, dim)
            except RuntimeError:
                continue
            if joined.shape == tensor.shape and not torch.allclose(joined, tensor, tolerance, tolerance):
                return False
            break
    return True


def _unpack_value(message: Message) -> Any:
    return unflatten(message.structure, message.tensors)  # type: ignore[arg-type]


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
