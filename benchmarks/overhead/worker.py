"""One rank: runs the variants in turns, in rounds; rank 0 prints what all ranks measured as one JSON object.

Started by run.py, which sets torch's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
"""

from __future__ import annotations

import cProfile
import gc
import json
import os
import sys
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from stages import Shape, Waits
from variants import VARIANTS, Bench

sys.path.append(str(Path(__file__).parents[1]))
from scaffold import take_turns


def main(request: dict[str, Any]) -> None:
    """Runs what was asked: keys `shape`, `variants`, `rounds`, `segment`, `profile`, `pinned` (each rank to a core).

    Prints variant -> rounds -> ranks -> `Segment` as a list.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if request["pinned"]:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[dist.get_rank()]})
    group = dist.new_group(backend="gloo")
    profiled = request["profile"]
    shape = Shape(**request["shape"])
    segments_by_variant: dict[str, list[Any]] = {name: [] for name in request["variants"]}
    for name in take_turns(segments_by_variant, request["rounds"]):
        profiler = cProfile.Profile(time.thread_time) if profiled else None
        bench = Bench(dist.get_rank(), shape, group, request["segment"], Waits(), profiler)
        dist.barrier(group)
        segments: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(segments, astuple(VARIANTS[name](bench)), group=group)
        segments_by_variant[name].append(segments)
        for rank in range(len(segments)):
            if profiled and bench.rank == rank:
                bench.print_profile(name)
            dist.barrier(group)
        gc.collect()
    if dist.get_rank() == 0:
        print(json.dumps(segments_by_variant), flush=True)
    dist.barrier(group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
