"""A worker of `pipedream compare` for what is not `pipedream train`: ``python -m ...training.compare_worker JSON``.

The JSON has recipe, kind, seed, device, mesh, layout, shard_weights and out, the file that rank 0 writes. A 'profile'
is measured on all workers at the same time, with so many `runs`, of minibatches and of one of their `microbatches`,
also for a rank of the mesh; 'messages' is what a byte of a message takes from compute on a link of `bytes_per_s`. What
torch itself offers is trained by 'plain', 'ddp' or '1f1b', with parts, bounds (the layers of the stages), epochs and
minibatches; the file has its figures, or why this recipe is not trained so.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pipedream.core.artifact import write_text
from pipedream.core.errors import BAD_CALL, PipelineError, RecipeError
from pipedream.recipe import load_recipe
from pipedream.runtime.comm import process_group
from pipedream.runtime.failure.launch import set_threads
from pipedream.runtime.torch_baselines import Baseline, DataParallel, OneFOneB, PlainLoop, message_s_per_byte
from pipedream.training.job import capture_recipe, profile_recipe, with_layout

BEGUN = ".begun"
"""Suffix of the file that rank 0 makes when the training begins."""


def run_asked(job: dict[str, Any]) -> None:
    """Trains as asked on this rank."""
    device = process_group.process_device(job["device"])
    rank, workers = process_group.join_group(device, check_software=False)
    set_threads(workers)
    recipe = load_recipe(job["recipe"], seed=job["seed"])
    figures: dict[str, Any]
    if job["kind"] == "profile":
        profile = profile_recipe(
            with_layout(recipe, job["layout"], job["shard_weights"]),
            device=str(device),
            seed=job["seed"],
            runs=job["runs"],
            microbatches=job["microbatches"],
            meshes=[job["mesh"]] if job["mesh"] else (),
        )
        if rank == 0:
            profile.save(Path(job["out"]))
        process_group.wait_for_all()
        return
    try:
        if job["kind"] == "messages":
            loop = PlainLoop(recipe, rank, workers, device)
            taken = message_s_per_byte(loop, recipe.first_batch(), rank, workers, job["bytes_per_s"])
            figures = {"message_s_per_byte": taken}
        else:
            baseline = _made(job, recipe, rank, workers, device)
            if rank == 0:
                Path(job["out"]).with_suffix(BEGUN).touch()
            figures = baseline.train(job["epochs"] or recipe.epochs, job["minibatches"])
            figures["target"] = recipe.target
    except PipelineError as error:  # the same on all ranks
        figures = {"why": str(error)}
    if rank == 0:
        write_text(Path(job["out"]), json.dumps(figures, indent=1))
    process_group.wait_for_all()


def _made(job: dict[str, Any], recipe: Any, rank: int, workers: int, device: Any) -> Baseline:
    if job["kind"] == "plain":
        return PlainLoop(recipe, rank, workers, device)
    if job["kind"] == "ddp":
        return DataParallel(recipe, rank, workers, device, parts=job["parts"])
    captured = capture_recipe(recipe, device=str(device))
    if captured.model is not None:
        raise RecipeError("Schedule1F1B needs a chain of modules, and this model runs by its own forward")
    stages = [captured.stage(*bounds) for bounds in job["bounds"]]
    return OneFOneB(recipe, rank, workers, device, stages=stages, parts=job["parts"])


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
