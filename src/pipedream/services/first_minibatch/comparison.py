"""Compares the first minibatch of a pipeline with the user's model, run plainly on the same data.

1. When the first minibatch is read, the input stage's first worker runs the whole model on it, in the microbatches of
   the pipeline: `ReferenceRun.read`. It also compares the loss of the whole minibatch with those of its parts.
2. All ranks get fingerprints of its loss, gradients and buffers.
3. The pipeline trains. Each stage compares its buffers after the minibatch's last forward, and its gradients before its
   first update (`StageCheck`). Each rank compares the loss.

Where the model does not fit one worker as a whole, each stage runs its own layers instead (`LayersCheck`).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist

from pipedream.core.schedule.program import Program
from pipedream.runtime.comm.message import Message
from pipedream.runtime.comm.process_group import broadcast_text
from pipedream.runtime.comm.values import map_tensors, tensors_in
from pipedream.runtime.data.source import MeshSource, ReadingSource, Source
from pipedream.runtime.data.splitter import Parts
from pipedream.runtime.division import Division
from pipedream.runtime.results import Done
from pipedream.runtime.session.local_workers import LocalWorkers
from pipedream.runtime.session.service import SessionService
from pipedream.runtime.stage.stage_module import SavedForward, StageModule
from pipedream.runtime.stage_passes import StageObserver
from pipedream.runtime.stage_state import StageState
from pipedream.runtime.weights.parameters import named_state
from pipedream.services.first_minibatch.comparer import Reference
from pipedream.services.first_minibatch.first import FirstMinibatch, find_last_share
from pipedream.services.first_minibatch.plain_model import PlainModel
from pipedream.services.first_minibatch.reference_run import ReferenceRun
from pipedream.services.weights.transfer import collect_tensors, list_tensors
from pipedream.tensors.auxiliary_loss import auxiliary_loss_scale
from pipedream.tensors.outside_func import HooksOutsideFunc

_log = logging.getLogger("pipedream")


@dataclass
class Comparison(SessionService):
    """The comparison of one process."""

    workers_here: LocalWorkers
    model: PlainModel
    _is_due: bool = True
    _reference: ReferenceRun | None = None

    def begin_stream(self, sources: Mapping[int, Source]) -> None:
        """Prepares the comparison of the first minibatch."""
        self._reference = self._begin(sources) if self._is_due else None
        self._is_due, self.model.dropped = False, {}

    def take_result(self, done: Done) -> None:
        """Compares the first minibatch's loss; raises a `WorkerError` if it is another one."""
        reference, self._reference = self._reference, None
        if reference is not None:
            reference.comparer.compare_loss(done.loss)

    def note_restored(self) -> None:
        """Skips the comparison: the checkpoint's first minibatch was compared."""
        self._is_due, self.model.dropped = False, {}

    def _begin(self, sources: Mapping[int, Source]) -> ReferenceRun | None:
        """Returns the run that has the first minibatch's loss, if the model fits."""
        workers_here, program = self.workers_here, self.workers_here.program
        if min(program.updates.per_update) < program.microbatches:
            return None
        reader = program.placement.readers[0]
        if (workers_here.distributed or self._has_weights_elsewhere) and not self._fits(reader):
            self._check_each_stage()
            return None
        weights: dict[str, Any] = {"values": named_state(workers_here.model)} if self._has_weights_elsewhere else {}
        if workers_here.distributed:
            weights = self._collect_weights(reader)
        run = ReferenceRun(self.model, workers_here, **weights)
        for worker in workers_here.workers:
            for stage, replica in program.placement.stage_replicas(worker.rank):
                self._check_stage(run, stage, replica, worker.stage_states[stage])
        source = sources.get(reader)
        if isinstance(source, MeshSource):
            source = source.source
        if isinstance(source, ReadingSource):
            splitter, batch_dim = source.splitter, workers_here.blueprint.settings.batch_dim

            def read_first(parts: Parts, take_first: Callable[[int], Parts]) -> None:
                last_share = find_last_share(splitter.loader, batch_dim)
                run.read(FirstMinibatch.of(parts, take_first, last_share))

            splitter.on_first = read_first
        return run

    @property
    def _has_weights_elsewhere(self) -> bool:
        """Whether the weights are not on the workers' device, where the model runs for the comparison."""
        return self.workers_here.blueprint.weights_device != self.workers_here.blueprint.device

    def _fits(self, reader: int) -> bool:
        """Returns whether the comparison fits the rank that reads the data."""
        workers_here = self.workers_here
        is_reader = workers_here.worker_rank == reader
        return not workers_here.any_rank(is_reader and not self.model.fits(workers_here.blueprint.device))

    def _collect_weights(self, reader: int) -> dict[str, Any]:
        """Collects the weights at the reading rank; returns them and how the reference is published and received."""
        workers_here = self.workers_here
        store = dist.distributed_c10d._get_default_store()
        key = "pipedream/first/" + broadcast_text(uuid.uuid4().hex, workers_here.group)
        with workers_here.activity.at("collecting the weights"):
            values: dict[str, torch.Tensor] = collect_tensors(
                workers_here, list_tensors(workers_here), reader, dropped=self.model.dropped
            )
        first_names = {name: workers_here.names.shared.get(name, (name,))[0] for name in values}
        values |= {name: values[first] for name, first in first_names.items() if first in values}

        def receive() -> str:
            with workers_here.activity.waiting():  # within a forward, while the reader runs a whole minibatch
                text: str = store.get(key).decode()
            return text

        return {"values": values, "publish": partial(store.set, key), "receive": receive}

    def _check_each_stage(self) -> None:
        """Lets each stage of this rank compare its first microbatch with its own layers."""
        workers_here, placement = self.workers_here, self.workers_here.program.placement
        if workers_here.rank == 0:
            is_compared = not (workers_here.shardings or self._has_weights_elsewhere)
            outcome = "compared stage by stage" if is_compared else "not compared with the model's own"
            _log.warning("the first minibatch is %s: the whole model does not fit the worker that reads it", outcome)
        if workers_here.shardings or self._has_weights_elsewhere:
            return
        for stage, replica in placement.stage_replicas(workers_here.worker_rank):
            stage_state = workers_here.lead.stage_states[stage]
            if not replica and _runs_at_home(workers_here.program, stage):
                run, names = ReferenceRun(self.model, workers_here), list(stage_state.versions.handles)
                stage_state.observer = LayersCheck(run, stage, names, module=stage_state.module)

    def _check_stage(self, run: ReferenceRun, stage: int, replica: int, stage_state: StageState) -> None:
        workers_here, placement = self.workers_here, self.workers_here.program.placement
        microbatches = workers_here.program.microbatches
        whole_update = workers_here.program.updates.per_update[stage] == microbatches
        buffers: list[str] = []
        runs_here = _runs_at_home(workers_here.program, stage)
        if runs_here and (placement.replicas[stage] == 1 or (microbatches == 1 and not replica)):
            buffers_here = dict(workers_here.model.named_buffers(remove_duplicate=False))
            buffers = [name for name in workers_here.names.by_stage[stage] if name in buffers_here]
        division = stage_state.module.division
        if whole_update or (microbatches == 1 and not replica and not division.is_divided):
            plan = workers_here.program.plan
            holders = {stage, *(s for tied in plan.tied_weights if stage in tied.stages for s in tied.stages)}
            # Gradients that only approximate the sums would differ.
            is_summed = any(placement.replicas[holder] > 1 for holder in holders)
            comparable = not (whole_update and is_summed) or plan.choices.sums.is_exact
            names = list(stage_state.versions.handles) if comparable else []
            if not comparable and workers_here.rank == replica == 0:
                sums = plan.choices.sums
                _log.info("the gradients of stage %d are not compared with the model's: sums=%r", stage, sums)
            stage_state.observer = StageCheck(run, stage, names, buffers, whole_update, division)


