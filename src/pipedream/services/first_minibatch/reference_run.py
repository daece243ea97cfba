"""The user's model, run plainly on the first minibatch, is the reference of the pipeline.

Each check compares two runs of one kind (`ModelRunner.run`), on other parts or in another mode:

    the microbatches          gradients, loss and buffers of the pipeline
    rounded at the cuts       the same, if messages are encoded
    each from the same state  no microbatch reads what another one leaves on modules
    the whole minibatch       its loss is that of its microbatches
    two microbatches as one   so is its gradient
    both in evaluation mode   a metric of the whole is the mean of those of the parts
    one sample                normalisations do not fail for the last minibatch of an epoch
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from types import MappingProxyType

import torch

from pipedream.core.errors import PipelineError, WorkerError
from pipedream.core.fingerprint import Fingerprint, find_difference
from pipedream.core.user_code import with_place
from pipedream.runtime.data.splitter import SINGLE_ADVICE, SINGLE_SAMPLE, Parts
from pipedream.runtime.session.local_workers import LocalWorkers
from pipedream.runtime.stage_parts import explain_difference
from pipedream.services.first_minibatch.comparer import Comparer, Reference
from pipedream.services.first_minibatch.first import FirstMinibatch
from pipedream.services.first_minibatch.metric_means import Row, explain_mean
from pipedream.services.first_minibatch.model_runner import ModelRunner, Run
from pipedream.services.first_minibatch.plain_model import PlainModel

_REPEATS = 4  # of a minibatch, by which what forwards count should show
Outputs = Sequence[tuple[int, Fingerprint]]
_SPLIT_ADVICE = "say where the samples are (batch_dim=...), give tensors with one entry per sample instead of lists"


class ReferenceRun:
    """Runs the model for the comparison on one rank.

    Args:
        values: parameters and buffers that are not on the device of the rank that calls `read`.
        publish: sends a text to all ranks; None in one process.
        receive: returns that text at the other ranks.
    """

    def __init__(
        self,
        model: PlainModel,
        workers_here: LocalWorkers,
        values: Mapping[str, torch.Tensor] = MappingProxyType({}),
        publish: Callable[[str], None] | None = None,
        receive: Callable[[], str] = str,
    ) -> None:
        self.runner = ModelRunner(model, workers_here, values)
        self.comparer = Comparer(workers_here.rank, receive)
        self._model, self._settings = model, workers_here.blueprint.settings
        self._program = workers_here.program
        self._messages = workers_here.program.plan.choices.messages
        self._uses_meshes = any(mesh.dimensions for mesh in workers_here.blueprint.meshes)
        self._publish = publish

    def read(self, first: FirstMinibatch) -> None:
        """Runs the model on the first minibatch.

        Raises:
            WorkerError: the losses of the parts do not give that of the whole, or the model cannot be trained.
        """
        try:
            reference = self._make_reference(first)
            self._try_single(first.single)
        except PipelineError as error:
            raise error if isinstance(error, WorkerError) else self.comparer.make_error(str(error)) from error
        except torch.OutOfMemoryError:
            reference = Reference(incomparable="the memory does not suffice for running it beside the stages")
        except Exception as error:  # let the pipeline raise it, at the stage that it concerns
            self._check_split(first, error)
            reference = Reference(incomparable=f"the model raised {with_place(error)}")
        self.comparer.reference = reference
        self.runner.values = {}
        self.release_memory()
        if self._publish is not None:
            self._publish(reference.to_json())

    def release_memory(self) -> None:
        """Returns the comparison's memory to the GPU, and resets the peak, so that training's is reported."""
        if self.runner.device.type == "cuda":
            torch.cuda.empty_cache()  # first, because the peak of the reserved bytes restarts from their present value
            torch.cuda.reset_peak_memory_stats(self.runner.device)

    def _make_reference(self, first: FirstMinibatch) -> Reference:
        run = self.runner.run(first.parts, backward=True)
        reference = run.numbers
        reasons = {
            "compiled modules draw other random numbers": run.draws and self._settings.compile is not None,
            "the model draws random numbers where it drew none when it was profiled, so that they depend on the cuts; "
            "profile it as it is trained": self._model.draws_unseeded,
            "the forward draws from the generators of Python or NumPy": run.changed["python"],
            "the model draws from a generator of its own, which replicas seed anew": run.changed["generators"],
        }
        of_parts = explain_difference(self._program, [inputs for inputs, _ in first.parts])
        reference.incomparable = next((reason for reason, holds in reasons.items() if holds), of_parts)
        reference.written = next((name for name in run.changed["buffers"] if name in self.runner.replicated), "")
        self._check_training(run)
        if len(first.parts) > 1 and run.changed["weights"]:
            self._check_written(run.changed["weights"], first)
        if self._messages:
            reference = self._encode(run, first.parts)
        for self.runner.keeps_graph in (False, True):
            try:
                if not reference.incomparable:
                    self._check_carried(run, first.parts)
                reference.parts = self._check_parts(first, run) if len(first.parts) > 1 else ""
                if len(first.parts) > 1 and self._model.metrics and not reference.parts:
                    self._check_metrics(first)
                break
            except PipelineError:
                raise
            except Exception as error:  # in evaluation mode, for instance
                reference.parts = f"the whole minibatch raised {with_place(error)}"
        return reference

    def _encode(self, plain: Run, parts: Parts) -> Reference:
        """Returns the model's numbers with encoded messages at the cuts, and records what the encoding changed.

        Raises:
            PipelineError: the messages hold nothing that can be encoded, or float16 loses most of a gradient.
        """
        messages = self._messages
        run = self.runner.run(parts, backward=True, encodes=True)
        exact, rounded = plain.numbers, run.numbers
        pairs = ((name, numbers, rounded.gradients[name]) for name, numbers in exact.gradients.items())
        lost = [n for n, a, b in pairs if a and b and b[2] < a[2] / 2 and a[2] > 1e-3 * exact.scale]
        if lost and "float16" in (messages.activations, messages.gradients):
            raise PipelineError(
                f"messages={messages} was asked for, but float16 rounds most of the gradient of {lost[0]!r} to "
                "0; train with a loss scale (grad_scaler=), or messages='bfloat16'"
            )
        in_parts = "each rank of a mesh encodes its own part of a message" if self._uses_meshes else ""
        return replace(
            rounded,
            tolerance=exact.tolerance,
            written=exact.written,
            incomparable=exact.incomparable or in_parts,
            encoding=f"messages={messages} changed the loss of the first minibatch from {exact.loss:.6g} to "
            f"{rounded.loss:.6g}, and the norm of its gradient from {plain.norm:.6g} to {run.norm:.6g}",
        )

    def _check_training(self, run: Run) -> None:
        """Raises a PipelineError if the loss trains nothing, or what no stage has, or a weight's change is lost."""
        gradients = run.numbers.gradients
        if gradients and not any(gradients.values()) and isfinite(run.numbers.loss) and run.weight:
            raise PipelineError(
                "the loss gives no parameter of the model a gradient, so nothing would be trained; compute it from the "
                "model's output, without detach(), .item(), torch.no_grad() or a tensor made anew"
            )
        if run.others:
            named = [pair for module in self.runner.modules_of_loss for pair in module.named_parameters()]
            names = {id(parameter): repr(name) for name, parameter in named}
            other = run.others[0]
            raise PipelineError(
                "the loss has a trained parameter of its own, "
                f"{names.get(id(other), f'of shape {list(other.shape)}')}, which no stage would train; let "
                "the model hold and use it, or freeze it: requires_grad_(False)"
            )
        if (written := run.changed["weights"]) and self.runner.shares_weights:
            raise PipelineError(
                f"the forward writes the weight {written[0]!r} (as nn.Embedding(max_norm=...) does), and a pass drops "
                "its copy of it; keep it in a buffer, write it in the optimizer's step, or choose another method"
            )

    def _check_written(self, names: Sequence[str], first: FirstMinibatch) -> None:
        """Raises a PipelineError if written weights depend on how the minibatch is split, or on a replica's part."""
        whole = self.runner.run(first.whole, backward=True, moves_weights=True)
        alone = [name for name in names if name.rpartition(".")[0] in self.runner.in_replicas]
        rest = [name for name in names if name not in alone]
        for some, parts in [(rest, first.parts), *((alone, [part]) for part in first.parts if alone)]:
            run = self.runner.run(parts, backward=True, moves_weights=True)
            expected, actual = ({name: weights[name] for name in some} for weights in (whole.weights, run.weights))
            if difference := find_difference(expected, actual, whole.numbers.tolerance):
                raise PipelineError(
                    f"the forward or backward writes the weight {difference.name!r}, and other numbers where a "
                    f"minibatch has {len(first.parts)} microbatches: it does so for each of them, a plain loop once "
                    "for all samples; train with microbatches=1 and one replica of its stage, or write it in the "
                    "optimizer's step"
                )

    def _check_carried(self, run: Run, parts: Parts) -> None:
        """Raises a PipelineError if a forward reads what another one left on modules, unlike in the pipeline.

        With one part, only modules that replicas have for themselves matter, and the part is followed by itself.
        """
        is_split = len(parts) > 1
        modules = self.runner.modules if is_split else self.runner.in_replicas
        if not modules:
            return
        isolated = self.runner.run(parts, isolated=modules)
        keeps = isolated.changed["attributes"]  # what may show only after some forwards
        if is_split and isolated.losses == run.losses and not keeps:
            return
        sequence = [*parts] * (_REPEATS if keeps else 1 if is_split else 2)
        isolated = self.runner.run(sequence, isolated=modules)
        again = self.runner.run(sequence)
        noise = max(abs(a - b) for a, b in zip(run.losses, again.losses, strict=False))
        limit = 4 * noise + 0.01 * again.numbers.tolerance * max(map(abs, again.losses))
        if not any(abs(a - b) > limit for a, b in zip(isolated.losses, again.losses, strict=True)):
            return
        names = " or ".join(map(repr, isolated.changed["attributes"][:3])) or "an attribute"
        raise PipelineError(
            f"the forward reads what the one before left in {names}, "
            + (
                f"and a minibatch has {len(parts)} microbatches; train with microbatches=1"
                if is_split
                else "which each replica of its stage has for itself; plan one replica of this stage"
            )
        )

    def _try_single(self, single: Parts) -> None:
        """Runs the model on a part of one sample, if there is one; raises its error if a normalisation needs more."""
        try:
            if single:
                self.runner.run(single)
        except Exception as error:  # another one comes at its own minibatch, from the stage that it concerns
            if SINGLE_SAMPLE in str(error):
                raise

    # -- the whole and its parts --------------------------------------------------------------------------

    def _check_split(self, first: FirstMinibatch, error: Exception) -> None:
        """Raises a WorkerError if the model runs on the whole minibatch, after it raised an error for a part."""
        try:
            self.runner.run(first.whole, backward=True)
        except Exception:
            return
        advice = SINGLE_ADVICE if SINGLE_SAMPLE in str(error) else _SPLIT_ADVICE
        raise self.comparer.make_error(
            f"the model or the loss raised {with_place(error)} for one of {len(first.parts)} microbatches, and does "
            f"not for the whole minibatch; {advice}, or train with fewer microbatches"
        ) from error

    def _check_parts(self, first: FirstMinibatch, plain: Run) -> str:
        """Compares the whole minibatch with its parts; returns why it cannot be compared, or "".

        In evaluation mode, too, if random numbers, the statistics of a batch or what a forward writes may make a
        difference.

        Raises:
            PipelineError: its loss or its gradient is not that of its parts.
        """
        run, loss = self.runner.run, self.runner.loss
        for name, module in self.runner.model.named_modules():
            if getattr(module, "mixes_samples", False):
                return f"{name!r} computes with several samples at once, as its mixes_samples says"
        for training in (False,) if plain.draws else (True, False):
            split = plain if training else run(first.parts, training=False, isolated=self.runner.modules)
            whole = run(first.whole, training=training)
            limit = whole.numbers.tolerance * max(map(abs, (whole.numbers.loss, *split.losses)))
            if not isfinite(whole.numbers.loss):
                return ""
            has_loss_of_parts = abs(whole.numbers.loss - split.numbers.loss) <= limit
            if has_loss_of_parts and self._has_gradient_of_parts(first, training):
                return ""
        if has_loss_of_parts:
            raise PipelineError(
                "the loss of the minibatch is the mean of its microbatches' losses, but its gradient is not, as where "
                "the loss or the model divides by a detached value of the batch; train with microbatches=1"
            )
        if loss.function is None and loss.weight is not None:
            return ""  # the user has defined how much each part counts
        other = [(replace(message, microbatch=-1), target) for message, target in first.whole]  # with another seed
        repeated = run([*first.whole, *other], training=False)
        if abs(repeated.losses[0] - repeated.losses[1]) > limit:
            if changed := repeated.changed["loss"]:
                raise PipelineError(
                    f"the loss changes its {changed[0]!r} whenever it is called, and it is called for "
                    "each microbatch, not once per minibatch; train with microbatches=1, or change it in a callback's "
                    "on_minibatch"
                )
            return "its loss is another each time"
        raise PipelineError(
            f"the loss of a minibatch of {first.whole[0][0].samples} samples is {whole.numbers.loss:.7g}, but the "
            f"losses of its {len(first.parts)} microbatches make {split.numbers.loss:.7g}; "
            f"{self._explain_parts(whole, split, limit)}"
        )

    def _check_metrics(self, first: FirstMinibatch) -> None:
        """Raises a PipelineError if the value of a metric for the whole is not the mean of those for the parts."""
        whole, parts = list[Row](), list[Row]()
        self.runner.run(first.whole, training=False, rows=whole)
        self.runner.run(first.parts, training=False, isolated=self.runner.modules, rows=parts)
        for name, metric in self._model.metrics.items():
            with self.runner.restoring_state(metric):
                difference = explain_mean(metric, whole[0], parts, self.runner.choose_tolerance())
            if difference:
                raise PipelineError(
                    f"the metric {name!r} of a minibatch is {difference}, which would be reported; let it return (sum, "
                    "weight) of what it is a mean over, and compute a root or a ratio of means yourself; or train with "
                    "microbatches=1"
                )

    def _has_gradient_of_parts(self, first: FirstMinibatch, training: bool) -> bool:
        """Returns whether the gradient of two microbatches as one is that of both; all would need more memory.

        Auxiliary losses count by microbatch.
        """
        split, joined = (
            self.runner.run(parts, backward=True, training=training, auxiliary=False).numbers
            for parts in (first.parts[:2], first.pair)
        )
        named = self.runner.model.named_parameters(remove_duplicate=False)
        # Sums of other sizes round differently, which is all that a gradient near zero may hold.
        floors = {name: p.numel() * split.scale for name, p in named}
        expected, actual = ({n: g or (0.0,) * 3 for n, g in run.gradients.items()} for run in (joined, split))
        return not isfinite(joined.loss) or find_difference(expected, actual, joined.tolerance, floors) is None

    def _explain_parts(self, whole: Run, split: Run, limit: float) -> str:
        if not _are_parts(whole.outputs[0], split.outputs, whole.numbers.tolerance):
            return (
                "the model's outputs for the microbatches are not those for the minibatch, so that its samples are not "
                "along dimension 0 of each input, or it computes with several samples at once; say where the samples "
                "are (batch_dim=...), give tensors with one entry per sample instead of lists, or train with "
                "microbatches=1 and one replica of the last stage"
            )
        otherwise = "or, if it compares samples with each other or broadcasts over them, train with microbatches=1"
        if abs(whole.losses[0] - sum(split.losses)) <= limit:
            return f"the loss is a sum: let it return (sum, weight), for instance (loss, len(targets)), {otherwise}"
        if self.runner.loss.weight is not None:
            return f"weight=... does not give what the loss is a mean over; correct it, {otherwise}"
        return (
            "the loss is not a mean over samples; give weight=..., a function from a batch to the amount that the loss "
            f"is a mean over (such as the number of counted targets), let the loss return (sum, weight), {otherwise}"
        )


def _are_parts(whole: Outputs, parts: Sequence[Outputs], tolerance: float) -> bool:
    """Returns False if tensors of the parts, which have as many numbers together as that of the whole, differ."""
    for (size, (total, _, absolute)), *pieces in zip(whole, *parts, strict=False):
        if sum(piece_size for piece_size, _ in pieces) == size:
            sums = [sum(numbers[i] for _, numbers in pieces) for i in (0, 2)]
            if max(abs(sums[0] - total), abs(sums[1] - absolute)) > tolerance * absolute:
                return False
    return True
