"""Decisions before an update: whether its gradients are finite, and how much they are clipped.

A stage decides by its own gradients or by those of all stages, whose norm is the whole model's
(`torch.nn.utils.clip_grad_norm_`). A rank contributes one number for all its stages together, and one sum for all its
holders of a tied weight. So the first update of a round on a rank needs the gradients of all its stages, and the
schedule places their updates together (`Schedule.couple_updates`). Without a flush, an update is clipped by the norm of
an earlier one (`core.schedule.coupling`).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from math import isfinite

import torch

from pipedream.core.plan.placement import Placement
from pipedream.core.schedule.coupling import Policy
from pipedream.core.schedule.op import Op
from pipedream.core.schedule.program import Program
from pipedream.runtime.comm.channel import Group, Pending, Waiting, run_alone, wait_for
from pipedream.runtime.stage_state import StageState
from pipedream.runtime.update.gradients import Gradients
from pipedream.runtime.update.overlapped import UpdateThread
from pipedream.runtime.update.tied_weights import TiedGradientSum


class UpdateBarrier:
    """Decides about the updates of one rank's stages under one program.

    Attributes:
        norm_square: of the newest finite global norm; 0 before the first.
        thread: makes updates while passes run.
    """

    def __init__(
        self,
        policy: Policy,
        program: Program,
        group: Group,
        stage_states: Mapping[int, StageState],
        tied: Sequence[TiedGradientSum] = (),
    ) -> None:
        self._max_norm = policy.clip_grad_norm
        self._skips = policy.skips
        self._clips_locally = policy.clip == "local"
        self._group = group
        self._stage_states = stage_states
        self._tied_sums = tuple(tied)
        is_policy_global = self._skips or (self._max_norm is not None and not self._clips_locally)
        self._is_decided_globally = is_policy_global and program.couples_updates
        self._norm_delay = program.norm_delay
        self._prepared: dict[int, tuple[float, bool]] = {}
        self._pending_norms: deque[Pending[torch.Tensor]] = deque()
        self.norm_square = 0.0
        self.thread = UpdateThread()
        self._thread_stages: set[int] = set()

    @property
    def needs_norms(self) -> bool:
        """Whether each update needs the norm of its gradients."""
        return self._skips or self._max_norm is not None

    @property
    def couples_stages(self) -> bool:
        """Whether an update needs the gradients of other stages."""
        return self._is_decided_globally or bool(self._tied_sums)

    def begin_thread(self, stage: int, update: int) -> None:
        """Chooses the thread for the update that follows."""
        self._thread_stages.add(stage)

    def ask_thread(self, stage: int) -> bool:
        """Returns whether the thread makes an update that is due."""
        is_chosen = stage in self._thread_stages
        self._thread_stages.discard(stage)
        return is_chosen

    def overlap(self, op: Op, number: int, *, is_prepared: bool) -> None:
        """Lets the thread make an update (`StageState.step_in_thread`), and prepare it first unless `is_prepared`."""
        stage_state = self._stage_states[op.stage]

        def prepare(gradients: Gradients) -> None:
            run_alone(stage_state.optimizer.prepare(gradients))
            self._decide_locally(stage_state)

        stage_state.step_in_thread(self.thread, op, number, None if is_prepared else prepare)

    def prepare(self, stage: int, stop_request: float) -> Waiting[tuple[float, bool]]:
        """Does what `Optimizer.prepare` does, then decides about the update."""
        if not self.couples_stages:
            stage_state = self._stage_states[stage]
            prepared = yield from stage_state.optimizer.prepare(stage_state.collect_gradients(), stop_request)
            stage_state.compare_first_update()
            self._decide_locally(stage_state)
            return prepared
        if not self._prepared:
            gathered = {}
            for number, stage_state in self._stage_states.items():
                gathered[number] = yield from stage_state.optimizer.gather(
                    stage_state.collect_gradients(), stop_request
                )
            for gradient_sum in self._tied_sums:
                yield from gradient_sum.all_reduce(
                    {number: gradients.gradients for number, gradients in gathered.items()}
                )
            self._prepared = {
                n: stage_state.optimizer.normalise(gathered[n]) for n, stage_state in self._stage_states.items()
            }
            for stage_state in self._stage_states.values():
                stage_state.compare_first_update()
            if self._is_decided_globally:
                yield from self._decide_globally()
            else:
                for stage_state in self._stage_states.values():
                    self._decide_locally(stage_state)
        return self._prepared.pop(stage)

    def begin(self, placement: Placement) -> Waiting[None]:
        """Begins a stream: publishes the weights of this rank's stages to ranks with remote forwards."""
        for stage_state in self._stage_states.values():
            stage_state.versions.publish()
        if any(map(placement.runs_backward_elsewhere, range(placement.stages))):
            yield from self.meet()

    def meet(self) -> Waiting[None]:
        """Waits until all ranks do."""
        yield from wait_for(self._group.all_reduce(torch.zeros(1)))

    def finish(self) -> Waiting[None]:
        """Receives the norms still under way, at a drain."""
        while self._pending_norms:
            yield from self._receive_norm()

    def _decide_locally(self, stage_state: StageState) -> None:
        if not self.needs_norms:
            return
        square = stage_state.optimizer.norm_square
        if self._max_norm is None or self._skips or square.device.type == "cpu":
            norm_square = float(square)  # waits for a GPU
            self._decide(stage_state, norm_square, norm_square)
        else:  # nothing to decide on the host, which need not wait for the GPU
            stage_state.optimizer.finite = True
            stage_state.optimizer.clip(self._max_norm, square.sqrt())

    def _decide_globally(self) -> Waiting[None]:
        on_device = {stage: stage_state.optimizer.norm_square for stage, stage_state in self._stage_states.items()}
        squares = {stage: float(square) for stage, square in on_device.items()}  # waits for a GPU once
        # The replicas, and the ranks of each, have the same square of the stage: each contributes its share.
        share = sum(squares[stage] / stage_state.optimizer.copies for stage, stage_state in self._stage_states.items())
        self._pending_norms.append(self._group.all_reduce(torch.tensor([share], dtype=torch.float64)))
        global_square = 0.0
        if len(self._pending_norms) > self._norm_delay:
            global_square = yield from self._receive_norm()
        for stage, stage_state in self._stage_states.items():
            square = squares[stage]
            if not self._norm_delay:
                self._decide(stage_state, global_square, square if self._clips_locally else global_square)
            else:
                # This update's global norm is at least the stage's own.
                self._decide(stage_state, square, max(square, self.norm_square))

    def _receive_norm(self) -> Waiting[float]:
        square = float((yield from wait_for(self._pending_norms.popleft())))
        if isfinite(square):
            self.norm_square = square
        return square

    def _decide(self, stage_state: StageState, square: float, clip_square: float) -> None:
        """Skips an update if `square` is not finite, else clips it; both arguments are squared norms."""
        stage_state.optimizer.finite = isfinite(square) or not self._skips
        if self._max_norm is not None and stage_state.optimizer.finite:
            stage_state.optimizer.clip(self._max_norm, clip_square**0.5)