@dataclass
class StageCheck(StageObserver):
    """Compares a stage's buffers and gradients with those of the model, which has run as a whole.

    Attributes:
        names: of its trained parameters, in the order of the handles.
        buffers: names of the stage's buffers, if no other replica has changed its own.
        is_whole_update: the minibatch is its whole first update; otherwise the gradients of the minibatch's only
            microbatch, 0, are compared before they are summed over the replicas.
        division: whose ranks compare whole gradients.
    """

    run: ReferenceRun
    stage: int
    names: Sequence[str]
    buffers: Sequence[str] = ()
    is_whole_update: bool = False
    division: Division = field(default_factory=Division)
    _ready_gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    observes = True

    def after_forward(self, index: int) -> None:
        if index == self.run.runner.microbatches - 1:
            model = self.run.runner.model
            self.run.comparer.compare_buffers(self.stage, ((name, model.get_buffer(name)) for name in self.buffers))

    def gradient_ready(self, index: int, gradient: torch.Tensor) -> None:
        if not self.is_whole_update:
            self._ready_gradients[index] = gradient.clone()

    def after_backward(self, index: int, gradients: Sequence[torch.Tensor | None], factor: float) -> None:
        if self.is_whole_update or index or not factor:
            return
        by_index = {i: gradient for i, gradient in enumerate(gradients) if gradient is not None} | self._ready_gradients
        by_name = {name: by_index.get(i) for i, name in enumerate(self.names)}
        self.run.comparer.compare_gradients(self.stage, by_name, factor)
        self._ready_gradients.clear()

    def before_update(self, handles: Mapping[str, torch.Tensor]) -> None:
        for name in self.names if self.is_whole_update else ():
            gradient = handles[name].grad
            if gradient is not None:
                gradient = self.division.gather([name], gradient)
            self.run.comparer.compare_gradients(self.stage, {name: gradient})


