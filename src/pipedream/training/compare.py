"""Compares ways to train a recipe: one worker, what torch offers, and some methods, in turn over slow links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from pipedream import metrics
from pipedream.core.artifact import encode, write_text
from pipedream.core.comparison import DDP, ONE_WORKER, TORCH, OverLink, RecipeComparison, Variant, format_link
from pipedream.core.errors import BAD_CALL, PipelineError, PlanError, ScheduleError, WorkerError
from pipedream.core.hardware.cluster import Cluster, Level
from pipedream.core.model.profile import Profile
from pipedream.core.plan.mesh import meshes_of
from pipedream.core.plan.plan import Plan
from pipedream.options import TrainingOptions
from pipedream.plan_request import PlanRequest
from pipedream.report.comparison import comparison_page, comparison_svg
from pipedream.runtime.checkpoint.remote import is_url
from pipedream.runtime.failure.launch import launch
from pipedream.schedules import properties_of
from pipedream.slow_links import Network, loopback_bytes_per_s, slow_network
from pipedream.training.compare_worker import BEGUN
from pipedream.workflows.plan import make_plan
from pipedream.workflows.probe import detect_cluster
from pipedream.workflows.simulate import simulate

COMPARED = ("data-parallel", "1f1b", "pipedream", "pipedream_2bw", "auto")
"""The methods that are compared by default, beside one worker and what torch offers."""

_LATENCY_S = 1e-4  # of a message between two hosts of a slow network
_RUNS, _MORE_RUNS, _WIDE = 10, 40, 0.25  # of the profile; a spread of its seconds that is large
_GRACE_S = 10.0  # for the other workers, once one has failed
_LONG_S, _CARRIED_BYTES_PER_S = 0.05, 1e8  # see _scales
_NAMES = {
    "data-parallel": "data parallel",
    "1f1b": "1F1B",
    "pipedream": "PipeDream",
    "pipedream_2bw": "2BW",
    "auto": "planner's choice",
}


def compare_recipe(
    recipe: str,
    schedules: Sequence[str],
    options: TrainingOptions,
    *,
    links: Sequence[tuple[float, ...]] = (),
    widths: tuple[int, ...] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> RecipeComparison:
    """Trains each variant in its own processes, and writes the comparison into a folder.

    Args:
        recipe: a recipe's file.
        schedules: methods besides what torch offers; 'data-parallel' is this library's, 'auto' the planner's choice.
        options: workers, microbatches, epochs, minibatches, seed, device, out (the folder), mesh, layout and
            shard_weights are used. With a mesh workers are ranks: so many for torch's own ways, and for a method's
            meshes together.
        links: for each the bytes/s of the levels of a slow network, innermost first; without any, this machine's own.
        widths: of the levels; by default all workers on one.
        progress: is called with a line before and after each variant.

    Over `links`, more workers than this machine has cores are emulated (`pipedream.training.emulate`).

    Raises:
        PlanError: the folder is used, this machine does not carry a rate, or the mesh does not divide the workers.
        WorkerError: a variant failed; the message is that of its worker.
    """
    workers = options.workers or 2 * _mesh_size(options.mesh)
    _check_mesh(options.mesh, workers, emulated=bool(links) and workers > _cores())
    folder = _new_folder(recipe, options.out)
    widths = widths or (workers,)
    _check_links(links, widths, workers)
    emulated = bool(links) and workers > _cores()
    context = slow_network(widths, (None,) * len(widths)) if links else nullcontext()
    with context as network, _own_threads(workers):
        runs = _Runs(recipe, options, folder, network)
        profile, notes = _profiled(runs, workers, options.microbatches or workers)
        comparisons: list[OverLink] = []
        if emulated:
            notes = (_emulated_in_words(workers), *notes)
        if options.mesh:
            notes = (f"workers are ranks; the methods cut layers over meshes of them, {options.mesh}", *notes)
        for bytes_per_s in links or ((),):
            scales = _scales(profile, workers, bytes_per_s) if emulated else None
            if network is not None:
                for level, rate in enumerate(bytes_per_s):
                    network.limit(rate if scales is None else rate * scales[1] / scales[0], level=level)
                latency_s = _LATENCY_S if scales is None else 0.0  # which is not scaled, so next to nothing
                levels = [Level(width, rate, latency_s) for width, rate in zip(widths, bytes_per_s, strict=True)]
                cluster = Cluster(tuple(levels))
            else:
                cluster = detect_cluster(options.device, workers=workers)[0]
            if network is not None and scales is None and options.device == "cpu":
                profile = _with_message_cost(runs, profile, workers, min(bytes_per_s))
            over = _OverLink(runs, profile, cluster, options.microbatches, tuple(schedules), progress, scales)
            variants = tuple(over.variants(comparisons[0].variants if comparisons else ()))
            comparisons.append(OverLink(tuple(bytes_per_s), variants))
    comparison = RecipeComparison(Path(recipe).stem, workers, runs.target, tuple(comparisons), notes, emulated)
    write_text(folder / "compare.svg", comparison_svg(comparison))
    text = json.dumps({"verdict": comparison.verdict} | dict(encode(comparison)), indent=1)
    write_text(folder / "compare.json", text + "\n")
    write_text(folder / "compare.html", comparison_page(comparison))
    progress(f"{folder / 'compare.html'}, picture in {folder / 'compare.svg'}")
    return comparison


def _new_folder(recipe: str, out: str | os.PathLike[str] | None) -> Path:
    """Returns a folder that has nothing in it."""
    if out is None:
        return Path("runs") / f"compare-{Path(recipe).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    if is_url(out):
        raise PlanError(f"--out {out} was asked for, but comparisons are written on this machine; name a folder")
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PlanError(f"{folder} is not empty; name a new folder, or leave --out away for one in runs/")
    return folder


def _mesh_size(mesh: str) -> int:
    """Returns the ranks of the mesh of every worker; raises a `PlanError` if there are several."""
    first, *others = set(meshes_of(mesh))
    if others:
        raise PlanError(
            f"the meshes {mesh} were asked for, but the methods that are compared cut the model into different stages; "
            "give one mesh for all, such as model:2"
        )
    return first.size


def _check_mesh(mesh: str, workers: int, *, emulated: bool) -> None:
    size = _mesh_size(mesh)
    if workers % size:
        raise PlanError(
            f"{workers} workers were asked for with the mesh {mesh}, and are ranks then, which its {size} do not "
            f"divide; give {size}, {2 * size} or another multiple"
        )
    if mesh and emulated:
        raise PlanError(
            f"the mesh {mesh} was asked for over --link by {workers} workers, more than {_cores()} cores, which would "
            "be emulated, but an emulation has one rank of each mesh; give fewer, or no --link"
        )


def _check_links(links: Sequence[tuple[float, ...]], widths: tuple[int, ...], workers: int) -> None:
    if not links:
        return
    if prod(widths) != workers:
        shape = "x".join(map(str, reversed(widths)))
        raise PlanError(f"{workers} workers on {shape} hosts were asked for; the product must be the workers")
    if wrong := next((rates for rates in links if len(rates) != len(widths)), None):
        raise PlanError(
            f"a link of {len(wrong)} rates was asked for on a network of {len(widths)} levels; give a rate for each, "
            "innermost first, as in --link 10gbit/s,400mbit/s --hosts 2x2"
        )
    fastest = max(rate for rates in links for rate in rates)
    if fastest > (most := loopback_bytes_per_s()):
        raise PlanError(
            f"a link of {format_link(fastest)} was asked for, but this machine's loopback carries {format_link(most)} "
            "(measured now); ask for a slower one"
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _scales(profile: Profile, workers: int, bytes_per_s: Sequence[float]) -> tuple[float, float]:
    """Returns `dilation` and `byte_scale` of an emulation, so that the cores have little to do beside the waits.

    A worker's share of a minibatch takes at least `_LONG_S`; the slowest links carry no more than
    `_CARRIED_BYTES_PER_S` from all workers together.
    """
    share_s = max(1e-9, profile.forward_s + profile.backward_s) / workers
    dilation = max(1.0, _LONG_S / share_s)
    return dilation, dilation * min(1.0, _CARRIED_BYTES_PER_S / (workers * min(bytes_per_s)))


def _emulated_in_words(workers: int) -> str:
    return (
        f"{workers} workers are more than {_cores()} cores, so they are emulated: they wait for the profiled seconds, "
        "with real messages and all-reduces; DDP's rows are emulated with this library's data parallelism; peaks and "
        "seconds to the target are not known"
    )


@contextmanager
def _own_threads(workers: int) -> Iterator[None]:
    """One worker alone also has one worker's share of the cores."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)


