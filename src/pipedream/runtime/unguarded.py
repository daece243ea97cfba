"""What a session asks of whoever watches its ranks, and its answers where nobody does."""

from pipedream.core.errors import PeerError, PipelineError, WorkerError
from pipedream.core.user_code import with_place


class Unguarded:
    """The guard of a single process, which has no other ranks to watch or to tell."""

    @property
    def interrupts(self) -> int:
        """How often other ranks were interrupted, by their newest statuses."""
        return 0

    def report(self, error: WorkerError) -> PeerError | None:
        """Reports a failure; returns the failure that another rank reported before, or None."""
        return None

    def first_cause(self, error: BaseException, where: str) -> PipelineError:
        """Reports an error of this rank; returns the error to raise: this one, or its cause at another rank."""
        return error if isinstance(error, PipelineError) else WorkerError(0, where, with_place(error))

    def end(self) -> None:
        """Ends the watch."""
