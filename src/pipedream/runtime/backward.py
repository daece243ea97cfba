"""The backwards of one rank, from the gradients of a stage's outputs to those of its inputs and weights."""

from collections.abc import Callable

import torch

from pipedream.core.plan.placement import Carries
from pipedream.core.schedule.op import Kind, find_gradient_kind
from pipedream.runtime.comm.message import Content, Message
from pipedream.runtime.forward import DataStream, ForwardRunner
from pipedream.runtime.rank_context import RankContext
from pipedream.runtime.recorder import Moment
from pipedream.runtime.stage.stage_module import SavedForward
from pipedream.runtime.stage_parts import find_split
from pipedream.runtime.stage_passes import StagePasses

BACKWARDS = {
    Kind.BACKWARD: "a backward",
    Kind.INPUT_GRADIENT: "an input gradient",
    Kind.WEIGHT_GRADIENT: "a weight gradient",
}
"""What a watch calls the kinds of backwards."""


class BackwardRunner:
    """Runs the backwards of a rank. Lifecycle: `begin` a stream; then `run` each, or both of its halves.

    Args:
        is_stop_requested: called at the last backward before an update of a replicated stage.
    """

    def __init__(
        self,
        context: RankContext,
        forwards: ForwardRunner,
        is_stop_requested: Callable[[], bool],
    ) -> None:
        program = context.program
        self._forwards = forwards
        self._saved_forwards = forwards.saved_forwards
        self._mailbox, self._results = context.mailbox, context.results
        self._recorder, self._activity = context.recorder, context.activity
        self._is_stop_requested = is_stop_requested
        self._fetched_gradients = program.fetched_gradients
        self._last_stage = program.placement.stages - 1
        self._gradient_kind = find_gradient_kind(program.kinds)
        self._split = find_split(program)
        self._runs_backward_elsewhere = [
            program.placement.runs_backward_elsewhere(stage) for stage in range(program.placement.stages)
        ]

    def begin(self, stream: DataStream) -> None:
        self._stream = stream
        self._begun_sums: set[tuple[int, int]] = set()  # (stage, microbatch)

    def begin_sum(self, stage: int, index: int) -> None:
        """Lets the sum of a stage's gradients over its replicas begin within the backward of a microbatch."""
        self._begun_sums.add((stage, index))

    def repeat_forward(self, stage: int, index: int) -> None:
        """Repeats a forward whose graph was not kept, while the gradients of its outputs are on their way."""
        passes, start = self._begin_backward(self._gradient_kind, stage, index, "a repeated forward")
        saved = self._saved_forwards[stage, index]
        if saved.weights is not None:
            with passes.pass_parts.backward(saved), passes.module.division.count_collectives("repeated forward"):
                saved.repeat_forward()
        self._recorder.note("recompute", stage, self._stream.offset + index, start)
        self._activity.end()

    def run(self, kind: Kind, stage: int, index: int) -> None:
        """Runs a B, which computes the gradients of the received tensors and of the weights, or one of its halves: an I
        computes the former, for which the previous stage waits, and a later W the others.
        """
        passes, start = self._begin_backward(kind, stage, index, BACKWARDS[kind])
        begins, ends = kind is not Kind.WEIGHT_GRADIENT, kind is not Kind.INPUT_GRADIENT
        saved = self._saved_forwards.pop((stage, index)) if ends else self._saved_forwards[stage, index]
        message = self._take_gradients(stage, index) if begins else None
        hook = self._choose_ready_hook(stage, index, passes) if ends else None
        weight_gradients: list[torch.Tensor | None] = []
        input_gradients: list[torch.Tensor | None] = []
        if saved.weights is not None:
            module, accumulators = passes.module, passes.gradients.accumulators
            what = "backward" if begins else "weights' backward"
            with passes.pass_parts.backward(saved), module.division.count_collectives(what):
                if not begins:
                    weight_gradients = self._split.backward_weights(module, saved, accumulators, hook)
                else:
                    output_gradients = saved.output_gradients(message, passes.loss_scale.value)
                    passes.observer.before_backward(saved, output_gradients)
                    if ends:
                        weight_gradients, input_gradients = module.backward(saved, output_gradients, accumulators, hook)
                    else:
                        input_gradients = self._split.backward_inputs(module, saved, output_gradients)
        passes.pass_parts.end_backward(index)
        if ends:
            passes.add_gradients(saved, weight_gradients)
            if hook is not None:
                # The sums over the replicas are under way; adds zeros for the gradients that this replica lacks.
                passes.close_sum(float(self._is_stop_requested()))
        if begins:
            self._send_back(stage, index, saved, input_gradients, message)
        self._recorder.note(kind.value, stage, self._stream.offset + index, start)
        if ends and (index + 1) % self._stream.split == 0:
            self._finish_minibatch(stage, index, passes)
        self._activity.end()

    def _begin_backward(self, kind: Kind, stage: int, index: int, task: str) -> tuple[StagePasses, Moment]:
        self._activity.begin(task)
        passes = self._forwards.stage_passes[stage]
        passes.pass_parts.begin_backward(kind, index)
        if self._runs_backward_elsewhere[stage] and (stage, index) not in self._saved_forwards:
            # It ran on another rank, which has sent its input; the graph is built here.
            self._saved_forwards[stage, index] = self._forwards.recompute(
                stage, index, passes, self._mailbox.take(Carries.STAGE_INPUT, stage, index)
            )
        return passes, self._recorder.mark()

    def _choose_ready_hook(
        self, stage: int, index: int, passes: StagePasses
    ) -> Callable[[int, torch.Tensor], None] | None:
        """Returns the hook that takes gradients to a sum over the replicas that has begun."""
        if (stage, index) not in self._begun_sums:
            return None
        self._begun_sums.discard((stage, index))
        return passes.choose_ready_hook()

    def _finish_minibatch(self, stage: int, index: int, passes: StagePasses) -> None:
        passes.finish_minibatch()
        if stage in self._fetched_gradients:  # the rank of the update does not know them
            for microbatch, *versions in passes.gradient_versions:
                row = (*versions, index // self._stream.split)
                self._recorder.note_gradient_versions(stage, self._stream.offset + microbatch, *row)
            passes.gradient_versions.clear()

    def _take_gradients(self, stage: int, index: int) -> Message | None:
        """Returns the message with the gradients of a stage's outputs; None at the last stage."""
        if stage == self._last_stage:
            return None
        message = self._mailbox.take(Carries.GRADIENT, stage, index)
        if message.numbers:
            self._results.accept_carried(index, message)
        return message

    def _send_back(
        self,
        stage: int,
        index: int,
        saved: SavedForward,
        input_gradients: list[torch.Tensor | None],
        received: Message | None,
    ) -> None:
        """Sends the gradients of a stage's inputs, with the results that travel with them."""
        if not stage:
            return
        self._forwards.stage_passes[stage].observer.before_send_back(index, input_gradients)
        results = self._results.take_carried(index) if received is None else received
        content = Content.EMPTY if saved.weights is None else Content.DATA
        gradients = Message(
            index, content, tuple(input_gradients), saved.gradient_structure, loss_weight=saved.loss_weight
        )
        if results is not None and results.numbers:
            gradients.carry(results)
        self._mailbox.put(Carries.GRADIENT, stage - 1, gradients)
