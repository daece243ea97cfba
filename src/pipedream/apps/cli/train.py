"""`pipedream train`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pipedream.apps.cli import options as common
from pipedream.apps.cli.workers import is_rank_0, is_worker, start_workers
from pipedream.apps.training.options import TrainingOptions
from pipedream.apps.training.recipe import check_recipe_file
from pipedream.core.errors import ScheduleError
from pipedream.core.flags import Panel, option, option_of
from pipedream.core.garbage import pause_collection
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.ranks import ranks_of
from pipedream.core.schedule.schedule import Schedule
from pipedream.schedules import build, refuse_code, uniform
from pipedream.services.phases.phases import read_phases

if TYPE_CHECKING:
    from pipedream.apps.training.run_folder import ResumePoint

_MEASURED = "this machine's, or measured between several"


@dataclass(frozen=True, kw_only=True)
class LinkFlags:
    """The machines of a run, by a file or by figures."""

    cluster: Path | None = common.CLUSTER
    bandwidth: list[str] | None = option_of(
        common.ClusterFlags,
        "bandwidth",
        help="Bandwidth of a link in one direction, e.g. 1e9 (bytes/s) or 10Gbit/s; or two values, within and between "
        "machines.",
        unset=_MEASURED,
    )
    latency: float | None = option_of(common.ClusterFlags, "latency", default=None, unset=_MEASURED)
    memory: str | None = option_of(
        common.ClusterFlags, "memory", unset="the cluster's, what the machines have, or no limit if links are given"
    )

    def join(self, processes: int) -> Cluster | None:
        """Returns a cluster of these processes with the given links: one level, or two, within and between machines."""
        if not self.bandwidth and self.latency is None:
            return None
        local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
        widths = [local_processes, processes // local_processes] if len(self.bandwidth or ()) > 1 else [processes]
        return common.make_cluster(map(str, widths), self.bandwidth or [], self.latency or 0.0, self.memory)


@dataclass(frozen=True, kw_only=True)
class RestartFlags:
    """Restarts after a failure."""

    max_restarts: int = Panel.FAILURES.option(0, "Restart the workers after a failure, at most N times.", least=0)
    elastic: bool = Panel.FAILURES.option(
        False,
        "If restarts fail, continue without the lost workers: with their stages' other replicas, or with a new plan.",
    )
    min_workers: int = Panel.FAILURES.number(1, "Fewest workers that --elastic may leave.")

    def check(self, method: str | Schedule, workers: int, chunks: int | None) -> None:
        """Raises a `ScheduleError` if the method does not work with every number of workers that may remain."""
        if method == "auto":
            return
        for remaining in range(workers - 1, self.min_workers - 1, -1):
            try:
                if not isinstance(method, str):
                    raise ScheduleError(f"it is a Schedule object, made for {method.plan.workers} workers")
                build(method, uniform(method, remaining, chunks=chunks))
            except ScheduleError as error:
                name = method if isinstance(method, str) else method.name
                raise ScheduleError(
                    f"--elastic may leave {remaining} worker{'s' * (remaining != 1)}, with which {name!r} does not "
                    f"work: {error}; give --min-workers {remaining + 1}, another method, or no --elastic"
                ) from error


def train(
    *,
    recipe: str = common.RECIPE,
    plan: Path | None = option(None, "Plan to run, from 'pipedream plan -o'.", unset="profile the model and plan here"),
    shape: common.ShapeFlags,
    options: TrainingOptions,
    links: LinkFlags,
    restarts: RestartFlags,
    as_json: bool = common.JSON,
) -> None:
    """Train a recipe: profile, plan, run, report.

    Starts local worker processes; under torchrun this process is one of the workers. Leaves summary.json, weights.pt,
    trace.json (for Perfetto), report.html and checkpoints in the run folder.

    \b
    Example:
      pipedream train examples/digits.py --workers 2 --schedule 1f1b
    """
    options = replace(options, shape=shape.read() or options.shape)
    common.check_flags(plan=plan, **options.plan_settings | vars(links))
    common.check_flags(phases=options.phases, schedule=options.schedule, microbatches=options.microbatches)
    check_recipe_file(recipe)  # before workers import torch
    options = replace(
        options,
        plan=None if plan is None else Plan.load(plan),
        cluster=None if links.cluster is None else common.read_cluster(links.cluster),
        quiet=as_json,
    )
    meshes = ",".join(str(mesh) for mesh in options.plan.meshes if mesh.size > 1) if options.plan else ""
    common.check_flags(elastic=restarts.elastic, mesh=options.mesh or meshes)
    if not is_worker():
        _start_processes(recipe, options, restarts)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    planned = replace(options, schedule=None).count_ranks()
    if restarts.elastic and is_worker() and planned not in (None, processes):
        # Workers were lost: plan again for those that are left.
        options = replace(options, plan=None, shape=TrainingOptions.shape, cluster=None)
    if linked := links.join(processes):
        options = replace(options, cluster=linked)
    options = replace(options, memory_bytes=common.read_memory(links.memory))
    with pause_collection(freeze="torch" not in sys.modules):
        from pipedream.apps.training.recipe import Recipe, load_recipe
        from pipedream.apps.training.train import train_recipe
        from pipedream.workflows.prepare import read_run_phases

    def make(seed: int) -> Recipe:
        loaded = load_recipe(recipe, seed=seed)
        if restarts.elastic and options.phases is None and options.schedule is None and loaded.phases:
            for phase in read_run_phases(None, None, loaded.phases):
                restarts.check(phase.schedule, processes, options.chunks)
        return loaded

    summary = train_recipe(make, **vars(options))
    if as_json and is_rank_0():
        common.print_json(summary)


def _start_processes(recipe: str, options: TrainingOptions, restarts: RestartFlags) -> None:
    """Trains in worker processes and exits, unless one process is enough."""
    count = options.workers or options.count_ranks()
    if count is None:
        checkpoint = _find_checkpoint(options)
        count = ranks_of(options.single_mesh) if checkpoint is None else checkpoint.manifest.plan.ranks
    if restarts.elastic:
        for method in _list_methods(options):
            restarts.check(method, count, options.chunks)
    if count == 1 and not restarts.max_restarts:
        return
    more: tuple[str, ...] = ()
    if (restarts.max_restarts or restarts.elastic) and options.out is None:  # all attempts write into one folder
        more = ("--out", f"runs/{Path(recipe).stem}-{datetime.now():%Y%m%d-%H%M%S}")
    start_workers(
        count,
        "pipedream.apps.training.train",
        more=more,
        max_restarts=restarts.max_restarts,
        fewest=restarts.min_workers if restarts.elastic else None,
    )


def _find_checkpoint(options: TrainingOptions) -> ResumePoint | None:
    if options.resume is None:
        return None
    from pipedream.apps.training.run_folder import find_resume_point  # here, because it loads torch

    return find_resume_point(options.resume, options.out)


def _list_methods(options: TrainingOptions) -> list[str]:
    """Returns the methods named by the options, the checkpoint or the plan; the recipe is not loaded yet."""
    if options.phases is not None:
        return [phase.name for phase in read_phases(str(options.phases))]
    if options.schedule is not None:
        return [options.schedule]
    names, source = [] if options.plan is None else [options.plan.method()[0]], "the plan"
    if (checkpoint := _find_checkpoint(options)) is not None:
        saved, source = checkpoint.manifest, f"the checkpoint {checkpoint}"
        names = [phase.name for phase in read_phases(saved.phases)] if saved.phases else names or [saved.schedule]
    for name in names:
        refuse_code(name, source)
    return names or ["pipedream"]
