"""Seconds of messages and of gradient sums, for planner and simulator.

Legend: b bytes, B bandwidth of a link in one direction (bytes/s), l latency (s), n workers; numbers or arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipedream.core.model.collective import EXCHANGE

Numbers = float | NDArray[Any]
"""The planner computes many stages at once."""

# As in torch's DistributedDataParallel, a small first bucket starts the network early. The last one is never hidden,
# so buckets should be small (benchmarks/reduction_overlap), but each message has a cost. 4 MiB take 34 ms at 1 Gbit/s,
# 4 ms at 10 Gbit/s, some tenths of a millisecond between GPUs.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 4 << 20
GPU_BUCKET_BYTES = 25 << 20
"""Between GPUs, where latency counts for more; that of torch's DistributedDataParallel."""


def transfer_s(size_bytes: Numbers, bandwidth_bytes_per_s: float, latency_s: float = 0.0) -> Numbers:
    """Returns the seconds of one message: l + b / B."""
    return latency_s + size_bytes / bandwidth_bytes_per_s


def all_reduce_s(
    size_bytes: Numbers,
    workers: Numbers,
    bandwidth_bytes_per_s: Numbers,
    latency_s: Numbers = 0.0,
    *,
    how: str = "ring",
) -> Numbers:
    """Returns the seconds of an all-reduce.

    'ring': 2 (n - 1) (l + b / (n B)) (Patarasuk and Yuan 2009; the bytes as in PipeDream, section 3.1).

    'tree': 2 (ceil(log2 n) l + b / B): two trees, each for half of the bytes, so that every worker sends and receives
    all of them on the way up and again on the way down (Sanders, Speck and Traeff 2009; NCCL).
    """
    if np.ndim(workers) == 0 and workers == 1:
        return 0.0
    if how == "tree":
        ups = np.ceil(np.log2(workers))
        return (workers > 1) * 2 * (ups * latency_s + size_bytes / bandwidth_bytes_per_s)
    return 2 * (workers - 1) * (latency_s + size_bytes / (workers * bandwidth_bytes_per_s))


def collective_s(
    kind: str,
    count: int,
    size_bytes: Numbers,
    ranks: int,
    bandwidth_bytes_per_s: float,
    latency_s: float = 0.0,
    *,
    how: str = "ring",
) -> Numbers:
    """Returns the seconds of several collectives (`core.model.collective.Collective`).

    An all-gather, a reduce-scatter and an all-to-all take (n - 1) (l + b / (n B)) each: n - 1 steps, each with a part.
    An exchange, whose bytes are all for others, takes (n - 1) l + b / B.
    """
    if kind == EXCHANGE:
        return count * (ranks - 1) * latency_s + size_bytes / bandwidth_bytes_per_s
    if kind == "all-reduce":
        return count * all_reduce_s(size_bytes / max(count, 1), ranks, bandwidth_bytes_per_s, latency_s, how=how)
    return (ranks - 1) * (count * latency_s + size_bytes / (ranks * bandwidth_bytes_per_s))


def all_reduce_bytes(size_bytes: Numbers, workers: Numbers, *, how: str = "ring") -> Numbers:
    """Returns the bytes that each worker sends, and receives."""
    if np.ndim(workers) == 0 and workers == 1:
        return 0.0
    return 2.0 * size_bytes if how == "tree" else 2.0 * size_bytes * (workers - 1) / workers


def sum_buckets(
    size_bytes: Numbers,
    workers: Numbers,
    bandwidth_bytes_per_s: Numbers,
    latency_s: Numbers = 0.0,
    *,
    how: str = "ring",
) -> tuple[tuple[Numbers, Numbers], ...]:
    """Returns the buckets of a sum: a first one of 1 MiB, further ones of 4 MiB, and the rest.

    For each: the share of the gradients up to it, and the seconds of it and all later ones. Both are linear between the
    first and the last 4 MiB bucket, so those in between never decide and are left out.
    """
    if np.ndim(workers) == 0 and workers == 1:
        return ()

    def seconds(part_bytes: Numbers) -> Numbers:
        return all_reduce_s(part_bytes, workers, bandwidth_bytes_per_s, latency_s, how=how)

    size = np.asarray(size_bytes, dtype=float)
    first = np.minimum(size, FIRST_BUCKET_BYTES)
    left = size - first
    whole = np.floor(left / BUCKET_BYTES)
    rest = left - whole * BUCKET_BYTES
    later_s = np.where(rest > 0, seconds(rest), 0.0)
    bucket_s = seconds(BUCKET_BYTES)
    below = np.maximum(size, 1.0)
    start = np.where(size > 0, first / below, 1.0), seconds(first) + whole * bucket_s + later_s
    buckets = [start]
    for count in (whole, np.minimum(whole, 1.0)):
        ready = (FIRST_BUCKET_BYTES + (whole - count + 1) * BUCKET_BYTES) / below
        tail_s = count * bucket_s + later_s
        buckets.append((np.where(whole > 0, ready, start[0]), np.where(whole > 0, tail_s, start[1])))
    return (*buckets, (1.0, later_s))


def visible_sum_s(
    size_bytes: Numbers,
    backward_s: Numbers,
    workers: Numbers,
    bandwidth_bytes_per_s: Numbers,
    latency_s: Numbers = 0.0,
    *,
    how: str = "ring",
) -> Numbers:
    """Returns the seconds of a sum that its last backward does not hide: max_k (T_k - (1 - q_k) D).

    Gradients become ready evenly over the backward, counted in bytes. q_k is the share of the bytes in buckets up to k,
    T_k the seconds of bucket k and all later ones, D those of the backward.
    """
    tails = sum_buckets(size_bytes, workers, bandwidth_bytes_per_s, latency_s, how=how)
    visible: Numbers = 0.0
    for ready, tail_s in tails:
        visible = np.maximum(visible, tail_s - (1 - ready) * backward_s)
    return visible
