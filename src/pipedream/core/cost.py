"""Seconds of messages and of gradient sums: the formulas that planner and simulator share.

Legend: b bytes, B bandwidth of one link in one direction (bytes per second), l latency (s), n workers.
"""

from __future__ import annotations

from itertools import pairwise

__all__ = ["BUCKET_BYTES", "FIRST_BUCKET_BYTES", "all_reduce_s", "pipeline_period_s", "transfer_s"]

# A sum over replicas goes bucket by bucket. As in torch's DistributedDataParallel a small first one starts the network
# early in the backward. The last one is never hidden, so they should be small (benchmarks/reduction_overlap); a message
# has a price. 4 MiB take 34 ms at 1 Gbit/s, 4 ms at 10 Gbit/s, some tenths of a millisecond between GPUs.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 4 << 20


def transfer_s(size_bytes: float, bandwidth_bytes_per_s: float, latency_s: float = 0.0) -> float:
    """Returns the seconds of one message: l + b / B."""
    return latency_s + size_bytes / bandwidth_bytes_per_s


def all_reduce_s(size_bytes: float, workers: int, bandwidth_bytes_per_s: float, latency_s: float = 0.0) -> float:
    """Returns the seconds of a ring all-reduce: 2 (n - 1) (l + b / (n B)).

    Each worker sends, and at the same time receives, 2 (n - 1) / n of the bytes (Patarasuk and Yuan 2009;
    PipeDream, section 3.1, counts the same bytes per direction).
    """
    if workers == 1:
        return 0.0
    return 2 * (workers - 1) * (latency_s + size_bytes / (workers * bandwidth_bytes_per_s))


def pipeline_period_s(stage_s: tuple[float, ...], replicas: tuple[int, ...], transfers_s: tuple[float, ...]) -> float:
    """Returns the seconds per minibatch of a full pipeline: its slowest stage or its slowest boundary.

    Each worker has one full-duplex link to each neighbouring stage, which the messages of all replicas there share.
    In round robin minibatch k goes from replica k mod r_s to k mod r_{s+1}, so each link of the stage with fewer
    replicas carries every min(r_s, r_{s+1})-th message, and both directions run at once.

    Args:
        stage_s: seconds of one minibatch on one worker of each stage, synchronisation included.
        replicas: workers of each stage; r_s of them finish r_s minibatches in the time of one.
        transfers_s: seconds that one message keeps a link busy, across each boundary.
    """
    compute = (seconds / count for seconds, count in zip(stage_s, replicas, strict=True))
    links = (seconds / min(pair) for seconds, pair in zip(transfers_s, pairwise(replicas), strict=True))
    return max([*compute, *links])
