"""Measures messages and sums between the ranks of a group.

Each function is called by exactly these ranks. Times are taken on one rank, from before a message until a short reply.
`target_s`: about how long a large message should take. What is sent in a batch is received in one: NCCL has a
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


def echo(rank: int, pair: tuple[int, int], group: Any, device: torch.device) -> float:
    """Returns half the seconds of a round trip of a byte, on both ranks."""
    token = torch.zeros(1, dtype=torch.uint8, device=device)
    sender, other = pair
    if rank == other:
        for _ in range(_ECHOES):
            dist.recv(token, sender, group=group)
            dist.send(token, sender, group=group)
        return _receive_numbers(1, sender, group, device)[0]
    echoes = []
    for _ in range(_ECHOES):
        start = time.perf_counter()
        dist.send(token, other, group=group)
        dist.recv(token, other, group=group)
        _finish(device)
        echoes.append(time.perf_counter() - start)
    latency_s = lower_quartile(echoes) / 2
    _send_numbers([latency_s], other, group, device)
    return latency_s


def one_way(
    rank: int, sender: int, receiver: int, group: Any, device: torch.device, target_s: float
) -> tuple[float, int]:
    """Returns bytes/s from one rank to another and the bytes of the large messages, on both ranks."""
    token = torch.zeros(1, dtype=torch.uint8, device=device)
    if rank == receiver:
        while size := int(*_receive_numbers(1, sender, group, device)):
            dist.recv(_make_payload(size, device), sender, group=group)
            dist.send(token, sender, group=group)
        rate, large = _receive_numbers(2, sender, group, device)
        return rate, int(large)

    def seconds(size: int) -> float:
        _send_numbers([size], receiver, group, device)
        payload = _make_payload(size, device)
        _finish(device)
        start = time.perf_counter()
        dist.send(payload, receiver, group=group)
        dist.recv(token, receiver, group=group)
        _finish(device)
        return time.perf_counter() - start

    size = _choose_size(seconds, _MIN_BYTES, _MAX_BYTES, target_s)
    result = _measure_rate(seconds, size), size
    _send_numbers([0], receiver, group, device)
    _send_numbers(result, receiver, group, device)
    return result


def both_ways(rank: int, pair: tuple[int, int], group: Any, size: int, device: torch.device) -> float:
    """Returns the bytes/s at which this rank receives while both ranks send."""
    other = pair[1] if rank == pair[0] else pair[0]
    token = torch.zeros(1, dtype=torch.uint8, device=device)
    sent, received = _make_payload(size, device), _make_payload(size, device)
    seconds = []
    for _ in range(_REPEATS):
        _exchange(token, token.clone(), other, group)
        start = time.perf_counter()
        seconds.append(_exchange(sent, received, other, group) - start)
    return size / lower_quartile(seconds)


def fan(rank: int, ranks: Sequence[int], group: Any, device: torch.device, target_s: float, *, sends: bool) -> float:
    """Returns the bytes/s that the first rank sends to all others at once, or receives; 0 on the others."""
    centre, *others = ranks
    token = torch.zeros(1, dtype=torch.uint8, device=device)
    if rank != centre:
        while size := int(*_receive_numbers(1, centre, group, device)):
            received, reply = (_make_payload(size, device), token) if sends else (token, _make_payload(size, device))
            _move_batch(dist.irecv, [received], [centre], group)
            _move_batch(dist.isend, [reply], [centre], group)
        return 0.0

    def seconds(size: int) -> float:
        for other in others:
            _send_numbers([size], other, group, device)
        payload = _make_payload(size, device) if sends else token
        buffers = [_make_payload(1 if sends else size, device) for _ in others]
        _finish(device)
        start = time.perf_counter()
        _move_batch(dist.isend, [payload] * len(others), others, group)
        _move_batch(dist.irecv, buffers, others, group)
        _finish(device)
        return time.perf_counter() - start

    size = _choose_size(seconds, _MIN_BYTES, _MAX_BYTES, target_s)
    rate = _measure_rate(seconds, size) * len(others)
    for other in others:
        _send_numbers([0], other, group, device)
    return rate


def sum_over(group: Any, members: int, device: torch.device, target_s: float) -> tuple[float, float]:
    """Measures all-reduces: returns the latency (s) of a ring's step, and 2 (n - 1) / n of the bytes per second."""
    steps = 2 * (members - 1)

    def seconds(size: int) -> float:
        payload = torch.zeros(size // 4, dtype=torch.float32, device=device)
        dist.barrier(group=group)
        start = time.perf_counter()
        dist.all_reduce(payload, group=group)
        _finish(device)
        # The members must agree on what to measure next, so the slowest one counts.
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


def _send_numbers(numbers: Sequence[float], receiver: int, group: Any, device: torch.device) -> None:
    dist.send(torch.tensor(numbers, dtype=torch.float64, device=device), receiver, group=group)


def _receive_numbers(count: int, sender: int, group: Any, device: torch.device) -> list[float]:
    numbers = torch.zeros(count, dtype=torch.float64, device=device)
    dist.recv(numbers, sender, group=group)
    return list(numbers.tolist())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
