"""Updates made by a thread while passes with older weights run."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from pipedream.core.schedule.op import Op


@dataclass(eq=False)
class OverlappedUpdate:
    """An update under way.

    Attributes:
        number: counts updates since the start of training.
    """

    op: Op
    number: int
    _future: Future[tuple[float, float]]

    def finish(self) -> tuple[float, float]:
        """Waits for it. Returns when it began and ended, in seconds of `time.perf_counter`; raises its error."""
        return self._future.result()


class UpdateThread:
    """The thread that makes one worker's updates, in order."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "updates")  # starts its thread with the first update

    def begin(self, op: Op, number: int, make: Callable[[], object]) -> OverlappedUpdate:
        def run() -> tuple[float, float]:
            start_s = time.perf_counter()
            make()
            return start_s, time.perf_counter()

        return OverlappedUpdate(op, number, self._executor.submit(run))

    def close(self, *, wait: bool) -> None:
        self._executor.shutdown(wait)
