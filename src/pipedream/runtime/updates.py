"""The updates of one rank's stages: what they wait for together, and those that a thread makes.

A rank contributes one norm for all its stages together, and one sum for all its holders of a tied weight. So the first
update of a round on a rank needs the gradients of all its stages, and the schedule places their updates together
(`Schedule.couple_updates`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from pipedream.core.extensions import find_offer
from pipedream.core.plan.placement import Placement
from pipedream.core.plan.stage import TiedWeights
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.update_policy import Policy
from pipedream.runtime.activity import Activity
from pipedream.runtime.comm.channel import Group, Waiting, run_alone, wait_for
from pipedream.runtime.recorder import Recorder
from pipedream.runtime.stage_state import StageState
from pipedream.runtime.update.decision import make_decision


class Updates:
    """Prepares the updates of one rank's stages under one program.

    Args:
        group: of all workers.
        tied: weights that stages here share with others, each with the group of its holders.

    Attributes:
        thread: makes updates while passes run.
    """

    def __init__(
        self,
        policy: Policy,
        program: Program,
        group: Group,
        stage_states: Mapping[int, StageState],
        tied: Sequence[tuple[TiedWeights, Group]] = (),
    ) -> None:
        self.decision = make_decision(policy, program, group)
        self.thread = UpdateThread()
        self._group = group
        self._stage_states = stage_states
        self._optimizers = {stage: stage_state.optimizer for stage, stage_state in stage_states.items()}
        self._tied_sums = [
            find_offer("gradient_sums", f"the plan's stages share {weights}").TiedGradientSum(
                weights,
                {stage: self._optimizers[stage].named for stage in weights.among(stage_states).stages},
                program.placement.replicas,
                holders,
            )
            for weights, holders in tied
        ]
        self._prepared: dict[int, tuple[float, bool]] = {}
        self._thread_stages: set[int] = set()
        self._overlapped: dict[int, tuple[int, Future[tuple[float, float]]]] = {}  # stage -> number of its update

    @property
    def couples_stages(self) -> bool:
        """Whether an update needs the gradients of other stages."""
        return self.decision.is_global or bool(self._tied_sums)

    def begin(self, placement: Placement) -> Waiting[None]:
        """Begins a stream: publishes the weights of this rank's stages to ranks with remote forwards."""
        for stage_state in self._stage_states.values():
            stage_state.versions.publish()
        if any(map(placement.runs_backward_elsewhere, range(placement.stages))):
            yield from self.meet()

    def meet(self) -> Waiting[None]:
        """Waits until all ranks do."""
        yield from wait_for(self._group.all_reduce(torch.zeros(1)))

    def prepare(self, stage: int, stop_request: float) -> Waiting[tuple[float, bool]]:
        """Does what `Optimizer.prepare` does, then decides about the update."""
        if stage not in self._prepared:
            stages = list(self._stage_states) if self.couples_stages else [stage]
            yield from self._prepare(stages, stop_request)
        return self._prepared.pop(stage)

    def _prepare(self, stages: Sequence[int], stop_request: float) -> Waiting[None]:
        optimizers = {stage: self._optimizers[stage] for stage in stages}
        gathered = {}
        for stage, optimizer in optimizers.items():
            gradients = self._stage_states[stage].collect_gradients()
            gathered[stage] = yield from optimizer.gather(gradients, stop_request)
        for gradient_sum in self._tied_sums:
            yield from gradient_sum.all_reduce({stage: reduced.gradients for stage, reduced in gathered.items()})
        for stage, optimizer in optimizers.items():
            self._prepared[stage] = optimizer.normalise(gathered[stage])
            self._stage_states[stage].compare_first_update()
        yield from self.decision.decide(optimizers)

    # -- updates beside the passes --------------------------------------------------------------------

    def begin_thread(self, stage: int, update: int) -> None:
        """Chooses the thread for the update that follows."""
        self._thread_stages.add(stage)

    def ask_thread(self, stage: int) -> bool:
        """Returns whether the thread makes an update that is due."""
        is_chosen = stage in self._thread_stages
        self._thread_stages.discard(stage)
        return is_chosen

    def overlap(self, stage: int, number: int, *, is_prepared: bool) -> None:
        """Lets the thread make an update, and prepare it first unless `is_prepared`.

        Args:
            number: counts updates since the start of training.
        """
        assert stage not in self._overlapped, f"an update of stage {stage} has not ended"
        stage_state = self._stage_states[stage]
        gradients, stage_state.gradients = stage_state.collect_gradients(), stage_state.gradients.make_next()
        stage_state.versions.announce()

        def make() -> None:
            try:
                if not is_prepared:
                    run_alone(stage_state.optimizer.prepare(gradients))
                    self.decision.decide_locally(stage_state.optimizer)
                stage_state.step(1.0)
            except BaseException:
                stage_state.versions.withdraw()
                raise

        self._overlapped[stage] = number, self.thread.begin(make)

    def join(self, stage: int, recorder: Recorder, activity: Activity) -> None:
        """Waits for the update of a stage that the thread makes; raises its error."""
        (number, update), start = self._overlapped[stage], recorder.mark()
        activity.begin("an update")
        seconds = update.result()
        activity.end()
        del self._overlapped[stage]
        recorder.note("wait", stage, number, start)
        recorder.note_step(stage, number, *seconds)


class UpdateThread:
    """The thread that makes one worker's updates, in order."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "updates")  # starts its thread with the first update

    def begin(self, make: Callable[[], object]) -> Future[tuple[float, float]]:
        """Lets the thread make an update; the result is when it began and ended, in seconds of `time.perf_counter`."""

        def run() -> tuple[float, float]:
            start_s = time.perf_counter()
            make()
            return start_s, time.perf_counter()

        return self._executor.submit(run)

    def close(self, *, wait: bool) -> None:
        self._executor.shutdown(wait)
