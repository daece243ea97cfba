"""Compares ways to train a recipe: one worker, what torch offers, and some methods, in turn over slow links."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from math import prod
from pathlib import Path

from pipedream.core.artifact import encode, write_text
from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster, Level
from pipedream.core.model.profile import Profile
from pipedream.core.plan.mesh import meshes_of
from pipedream.core.schedule.compensation import Compensation
from pipedream.core.units import format_seconds
from pipedream.core.variants import ONE_WORKER, OverLink, RecipeComparison, format_link
from pipedream.options import TrainingOptions
from pipedream.report.variants import variants_page, variants_svg
from pipedream.runtime.checkpoint.remote import is_url
from pipedream.slow_links import Network, loopback_bytes_per_s, slow_network
from pipedream.training.compare_runs import RunFailed, Runs, Scales, count_cores, limit_threads
from pipedream.training.compare_variants import OF_TORCH, LinkVariants
from pipedream.workflows.probe import detect_cluster

COMPARED = (
    OF_TORCH, "data-parallel", "data-parallel+powersgd:4", "data-parallel+diloco:30",
    "1f1b", "1f1b+bfloat16", "1f1b+int8", "pipedream", "pipedream+int8",
    "pipedream_2bw", "pipedream_2bw+bfloat16", "pipedream_2bw+int8", "auto",
)  # fmt: skip
"""The methods that are compared with one worker by default, with their sums or messages."""

_LATENCY_S = 1e-4  # of a message between two hosts of a slow network
_RUNS, _MORE_RUNS, _WIDE_SPREAD = 10, 40, 0.25  # of the profile; relative spread that asks for more runs
_MIN_SHARE_S, _MAX_TOTAL_BYTES_PER_S = 0.05, 1e8  # see choose_scales


def compare_recipe(
    recipe: str,
    schedules: Sequence[str],
    options: TrainingOptions,
    *,
    links: Sequence[tuple[float, ...]] = (),
    widths: tuple[int, ...] = (),
    seconds: float | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> RecipeComparison:
    """Trains each variant in its own processes, and writes the comparison into a folder.

    Over `links`, more workers than this machine has cores are emulated (`pipedream.training.emulate`).

    Args:
        recipe: a recipe's file.
        schedules: methods; 'torch' is all that torch offers, 'data-parallel' this library's, 'auto' the planner's
            choice. After a plus follow sums or messages: 'data-parallel+powersgd:4', '1f1b+int8'.
        options: workers, microbatches, epochs, minibatches, seed, device, out (the folder), mesh, layout and
            shard_weights are used. With a mesh, workers are ranks: torch's own methods use each as a worker, the others
            form meshes of them.
        links: for each the bytes/s of the levels of a slow network, innermost first; without any, this machine's own.
        widths: of the levels; by default all workers on one.
        seconds: of each variant after its warm-up, as predicted, in place of the options' epochs and minibatches.
        progress: is called with a line before and after each step.

    Raises:
        PlanError: the folder is used, a link is faster than this machine's, or the mesh does not divide the workers.
        ScheduleError: a method is not known.
        WorkerError: a variant failed; the message is that of its worker.
    """
    for text in schedules:
        if text.partition("+")[2].partition(":")[0] in Compensation.kinds:
            raise PlanError(
                f"--schedule {text} was given, but a compensation changes losses, and speeds are compared; add "
                "--emulate-delay to compare losses, or leave it out"
            )
    workers = options.workers or 2 * _measure_mesh(options.mesh)
    emulated = bool(links) and workers > count_cores()
    _check_mesh(options.mesh, workers, emulated=emulated)
    folder = name_folder(recipe, options.out)
    widths = widths or (workers,)
    if links:
        progress("measuring this machine's own link ...")
    _check_links(links, widths, workers)
    context = slow_network(widths, (None,) * len(widths)) if links else nullcontext()
    with context as network, limit_threads(workers):
        runs = Runs(recipe, options, folder, network)
        progress(f"profiling the model, on {workers} workers at once ...")
        profile, notes = profile_together(runs, workers, options.microbatches or workers)
        compute_s = profile.forward_s + profile.backward_s
        progress(f"profiled: {format_seconds(compute_s)} of layers per minibatch of {profile.batch} samples")
        compared: list[OverLink] = []
        target = None
        for bytes_per_s in links or ((),):
            scales = choose_scales(profile, workers, bytes_per_s) if emulated else None
            if network is None:
                cluster = detect_cluster(options.device, workers=workers)[0]
            else:
                cluster = _limit_network(network, widths, bytes_per_s, scales)
                if scales is None and options.device == "cpu":
                    progress(f"measuring messages over {format_link(min(bytes_per_s))} ...")
                    profile, cluster = add_link_costs(runs, profile, cluster)
            link = LinkVariants(
                runs, profile, cluster, options.microbatches, schedules, progress, scales, target, seconds
            )
            earlier = compared[0].variants if compared else ()
            one_worker = next((variant for variant in earlier if variant.name == ONE_WORKER), None)
            compared.append(OverLink(tuple(bytes_per_s), tuple(link.measure_all(one_worker))))
            target = link.target
    notes = (*_describe_setting(options, workers, emulated), *notes)
    comparison = RecipeComparison(Path(recipe).stem, workers, target, tuple(compared), notes, emulated)
    write_text(folder / "compare.svg", variants_svg(comparison))
    text = json.dumps({"verdict": comparison.verdict} | dict(encode(comparison)), indent=1)
    write_text(folder / "compare.json", text + "\n")
    write_text(folder / "compare.html", variants_page(comparison))
    progress(f"{folder / 'compare.html'}, picture in {folder / 'compare.svg'}")
    return comparison


def profile_together(runs: Runs, workers: int, microbatches: int) -> tuple[Profile, tuple[str, ...]]:
    """Profiles the recipe on all workers at once, as they will train, and for longer if its seconds vary.

    Returns the profile, and a note if they still do.
    """
    processes = workers if workers <= count_cores() else 1
    notes: tuple[str, ...] = ()
    for count in (_RUNS, _MORE_RUNS):
        try:
            file, _ = runs.run_worker("profile", processes, "profile", runs=count, microbatches=microbatches)
        except RunFailed as failed:
            raise failed.make_error("profile") from None
        profile = Profile.load(file)
        compute_s = profile.forward_s + profile.backward_s
        spread = sum(layer.forward_spread_s + layer.backward_spread_s for layer in profile.layers)
        if spread <= _WIDE_SPREAD * compute_s:
            break
        remark = f"measured again with {_MORE_RUNS} runs" if count == _RUNS else f"also with {_MORE_RUNS} runs"
        text = f"the profile's seconds vary by {spread / compute_s:.0%} ({remark}): the machine is not quiet"
        notes = (f"{text}, and what is predicted may be off by as much",)
    profile.save(runs.folder / "profile.json")
    return profile, notes


def add_link_costs(runs: Runs, profile: Profile, cluster: Cluster) -> tuple[Profile, Cluster]:
    """Returns the profile with the compute that messages and all-reduces cost, the cluster with the latter's rate."""
    bytes_per_s = cluster.bandwidth_bytes_per_s
    name = f"messages {format_link(bytes_per_s)}"
    try:
        file, _ = runs.run_worker("messages", cluster.workers, name, bytes_per_s=bytes_per_s)
    except RunFailed as failed:
        raise failed.make_error("the exchange of messages") from None
    measured = json.loads(file.read_text(encoding="utf-8"))
    if "why" in measured:  # the plain loop does not train this recipe
        return profile, cluster
    *inner, outermost = cluster.levels
    levels = (*inner, replace(outermost, sum_bytes_per_s=measured["sum_bytes_per_s"]))
    runtime = replace(profile.runtime, **measured["costs"])
    return replace(profile, runtime=runtime), replace(cluster, levels=levels)