@dataclass
class _Runs:
    """Runs workers: local processes, or one on each host of a network.

    Attributes:
        target: of the recipe, once something has been trained.
    """

    recipe: str
    options: TrainingOptions
    folder: Path
    network: Network | None
    target: tuple[str, float] | None = None
    _count: int = 0

    def run(self, workers: int, arguments: Sequence[str], begun: Path) -> int | None:
        """Runs ``python ARGUMENTS`` on so many workers; returns the bytes that they sent, None if not known.

        Args:
            begun: a file that is made when the training begins; what was sent before does not count.
        """
        self._count += 1
        begun.parent.mkdir(parents=True, exist_ok=True)
        if self.network is None or workers == 1:
            if status := launch(workers, list(arguments), silent=True):
                raise _Failed(status, "")
            return 0 if workers == 1 else None
        return self._run_on_hosts(self.network, workers, arguments, begun)

    def torch(self, kind: str, workers: int, name: str, **job: Any) -> tuple[Path, int | None]:
        """Runs `compare_worker`; returns its file and the bytes sent."""
        folder = self.folder / _folder_name(name)
        out = folder / f"{kind}.json"
        options = self.options
        job |= {"recipe": self.recipe, "kind": kind, "seed": options.seed or 0, "device": options.device}
        job |= {"epochs": options.epochs, "minibatches": options.minibatches, "out": str(out)}
        job |= {"mesh": options.mesh, "layout": options.layout, "shard_weights": options.shard_weights}
        sent = self.run(workers, ["-m", "pipedream.training.compare_worker", json.dumps(job)], out.with_suffix(BEGUN))
        return out, sent

    def train(self, plan: Plan, name: str) -> tuple[dict[str, Any], int | None]:
        """Runs ``pipedream train``; returns its summary and the bytes sent."""
        folder, options = self.folder / _folder_name(name), self.options
        plan_file = self.folder / f"{_folder_name(name)}.plan.json"
        plan.save(plan_file)
        flags = ["--plan", str(plan_file), "--workers", str(plan.ranks)]
        flags += [] if options.layout is None else ["--layout", options.layout]
        flags += [] if options.shard_weights is None else ["--shard-weights", options.shard_weights]
        flags += ["--seed", str(options.seed or 0), "--device", options.device, "--checkpoint-every", "0", "--json"]
        for flag, count in (("--epochs", options.epochs), ("--minibatches", options.minibatches)):
            flags += [] if count is None else [flag, str(count)]
        arguments = ["-m", "pipedream", "train", self.recipe, *flags, "--out", str(folder)]
        sent = self.run(plan.ranks, arguments, folder / "plan.json")  # written between planning and training
        return json.loads((folder / "summary.json").read_text(encoding="utf-8")), sent

    def emulate(self, plan: Plan, name: str, scales: tuple[float, float]) -> tuple[dict[str, Any], int | None]:
        """Runs ``pipedream emulate``; returns its summary and the bytes sent, both without the scales."""
        folder, plan_file = self.folder / _folder_name(name), self.folder / f"{_folder_name(name)}.plan.json"
        plan.save(plan_file)
        count = self.options.minibatches or _steady_minibatches(plan)
        dilation, byte_scale = scales
        flags = ["--dilation", str(dilation), "--byte-scale", str(byte_scale), "--minibatches", str(count)]
        sent = self.run(
            plan.workers,
            ["-m", "pipedream", "emulate", str(plan_file), *flags, "--json", "--out", str(folder)],
            folder / ".lock",
        )
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        rates = {name: dilation * summary["throughput"][name] for name in ("measured_per_s", "predicted_per_s")}
        sent = None if sent is None else round(sent / byte_scale)
        return summary | {"throughput": rates, "stages": (), "seconds_to_target": None}, sent

    def _run_on_hosts(self, network: Network, workers: int, arguments: Sequence[str], begun: Path) -> int:
        processes: list[subprocess.Popen[bytes]] = []
        outputs = [self.folder / f"{begun.parent.name}.rank{rank}.txt" for rank in range(workers)]
        before: int | None = None

        def watch() -> None:
            nonlocal before
            if before is None and begun.exists():
                before = network.sent_bytes()

        try:
            for rank, (host, output) in enumerate(zip(network.hosts, outputs, strict=False)):
                variables = network.variables(rank, port=20000 + self._count) | {"WORLD_SIZE": str(workers)}
                with output.open("wb") as file:
                    processes.append(
                        subprocess.Popen(
                            host.inside(sys.executable, *arguments),
                            env=os.environ | variables,
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.DEVNULL,
                            stderr=file,
                        )
                    )
            statuses = _ended(processes, watch)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if any(statuses):
            first = next((i for i, status in enumerate(statuses) if status == BAD_CALL), 0)
            texts = [output.read_text(encoding="utf-8", errors="replace").strip() for output in outputs]
            raise _Failed(statuses[first] or 1, texts[first] or "\n".join(filter(None, texts)))
        for output in outputs:
            if not output.stat().st_size:
                output.unlink()
        return network.sent_bytes() - (before or 0)


