"""Checks at the end of a stream that its last updates have left finite weights, which no loss shows any more."""

from collections.abc import Mapping

import torch

from pipedream.core.errors import WorkerError
from pipedream.runtime.data.source import Source
from pipedream.runtime.results import NOT_FINITE_ADVICE
from pipedream.runtime.session.local_workers import LocalWorkers
from pipedream.runtime.session.service import SessionService
from pipedream.runtime.stage_state import StageState
from pipedream.runtime.worker import Worker


class FiniteWeights(SessionService):
    """The check of one process."""

    def __init__(self, workers_here: LocalWorkers) -> None:
        self._workers_here = workers_here
        self._before: dict[int, dict[str, int]] = {}  # rank -> weights that were not finite before the stream

    def begin_stream(self, sources: Mapping[int, Source]) -> None:
        self._before = {worker.rank: _find_not_finite(worker.stage_states) for worker in self._workers_here.workers}

    def end_stream(self) -> None:
        """Raises a `WorkerError` for a weight that is not finite."""
        for worker in self._workers_here.workers:
            before, after = self._before[worker.rank], _find_not_finite(worker.stage_states)
            new = [(name, stage) for name, stage in after.items() if name not in before]
            if new:
                raise _make_error(worker, *new[0])


def _find_not_finite(stage_states: Mapping[int, StageState]) -> dict[str, int]:
    """Returns each trained weight that is not finite, with its stage."""
    weights = [
        (name, stage, handle.detach())
        for stage, stage_state in stage_states.items()
        for name, handle in stage_state.versions.handles.items()
    ]
    if not weights:
        return {}
    # First the sums: they take a twentieth of the time, and wait for a GPU once, but finite numbers may overflow.
    finite = torch.stack([weight.sum().isfinite() for _, _, weight in weights]).tolist()
    return {
        name: stage
        for (name, stage, weight), is_finite in zip(weights, finite, strict=True)
        if not is_finite and not bool(weight.isfinite().all())
    }


def _make_error(worker: Worker, name: str, stage: int) -> WorkerError:
    program, last = worker.program, worker.done_minibatches - 1
    minibatches = f"minibatch {last}"
    if any(program.weights.mean_staleness(s) for s in range(program.placement.stages)):
        unread = -(-max(program.plan.in_flight) // program.microbatches) + 1  # weights are read at most so much later
        minibatches = f"one of the minibatches {max(0, last + 1 - unread)} to {last}"
    return WorkerError(
        worker.process,
        f"stage {stage}, the updates after minibatch {last}",
        f"the weight {name!r} is not finite, because a gradient of {minibatches} was not",
        NOT_FINITE_ADVICE,
    )
