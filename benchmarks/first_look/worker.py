"""One of the two workers: runs all variants by turns, in rounds; rank 0 prints what it found as one JSON object.

Started by run.py, which sets torch's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from model import CUT, Sizes, network
from torch.nn import functional
from variants import Bench, optimizer, variants

import pipedream as pd
from pipedream import Cluster, Profile
from pipedream.planner import manual_plan

__all__ = ["main"]

Found = TypeVar("Found")

_QUIET = 0.03
"""Share of the cores' time that other processes may take during a segment."""


def main(asked: dict[str, Any]) -> None:
    """Runs what was asked: keys `sizes`, `bytes_per_s` (null: as fast as the link is), `rounds`, `segment`,
    `only` (null: all), `patience_s`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sizes = Sizes(**asked["sizes"])
    group = dist.new_group(backend="gloo")
    profile, _ = _least_disturbed(partial(_profile, sizes), group, asked["patience_s"])
    message_s, floor_s = _one_way_s(profile.layers[CUT - 1].output_bytes, rank)
    bytes_per_s = asked["bytes_per_s"] or profile.layers[CUT - 1].output_bytes / message_s
    plan = manual_plan(profile, Cluster.flat(2, bytes_per_s), (CUT,))
    bench = Bench(rank, sizes, plan, group, asked["segment"])
    names = [name for name in variants() if not asked["only"] or name in asked["only"]]
    rates: dict[str, list[float]] = {name: [] for name in names}
    others: dict[str, list[float]] = {name: [] for name in names}
    for number in range(asked["rounds"]):
        # Each round begins with another one: none is always the first.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            rate, share = _least_disturbed(partial(_slower, variants()[name], bench), group, asked["patience_s"])
            rates[name].append(rate)
            others[name].append(share)
            gc.collect()
            if rank == 0:
                print(
                    f"  round {number + 1}: {name}: {rate:.1f} samples/s, others {share:.0%}",
                    file=sys.stderr,
                    flush=True,
                )
    if rank == 0:
        found = {
            "plan": plan.to_json(),
            "profile": profile.to_json(),
            "depths": {depth: plan.with_depth(depth).in_flight for depth in ("noam", "full")},
            "message_s": message_s,
            "latency_s": floor_s,
            "rates": rates,
            "others": others,
        }
        print(json.dumps(found), flush=True)
    dist.barrier(group)
    dist.destroy_process_group()


def _least_disturbed(run: Callable[[], Found], group: dist.ProcessGroup, patience_s: float) -> tuple[Found, float]:
    """Runs something until other processes have left the cores alone meanwhile, or the patience is over.

    Returns what the least disturbed run returned, and the share of the cores' time that other processes took.
    """
    best: tuple[Found, float] | None = None
    start = time.monotonic()
    while True:
        dist.barrier(group)
        busy_s, own_s, begun = _busy_s(), sum(os.times()[:2]), time.monotonic()
        found = run()
        own = torch.tensor([sum(os.times()[:2]) - own_s], dtype=torch.float64)
        dist.all_reduce(own, group=group)
        taken_s = max(0.0, _busy_s() - busy_s - float(own))
        share = taken_s / (time.monotonic() - begun) / (os.cpu_count() or 1)
        if best is None or share < best[1]:
            best = (found, share)
        # Rank 0 decides for both.
        enough = torch.tensor([best[1] <= _QUIET or time.monotonic() - start > patience_s])
        dist.broadcast(enough, 0, group=group)
        if bool(enough):
            return best


def _slower(run: Callable[[Bench], float], bench: Bench) -> float:
    """Runs a segment; returns the slower worker's rate."""
    rate = torch.tensor([run(bench)], dtype=torch.float64)
    dist.all_reduce(rate, dist.ReduceOp.MIN, group=bench.group)
    return float(rate)


def _busy_s() -> float:
    """Returns the seconds for which processes have used the machine's cores since it started."""
    ticks = Path("/proc/stat").read_text().split(maxsplit=4)
    return sum(map(int, ticks[1:4])) / os.sysconf("SC_CLK_TCK")


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
    """Returns the seconds of one message of so many bytes, one way, and of one of no size."""
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

    # The shortest of several: nothing makes a message faster than its link, other processes make it slower.
    small = min(round_trip_s(token.clone()) for _ in range(20)) / 2
    large = min(round_trip_s(payload) for _ in range(9))
    times = torch.tensor([max(large - small, small), small], dtype=torch.float64)
    dist.broadcast(times, 0)
    return float(times[0]), float(times[1])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
