"""One process of a check over several: trains as one rank, and writes what it saw.

python worker.py JOB    # JSON, see `process_checks.Job`; started with RANK, WORLD_SIZE and the rest
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loops import SEED, SGD, allocated_bytes, batches_of, dense, deterministic, plan_of, summed_loss, wait_for

import pipedream as pd


def train(job: dict[str, Any]) -> None:
    """Trains in two streams, so that there are two drains; the second is timed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # a card cannot be shared over NCCL
    rank, device = dist.get_rank(), torch.device(job["device"])
    folder = Path(job["folder"])
    model = dense(job["width"], dropout=job["dropout"])
    few = batches_of(job["width"], job["samples"], 4)
    plan = plan_of(model, few[0][0], job["stages"], job["method"])
    answer: dict[str, Any] = {"at_drains": [], "waits_s": []}
    draws = random.Random(rank)
    with (
        deterministic(),
        pd.Pipeline(
            model,
            plan,
            schedule=job["method"],
            microbatches=job["microbatches"],
            loss=summed_loss,
            optimizer=partial(torch.optim.SGD, **SGD),
            seed=SEED,
            device=job["device"],
        ) as pipeline,
    ):
        for minibatches in (job["minibatches"] // 4, job["minibatches"] - job["minibatches"] // 4):
            wait_for(device)
            began = time.perf_counter()
            for done in pipeline.train([few[k % len(few)] for k in range(minibatches)]):
                if done.number == 1:
                    (folder / f"{rank}.started").touch()
                if len(answer["waits_s"]) < job["waits"] and draws.random() < 0.5:
                    since = time.perf_counter()
                    wait_for(device)  # while receives may be posted
                    answer["waits_s"].append(time.perf_counter() - since)
            wait_for(device)
            answer["seconds"] = (time.perf_counter() - began) / minibatches
            dist.barrier()
            answer["at_drains"].append(allocated_bytes(device))
        state = pipeline.state_dict()
    if rank == 0:
        torch.save({name: tensor.detach().cpu() for name, tensor in state.items()}, folder / "state.pt")
    (folder / f"{rank}.json").write_text(json.dumps(answer), encoding="utf-8")
    dist.destroy_process_group()


def share_card_over_nccl(job: dict[str, Any]) -> None:
    """Adds one number up over NCCL; it may refuse two ranks on one card."""
    device = torch.device(job["device"])
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    tensor = torch.ones(1, device=device)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    print(f"the sum is {tensor.item():g}")
    os._exit(0)  # leaving the group may wait for the other rank


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    {"train": train, "share_card_over_nccl": share_card_over_nccl}[request["do"]](request)
