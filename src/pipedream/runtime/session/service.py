"""What accompanies a session: whoever builds one adds its services, the session knows none by name."""

from collections.abc import Mapping

from pipedream.runtime.data.source import Source
from pipedream.runtime.results import Done


class SessionService:
    """Something that a session reports to; does nothing by default."""

    def begin_stream(self, sources: Mapping[int, Source]) -> None:
        """Prepares for a training stream, which reads these sources (worker -> source)."""

    def take_result(self, done: Done) -> None:
        """Takes a minibatch's result, before the user's loop does."""

    def end_stream(self) -> None:
        """Follows a training stream, at its drain."""

    def note_restored(self) -> None:
        """Takes note that a checkpoint was loaded."""

    def check(self) -> None:
        """Raises the error of what it does in the background; called before each minibatch."""

    def finish(self) -> None:
        """Waits for what it does in the background, when a session ends without a failure."""

    def close(self, *, failed: bool) -> None:
        """Ends it; `failed`: other ranks may have ended already."""
