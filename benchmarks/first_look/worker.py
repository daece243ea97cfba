"""One of the two workers: runs all variants by turns, in rounds; rank 0 prints what it found as one JSON object.

Started by run.py, which sets torch's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from model import CUT, Sizes, network
from torch.nn import functional
from variants import Bench, optimizer, variants

import pipedream as pd
from pipedream import Cluster, Profile
from pipedream.planner import by_hand

__all__ = ["main"]


def main(asked: dict[str, Any]) -> None:
    """Runs what was asked: keys `sizes`, `bytes_per_s` (null: as fast as the link is), `rounds`, `segment`, `only`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sizes = Sizes(**asked["sizes"])
    group = dist.new_group(backend="gloo")
    profile = _profile(sizes)
    message_s, floor_s = _one_way_s(profile.layers[CUT - 1].output_bytes, rank)
    bytes_per_s = asked["bytes_per_s"] or profile.layers[CUT - 1].output_bytes / message_s
    plan = by_hand(profile, Cluster.flat(2, bytes_per_s), (CUT,))
    bench = Bench(rank, sizes, plan, group, asked["segment"])
    names = [name for name in variants() if not asked["only"] or name in asked["only"]]
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(asked["rounds"]):
        # Each round begins with another one: none is always the first.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier(group)
            rate = torch.tensor([variants()[name](bench)], dtype=torch.float64)
            dist.all_reduce(rate, dist.ReduceOp.MIN, group=group)
            rates[name].append(float(rate))
            gc.collect()
            if rank == 0:
                print(f"  round {number + 1}: {name}: {float(rate):.1f} samples/s", file=sys.stderr, flush=True)
    if rank == 0:
        found = {
            "plan": plan.to_json(),
            "profile": profile.to_json(),
            "depths": {depth: plan.with_depth(depth).in_flight for depth in ("noam", "full")},
            "message_s": message_s,
            "latency_s": floor_s,
            "rates": rates,
        }
        print(json.dumps(found), flush=True)
    dist.barrier(group)
    dist.destroy_process_group()


def _profile(sizes: Sizes) -> Profile:
    """Measures one microbatch through every layer, at rank 0 while the other worker waits."""
    targets = torch.zeros(sizes.batch, dtype=torch.int64)
    return pd.profile(
        network(sizes),
        torch.randn(sizes.batch, 3, 32, 32),
        loss=lambda output: functional.cross_entropy(output, targets),
        optimizer=optimizer,
    )


def _one_way_s(size_bytes: int, rank: int) -> tuple[float, float]:
    """Returns the seconds of one message of so many bytes, one way, and of one of no size; medians."""
    payload, token = torch.zeros(size_bytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)

    def round_trip_s(sent: torch.Tensor) -> float:
        start = time.perf_counter()
        if rank == 0:
            dist.send(sent, 1)
            dist.recv(token, 1)
        else:
            dist.recv(sent, 0)
            dist.send(token, 0)
        return time.perf_counter() - start

    small = statistics.median(round_trip_s(token.clone()) for _ in range(20)) / 2
    large = statistics.median(round_trip_s(payload) for _ in range(9))
    times = torch.tensor([large - small, small], dtype=torch.float64)
    dist.broadcast(times, 0)
    return float(times[0]), float(times[1])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
