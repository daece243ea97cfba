"""Measures messages and sums between the ranks of a group.

Each function is called by exactly these ranks, makes the same messages on each, and returns the same on each. A time is
taken on one rank, from before a message until a short reply, and given to the others: so all agree on what to measure
next. `target_s`: about how long a large message should take. What is sent in a batch is received in one: NCCL has a
communicator for the batches of a group, and others for single messages.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipedream.services.probe.survey import lower_quartile, slope

_ECHOES = 30
_REPEATS = 5
_MIN_BYTES, _MAX_BYTES = 1 << 18, 1 << 26
_MAX_SUM_BYTES = 1 << 24
_PART = 4  # ratio of the two sizes


def echo(rank: int, pair: Sequence[int], group: Any, device: torch.device) -> float:
    """Returns half the seconds of a round trip of a byte."""
    token, echoes = _make_payload(1, device), []
    for _ in range(_ECHOES):
        start = time.perf_counter()
        _send_both_ways(rank, pair, token, token, group)
        echoes.append(time.perf_counter() - start)
    return _share(lower_quartile(echoes) / 2, pair[0], group, device)


def one_way(rank: int, pair: Sequence[int], group: Any, device: torch.device, target_s: float) -> tuple[float, int]:
    """Returns bytes/s from the first of two ranks to the other and the bytes of the large messages."""
    token = _make_payload(1, device)

    def seconds(size: int) -> float:
        payload = _make_payload(size, device)
        _finish(device)
        start = time.perf_counter()
        _send_both_ways(rank, pair, payload, token, group)
        return _share(time.perf_counter() - start, pair[0], group, device)

    size = _choose_size(seconds, _MIN_BYTES, _MAX_BYTES, target_s)
    return _measure_rate(seconds, size), size


def both_ways(other: int, group: Any, size: int, device: torch.device) -> float:
    """Returns the bytes/s at which this rank receives while both ranks send, alone of all measurements its own."""
    token = _make_payload(1, device)
    sent, received = _make_payload(size, device), _make_payload(size, device)
    seconds = []
    for _ in range(_REPEATS):
        _exchange(token, token.clone(), other, group)
        start = time.perf_counter()
        seconds.append(_exchange(sent, received, other, group) - start)
    return size / lower_quartile(seconds)


def fan(rank: int, ranks: Sequence[int], group: Any, device: torch.device, target_s: float, *, sends: bool) -> float:
    """Returns the bytes/s that the first rank sends to all others at once, or receives."""
    centre, *others = ranks

    def seconds(size: int) -> float:
        there, back = (_make_payload(size if sends is outward else 1, device) for outward in (True, False))
        buffers = [back.clone() for _ in others] if rank == centre else []
        _finish(device)
        start = time.perf_counter()
        if rank == centre:
            _move_batch(dist.isend, [there] * len(others), others, group)
            _move_batch(dist.irecv, buffers, others, group)
        else:
            _move_batch(dist.irecv, [there], [centre], group)
            _move_batch(dist.isend, [back], [centre], group)
        _finish(device)
        return _share(time.perf_counter() - start, centre, group, device)

    size = _choose_size(seconds, _MIN_BYTES, _MAX_BYTES, target_s)
    return _measure_rate(seconds, size) * len(others)


def sum_over(group: Any, members: int, device: torch.device, target_s: float) -> tuple[float, float]:
    """Measures all-reduces: returns the latency (s) of a ring's step, and 2 (n - 1) / n of the bytes per second."""
    steps = 2 * (members - 1)

    def seconds(size: int) -> float:
        payload = torch.zeros(size // 4, dtype=torch.float32, device=device)
        dist.barrier(group=group)
        start = time.perf_counter()
        dist.all_reduce(payload, group=group)
        _finish(device)
        # The slowest member counts.
        elapsed_s = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=device)
        dist.all_reduce(elapsed_s, dist.ReduceOp.MAX, group=group)
        return float(elapsed_s)

    latency_s = lower_quartile([seconds(4) for _ in range(_ECHOES // 2)]) / steps
    size = _choose_size(seconds, _MIN_BYTES, _MAX_SUM_BYTES, target_s)
    return latency_s, steps / members * _measure_rate(seconds, size)


def _choose_size(seconds: Callable[[int], float], least: int, most: int, target_s: float) -> int:
    size = least
    while True:
        elapsed_s = min(seconds(size), seconds(size))
        if elapsed_s >= target_s or size >= most:
            return size
        size = min(most, size * (8 if elapsed_s < target_s / 8 else 2))


def _measure_rate(seconds: Callable[[int], float], size: int) -> float:
    sizes = (size // _PART, size)
    rows: tuple[list[float], list[float]] = ([], [])
    for _ in range(_REPEATS):
        for sent_bytes, row in zip(sizes, rows, strict=True):  # alternating, so that a disturbance affects both
            row.append(seconds(sent_bytes))
    return slope(sizes, rows)


def _send_both_ways(rank: int, pair: Sequence[int], there: torch.Tensor, back: torch.Tensor, group: Any) -> None:
    """Sends one tensor from the first of two ranks to the other, then one back; returns when both have arrived."""
    first, other = pair
    if rank == first:
        dist.send(there, other, group=group)
        dist.recv(back, other, group=group)
    else:
        dist.recv(there, first, group=group)
        dist.send(back, first, group=group)
    _finish(there.device)


def _move_batch(move: Callable[..., Any], tensors: Sequence[torch.Tensor], others: Sequence[int], group: Any) -> None:
    moves = [dist.P2POp(move, tensor, other, group) for tensor, other in zip(tensors, others, strict=True)]
    for work in dist.batch_isend_irecv(moves):
        work.wait()


def _exchange(sent: torch.Tensor, received: torch.Tensor, other: int, group: Any) -> float:
    """Returns the time when everything was received."""
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, other, group), dist.P2POp(dist.irecv, received, other, group)]
    )
    works[-1].wait()
    _finish(sent.device)
    end = time.perf_counter()
    works[0].wait()
    return end


def _make_payload(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _share(number: float, source: int, group: Any, device: torch.device) -> float:
    """Returns a rank's number on all ranks of the group."""
    numbers = torch.tensor([number], dtype=torch.float64, device=device)
    dist.broadcast(numbers, source, group=group)
    return float(numbers)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