def choose_scales(profile: Profile, workers: int, bytes_per_s: Sequence[float]) -> Scales:
    """Returns the scales of an emulation with which the cores have little to do but wait.

    A worker's share of a minibatch takes at least `_MIN_SHARE_S`; the slowest links carry no more than
    `_MAX_TOTAL_BYTES_PER_S` from all workers together.
    """
    share_s = max(1e-9, profile.forward_s + profile.backward_s) / workers
    dilation = max(1.0, _MIN_SHARE_S / share_s)
    return Scales(dilation, dilation * min(1.0, _MAX_TOTAL_BYTES_PER_S / (workers * min(bytes_per_s))))


def _limit_network(
    network: Network, widths: Sequence[int], bytes_per_s: Sequence[float], scales: Scales | None
) -> Cluster:
    """Gives each level of the network its rate, and returns it as a cluster."""
    for level, rate in enumerate(bytes_per_s):
        network.limit(rate if scales is None else rate * scales.byte_scale / scales.dilation, level=level)
    latency_s = _LATENCY_S if scales is None else 0.0  # the real one is not dilated, so it is negligible
    return Cluster(tuple(Level(width, rate, latency_s) for width, rate in zip(widths, bytes_per_s, strict=True)))


def _describe_setting(options: TrainingOptions, workers: int, emulated: bool) -> list[str]:
    notes = []
    if options.mesh:
        notes.append(f"workers are ranks; the methods shard layers over meshes of them, {options.mesh}")
    if emulated:
        notes.append(
            f"{workers} workers are more than {count_cores()} cores, so they are emulated: they wait for the profiled "
            "seconds, with real messages and all-reduces; DDP's rows are emulated with this library's data "
            "parallelism; peaks and seconds to the target are not known"
        )
    return notes


