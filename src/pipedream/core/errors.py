"""Everything that can go wrong, on one page.

    PipelineError
     +-- ArtifactError     a file does not hold what it should, or is of another format
     +-- CaptureError      the model cannot be cut the way it was asked to
     +-- ProfileError      the model cannot be measured
     +-- PlanError         no plan fits, or a plan does not fit the model or the workers
     |    +-- ShortageError   no plan of a family fits the memory
     +-- ScheduleError     a schedule or a program breaks a rule; nothing was run
     |    +-- DeadlockError   its ranks would wait for each other for ever
     +-- RecipeError       a recipe file does not import, or gives the wrong things
     +-- WorkerError       a worker failed while it ran; names rank, stage, op and cause
          +-- PeerError       another worker failed, not this one

Each message says what was asked, what was found and what to do.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "BAD_CALL",
    "ArtifactError",
    "CaptureError",
    "DeadlockError",
    "PeerError",
    "PipelineError",
    "PlanError",
    "ProfileError",
    "RecipeError",
    "ScheduleError",
    "ShortageError",
    "WorkerError",
]


BAD_CALL = 2
"""Exit status for a wrong call or bad input, which would fail again; a run that failed exits with 1."""


class PipelineError(Exception):
    """Base of all errors that this library raises on purpose."""


class ArtifactError(PipelineError):
    """A file or a JSON text does not hold what was asked for."""


class CaptureError(PipelineError):
    """A model cannot be taken apart into layers, or not at this place."""


class ProfileError(PipelineError):
    """A model cannot be measured."""


class PlanError(PipelineError):
    """No plan fits, or the plan does not fit the model, the workers or the schedule."""


class ShortageError(PlanError):
    """No plan of a family fits the memory.

    Attributes:
        need_bytes: that a worker needs at least for one of them.
    """

    def __init__(self, message: str, need_bytes: int) -> None:
        super().__init__(message)
        self.need_bytes = need_bytes


class ScheduleError(PipelineError):
    """A schedule or a program breaks a rule; found before anything ran."""


class DeadlockError(ScheduleError):
    """Some ranks would wait for each other for ever."""


class RecipeError(PipelineError):
    """A recipe file does not import, or returns the wrong things."""


class WorkerError(PipelineError):
    """A worker failed while it ran.

    Attributes:
        rank: the rank that failed.
        where: stage and op, as in ``stage 1, 1F17``.
        cause: one line on what happened there.
        advice: what the user can do about it; may be empty.
    """

    def __init__(self, rank: int, where: str, cause: str, advice: str = "") -> None:
        self.rank = rank
        self.where = where
        self.cause = cause
        self.advice = advice
        super().__init__(f"rank {rank}, {where}: {cause}" + (f"\n{advice}" if advice else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are pickled by their args, which here are the finished text.
        return type(self), (self.rank, self.where, self.cause, self.advice)


class PeerError(WorkerError):
    """Another worker failed; carries that worker's own words."""
