"""What a session asks of whoever watches its ranks, and its answers where nobody does."""

from collections.abc import Mapping
from typing import Any

from pipedream.core.errors import PeerError, PipelineError, WorkerError
from pipedream.core.user_code import with_place

CALL = "their call"
"""Name of the setting that describes a rank's call."""


class Unguarded:
    """The guard of a single process, which has no other ranks to watch or to tell."""

    @property
    def interrupts(self) -> int:
        """How often other ranks were interrupted, by their newest statuses."""
        return 0

    def check_same_software(self) -> None:
        """Raises a `PlanError` if the ranks run different software, or one of them does not call it in time."""

    def check_same(self, settings: Mapping[str, Any], group: Any) -> None:
        """Compares each setting among the ranks of a group that have one of its name; every rank calls it.

        Raises a `PlanError` if one differs: a text, an optimizer or a loader.
        """

    def report(self, error: WorkerError) -> PeerError | None:
        """Reports a failure; returns the failure that another rank reported before, or None."""
        return None

    def first_cause(self, error: BaseException, where: str) -> PipelineError:
        """Reports an error of this rank; returns the error to raise: this one, or its cause at another rank."""
        return error if isinstance(error, PipelineError) else WorkerError(0, where, with_place(error))

    def end(self) -> None:
        """Ends the watch."""