def name_folder(recipe: str, out: str | os.PathLike[str] | None, *, may_be_used: bool = False) -> Path:
    """Returns a comparison's folder. Raises a `PlanError` if it is not empty, unless it may be."""
    if out is None:
        return Path("runs") / f"compare-{Path(recipe).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    if is_url(out):
        raise PlanError(f"--out {out} was asked for, but comparisons are written on this machine; name a folder")
    folder = Path(out)
    if not may_be_used and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PlanError(f"{folder} is not empty; name a new folder, or omit --out for one in runs/")
    return folder


def _measure_mesh(mesh: str) -> int:
    """Returns the ranks of the mesh of every worker; raises a `PlanError` if there are several."""
    first, *others = set(meshes_of(mesh))
    if others:
        raise PlanError(
            f"the meshes {mesh} were asked for, but the methods that are compared partition the model differently; "
            "give one mesh for all, such as model:2"
        )
    return first.size


def _check_mesh(mesh: str, workers: int, *, emulated: bool) -> None:
    size = _measure_mesh(mesh)
    if workers % size:
        raise PlanError(
            f"{workers} workers were asked for with the mesh {mesh}, so they are ranks, {size} to a mesh; give {size}, "
            f"{2 * size} or another multiple"
        )
    if mesh and emulated:
        raise PlanError(
            f"the mesh {mesh} was asked for over --link with {workers} workers on {count_cores()} cores, which would "
            "be emulated, but an emulation has one rank of each mesh; give fewer workers, or no --link"
        )


def _check_links(links: Sequence[tuple[float, ...]], widths: tuple[int, ...], workers: int) -> None:
    if not links:
        return
    if prod(widths) != workers:
        shape = "x".join(map(str, reversed(widths)))
        raise PlanError(f"{workers} workers on {shape} hosts were asked for; the product must be the workers")
    if misfit := next((rates for rates in links if len(rates) != len(widths)), None):
        raise PlanError(
            f"a link of {len(misfit)} rates was asked for on a network of {len(widths)} levels; give a rate for each, "
            "innermost first, as in --link 10gbit/s,400mbit/s --hosts 2x2"
        )
    fastest = max(rate for rates in links for rate in rates)
    if fastest > (limit := loopback_bytes_per_s()):
        raise PlanError(
            f"a link of {format_link(fastest)} was asked for, but this machine's loopback carries {format_link(limit)} "
            "(measured now); ask for a slower one"
        )
