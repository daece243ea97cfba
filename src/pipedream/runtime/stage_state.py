"""The state of a stage on one rank: layers, versions of the weights, optimizer."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from pipedream.core.schedule.op import Op
from pipedream.core.schedule.program import Program
from pipedream.runtime.comm.channel import Waiting
from pipedream.runtime.recorder import Recorder
from pipedream.runtime.stage.part import StageFacts, StagePart
from pipedream.runtime.stage.versions import WeightSet
from pipedream.runtime.stage_passes import UNOBSERVED, StagePasses
from pipedream.runtime.update.gradients import Gradients


class StageState(StagePasses):
    """A stage replica on its rank: layers, weights and optimizer, under one program.

    Life of a stage's state:

    1. `begin` starts a stream.
    2. Passes run (`StagePasses`). In a backward in which a sum begins, `gradient_ready` takes gradients to the reducer.
    3. `choose_version` and `step` make the next version from the gradients that `Updates` has put into the handles.
    4. `end` ends a stream, at a drain.

    The `parts` take part in all of it, and in checkpoints.
    """

    def __init__(self, facts: StageFacts, parts: Iterable[StagePart]) -> None:
        gradients = Gradients(len(facts.versions.handles))
        super().__init__(facts, gradients, facts.optimizer.loss_scale, parts)
        self.facts = facts
        self.versions, self.optimizer = facts.versions, facts.optimizer
        self.versions.averages = self.optimizer.ema

    def take_over(self, former: "StageState", input_updates: int) -> None:
        """Continues where another program has drained, when one version of the weights is left.

        The state of a part continues if the former program kept it too. `input_updates` counts the input stage's
        updates with the former program.
        """
        self.optimizer.take_over(former.optimizer, input_updates)
        self.versions.take_over(former.versions)
        tensors = former.part_tensors()
        for part in self.parts:
            part.restore(tensors)

    def part_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the state of the parts in a checkpoint, by KIND/NAME."""
        return {name: tensor for part in self.parts for name, tensor in part.tensors().items()}

    def end(self) -> Waiting[None]:
        """Ends a stream, at a drain; yields where it would wait."""
        for part in self.parts:
            yield from part.end()
        self.versions.rewind()

    def forward(self, value: Any, weights: WeightSet, microbatch: int, first: bool) -> Any:
        self.module.check_unchanged()
        return super().forward(value, weights, microbatch, first)

    def choose_ready_hook(self) -> Callable[[int, torch.Tensor], None] | None:
        return self.gradient_ready if self.optimizer.reducer.sums_in_backward else None

    def close_sum(self, stop_request: float) -> None:
        self.optimizer.reducer.close(self.gradients, stop_request)

    def gradient_ready(self, index: int, gradient: torch.Tensor) -> None:
        """Takes a handle's gradient while the last backward before an update still runs."""
        complete = self.gradients.complete(index, gradient)
        self.observer.gradient_ready(index, complete)
        self.optimizer.reducer.put(index, complete)

    def collect_gradients(self) -> Gradients:
        """Moves the next update's gradients to the device of the handles, and returns them."""
        self.store.collect_gradients(self.gradients)
        return self.gradients

    def compare_first_update(self) -> None:
        """Compares the gradients of the first update, which the handles have, with the model's."""
        if self.observer.observes:
            self.versions.check_handles()  # first: its error, such as for a hook, explains a difference
        self.observer.before_update(self.versions.handles)

    def choose_version(self, program: Program, op: Op, total: int | None) -> list[tuple[int, int, int, int]]:
        """Chooses the place of an update's weights; `step` follows.

        Args:
            total: microbatches of the stream; None if not known yet.

        Returns each gradient's (microbatch, forward version, backward version, version before the update).
        """
        self.observer = UNOBSERVED
        for part in self.parts:
            part.before_update()
        stage, updates, compensator = op.stage, program.updates, self.optimizer.compensator
        newest = self.versions.newest
        first, step = self.next_forward, program.placement.replicas[stage]
        if compensator.needs_read_weights:
            # The next update's penalty needs the version that its first microbatch reads: keep it even on a replica
            # that does not run that forward.
            first, step = updates.members(stage, op.index + 1).start, 1
            read = program.weights.forward_version(stage, updates.members(stage, op.index).start)
            compensator.penalise(self.versions.peek().leaves, self.versions.peek(read).leaves)
        readable = program.weights.readable(stage, first, newest, step=step, total=total)
        self.versions.choose_storage(readable)
        self.optimizer.schedule.step()
        versions = [(*row, newest) for row in self.gradient_versions]
        self.gradient_versions.clear()
        return versions

    def step(self, present_share: float) -> None:
        """Makes an update from the gradients in the handles.

        Args:
            present_share: of the round's replicas; a factor on the learning rate.
        """
        self.versions.move_handles()
        for part in self.parts:
            part.before_step()
        self.optimizer.step(present_share)
        self.versions.after_step()
        for part in self.parts:
            part.after_step()

    def average_replicas(self, recorder: Recorder, stage: int, index: int) -> Waiting[None]:
        """Averages the weights over the replicas if a period of updates has ended; yields where it would wait."""
        start = recorder.mark()
        if (yield from self.optimizer.reducer.after_step()):
            self.versions.adopt_written()
            recorder.note("wait", stage, index, start)
