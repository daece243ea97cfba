"""The clock of workers in one process, by which they take turns. On several processes each runs by itself."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

from pipedream.core.errors import DeadlockError
from pipedream.runtime.comm.channel import Pending


def run_in_process(workers: Sequence[Generator[Any, None, None]], input_ranks: Sequence[int]) -> Iterator[Any]:
    """Runs all workers by turns in one thread, deterministically; yields the results of the lead worker.

    Args:
        input_ranks: of the input stage, the lead first. None continues after a result before the lead has yielded the
            same one, so that a drain reaches all at the same point.

    Raises:
        DeadlockError: no worker can continue. (The verifier excludes this.)
    """
    waiting: dict[int, Pending[Any] | None] = dict.fromkeys(range(len(workers)))
    lead, yielded = input_ranks[0], dict.fromkeys(input_ranks, 0)
    while waiting:
        moved = False
        for number in list(waiting):
            pending = waiting[number]
            if (pending is not None and not pending.ready()) or yielded.get(number, 0) > yielded[lead]:
                continue
            moved = True
            for event in workers[number]:
                if isinstance(event, Pending):
                    waiting[number] = event
                    if not event.ready():
                        break
                elif number in yielded:
                    yielded[number] += 1
                    if number == lead:
                        yield event
                    elif yielded[number] > yielded[lead]:
                        waiting[number] = None
                        break
            else:
                del waiting[number]
        if not moved:
            raise DeadlockError(f"workers {sorted(waiting)} wait for each other")
