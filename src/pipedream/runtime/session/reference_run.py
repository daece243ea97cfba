"""Runs the user's model plainly on the first minibatch: its loss, gradients and buffers are the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, sqrt
from types import CellType, MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from pipedream.core.errors import PipelineError, WorkerError
from pipedream.core.fingerprint import Fingerprint, is_close
from pipedream.core.plan.messages import Messages
from pipedream.core.plan.placement import Placement
from pipedream.core.user_code import with_place
from pipedream.runtime.comm.encoding import apply_messages
from pipedream.runtime.comm.message import Message
from pipedream.runtime.comm.values import flatten, map_tensors, tensors_in, to_device
from pipedream.runtime.data.generators import find_values
from pipedream.runtime.data.rng import read_state
from pipedream.runtime.data.splitter import SINGLE_ADVICE, SINGLE_SAMPLE, Parts
from pipedream.runtime.results.losses import Loss
from pipedream.runtime.results.scoring import choose_unit
from pipedream.runtime.session.comparer import Comparer, Reference
from pipedream.runtime.stage.auxiliary import auxiliary_loss_scale
from pipedream.runtime.stage.generators import LayerGenerators

_SPLIT_ADVICE = "say where the samples are (batch_dim=...), give tensors with one entry per sample instead of lists"
_MIN_TOLERANCE = 1e-6  # a part of the model may compute in single precision


class CarriedState(Protocol):
    """See `pipedream.capture.preserve_state`."""

    def list_changed(self) -> list[str]: ...

    def restore(self) -> None: ...


class UserModel(Protocol):
    """The user's model, see `pipedream.capture.plain_model`."""

    model: nn.Module
    draws: bool
    draws_unseeded: bool

    def forward(
        self, inputs: Any, reseed: Callable[[str], None], send: Callable[[int, Any], Any] | None = None
    ) -> Any: ...

    def restoring_state(
        self, values: Mapping[str, torch.Tensor], others: Iterable[Any] = (), *, copies_on_cpu: bool = False
    ) -> AbstractContextManager[None]: ...

    def carried_state(self, modules: Mapping[str, nn.Module]) -> CarriedState: ...

    def python_draws(self) -> Callable[[], bool]: ...

    def fingerprint(self, tensor: torch.Tensor) -> Fingerprint: ...


def _do_nothing() -> None:
    pass


@dataclass(frozen=True)
class _Run:
    """The numbers of a forward over all parts.

    Attributes:
        loss: of the minibatch.
        weight: of its parts, summed.
        divisor: of the gradients.
        losses: of the parts; sums if the loss is a sum.
        outputs: of the parts.
        output_gradients: those of the parts' losses, times their weights.
    """

    loss: float
    weight: float
    divisor: float
    losses: tuple[float, ...]
    outputs: tuple[Any, ...]
    output_gradients: tuple[Any, ...]