def _while_memory_suffices(step: Callable[..., None]) -> Callable[..., None]:
    """Decorates the steps of a `LayersCheck`: it ends where the memory does not suffice."""

    @wraps(step)
    def run_step(check: LayersCheck, *arguments: Any) -> None:
        if check.has_ended:
            return
        try:
            step(check, *arguments)
        except torch.OutOfMemoryError:
            check.has_ended = True
        if check.has_ended:  # out of the except block, as the error's traceback holds tensors
            check.end()

    return run_step


@dataclass
class LayersCheck(StageCheck):
    """Compares a stage's first microbatch with its layers, run plainly on what the stage has received.

    The layers run on a copy of the received value, with the user's own parameters, before the stage's forward. Their
    outputs must equal the stage's, and so must their gradients for the output gradients that the stage receives. If the
    memory does not suffice, the comparison ends with a warning, and training continues.
    """

    module: StageModule = field(kw_only=True)
    has_ended: bool = False
    _inputs: list[torch.Tensor] = field(default_factory=list)
    _outputs: tuple[torch.Tensor, ...] = ()
    _received: Sequence[str] = ()
    _has_reference: bool = False

    def end(self) -> None:
        self._has_reference = False
        self._inputs, self._outputs = [], ()
        self._ready_gradients.clear()
        self.run.release_memory()
        _log.warning(
            "the first microbatch of stage %d is not compared with its layers: the memory does not suffice for "
            "running them twice; training continues, and check=False (--no-check) leaves the attempt out",
            self.stage,
        )

    @_while_memory_suffices
    def before_forward(
        self, value: Any, microbatch: int, is_first: bool, message: Message, targets: Message | None
    ) -> None:
        """Runs the layers."""

        def enter(tensor: torch.Tensor) -> torch.Tensor:
            copy = tensor.detach().clone()
            if not tensor.requires_grad:
                return copy
            self._inputs.append(copy.requires_grad_())
            return copy.clone()  # a layer may write into it

        runner = self.run.runner
        # Otherwise, within a forward that is recomputed later, this graph would keep no tensors.
        keep_tensors = HooksOutsideFunc(_return_itself, _return_itself)
        # Weights are copied to the CPU: stages are compared one by one where a GPU's memory is short.
        with runner.restoring_state(copies_on_cpu=True), torch.enable_grad(), keep_tensors:
            output = self.module.forward(map_tensors(value, enter), dict(self.module.handles), microbatch, is_first)
            if targets is not None:
                with self.module.autocasting():
                    output = runner.compute_loss(runner.loss.copy_unused(), output, message, targets.value())[0]
        self._outputs = tensors_in(output)
        runner.note_dtypes(self._outputs)

    @_while_memory_suffices
    def before_backward(self, saved: SavedForward, gradients: Sequence[torch.Tensor | None]) -> None:
        """Compares the outputs, and computes the layers' gradients from those of the outputs."""
        if saved.microbatch or not self._outputs:
            return
        comparer = self.run.comparer
        comparer.reference = Reference(tolerance=self.run.runner.choose_tolerance())
        comparer.compare_outputs(self.stage, self._outputs, saved.outputs)
        pairs = [(o, g) for o, g in zip(self._outputs, gradients, strict=True) if g is not None and o.requires_grad]
        leaves = [*(self.module.handles[name] for name in self.names), *self._inputs]
        layer_gradients: Sequence[torch.Tensor | None] = [None] * len(leaves)
        if pairs:
            outputs, received = zip(*pairs, strict=True)
            with auxiliary_loss_scale(saved.auxiliary_scale):
                layer_gradients = torch.autograd.grad(outputs, leaves, received, allow_unused=True)
        self._received = [f"received tensor {number}" for number in range(len(self._inputs))]
        named = zip([*self.names, *self._received], layer_gradients, strict=True)
        comparer.reference.note_gradients(named)
        self._inputs, self._outputs = [], ()
        self._has_reference = True

    def after_forward(self, index: int) -> None:
        """Compares no buffers: the layers ran on copies."""

    gradient_ready = _while_memory_suffices(StageCheck.gradient_ready)

    @_while_memory_suffices
    def after_backward(self, index: int, gradients: Sequence[torch.Tensor | None], factor: float) -> None:
        if not index and self._has_reference:
            super().after_backward(index, gradients, 1.0)

    @_while_memory_suffices
    def before_send_back(self, index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Compares the gradients of the received tensors, which go to the previous stage."""
        if index or not self._has_reference or len(gradients) != len(self._received):
            return
        named = {n: torch.zeros(()) if g is None else g for n, g in zip(self._received, gradients, strict=True)}
        expected = self.run.comparer.reference.gradients
        self.run.comparer.compare_gradients(self.stage, {n: g for n, g in named.items() if expected[n] is not None})

    def before_update(self, handles: Mapping[str, torch.Tensor]) -> None:
        """Ends the comparison, whose memory training may need."""
        self.run.release_memory()


def _return_itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _runs_at_home(program: Program, stage: int) -> bool:
    """Returns whether all passes of a stage run on the rank of its updates, with that rank's weights."""
    return stage not in program.fetched_gradients and not program.placement.runs_backward_elsewhere(stage)
