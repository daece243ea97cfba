"""A worker of `pipedream compare` for what is not `pipedream train`: ``python -m ...training.compare_worker JSON``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipedream.core.artifact import write_text
from pipedream.core.errors import BAD_CALL, PipelineError, RecipeError
from pipedream.core.plan.plan import Plan
from pipedream.recipe import Recipe, load_recipe
from pipedream.runtime import torch_baselines
from pipedream.runtime.comm import process_group
from pipedream.runtime.failure.launch import set_threads
from pipedream.runtime.torch_baselines import Baseline, Task
from pipedream.training.job import capture_recipe, profile_recipe, with_layout
from pipedream.training.train import train_recipe

BEGIN_SUFFIX = ".begun"
"""Suffix of the file that rank 0 makes when the training begins."""


@dataclass(frozen=True, kw_only=True)
class WorkerJob:
    """The task of a worker; its JSON is the worker's argument.

    Attributes:
        kind: 'profile' measures the recipe on all workers at the same time; 'messages' the seconds of compute that a
            byte of a message or an all-reduce costs, and the rate of the latter; 'plain', 'ddp' and '1f1b' train it as
            torch itself does; 'pipeline' runs `plan` in the folder of `out`.
        out: the file that rank 0 writes: the profile, the figures, or why this kind cannot train the recipe.
        runs, microbatches, mesh, layout, shard_weights: of a profile; see `workflows.profile`.
        bytes_per_s: of the link of the messages.
        parts: microbatches of a minibatch.
        accumulated, sums: of 'ddp', see `torch_baselines.data_parallel`. Of 'pipeline': the recipe's batches that make
            a minibatch.
        bounds: the layers of each stage of '1f1b'.
        plan: a file.
    """

    kind: str
    recipe: str
    out: str
    seed: int
    device: str
    epochs: int | None = None
    minibatches: int | None = None
    mesh: str = ""
    layout: str | None = None
    shard_weights: str | None = None
    runs: int = 0
    microbatches: int | None = None
    bytes_per_s: float = 0.0
    parts: int = 1
    accumulated: int = 1
    sums: str = "full"
    bounds: Sequence[tuple[int, int]] = ()
    plan: str = ""


def run_job(job: WorkerJob) -> None:
    """Runs this rank's part of a job; rank 0 writes the file."""
    if job.kind == "pipeline":
        train_recipe(
            lambda seed: torch_baselines.collect_batches(load_recipe(job.recipe, seed=seed), job.accumulated),
            out=Path(job.out).parent,
            plan=Plan.load(job.plan),
            **{name: getattr(job, name) for name in ("seed", "device", "epochs", "minibatches")},
            layout=job.layout,
            shard_weights=job.shard_weights,
            checkpoint_every=0,
        )
        return
    device = process_group.process_device(job.device)
    rank, workers = process_group.join_group(device, check_software=False)
    set_threads(workers)
    recipe = load_recipe(job.recipe, seed=job.seed)
    if job.kind == "profile":
        profile = profile_recipe(
            with_layout(recipe, job.layout, job.shard_weights),
            device=str(device),
            seed=job.seed,
            runs=job.runs,
            microbatches=job.microbatches,
            meshes=[job.mesh] if job.mesh else (),
            on_all_ranks=True,
        )
        text = profile.to_json() + "\n"
    else:
        try:
            figures = _train(job, recipe, Task(recipe, rank, workers, device, job.parts))
        except PipelineError as error:  # the same on all ranks
            figures = {"why": str(error)}
        text = json.dumps(figures, indent=1)
    if rank == 0:
        write_text(Path(job.out), text)
    process_group.wait_for_all()


def _train(job: WorkerJob, recipe: Recipe, task: Task) -> dict[str, Any]:
    if job.kind == "messages":
        loop, batch = torch_baselines.plain_loop(task), recipe.first_batch()
        message_s_per_byte = torch_baselines.measure_message_s_per_byte(loop, batch, job.bytes_per_s)
        sum_bytes_per_s, sum_s_per_byte = torch_baselines.measure_sum(loop, batch, job.bytes_per_s)
        costs = {"message_s_per_byte": message_s_per_byte, "sum_s_per_byte": sum_s_per_byte}
        return {"sum_bytes_per_s": sum_bytes_per_s, "costs": costs}
    baseline = _make_baseline(job, recipe, task)
    if task.rank == 0:
        Path(job.out).with_suffix(BEGIN_SUFFIX).touch()
    return baseline.train(job.epochs or recipe.epochs, job.minibatches) | {"target": recipe.target}


def _make_baseline(job: WorkerJob, recipe: Recipe, task: Task) -> Baseline:
    if job.kind == "plain":
        return torch_baselines.plain_loop(task)
    if job.kind == "ddp":
        return torch_baselines.data_parallel(task, job.accumulated, job.sums)
    captured = capture_recipe(recipe, device=str(task.device))
    if captured.model is not None:
        raise RecipeError("Schedule1F1B needs a chain of modules, and this model runs by its own forward")
    return torch_baselines.one_f_one_b(task, [captured.stage(*bounds) for bounds in job.bounds])


def _run() -> int:
    try:
        run_job(WorkerJob(**json.loads(sys.argv[1])))
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
