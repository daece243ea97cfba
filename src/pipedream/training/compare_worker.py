"""A worker of `pipedream compare` for what is not `pipedream train`: ``python -m ...training.compare_worker JSON``.

The JSON has recipe, kind, seed, device and out, the file that rank 0 writes. A 'profile' is measured on all workers at
the same time, with so many `runs`, of minibatches and of one of their `microbatches`. 'messages' tells what a byte of a
message takes from compute on a link of `bytes_per_s`. What torch itself offers is trained by 'plain', 'ddp' or '1f1b',
with parts, bounds (the layers of the stages), epochs and minibatches; the file has its figures, or why this recipe is
not trained so.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from pipedream.core.artifact import write_text
from pipedream.core.errors import BAD_CALL, PipelineError, RecipeError
from pipedream.recipe import load_recipe
from pipedream.runtime.comm import process_group
from pipedream.runtime.failure.launch import set_threads
from pipedream.runtime.torch_baselines import Baseline, DataParallel, OneFOneB, PlainLoop
from pipedream.training.job import capture_recipe, profile_recipe

__all__ = ["BEGUN", "run_asked"]

BEGUN = ".begun"
"""Suffix of the file that rank 0 makes when the training begins."""

_UPDATES = 16  # that are timed without and with messages
_MOST_BYTES, _FILLED = 2e6, 0.4  # of a message: at most, and as a share of what the link carries during an update


def run_asked(asked: dict[str, Any]) -> None:
    """Trains as asked on this rank."""
    device = process_group.process_device(asked["device"])
    rank, workers = process_group.join_group(device, check_software=False)
    set_threads(workers)
    recipe = load_recipe(asked["recipe"], seed=asked["seed"])
    found: dict[str, Any]
    if asked["kind"] == "profile":
        how = {name: asked[name] for name in ("seed", "runs", "microbatches")}
        profile = profile_recipe(recipe, device=str(device), **how)
        if rank == 0:
            profile.save(Path(asked["out"]))
        process_group.wait_for_all()
        return
    if asked["kind"] == "messages":
        loop = PlainLoop(recipe, rank, workers, device)
        taken = _message_s_per_byte(loop, recipe.first_batch(), rank, workers, asked["bytes_per_s"])
        if rank == 0:
            write_text(Path(asked["out"]), json.dumps({"message_s_per_byte": taken}))
        process_group.wait_for_all()
        return
    try:
        made = _made(asked, recipe, rank, workers, device)
        if rank == 0:
            Path(asked["out"]).with_suffix(BEGUN).touch()
        found = made.train(asked["epochs"] or recipe.epochs, asked["minibatches"])
        found["target"] = recipe.target
    except PipelineError as error:  # the same on all ranks
        found = {"why": str(error)}
    if rank == 0:
        write_text(Path(asked["out"]), json.dumps(found, indent=1))
    process_group.wait_for_all()


def _made(asked: dict[str, Any], recipe: Any, rank: int, workers: int, device: Any) -> Baseline:
    if asked["kind"] == "plain":
        return PlainLoop(recipe, rank, workers, device)
    if asked["kind"] == "ddp":
        return DataParallel(recipe, rank, workers, device, parts=asked["parts"])
    captured = capture_recipe(recipe, device=str(device))
    if captured.model is not None:
        raise RecipeError("Schedule1F1B needs a chain of modules, and this model runs by its own forward")
    stages = [captured.stage(*bounds) for bounds in asked["bounds"]]
    return OneFOneB(recipe, rank, workers, device, stages=stages, parts=asked["parts"])


def _message_s_per_byte(loop: PlainLoop, batch: Any, rank: int, workers: int, bytes_per_s: float) -> float:
    """Returns what a byte of a message takes from compute, at each of its ends.

    The cores that compute also serve gloo and the network. Each worker trains the whole model while a message goes to
    the next one; what that adds to an update is a mean over the workers.
    """

    def update_s(message_bytes: int) -> float:
        sent, received = (torch.zeros(message_bytes, dtype=torch.uint8) for _ in range(2))
        seconds = []
        for _ in range(_UPDATES):
            start = time.perf_counter()
            works = [dist.irecv(received, (rank - 1) % workers), dist.isend(sent, (rank + 1) % workers)]
            loop.update([batch])
            for work in works:
                assert work is not None, "every rank of the group comes here"
                work.wait()
            seconds.append(time.perf_counter() - start)
        found = torch.tensor([median(seconds)], dtype=torch.float64)
        dist.all_reduce(found)
        return float(found) / workers

    loop.update([batch])
    alone_s = update_s(1)
    message_bytes = int(min(_MOST_BYTES, _FILLED * bytes_per_s * alone_s))
    return max(0.0, update_s(message_bytes) - alone_s) / (2 * message_bytes)


def _run() -> int:
    try:
        run_asked(json.loads(sys.argv[1]))
    except PipelineError as error:
        print(f"pipedream: {error}", file=sys.stderr, flush=True)
        return BAD_CALL
    return 0


if __name__ == "__main__":
    status = _run()
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo may abort an interpreter that shuts down, and destroying the group sometimes waits for ever for its thread.
    os._exit(status)
