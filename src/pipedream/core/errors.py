"""All errors; each message says what was asked, what was found and what to do.

PipelineError
 +-- ArtifactError, CaptureError, ProfileError, RecipeError
 +-- PlanError -- ShortageError
 +-- ScheduleError -- DeadlockError
 +-- WorkerError -- PeerError
"""

from collections.abc import Mapping
from typing import Any, Self

_CONNECTION_WORDS = ("gloo", "Gloo", "NCCL", "Connection", "Socket")
"""Each of torch's errors about broken connections contains one of these."""

BAD_CALL = 2
"""Exit status for a wrong call or bad input; a run that failed exits with 1."""


_EXTRAS = {
    "accelerate": "hf",
    "cairosvg": "pictures",
    "gcsfs": "gcs",
    "ipywidgets": "notebook",
    "mlflow": "mlflow",
    "pandas": "notebook",
    "s3fs": "s3",
    "safetensors": "hf",
    "scikit-learn": "digits",
    "sklearn": "digits",
    "tensorboard": "tensorboard",
    "transformers": "hf",
    "wandb": "wandb",
}
"""Package -> the extra of this library that installs it."""


def is_broken_connection(error: BaseException | None) -> bool:
    """Returns whether an error is one of torch's about a connection to another worker."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _CONNECTION_WORDS)


def install_advice(error: BaseException) -> str:
    """Says which extra installs a missing package; '' if none does."""
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return f"; pip install 'torch-pipedream[{_EXTRAS[missing]}]'" if missing in _EXTRAS else ""


class PipelineError(Exception):
    """Base of this library's errors.

    Attributes:
        is_first: no other rank has reported an error yet, so this rank prints it.
        status: the command's exit status.
    """

    is_first = False
    status = BAD_CALL


class ArtifactError(PipelineError):
    """A file or JSON text is invalid."""


class CaptureError(PipelineError):
    """A model cannot be split into layers, or not at the requested place."""


class ProfileError(PipelineError):
    """A model cannot be measured."""


class PlanError(PipelineError):
    """No plan can be made, or a plan does not fit the model, the cluster or the method."""


class ShortageError(PlanError):
    """No plan of a family fits the memory.

    Attributes:
        need_bytes: the least that a worker needs.
        missing_bytes: the part of it that the worker lacks.
        savings: option -> bytes that it would save there, with the same cuts.
    """

    def __init__(
        self, message: str, need_bytes: int, missing_bytes: int = 0, savings: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(message)
        self.need_bytes = need_bytes
        self.missing_bytes = missing_bytes
        self.savings = savings or {}

    def reworded(self, message: str) -> Self:
        return type(self)(message, self.need_bytes, self.missing_bytes, self.savings)


class ScheduleError(PipelineError):
    """A schedule or program breaks a rule; raised before anything runs."""


class DeadlockError(ScheduleError):
    """Some ranks would wait for each other for ever."""


class RecipeError(PipelineError):
    """A recipe file is invalid."""


class WorkerError(PipelineError):
    """A worker failed while it ran.

    Attributes:
        where: stage and op, as in ``stage 1, 1F17``.
        cause: in one line.
        advice: may be empty.
        status: `BAD_CALL` where the worker has found a wrong call or bad input, which another start will find again.
    """

    def __init__(self, rank: int, where: str, cause: str, advice: str = "", *, status: int = 1) -> None:
        self.rank = rank
        self.where = where
        self.cause = cause
        self.advice = advice
        self.status = status
        super().__init__(f"rank {rank}, {where}: {cause}" + (f"\n{advice}" if advice else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling passes `args`, which here are the finished text.
        return type(self), (self.rank, self.where, self.cause, self.advice), {"status": self.status}


class PeerError(WorkerError):
    """Another worker failed; this is its error."""


def parameter_hooked(name: str) -> CaptureError:
    """Returns the error for a trained parameter with a hook."""
    return CaptureError(
        f"the parameter {name!r} has a hook, which a pipeline would not call: backwards run on versions of the "
        "weights. Do in the optimizer what it does, in a step of its own"
    )
