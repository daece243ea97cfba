"""What a worker reports while it runs a program; whoever builds a session may record it."""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

Moment = Any
"""A point in time, as a recorder marks it."""


class Recorder:
    """Takes the reports of one worker, through the phases of a run. This base class records nothing.

    Attributes:
        mark: returns the present moment, for `note`.
        max_queued: how many forwards may be queued on a GPU once another one is issued.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self.mark: Callable[[], Moment] = time.perf_counter
        self.max_queued = sys.maxsize

    def begin_phase(self, phase: int) -> None:
        """Begins another phase, at a drain."""

    def note(self, kind: str, stage: int, index: int, start: Moment) -> None:
        """Takes an op (`Span`) that began at `start` and ends now."""

    def note_step(self, stage: int, index: int, start_s: float, end_s: float) -> None:
        """Takes an optimizer's step that a thread has made."""

    def note_gradient_versions(
        self, stage: int, microbatch: int, forward_version: int, backward_version: int, applied_to: int
    ) -> None:
        """Takes a `GradientVersions`."""

    def sample_memory(self) -> None:
        """Called inside of ops, where much memory may be taken."""

    def end_stream(self, begin: int, end: int, versions: int) -> None:
        """Takes note that a stream has trained from minibatch `begin` to `end`; called at its drain.

        Args:
            versions: of the weights, the most of a stage.
        """

    def oldest_mark(self) -> object:
        """Returns the GPU's oldest mark that is not completed, or None; another thread may call it."""
        return None
