"""The state of a stage on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from pipedream.core.errors import CaptureError
from pipedream.core.model.collective import StageCollectives
from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.prediction import VELOCITY
from pipedream.core.schedule.program import Program
from pipedream.runtime.comm.channel import Waiting
from pipedream.runtime.comm.message import Message
from pipedream.runtime.first_minibatch.observer import StageObserver
from pipedream.runtime.stage.predictions import WeightPredictions
from pipedream.runtime.stage.recompute import Recomputation
from pipedream.runtime.stage.saved_tensors import SavedTensorHooks
from pipedream.runtime.stage.stage_module import SavedForward, StageModule
from pipedream.runtime.stage.velocity import check_velocity
from pipedream.runtime.stage.versions import Versions, WeightSet
from pipedream.runtime.stage.without_data import drop_data, predict_collectives
from pipedream.runtime.update.all_reduce import all_reduce_many
from pipedream.runtime.update.compensation import check_optimizer
from pipedream.runtime.update.optimizer import Gradients, Optimizer

_NOTHING = nullcontext()
_UNOBSERVED = StageObserver()


class _Kept:
    """What a tensor held."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.mark = id(tensor), tensor._version
        self.shape = tensor.shape
        self.numbers = _sum_numbers(tensor)


def _sum_numbers(tensor: torch.Tensor) -> tuple[float, float]:
    """The sum, and the sum of the sizes."""
    flat = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return float(flat.sum(dtype=torch.float64)), float(
        flat.abs().sum(dtype=torch.float64) if flat.dtype != torch.bool else flat.sum()
    )