class _ModelRunner:
    """Runs the model on parts of a minibatch.

    Args:
        split: microbatches per minibatch.
        first_minibatch: number of the minibatch, for the seeds.
        placement: shows which values are sent to another worker.
        is_of_mean, has_units, scale: what gradients are when they are sent (`Scorer.score`), and the loss scale. With
            others, encodings and layers in low precision might round differently.
        with_replicas: modules of which the replicas of a stage have one each, by path.
    """

    def __init__(
        self,
        plain: UserModel,
        loss: Loss,
        *,
        split: int,
        first_minibatch: int,
        seed: int,
        device: torch.device,
        autocast: torch.dtype | None,
        placement: Placement | None = None,
        is_of_mean: bool = False,
        scale: float = 1.0,
        has_units: bool = False,
        with_replicas: Mapping[str, nn.Module] = MappingProxyType({}),
    ) -> None:
        self.plain = plain
        self.with_replicas = with_replicas
        self.loss = loss
        self.modules_of_loss = _list_modules(loss.function)
        self.parameters_of_loss: list[nn.Parameter] = []
        self.device = device
        self.split = split
        self._first_minibatch = first_minibatch
        self._placement = placement
        self._shares_weights = placement is not None and placement.shares_weights
        self._is_of_mean, self._has_units, self._scale = is_of_mean, has_units, scale
        self._generators = LayerGenerators(seed, device)
        self._autocast = autocast
        self._dtypes = set() if autocast is None else {autocast}  # floating-point dtypes that were computed with

    def restoring_state(self, values: Mapping[str, torch.Tensor], **options: bool) -> AbstractContextManager[Any]:
        """Context in which `values` are the model's missing weights; restores model, loss and generators after it."""
        buffers = dict(self.plain.model.named_buffers(remove_duplicate=False))
        copies = {id(value): value.clone() for name, value in values.items() if name in buffers}  # runs write buffers
        values = {name: copies.get(id(value), value) for name, value in values.items()}
        function = self.loss.function
        others = [function, getattr(function, "__self__", None), *self.modules_of_loss]
        return self.plain.restoring_state(values, others, **options)

    def run(
        self,
        parts: Parts,
        *,
        backward: bool,
        messages: Messages | None = None,
        before_part: Callable[[], None] = _do_nothing,
    ) -> _Run:
        """Runs the model on each part; with `messages`, stage by stage."""
        loss = self.loss.copy_unused()
        total = weights = divisor = 0.0
        losses, outputs, output_gradients = [], [], []
        for message, target_message in parts:
            before_part()
            value = to_device(map_tensors(message.value(), _clone), self.device)
            targets = map_tensors(target_message.value(), _clone)
            with self._enter_autocast():
                with loss.watching(value, message.samples):
                    send = None if messages is None else partial(self._send, messages, message.microbatch)
                    output = self.plain.forward(value, self._reseed(message.microbatch), send)
                targets_on_device = to_device(targets, self.device)
                with torch.enable_grad():
                    output = output if backward or loss.function is None else map_tensors(output, _track)
                    part_loss, weight, is_sum = loss(
                        output, targets_on_device, message.samples, message.share, message.minibatch, received=targets
                    )
            self.note_dtypes((part_loss, *tensors_in(output)))
            factor = 1.0 if is_sum else weight
            weights += weight
            if weight:
                total += float(part_loss.detach()) * factor
                if backward and part_loss.requires_grad:
                    unit = 1 / weight if self._is_of_mean else 1.0
                    if messages is not None:
                        has_unit = self._has_units and not self._is_of_mean
                        unit *= self._scale / (choose_unit(loss, message, output, targets) if has_unit else 1.0)
                    with auxiliary_loss_scale(weight * unit):
                        part_loss.backward(torch.full_like(part_loss, factor * unit))  # type: ignore[no-untyped-call]
                        divisor += weight * unit
            losses.append(float(part_loss.detach()))
            if backward:
                self.parameters_of_loss = _list_parameters(part_loss, output)
            else:
                outputs.append(output)
                reads = [t for t in tensors_in(output) if t.requires_grad] if part_loss.requires_grad else []
                scale = torch.full_like(part_loss, factor)
                gradients = torch.autograd.grad(part_loss, reads, scale, allow_unused=True) if reads else ()
                output_gradients.append(gradients)
            del output, part_loss
        mean = total / weights if weights else float("nan")
        return _Run(mean, weights, divisor, tuple(losses), tuple(outputs), tuple(output_gradients))

    def try_single(self, single: Parts, place_values: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Runs the model on a part of one sample, if there is one; raises its error if a normalisation needs more."""
        if single:
            with self.restoring_state(place_values()), torch.no_grad():
                try:
                    self.run(single, backward=False)
                except Exception as error:  # another one comes at its own minibatch, from the stage that it concerns
                    if SINGLE_SAMPLE in str(error):
                        raise

    def explain_carried(self, run: _Run, parts: Parts, values: Mapping[str, torch.Tensor]) -> str:
        """Returns why training differs from a loop over minibatches, if a forward reads what another left on modules.

        With one part, only modules that replicas have for themselves matter, and the part is followed by itself.
        """
        is_split = len(parts) > 1
        if not is_split and not self.with_replicas:
            return ""
        sequence = parts if is_split else [*parts, *parts]
        isolated, names = self.repeat(sequence, values, isolates=True)
        if is_split and isolated.losses == run.losses:
            return ""
        again, _ = self.repeat(sequence, values)
        noise = max(abs(a - b) for a, b in zip(run.losses, again.losses, strict=False))
        limit = 4 * noise + 0.01 * self.choose_tolerance(()) * max(map(abs, again.losses))
        if not any(abs(a - b) > limit for a, b in zip(isolated.losses, again.losses, strict=True)):
            return ""
        reads = f"the forward reads what the one before left in {' or '.join(map(repr, names[:3])) or 'an attribute'}"
        if is_split:
            return f"{reads}, and a minibatch has {len(parts)} microbatches; train with microbatches=1"
        return f"{reads}, which each replica of its stage has for itself; plan one replica of this stage"

    def repeat(
        self, parts: Parts, values: Mapping[str, torch.Tensor], *, training: bool = True, isolates: bool = False
    ) -> tuple[_Run, list[str]]:
        """Runs forwards; if it `isolates`, each with the attributes before the first. Also returns what they change."""
        model = self.plain.model
        with self.restoring_state(values), torch.no_grad():
            for module in model.modules():
                module.training = module.training and training
            state = self.plain.carried_state(dict(model.named_modules()) if self.split > 1 else self.with_replicas)
            before_part = state.restore if isolates else _do_nothing
            return self.run(parts, backward=False, before_part=before_part), state.list_changed()

    def _send(self, messages: Messages, microbatch: int, stage: int, value: Any) -> Any:
        """Returns a value as the next stage receives it."""
        assert self._placement is not None
        sender, receiver = (self._placement.rank_of(s, microbatch) for s in (stage, stage + 1))
        if sender == receiver:
            return value
        tensors = tensors_in(value)
        if messages and not any(map(torch.is_floating_point, tensors)):
            kinds = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors) or "no tensor"
            raise PipelineError(
                f"messages={messages} was asked for, but stage {stage} sends no floating-point numbers, only "
                f"{kinds}; choose other cuts, or leave messages out"
            )
        return map_tensors(value, partial(apply_messages, messages=messages))

    def _reseed(self, microbatch: int) -> Callable[[str], None]:
        return lambda layer: self._generators.seed(self._first_minibatch * self.split + microbatch, layer)

    def _enter_autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._autocast is None else torch.autocast(self.device.type, self._autocast)

    def choose_tolerance(self, inputs: Any) -> float:
        tensors = [*self.plain.model.parameters(), *tensors_in(inputs)]
        dtypes = self._dtypes | {t.dtype for t in tensors if t.is_floating_point() or t.is_complex()}
        return max([_MIN_TOLERANCE, *(sqrt(torch.finfo(dtype).eps) for dtype in dtypes)])

    def read_buffers(self, comparer: Comparer) -> dict[str, Fingerprint]:
        buffers = self.plain.model.named_buffers(remove_duplicate=False)
        return {name: comparer.fingerprint(buffer) for name, buffer in buffers if not buffer.is_meta}

    def read_state_of_loss(self) -> dict[str, Any]:
        """Returns the numbers that a loss holds, and the buffers, as numbers, of its modules; none of the model."""
        model_ids = {id(part) for part in (*self.plain.model.modules(), *self.plain.model.buffers())}
        state = find_values({"": self.loss.function}, (int, float), model_ids)
        for root in self.modules_of_loss:
            state |= {name: buffer.tolist() for name, buffer in root.named_buffers() if id(buffer) not in model_ids}
        return state

    def read_weights(self, comparer: Comparer) -> dict[str, Any]:
        """Returns numbers that change when a weight is written, where passes read copies or minibatches are split."""
        named = self.plain.model.named_parameters() if self.split > 1 or self._shares_weights else ()
        return {n: (comparer.fingerprint(p), p._version, p.data_ptr()) for n, p in named if not p.is_meta}

    def list_written(self, old_weights: Mapping[str, Any], comparer: Comparer) -> list[str]:
        """Returns the weights that were written; raises a WorkerError if a pass would drop the change."""
        new_weights = self.read_weights(comparer)
        written = [name for name, old in old_weights.items() if new_weights[name] != old]
        if written and self._shares_weights:
            raise comparer.make_error(
                f"the forward writes the weight {written[0]!r} (as nn.Embedding(max_norm=...) does), and a pass drops "
                "its copy of it; keep it in a buffer, write it in the optimizer's step, or choose another method"
            )
        return written

    def check_written(
        self, names: Sequence[str], parts: Parts, whole: Parts, values: Mapping[str, torch.Tensor], comparer: Comparer
    ) -> None:
        """Raises a WorkerError if written weights depend on how a minibatch is split, or on a replica's part of it."""

        def run_on(sequence: Parts) -> dict[str, Any]:
            with self.restoring_state(values), torch.enable_grad():
                generator = torch.Generator().manual_seed(0)
                for weight in self.plain.model.parameters():  # an average of weights may equal them so far
                    if weight.is_floating_point() and not weight.is_meta and weight.itemsize > 1:
                        weight.data *= 1 + torch.rand(weight.shape, generator=generator).to(weight.device) / 10
                self.run(sequence, backward=True)
                return self.read_weights(comparer)

        expected, tolerance = run_on(whole), self.choose_tolerance(())
        alone = [name for name in names if name.rpartition(".")[0] in self.with_replicas]
        rest = [name for name in names if name not in alone]
        for some, sequence in [(rest, parts), *((alone, [part]) for part in parts if alone)]:
            written = run_on(sequence)
            for name in some:
                if not is_close(expected[name][0], written[name][0], tolerance):
                    raise comparer.make_error(
                        f"the forward or backward writes the weight {name!r}, and other numbers where a minibatch has "
                        f"{len(parts)} microbatches: it does so for each of them, a plain loop once for all samples; "
                        "train with microbatches=1 and one replica of its stage, or write it in the optimizer's step"
                    )

    def note_dtypes(self, tensors: Iterable[torch.Tensor]) -> None:
        """Records dtypes that were computed with, which determine the tolerance."""
        self._dtypes |= {tensor.dtype for tensor in tensors if tensor.is_floating_point()}


class ReferenceRun:
    """Runs the model, or helps to run the layers of a stage, for the comparison on one rank.

    Args:
        messages: encoding of the messages, which the reference applies at the cuts.
        uses_meshes: workers are meshes, whose ranks encode parts, in other blocks than those of the whole.
        runs: further arguments of `_ModelRunner`.
        values: parameters and buffers that are on the meta device at the rank that calls `read`.
        publish: sends a text to all ranks; None in one process.
        receive: returns that text at the other ranks.
        reseeded: the model's generators that replicated stages seed for each microbatch.
        replicated: names of the buffers of replicated stages that are not averaged.
    """

    def __init__(
        self,
        plain: UserModel,
        loss: Loss,
        *,
        rank: int,
        compiles: bool,
        messages: Messages | None = None,
        uses_meshes: bool = False,
        values: Mapping[str, torch.Tensor] = MappingProxyType({}),
        publish: Callable[[str], None] | None = None,
        receive: Callable[[], str] = str,
        reseeded: Sequence[Any] = (),
        replicated: Sequence[str] = (),
        **runs: Any,
    ) -> None:
        self._runner = _ModelRunner(plain, loss, **runs)
        self._compiles = compiles
        self._messages = messages or Messages()
        self._uses_meshes = uses_meshes
        self._values = values
        self._publish = publish
        self._reseeded = reseeded
        self._replicated = replicated
        self.comparer = Comparer(rank, plain.fingerprint, receive)

    @property
    def model(self) -> nn.Module:
        return self._runner.plain.model

    @property
    def split(self) -> int:
        """Microbatches of a minibatch."""
        return self._runner.split

    # -- the model --------------------------------------------------------------------------------------

    def read(self, inputs: Any, targets: Any, parts: Parts, single: Parts) -> None:
        """Runs the model on the first minibatch; `parts` are its microbatches, `single` one of one sample, or none.

        Raises:
            WorkerError: the losses of the parts do not give that of the whole, or the model cannot be trained.
        """
        try:
            reference = self._run(inputs, targets, parts)
            self._runner.try_single(single, self._place_values)
        except PipelineError as error:
            raise error if isinstance(error, WorkerError) else self.comparer.make_error(str(error)) from error
        except Exception as error:  # let the pipeline raise it, at the stage that it concerns
            self._check_split(inputs, targets, parts, error)
            reference = Reference(incomparable=f"the model raised {with_place(error)}")
        self.comparer.reference = reference
        self._values = {}
        self.release_memory()
        if self._publish is not None:
            self._publish(reference.to_json())

    def release_memory(self) -> None:
        """Returns the comparison's memory to the GPU, and resets the peak, so that training's is reported."""
        if self._runner.device.type == "cuda":
            torch.cuda.empty_cache()  # first, because the peak of the reserved bytes restarts from their present value
            torch.cuda.reset_peak_memory_stats(self._runner.device)

    def _run(self, inputs: Any, targets: Any, parts: Parts) -> Reference:
        plain = self._runner.plain
        values = self._place_values()
        with self._runner.restoring_state(values), torch.enable_grad():
            old_weights = self._runner.read_weights(self.comparer)
            has_drawn, old_states = plain.python_draws(), [read_state(generator) for generator in self._reseeded]
            old_buffers = self._runner.read_buffers(self.comparer)
            run = self._runner.run(parts, backward=True)
            reference = Reference(run.loss, tolerance=self._runner.choose_tolerance(inputs))
            draws = plain.draws
            if draws and self._compiles:
                reference.incomparable = "compiled modules draw other random numbers"
            elif plain.draws_unseeded:
                reference.incomparable = (
                    "the model draws random numbers where it drew none when it was profiled, so that they depend on "
                    "the cuts; profile it as it is trained"
                )
            elif has_drawn():
                reference.incomparable = "the forward draws from the generators of Python or NumPy"
            elif old_states != [read_state(generator) for generator in self._reseeded]:
                reference.incomparable = "the model draws from a generator of its own, which replicas seed anew"
            self._check_training(run)
            written = self._runner.list_written(old_weights, self.comparer)
            self._note(reference, run.divisor)
            moved = (name for name in self._replicated if reference.buffers.get(name) != old_buffers.get(name))
            reference.written = next(moved, "")
            norm = self._measure_gradient(run.divisor)
        if written and len(parts) > 1:
            whole = _join_parts(inputs, targets, parts)
            self._runner.check_written(written, parts, whole, values, self.comparer)
        if self._messages:
            reference = self._encode(reference, norm, parts, values)
        try:
            if carried := "" if reference.incomparable else self._runner.explain_carried(run, parts, values):
                raise self.comparer.make_error(carried)
            if len(parts) > 1:
                reference.parts = self._compare_parts(inputs, targets, parts, values, draws)
        except PipelineError:
            raise
        except Exception as error:  # in evaluation mode, for instance
            reference.parts = f"the whole minibatch raised {with_place(error)}"
        return reference

    def _encode(
        self,
        plain: Reference,
        norm: float,
        parts: Parts,
        values: Mapping[str, torch.Tensor],
    ) -> Reference:
        """Returns the model's numbers with encoded messages at the cuts, and records what the encoding changed.

        The stages run in turn, first with plain messages, which must give the model's numbers.

        Raises:
            WorkerError: they do not, or the messages hold nothing that can be encoded.
        """
        references = []
        for messages in (Messages(), self._messages):
            with self._runner.restoring_state(values), torch.enable_grad():
                run = self._runner.run(parts, backward=True, messages=messages)
                references.append(replace(plain, loss=run.loss, gradients={}, buffers={}))
                self._note(references[-1], run.divisor)
                encoded_norm = self._measure_gradient(run.divisor)
        stages, encoded = references
        if self._uses_meshes and not encoded.incomparable:
            encoded.incomparable = "each rank of a mesh encodes its own part of a message"
        if not plain.incomparable:
            comparer = Comparer(self.comparer.rank, self._runner.plain.fingerprint, str)
            comparer.reference = plain
            comparer.compare_stages(stages)
        _check_float16(self.comparer, messages, stages, encoded)
        encoded.encoding = (
            f"messages={self._messages} changed the loss of the first minibatch from {plain.loss:.6g} to "
            f"{encoded.loss:.6g}, and the norm of its gradient from {norm:.6g} to {encoded_norm:.6g}"
        )
        return encoded

    def _measure_gradient(self, divisor: float) -> float:
        """Returns the norm of the minibatch's gradient."""
        gradients = [p.grad.to_dense() for p in self.model.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) / (divisor or 1.0)

    def _place_values(self) -> dict[str, torch.Tensor]:
        placed = {id(value): value.to(self._runner.device) for value in self._values.values()}
        return {name: placed[id(value)] for name, value in self._values.items()}  # shared tensors stay shared

    def _check_training(self, run: _Run) -> None:
        """Raises a WorkerError if the loss trains nothing, or a parameter that no stage has."""
        model_parameters = {id(parameter) for parameter in self.model.parameters()}
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if trained and isfinite(run.loss) and run.weight and all(p.grad is None for p in trained):
            raise self.comparer.make_error(
                "the loss gives no parameter of the model a gradient, so nothing would be trained; compute it from the "
                "model's output, without detach(), .item(), torch.no_grad() or a tensor made anew"
            )
        names = {id(p): repr(name) for module in self._runner.modules_of_loss for name, p in module.named_parameters()}
        for parameter in self._runner.parameters_of_loss:
            if id(parameter) not in model_parameters:
                raise self.comparer.make_error(
                    "the loss has a trained parameter of its own, "
                    f"{names.get(id(parameter), f'of shape {list(parameter.shape)}')}, which no stage would train; let "
                    "the model hold and use it, or freeze it: requires_grad_(False)"
                )

    def _note(self, reference: Reference, divisor: float) -> None:
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                gradient = parameter.grad
                numbers = None if gradient is None else self.comparer.fingerprint(gradient, divisor)
                reference.gradients[name] = numbers
                if numbers is not None and gradient is not None and gradient.numel():
                    reference.scale = max(reference.scale, numbers[2] / gradient.numel())
        reference.buffers = self._runner.read_buffers(self.comparer)

    # -- the whole and its parts --------------------------------------------------------------------------

    def _check_split(self, inputs: Any, targets: Any, parts: Parts, error: Exception) -> None:
        """Raises a WorkerError if the model runs on the whole minibatch, after it raised an error for a part."""
        try:
            with self._runner.restoring_state(self._place_values()), torch.enable_grad():
                self._runner.run(_join_parts(inputs, targets, parts), backward=True)
        except Exception:
            return
        advice = SINGLE_ADVICE if SINGLE_SAMPLE in str(error) else _SPLIT_ADVICE
        raise self.comparer.make_error(
            f"the model or the loss raised {with_place(error)} for one of {len(parts)} microbatches, and does not for "
            f"the whole minibatch; {advice}, or train with fewer microbatches"
        ) from error

    def _compare_parts(
        self,
        inputs: Any,
        targets: Any,
        parts: Parts,
        values: Mapping[str, torch.Tensor],
        draws: bool,
    ) -> str:
        """Compares the loss of the whole minibatch with those of its parts; returns why it cannot be compared, or "".

        It is computed in evaluation mode if random numbers or the statistics of a batch may make a difference.
        """
        if self._runner.loss.function is None and self._runner.loss.weight is not None:
            return ""  # the user has defined how much each part counts
        model = self.model
        for name, module in model.named_modules():
            if getattr(module, "mixes_samples", False):
                return f"{name!r} computes with several samples at once, as its mixes_samples says"
        whole = _join_parts(inputs, targets, parts)
        for training in (False,) if draws else (True, False):
            split, _ = self._runner.repeat(parts, values, training=training, isolates=True)
            with self._runner.restoring_state(values), torch.no_grad():
                for module in model.modules():
                    module.training = module.training and training
                old_state = self._runner.read_state_of_loss()
                undivided = self._runner.run(whole, backward=False)
                tolerance = self._runner.choose_tolerance(inputs)
                limit = tolerance * max(map(abs, (undivided.loss, *split.losses)))
                if not isfinite(undivided.loss):
                    return ""
                if abs(undivided.loss - split.loss) <= limit:
                    if not _are_parts(undivided.output_gradients[0], split.output_gradients, tolerance):
                        if training:
                            continue  # buffers that a forward moves may be the reason
                        raise self.comparer.make_error(
                            "the loss of the minibatch is the mean of its microbatches' losses, but its gradient is "
                            "not, as where it divides by a detached value; train with microbatches=1"
                        )
                    return ""
                repeated = self._runner.run([(replace(whole[0][0], microbatch=-1), whole[0][1])], backward=False)
                changed = [
                    name for name, number in self._runner.read_state_of_loss().items() if old_state.get(name) != number
                ]
        if abs(undivided.loss - repeated.loss) > limit:
            if changed:
                raise self.comparer.make_error(
                    f"the loss changes its {changed[0]!r} whenever it is called, and it is called for each microbatch, "
                    "not once per minibatch; train with microbatches=1, or change it in a callback's on_minibatch"
                )
            return "its loss is another each time"
        raise self.comparer.make_error(
            f"the loss of a minibatch of {whole[0][0].samples} samples is {undivided.loss:.7g}, but the losses of its "
            f"{len(parts)} microbatches make {split.loss:.7g}; {_explain_parts(self._runner, undivided, split, limit)}"
        )

    # -- one stage alone ----------------------------------------------------------------------------------

    def restoring_state(self) -> AbstractContextManager[None]:
        """Context after which the local layers, the loss and the generators are restored.

        Weights are copied to the CPU: stages are compared one by one where a GPU's memory is short.
        """
        return self._runner.restoring_state({}, copies_on_cpu=True)

    def compute_loss(self, output: Any, message: Message, targets: Any) -> torch.Tensor:
        """Returns the loss of the last stage's output; of a model that returns its loss, that one."""
        on_device = to_device(map_tensors(targets, _clone), self._runner.device)
        return self._runner.loss.copy_unused()(output, on_device, message.samples, message.share, received=targets)[0]

    def note_dtypes(self, tensors: Iterable[torch.Tensor]) -> None:
        """Records dtypes that a stage computed with, which determine the tolerance."""
        self._runner.note_dtypes(tensors)

    def set_reference(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Sets the gradients that `Comparer.compare_gradients` expects."""
        fingerprints = {name: None if g is None else self.comparer.fingerprint(g) for name, g in gradients.items()}
        sizes = [self.comparer.fingerprint(g)[2] / g.numel() for g in gradients.values() if g is not None and g.numel()]
        self.comparer.reference = Reference(
            gradients=fingerprints, tolerance=self._runner.choose_tolerance(()), scale=max(sizes, default=0.0)
        )


def _check_float16(comparer: Comparer, messages: Messages, exact: Reference, rounded: Reference) -> None:
    """Raises a WorkerError if messages in float16 lose most of a gradient, which is no rounding error itself."""
    pairs = ((name, numbers, rounded.gradients[name]) for name, numbers in exact.gradients.items())
    lost = [n for n, a, b in pairs if a and b and b[2] < a[2] / 2 and a[2] > 1e-3 * exact.scale]
    if lost and "float16" in (messages.activations, messages.gradients):
        raise comparer.make_error(
            f"messages={messages} was asked for, but float16 rounds most of the gradient of {lost[0]!r} to 0; train "
            "with a loss scale (grad_scaler=), or messages='bfloat16'"
        )


def _list_modules(function: Any) -> list[nn.Module]:
    """Returns the modules that a loss is, is a method of, or reads through a closure or its arguments."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != CellType()]
    arguments = [*function.args, *function.keywords.values()] if isinstance(function, partial) else []
    inner = [getattr(function, "func", None), getattr(function, "__self__", None)]
    return [candidate for candidate in (function, *inner, *cells, *arguments) if isinstance(candidate, nn.Module)]


def _join_parts(inputs: Any, targets: Any, parts: Parts) -> list[tuple[Message, Message]]:
    """Returns the whole minibatch as its only part."""
    first = replace(parts[0][0], samples=sum(message.samples for message, _ in parts), share=1.0)
    return [(first.with_tensors(*flatten(inputs)), first.with_tensors(*flatten(targets)))]


def _explain_parts(runner: _ModelRunner, undivided: _Run, split: _Run, limit: float) -> str:
    if not _are_parts(undivided.outputs[0], split.outputs, runner.choose_tolerance(())):
        return (
            "the model's outputs for the microbatches are not those for the minibatch, so that its samples are not "
            "along dimension 0 of each input, or it computes with several samples at once; say where the samples "
            "are (batch_dim=...), give tensors with one entry per sample instead of lists, or train with "
            "microbatches=1 and one replica of the last stage"
        )
    otherwise = "or, if it compares samples with each other or broadcasts over them, train with microbatches=1"
    if abs(undivided.losses[0] - sum(split.losses)) <= limit:
        return f"the loss is a sum: let it return (sum, weight), for instance (loss, len(targets)), {otherwise}"
    if runner.loss.weight is not None:
        return f"weight=... does not give what the loss is a mean over; correct it, {otherwise}"
    return (
        "the loss is not a mean over samples; give weight=..., a function from a batch to the amount that the loss "
        f"is a mean over (such as the number of counted targets), let the loss return (sum, weight), {otherwise}"
    )


def _are_parts(whole: Any, parts: Sequence[Any], tolerance: float) -> bool:
    """Returns False if the concatenated outputs of the parts certainly differ from those of the whole."""
    for index, tensor in enumerate(tensors_in(whole)):
        pieces = [tensors_in(part)[index] for part in parts if index < len(tensors_in(part))]
        for dim in range(tensor.ndim):
            if sum(piece.shape[dim] if piece.ndim > dim else 0 for piece in pieces) != tensor.shape[dim]:
                continue
            try:
                joined = torch.cat(pieces, dim)
            except RuntimeError:
                continue
            if joined.shape == tensor.shape and not torch.allclose(
                joined, tensor, tolerance, tolerance, equal_nan=True
            ):
                return False
            break
    return True


def _list_parameters(loss: torch.Tensor, output: Any) -> list[nn.Parameter]:
    """Returns the trained parameters that the loss reads beside the model's output."""
    visited: set[Any] = {None, *(tensor.grad_fn for tensor in tensors_in(output))}
    nodes: set[Any] = {loss.grad_fn}
    while nodes := nodes - visited:
        visited |= nodes
        nodes = {earlier for node in nodes for earlier, _ in node.next_functions}
    return [node.variable for node in visited if isinstance(getattr(node, "variable", None), nn.Parameter)]


def _track(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex()).clone()


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