class _Failed(Exception):
    """A run ended with an exit status and a message."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text.removeprefix("pipedream: ")

    def error(self, name: str) -> PipelineError:
        """Returns the error of a run that failed."""
        if self.status in (130, -2):
            raise KeyboardInterrupt
        if self.status == BAD_CALL:
            return PlanError(self.text or f"{name} was refused; see above")
        return WorkerError(0, f"variant {name!r}", self.text or f"its run ended with exit status {self.status}")


def _ended(processes: Sequence[subprocess.Popen[bytes]], watch: Callable[[], None]) -> list[int]:
    """Waits for all, and watches; once one has failed, the others have `_GRACE_S`. Returns their statuses."""
    since = None
    while any(process.poll() is None for process in processes):
        if since is None and any(process.returncode for process in processes):
            since = time.monotonic()
        if since is not None and time.monotonic() - since > _GRACE_S:
            for process in processes:
                if process.poll() is None:
                    process.kill()
        watch()
        time.sleep(0.02)
    return [process.returncode for process in processes]


def _profiled(runs: _Runs, workers: int, microbatches: int) -> tuple[Profile, tuple[str, ...]]:
    """Profiles the recipe on all workers at once, as they will train, and for longer if its seconds vary."""
    together = workers if workers <= _cores() else 1
    notes: tuple[str, ...] = ()
    for count in (_RUNS, _MORE_RUNS):
        try:
            profile_file, _ = runs.torch("profile", together, "profile", runs=count, microbatches=microbatches)
        except _Failed as failed:
            raise failed.error("profile") from None
        profile = Profile.load(profile_file)
        seconds = profile.forward_s + profile.backward_s
        spread = sum(layer.forward_spread_s + layer.backward_spread_s for layer in profile.layers)
        if spread <= _WIDE * seconds:
            break
        how = f"measured again with {_MORE_RUNS} runs" if count == _RUNS else f"also with {_MORE_RUNS} runs"
        text = f"the profile's seconds vary by {spread / seconds:.0%} ({how}): the machine is not quiet"
        notes = (f"{text}, and what is predicted may be off by as much",)
    profile.save(runs.folder / "profile.json")
    return profile, notes


def _with_message_cost(runs: _Runs, profile: Profile, workers: int, bytes_per_s: float) -> Profile:
    """Returns the profile with what a byte of a message takes from compute on a link."""
    try:
        cost_file, _ = runs.torch("messages", workers, f"messages {format_link(bytes_per_s)}", bytes_per_s=bytes_per_s)
    except _Failed as failed:
        raise failed.error("the exchange of messages") from None
    taken = json.loads(cost_file.read_text(encoding="utf-8"))
    if "why" in taken:  # the plain loop does not train this recipe
        return profile
    return replace(profile, runtime=replace(profile.runtime, **taken))


@dataclass
class _OverLink:
    """The variants over one link.

    Attributes:
        scales: `_scales` of several workers, which are emulated; None: they compute.
    """

    runs: _Runs
    profile: Profile
    cluster: Cluster
    microbatches: int | None
    schedules: tuple[str, ...]
    progress: Callable[[str], None]
    scales: tuple[float, float] | None = None
    _done: dict[tuple[Any, ...], Variant] = field(default_factory=dict)

    def variants(self, before: Sequence[Variant]) -> Iterator[Variant]:
        """Yields them as they are measured.

        Args:
            before: over another link, of which one worker's is the same.
        """
        workers, mesh = self.cluster.workers, self.runs.options.mesh
        alone = next((variant for variant in before if variant.name == ONE_WORKER), None) or self._alone()
        yield alone
        if workers == 1:
            return
        copies = {"shape": "data-parallel"}
        yield self._torch(DDP, "ddp", lambda: self._plan("pipedream", **copies))
        parts = self._parts()
        yield self._torch(TORCH[1], "ddp", lambda: self._plan("1f1b", **copies, microbatches=parts), parts)
        yield self._torch(TORCH[2], "1f1b", lambda: self._plan("1f1b", shape="straight", microbatches=parts), parts)
        for name in self.schedules:
            title = _NAMES.get(name, name)
            if name == "data-parallel":
                yield self._own(title, lambda: self._plan("pipedream", **copies, mesh=mesh))
                continue
            if name == "auto":
                yield self._own(title, lambda: self._plan("auto", allow_asynchronous=True, mesh=mesh), alone)
                continue
            how: dict[str, Any] = {"all_workers": True, "shape": "pipeline", "mesh": mesh}
            try:
                if properties_of(name).splits_minibatch:
                    how["microbatches"] = self.microbatches
            except ScheduleError as error:
                raise PlanError(str(error)) from None
            depths = ("noam", "full") if name == "pipedream" else ("noam",)
            for depth in depths:
                label = title if len(depths) == 1 else f"{title}, {depth}"
                yield self._own(label, partial(self._plan, name, **how, in_flight=depth))

    def _parts(self) -> int:
        """The microbatches of the variants that split minibatches."""
        try:
            return self._plan("1f1b", shape="straight", microbatches=self.microbatches).microbatches
        except (PlanError, ScheduleError):
            return self.microbatches or self.cluster.workers

    def _plan(self, schedule: str, **how: Any) -> Plan:
        return make_plan(self.profile, PlanRequest(self.cluster, schedule=schedule, **how))

    def _alone(self) -> Variant:
        plan = make_plan(self.profile, PlanRequest(Cluster.flat(1), shape="data-parallel"))
        return self._measured_torch(Variant(ONE_WORKER, 1), "plain", plan, 1)

    def _torch(self, name: str, kind: str, plan: Callable[[], Plan], parts: int = 1) -> Variant:
        variant = Variant(name, self.cluster.workers)
        if self.scales is not None:
            if kind == "1f1b":
                return replace(variant, why="it needs the model's layers, which emulated workers do not have")
            return replace(self._own(name, plan), plan="")
        try:
            prepared = plan()
        except (PlanError, ScheduleError) as error:
            return replace(variant, why=str(error))
        return self._measured_torch(variant, kind, prepared, parts)

    def _measured_torch(self, variant: Variant, kind: str, plan: Plan, parts: int) -> Variant:
        bounds = [(stage.first, stage.last) for stage in plan.stages]
        name = self._label(variant.name)
        self.progress(f"{name} ...")
        try:
            path, sent = self.runs.torch(kind, variant.workers, name, parts=parts, bounds=bounds)
        except _Failed as failed:
            if failed.status in (130, -2):
                raise KeyboardInterrupt from None
            return replace(variant, why=failed.text.rpartition("\n")[2] or f"exit status {failed.status}")
        figures = json.loads(path.read_text(encoding="utf-8"))
        if "why" in figures:
            return replace(variant, why=figures["why"])
        self._keep_target(figures["target"])
        rate, update = figures["samples_per_s"], figures["samples_per_update"]
        return self._shown(
            replace(
                variant,
                samples_per_s=rate,
                predicted_per_s=_predicted_per_s(plan),
                samples_per_update=update,
                bytes_per_sample=self._per_sample(sent, figures["minibatches"]),
                bubble=self._idle(rate, update, variant.workers, copies=variant.workers if kind == "ddp" else 1),
                peak_bytes=figures["peak_bytes"],
                seconds_to_target=figures["seconds_to_target"],
                metrics=figures["metrics"],
            )
        )

    def _own(self, name: str, plan: Callable[[], Plan], alone: Variant | None = None) -> Variant:
        variant = Variant(name, self.cluster.workers)
        try:
            variant_plan = plan()
        except (PlanError, ScheduleError) as error:
            return replace(variant, why=str(error))
        text = (
            f"{variant_plan.config} {variant_plan.schedule}"
            if name == _NAMES["auto"]
            else f"{variant_plan.config}, {variant_plan.depth_mode}"
        )
        if alone is not None and variant_plan.ranks == 1:
            return replace(alone, name=name, plan=text)
        if (repeated := self._done.get(_ran(variant_plan))) is not None:
            return replace(repeated, name=name, plan=text)
        label = self._label(name)
        self.progress(f"{label} ...")
        try:
            if self.scales is None:
                summary, sent = self.runs.train(variant_plan, label)
            else:
                summary, sent = self.runs.emulate(variant_plan, label, self.scales)
        except _Failed as failed:
            raise failed.error(name) from None
        if target := summary.get("target"):
            self._keep_target((target["metric"], target["value"]))
        splits = variant_plan.microbatches > 1 or properties_of(variant_plan.schedule or "pipedream").splits_minibatch
        measured = Variant(
            name,
            variant_plan.ranks,
            text,
            samples_per_s=summary["throughput"]["measured_per_s"],
            # An emulation predicts for stages that wait, without what the runtime costs those that compute.
            predicted_per_s=summary["throughput"]["predicted_per_s"] if self.scales else _predicted_per_s(variant_plan),
            samples_per_update=self.profile.batch * (1 if splits else max(variant_plan.replicas)),
            bytes_per_sample=self._per_sample(sent, summary["minibatches"]),
            bubble=summary["bubble"]["measured"],
            peak_bytes=max((stage["peak_bytes"] or 0 for stage in summary["stages"]), default=0) or None,
            seconds_to_target=summary["seconds_to_target"],
            metrics=summary["metrics"],
        )
        self._done[_ran(variant_plan)] = measured
        return self._shown(measured)

    def _label(self, name: str) -> str:
        """Returns a variant's name with its link."""
        if self.runs.network is None or name == ONE_WORKER:
            return name
        return f"{name} over {format_link(self.cluster.bandwidth_bytes_per_s)}"

    def _shown(self, variant: Variant) -> Variant:
        self.progress(f"{self._label(variant.name)}: {variant.samples_per_s:.4g} samples/s")
        return variant

    def _keep_target(self, target: Any) -> None:
        self.runs.target = None if target is None else (target[0], target[1])

    def _per_sample(self, sent: int | None, minibatches: int) -> float | None:
        return None if sent is None else sent / max(1, minibatches * self.profile.batch)

    def _idle(self, rate: float, update: int, workers: int, copies: int) -> float | None:
        """Returns the share of the workers' time beside the profiled seconds of compute and of `copies` updates."""
        profile = self.profile
        if not rate or not update:
            return None
        work_s = (
            profile.forward_s + profile.backward_s + profile.loss_s
        ) * update / profile.batch + copies * profile.update_s
        return min(1.0, max(0.0, 1 - work_s * rate / (update * workers)))


def _ran(plan: Plan) -> tuple[Any, ...]:
    """What distinguishes two plans' runs."""
    cuts = tuple((stage.first, stage.last, stage.replicas) for stage in plan.stages)
    return cuts, plan.schedule, plan.microbatches, plan.in_flight, plan.order


def _steady_minibatches(plan: Plan) -> int:
    """Returns how many minibatches to run, so that most of them are between filling and draining."""
    return max(12, 4 * plan.placement.cycle * max(plan.in_flight))


def _predicted_per_s(plan: Plan) -> float:
    timeline = simulate(plan, minibatches=_steady_minibatches(plan))
    try:
        return metrics.steady_metrics(timeline).samples_per_s
    except ValueError:  # too short for a steady part
        return metrics.run_metrics(timeline).samples_per_s


def _folder_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name).replace("__", "_")
