"""A session: one model trained in one placement, from the first minibatch to the last.

- `build` makes the workers of this process (`local_workers`), and gives them their initial values.
- `streams` runs them: training, evaluations, predictions; `comparison` compares their first minibatch with the model.
- `checkpointer` saves and restores them; `state` hands their weights out and in.
- `measured` collects what they have measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch import nn

from pipedream.core.errors import PipelineError, WorkerError
from pipedream.core.model.graph import LayerGraph
from pipedream.core.user_code import with_place
from pipedream.runtime.assemble import Blueprint
from pipedream.runtime.comm.process_group import wait_for_all
from pipedream.runtime.first_minibatch.reference_run import UserModel
from pipedream.runtime.session.build import Weights, build_local_workers
from pipedream.runtime.session.checkpointer import Checkpointer
from pipedream.runtime.session.comparison import Comparison, count_bytes
from pipedream.runtime.session.measured import ClockOffset
from pipedream.runtime.session.streams import LOOP, Streams


class Session:
    """Workers around one model; a failure of one rank ends all.

    Args:
        model: in a process group each rank keeps only its stages' parameters.
        stuck_after_s: limit for one op or the loader; 0 for none.
        weights: file or folder of initial weights, of which each rank reads its own; by default those of the model.
        plain: the model as the user wrote it, with which the first minibatch is compared; None compares nothing.
        free_bytes: returns the memory that this process may still take.

    Raises:
        PlanError, CaptureError: see `build_local_workers`.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: LayerGraph,
        blueprint: Blueprint,
        *,
        stuck_after_s: float,
        weights: Weights = None,
        plain: UserModel | None = None,
        free_bytes: Callable[[], int] = lambda: sys.maxsize,
    ) -> None:
        whole_bytes = count_bytes(model)
        local = self.local = build_local_workers(model, graph, blueprint, weights, stuck_after_s)
        self.clock = ClockOffset(local.group)
        self.checkpointer = Checkpointer(local)
        self.streams = Streams(local, None if plain is None else Comparison(local, plain, whole_bytes, free_bytes))
        local.activity.describe_op = lambda: local.lead.where

    def switch_to(self, phase: int) -> None:
        for worker in self.local.workers:
            worker.switch_to(self.local.blueprint.programs[phase], phase)

    def abort(self, error: BaseException) -> None:
        """Reports an error of the user's own code to the other ranks."""
        if self.local.guard is not None and not isinstance(error, PipelineError):
            self.local.guard.report(WorkerError(self.local.rank, LOOP, with_place(error)))

    def close(self, failed: bool) -> None:
        """Waits for the other ranks, unless a failure ended them."""
        local = self.local
        local.activity.place = "closing the pipeline"
        self.streams.interrupts.stop()
        local.data.close()
        if not failed:
            self.checkpointer.check_saved(wait=True)
            if local.connections is not None:
                wait_for_all()
                local.connections.close()
                local.connections = None
        self.checkpointer.close(failed=failed)
        if local.guard is not None:
            local.guard.end()