@dataclass
class StageState:
    """A stage replica on its rank: layers, weights and optimizer.

    Life of a stage's state:

    1. `switch_to` sets what depends on the method; `begin` starts a stream.
    2. A forward calls `read` for its weights, and runs the layers with `forward`.
    3. A backward runs in `backward_context`; `add_gradients` then adds its gradients to the coming update's and
       releases the weights. In the last backward before an update of a replicated stage, `gradient_ready` passes them
       to the all-reduce instead.
    4. `update` makes the next version from the gradients that the update barrier has put into the handles.
    5. `end` averages BatchNorm's statistics over the replicas, at a drain.

    Which weights a pass reads (`WeightRule`); each may be a prediction from the version named:

        backward_rule        held_until   forward              backward
        stash                BACKWARD     its version, kept    the same set
        recompute, graph     None         the newest           the newest
        recompute, graph     FORWARD      its version, unkept  the newest, or what `backward_reader` chooses

    Attributes:
        recomputation: None if forwards keep their graph.
        predictions: None if passes read versions.
        saved_tensor_hooks: None without the rule 'graph'.
        next_forward: its microbatch.
        gradient_versions: (microbatch, forward version, backward version) of the coming update's gradients.
        check: may compare the first minibatch with the model, until the first update.
        received: the first message of a stage on a mesh, without data.
        _counts: batches that each BatchNorm had tracked when the stream began.
        _kept: buffers and frozen parameters of a stage with replicas, as they were when the stream began.
        _stashes: a backward reads the weights of its forward.
        _until_forward: weights are kept until their forward only.
        _backward_weights: maps the set that a forward read to the backward's.
    """

    module: StageModule
    versions: Versions
    gradients: Gradients
    optimizer: Optimizer
    recomputation: Recomputation | None = None
    predictions: WeightPredictions | None = None
    saved_tensor_hooks: SavedTensorHooks | None = None
    next_forward: int = 0
    gradient_versions: list[tuple[int, int, int]] = field(default_factory=list)
    check: StageObserver = _UNOBSERVED
    received: Message | None = None
    _counts: list[int] = field(default_factory=list)
    _kept: dict[str, _Kept] = field(default_factory=dict)
    _stashes: bool = field(init=False)
    _until_forward: bool = field(init=False)
    _backward_weights: Callable[[WeightSet], WeightSet] = field(init=False)

    def check_programs(self, programs: Iterable[Program], stage: int) -> None:
        """Raises a `ScheduleError` before a run if a method needs a velocity that the optimizer does not have."""
        for program in programs:
            check_optimizer(program.updates.compensation, self.optimizer.optimizer)
            if any(prediction.by == VELOCITY for prediction in program.weights.predictions(stage)):
                check_velocity(self.optimizer.optimizer)

    def switch_to(self, program: Program, stage: int, input_updates: int) -> None:
        """Switches to another program at a drain, when one version of the weights is left.

        The state of predictions continues if the previous method kept it too. `input_updates` counts the input stage's
        updates with the previous program.
        """
        rule = program.weights
        self._stashes = rule.backward_rule == "stash"
        self._until_forward = rule.held_until is Kind.FORWARD
        late, mean = rule.staleness(stage), rule.mean_staleness(stage)
        self.optimizer.switch_to(program.updates, stage, late, input_updates, mean_staleness=mean)
        self.versions.switch_to(rule.held_until is None or rule.kept_until(stage) is not None)
        if self.saved_tensor_hooks is not None:
            self.saved_tensor_hooks.switch_to(redirects=rule.backward_rule == "graph" and rule.held_until is not None)
        self._backward_weights = rule.backward_reader(self.versions) or (lambda read: self.versions.peek())
        self.recomputation = Recomputation(self.module) if program.plan.stages[stage].recompute else None
        before = {} if self.predictions is None else self.predictions.tensors()
        self.predictions = (
            WeightPredictions(rule, stage, self.versions, self.optimizer) if rule.predictions(stage) else None
        )
        if self.predictions is not None:
            self.predictions.restore(before)

    def begin(self) -> None:
        self.next_forward = 0
        if self.predictions is not None:
            self.predictions.begin()
        self._counts = [
            int(norm.num_batches_tracked) for norm in self._list_norms() if norm.num_batches_tracked is not None
        ]
        if self.optimizer.replica_group is not None:
            self._kept = {name: _Kept(tensor) for name, tensor in self._list_untrained()}

    def end(self) -> Waiting[None]:
        """Ends a stream, at a drain; yields where it would wait."""
        yield from self.average_statistics()
        yield from self._check_replicas()
        self.versions.rewind()

    def average_statistics(self) -> Waiting[None]:
        """Averages BatchNorm's statistics over the replicas at a drain, and sums their counts."""
        group = self.optimizer.replica_group
        norms = self._list_norms()
        if group is None or not norms:
            return
        floats = [b for n in norms for b in (n.running_mean, n.running_var) if b is not None]
        counts = [n.num_batches_tracked for n in norms if n.num_batches_tracked is not None]
        news = [count - before for count, before in zip(counts, self._counts, strict=True)]
        sums = yield from all_reduce_many(group, [*floats, *news])
        with torch.no_grad():
            for buffer, total in zip(floats, sums, strict=False):
                buffer.copy_(total / self.optimizer.replicas)
            for count, before, total in zip(counts, self._counts, sums[len(floats) :], strict=True):
                count.copy_(before + total)

    def _list_untrained(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields buffers and frozen parameters, without the statistics that are averaged."""
        averaged = {id(buffer) for norm in self._list_norms() for buffer in norm._buffers.values()}
        for layer_name, layer in self.module.layers:
            for name, tensor in (*layer.named_buffers(layer_name), *layer.named_parameters(layer_name)):
                if not tensor.requires_grad and id(tensor) not in averaged and not tensor.is_meta:
                    yield name, tensor

    def _check_untrained(self) -> None:
        """Raises a `CaptureError` if a forward has changed a buffer, which the other replicas have not."""
        for name, tensor in self._list_untrained():
            before = self._kept.get(name)
            if before is not None and before.mark != (id(tensor), tensor._version):
                now = self._kept[name] = _Kept(tensor)
                if now.shape == before.shape and now.numbers != before.numbers:  # others are caches
                    raise CaptureError(self._describe_difference(name))

    def _check_replicas(self) -> Waiting[None]:
        """Raises a `CaptureError` if the replicas have other weights or buffers than this one, at a drain."""
        group = self.optimizer.replica_group
        if group is None:
            return
        tensors = {**self.versions.handles, **dict(self._list_untrained())}
        local_sums = torch.tensor([(*_sum_numbers(t), float(t.numel())) for t in tensors.values()], dtype=torch.float64)
        (sums,) = yield from all_reduce_many(group, [local_sums])
        mean = sums / self.optimizer.replicas
        for name, (total, size, count), other in zip(tensors, local_sums.tolist(), mean.tolist(), strict=True):
            limit = 1e-6 * max(abs(size), abs(other[1]))
            if count == other[2] and max(abs(total - other[0]), abs(size - other[1])) > limit:
                raise CaptureError(self._describe_difference(name))

    def _describe_difference(self, name: str) -> str:
        return (
            f"{name!r} differs between the replicas of its stage: the forward, or something outside of the optimizer, "
            "writes it, and each replica would have its own numbers; plan one replica for this stage, or write it "
            "where every replica computes the same"
        )

    def _list_norms(self) -> list[Any]:
        layers = [layer for _, layer in self.module.layers]
        norms = {id(m): m for layer in layers for m in layer.modules() if isinstance(m, _NormBase)}
        return [m for m in norms.values() if m.track_running_stats]

    def read(self, version: int) -> tuple[WeightSet, int]:
        """Returns the weights for a forward, and their version; for predicted weights, the one they are predicted from.

        Weights that are kept for the backward are released by `add_gradients`.
        """
        if self.predictions is not None and not self._until_forward:
            return self.predictions.read(version)
        weights = self.versions.peek(version) if self._until_forward else self.versions.read(version)
        return weights, weights.version

    def read_again(self, saved: SavedForward) -> WeightSet:
        assert saved.weights is not None
        if self._stashes:
            return saved.weights
        saved.recomputed_weights = self._choose_backward_weights(saved)
        return saved.recomputed_weights

    def _choose_backward_weights(self, saved: SavedForward) -> WeightSet:
        assert saved.weights is not None
        return self._backward_weights(saved.weights)

    def note_received(self, message: Message) -> None:
        """Keeps of the first message what a run without data needs, on a mesh."""
        if self.received is None and self.module.sharding is not None:
            self.received = drop_data(message)

    def collectives(self, program: Program, stage: int, needs_norms: bool) -> StageCollectives:
        """Returns the collectives of the first microbatch and update, on a mesh.

        Args:
            program: that the first microbatch was trained with.
            needs_norms: of each update's gradients.
        """
        assert self.module.sharding is not None
        assert self.received is not None
        measured = self.module.sharding.collectives
        ops = [op for rank in program.ranks for op in (*rank.warmup, *rank.period) if isinstance(op, Op)]
        try:
            predicted = predict_collectives(
                self.module,
                self.versions.peek().leaves,
                self.received,
                is_first=stage == 0,
                is_last=stage == program.placement.stages - 1,
                splits=any(op.kind is Kind.INPUT_GRADIENT and op.stage == stage for op in ops),
                recomputes=program.plan.stages[stage].recompute,
                needs_norms=needs_norms,
            )
        except Exception as error:  # of the user's layers
            return StageCollectives(measured, problem=f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return StageCollectives(measured, predicted)

    def forward_context(self) -> AbstractContextManager[None]:
        return _NOTHING if self.predictions is None else self.predictions.forward()

    def backward_context(self, saved: SavedForward) -> AbstractContextManager[None]:
        if self.saved_tensor_hooks is not None and self.saved_tensor_hooks.redirects:
            return self.saved_tensor_hooks.redirected_to(self._choose_backward_weights(saved))
        return _NOTHING if self.predictions is None else self.predictions.backward()

    def forward(self, value: Any, read: WeightSet, microbatch: int, first: bool) -> Any:
        self.module.check_unchanged()
        if self.saved_tensor_hooks is None:
            return self.module.forward(value, read.leaves, microbatch, first)
        layers = partial(self.module.forward, value, read.leaves, microbatch, first)
        return self.saved_tensor_hooks.run(layers, value, read)

    def gradient_ready(self, index: int, gradient: torch.Tensor) -> None:
        """Takes a handle's gradient while the last backward before an update still runs."""
        assert self.optimizer.all_reduce is not None
        complete = self.gradients.complete(index, gradient)
        self.check.gradient_ready(index, complete)
        self.optimizer.all_reduce.put(index, complete)

    def add_gradients(self, saved: SavedForward, gradients: list[torch.Tensor | None]) -> None:
        self.check.after_backward(saved.microbatch, gradients, saved.auxiliary_scale)
        self.gradients.add(gradients, saved.loss_weight)
        if saved.weights is not None:
            read = saved.weights.version if self._stashes else self.versions.newest
            self.gradient_versions.append((saved.microbatch, saved.version, read))
            if not self._until_forward:
                self.versions.release(saved.weights)

    def compare_first(self) -> None:
        """Compares the first update's gradients, which are in the handles, with the model's."""
        self.check.before_update(self.versions.handles)

    def update(
        self, program: Program, op: Op, present_share: float, total: int | None
    ) -> list[tuple[int, int, int, int]]:
        """Makes an update from the gradients in the handles.

        Args:
            present_share: of the round's replicas; a factor on the learning rate.
            total: microbatches of the stream; None if not known yet.

        Returns each gradient's (microbatch, forward version, backward version, version before the update).
        """
        self.check = _UNOBSERVED
        if self._kept:
            self._check_untrained()
        stage, updates, compensator = op.stage, program.updates, self.optimizer.compensator
        newest = self.versions.newest
        first, step = self.next_forward, program.placement.replicas[stage]
        if compensator.needs_read_weights:
            # The penalty of the next update needs the version that the update's first microbatch reads: keep it even
            # on a replica that does not run that forward.
            first, step = updates.members(stage, op.index + 1).start, 1
            read = program.weights.forward_version(stage, updates.members(stage, op.index).start)
            compensator.penalise(self.versions.peek().leaves, self.versions.peek(read).leaves)
        coming = program.weights.readable(stage, first, newest, step=step, total=total)
        self.versions.begin_update(coming)
        if self.predictions is not None:
            self.predictions.begin_update()
        self.optimizer.step(present_share)
        self.versions.end_update()
        if self.predictions is not None:
            self.predictions.end_update()
        versions = [(*row, newest) for row in self.gradient_versions]
        self.gradient_versions.clear()
        return versions


@contextmanager
def evaluating(stage_states: Iterable[StageState]) -> Iterator[None]:
    """Context in evaluation mode; restores each module's mode.

    Stages in one process may share modules, so all of them enter and leave it together.
    """
    flags = [flag for stage_state in stage_states for flag in stage_state.module.train(False)]
    try:
        yield
    finally:
        for module, training in reversed(flags):  # of a shared module the first flag is its own
            module.training = training
