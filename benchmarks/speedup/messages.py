"""What messages take from the compute of their sender and receiver."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from pipedream.apps.compare.torch_baselines import PlainLoop
from pipedream.core.cold import WARM_UP
from pipedream.core.malloc import keep_freed_memory

_TIMED_TURNS, _TURNS_S = 15, 2.0  # at most, of updates without messages and with
_MAX_MESSAGE_BYTES, _LINK_SHARE = 2e6, 0.4  # a message fills this share of what the link carries during an update


def measure_message_s_per_byte(loop: PlainLoop, batch: Any, bytes_per_s: float) -> float:
    """Returns by how many seconds a byte on a link of this rate delays the computation of its sender or receiver.

    The cores that compute also serve gloo and the network. Each worker trains the whole model while a message goes to
    the next one; the delay of an update is a mean over the workers.
    """
    rank, workers = loop.rank, loop.workers

    def make_update(size: int) -> Callable[[], None]:
        sent, received = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))

        def update() -> None:
            works = [dist.irecv(received, (rank - 1) % workers), dist.isend(sent, (rank + 1) % workers)]
            loop.step([batch])
            for work in works:
                assert work is not None, "every rank of the group comes here"
                work.wait()

        return update

    keep_freed_memory()
    for _ in range(WARM_UP):
        loop.step([batch])
    (update_s,) = _time_in_turns(loop, [make_update(1)])
    message_bytes = max(1, int(min(_MAX_MESSAGE_BYTES, _LINK_SHARE * bytes_per_s * update_s)))
    without_messages_s, with_messages_s = _time_in_turns(loop, [make_update(1), make_update(message_bytes)])
    return max(0.0, with_messages_s - without_messages_s) / (2 * message_bytes)


def _time_in_turns(loop: PlainLoop, runs: Sequence[Callable[[], object]]) -> list[float]:
    """Returns the median seconds of each, a mean over the workers; in turns, as a machine's speed drifts."""
    seconds: list[list[float]] = [[] for _ in runs]

    def take_turns(turns: int) -> list[float]:
        for _ in range(turns):
            for run, durations_s in zip(runs, seconds, strict=True):
                start_s = time.perf_counter()
                run()
                durations_s.append(time.perf_counter() - start_s)
        medians_s = torch.tensor([median(durations_s) for durations_s in seconds], dtype=torch.float64)
        dist.all_reduce(medians_s)
        return (medians_s / loop.workers).tolist()

    turn_s = sum(take_turns(1))
    return take_turns(min(_TIMED_TURNS, max(2, int(_TURNS_S / max(turn_s, 1e-9)))))
