"""Compares ways to train a recipe, one run folder each: one worker, what torch offers, some methods; and their losses.

Speeds are compared over slow links, each run in processes of its own. What stale gradients cost is compared in this one
process: there a `Pipeline` runs all stages, and gradients are exactly as stale as on several machines.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import sha256
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from pipedream.apps.compare.compare_options import ComparisonOptions
from pipedream.apps.compare.compare_runs import Runs
from pipedream.apps.compare.torch_baselines import check_torch_trains
from pipedream.apps.compare.variants import DDP, ONE_WORKER, RecipeComparison, Variant, at_link
from pipedream.apps.compare.variants_page import comparison_page, comparison_svg
from pipedream.apps.training.loop import count_left
from pipedream.apps.training.recipe import Recipe, load_recipe
from pipedream.apps.training.run_folder import measure_steady
from pipedream.apps.training.train import check_trains
from pipedream.core.artifact import encode, read_text, write_text
from pipedream.core.cold import WARM_UP
from pipedream.core.errors import PlanError, RecipeError, ScheduleError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.core.plan.codec import CODECS
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.delay_compensation import COMPENSATIONS
from pipedream.core.units import LinkSpeed, format_link, format_seconds
from pipedream.plan_request import AUTO, PlanRequest
from pipedream.schedules import properties_of
from pipedream.services.checkpoint.stores import find_kind
from pipedream.services.phases.phases import Phase, phases_text, read_phases
from pipedream.services.probe.probe import detect_cluster
from pipedream.slow_links import LinkError, loopback_bytes_per_s, slow_network
from pipedream.workflows.plan import make_plan
from pipedream.workflows.simulate import simulate

STATE = "compare.json"
"""Name of the file with a comparison's settings and figures."""
COMPARED = (
    "torch", "data-parallel", "data-parallel+powersgd:4", "data-parallel+diloco:30",
    "1f1b", "1f1b+bfloat16", "1f1b+int8", "1f1b+int4", "pipedream", "pipedream+int8", "pipedream+int4",
    "pipedream_2bw", "pipedream_2bw+bfloat16", "pipedream_2bw+int8", "pipedream_2bw+int4", AUTO,
)  # fmt: skip
"""The methods that are compared with one worker by default, with their sums or messages."""

DELAYED = ("1f1b", "pipedream_2bw", "pipedream")
"""The methods whose losses are compared by default."""

_DDP = (
    (DDP, "full", 1),
    ("DDP, accumulating 8", "full", 8),
    ("DDP, fp16", "float16", 1),
    ("DDP, fp16, accumulating 8", "float16", 8),
    ("local SGD, every 8", "every:8", 1),
)
"""Of the ways of torch's DDP: title, sums, minibatches that each worker accumulates for an update."""


_LONG_S, _MUCH_LONGER = 120.0, 5.0


class _Way(NamedTuple):
    """A way to train: its title, the request for its plan, its kind and options of `run_job`."""

    name: str
    request: PlanRequest
    kind: str = "pipeline"
    options: tuple[tuple[str, Any], ...] = ()


def compare_recipe(
    recipe: str,
    options: ComparisonOptions,
    *,
    out: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[RecipeComparison, Path]:
    """Trains a recipe's file in each way, and writes the comparison into a folder; continues one found there.

    Returns the comparison and its folder.

    Args:
        progress: is called with a line before and after each step.

    Raises:
        PlanError: the folder holds something else, no method has stale gradients to emulate, there are more workers
            than cores, or a link is faster than this machine's.
        ScheduleError: a method is not known.
        WorkerError: the model could not be profiled. A run that fails has a reason in place of figures.
    """
    workers, is_delayed = options.worker_count, options.emulate_delay
    phases = read_methods(options.schedules or DELAYED) if is_delayed else ()
    if not is_delayed:
        _check(options, options.schedules or COMPARED)
    settings = {"recipe_sha256": sha256(Path(recipe).read_bytes()).hexdigest()[:12]} | dict(encode(options))
    folder = open_folder(recipe, out, settings)
    is_linked = bool(options.links) and not is_delayed
    context = slow_network((workers,), (None,)) if is_linked else nullcontext()
    # A lone worker has only its share of the cores, as each of several.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    with context as network:
        runs = Runs(recipe, folder, options.seed, options.device, network)
        comparison = RecipeComparison(Path(recipe).stem, workers, (), settings, is_delayed, finished=False)
        comparer = _Comparer(options, runs, comparison, progress)
        profile = comparer.profile_together()
        loaded = load_recipe(recipe, seed=options.seed)
        for link in options.compared_links:
            cluster = options.make_cluster(link) if link else detect_cluster(options.device, workers=workers)[0]
            ways = _list_delayed(phases, options, cluster) if is_delayed else _list_ways(options, cluster)
            comparer.rows += [comparer.plan(way, link, profile, loaded) for way in ways]
        del loaded  # each run loads its own
        comparer.train()
    progress(f"{folder / 'compare.html'}, picture in {folder / 'compare.svg'}")
    return comparer.comparison, folder


@dataclass
class _Row:
    """A row of a comparison.

    Attributes:
        plan: None if the row cannot train the recipe.
        is_known: whether the variant has figures, or says why it has none.
        seconds: predicted for the run, without its start and evaluations; 0 if unknown.
    """

    way: _Way
    variant: Variant
    plan: Plan | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    is_known: bool = False
    seconds: float = 0.0


@dataclass
class _Comparer:
    """Trains the rows of a comparison, and writes it after each."""

    options: ComparisonOptions
    runs: Runs
    comparison: RecipeComparison
    progress: Callable[[str], None]
    rows: list[_Row] = field(default_factory=list)

    def profile_together(self) -> Profile:
        """Profiles the recipe on all workers at once, as they will train, unless the folder has its profile."""
        if not (self.runs.folder / STATE).exists():
            self.write()
        file, workers = self.runs.folder / "profile" / "profile.json", self.comparison.workers
        if not file.exists():
            self.progress("profiling the model ...")
            processes, parts = 0 if self.comparison.delayed else workers, self.options.microbatches or workers
            self.runs.run("profile", processes, "profile", runs=10, microbatches=parts)
        profile = Profile.load(file)
        self.comparison = replace(self.comparison, notes=profile.notes)
        return profile

    def plan(self, way: _Way, link: LinkSpeed | None, profile: Profile, recipe: Recipe) -> _Row:
        """Returns a row over a link, with what an earlier call has measured, or why it cannot train the recipe."""
        rate, latency_s = link or (None, 0.0)
        variant = Variant(way.name, rate, latency_s=latency_s, approximation=way.request.choices.approximations)
        try:
            plan = make_plan(profile, way.request)
            if way.kind == "pipeline":
                depth = plan.schedule if way.request.schedule == AUTO else plan.depth_mode
                variant = replace(variant, plan=f"{plan.config}, {depth}", predicted_per_s=predict_samples_per_s(plan))
            if plan.ranks == 1 and self.rows:
                return _Row(way, variant, plan)
            accumulated = dict(way.options).get("accumulated", 1)
            splits = plan.microbatches > 1 or properties_of(plan.schedule or "pipedream").splits_minibatch
            minibatches = accumulated * (1 if splits else max(plan.replicas))  # of an update
            folder, samples = re.sub(r"[\W_]+", "_", self._label(variant, plan)), minibatches * plan.batch
            variant = replace(variant, folder=folder, samples_per_update=samples)
            if measured := self.runs.read(variant, is_here=self.comparison.delayed):
                return _Row(way, measured, plan, is_known=True)
            if plan.ranks > 1 and latency_s:
                self._limit(variant)  # which this kernel may not be able to
            self._check(way, plan, recipe)
            # What accumulates sums as rarely as what averages.
            rare = way.request if accumulated == 1 else replace(way.request, sums=f"every:{accumulated}")
            minibatch_s = plan.batch / predict_samples_per_s(make_plan(profile, rare))
        except (PlanError, RecipeError, ScheduleError, LinkError) as error:
            return _Row(way, replace(variant, why=str(error)), is_known=True)
        if self.comparison.delayed:  # all workers take turns in this process
            minibatch_s = sum(stage.compute_s for stage in plan.stages)
        length = self._choose_length(plan, minibatches)
        count = count_left(recipe.train, (0, 0), length["epochs"] or recipe.epochs, length["minibatches"])
        return _Row(way, variant, plan, length | dict(way.options), seconds=count * minibatch_s)

    def _check(self, way: _Way, plan: Plan, recipe: Recipe) -> None:
        """Raises what keeps a plan from training the recipe, before anything is trained."""
        if way.kind != "pipeline":
            check_torch_trains(way.kind, recipe, plan)
            return
        # Built on the CPU, as other processes need the GPU's memory; a recipe may work on the GPU alone.
        with nullcontext() if self.options.device == "cpu" else suppress(RecipeError):
            check_trains(recipe, plan=plan, compensation=dict(way.options).get("compensation"))

    def _leave_out_long_rows(self, rows: Sequence[_Row]) -> None:
        """Leaves out rows that take minutes, and much longer than others; not the first, with which all are compared.

        Such are rare sums, of which some periods are to be trained. Rows that were asked for by name are trained.
        """
        limit_s = max(_LONG_S, _MUCH_LONGER * median([row.seconds for row in rows] or [0.0]))
        for row in () if self.options.schedules else rows:
            if row.seconds > limit_s and row is not self.rows[0]:
                why = f"it would take about {format_seconds(row.seconds)}; name it by --schedule to train it"
                row.variant, row.is_known = replace(row.variant, why=why), True

    def train(self) -> None:
        """Trains the rows that have no figures."""
        self._leave_out_long_rows([row for row in self.rows if not row.is_known])
        rows_s = [row.seconds for row in self.rows if not row.is_known]
        total = f"predicted to take {format_seconds(sum(rows_s))}, besides starts and evaluations"
        self.progress(f"{len(rows_s)} of {len(self.rows)} rows to train, {total}")
        self.write()
        for row in self.rows:
            if not row.is_known:
                row.variant, row.is_known = self._train(row), True
                self.write()
        self.write(finished=True)

    def _train(self, row: _Row) -> Variant:
        variant, plan = row.variant, row.plan
        assert plan is not None
        if not variant.folder:  # one worker is as fast over any link
            return replace(
                self.rows[0].variant,
                name=variant.name,
                link=variant.link,
                latency_s=variant.latency_s,
                plan=variant.plan,
            )
        label = self._label(variant, plan)
        self.progress(f"{label} ...")
        if plan.ranks > 1:
            self._limit(variant)
        variant = self.runs.train(variant, plan, row.way.kind, is_here=self.comparison.delayed, **row.options)
        rate = f"{variant.samples_per_s:.4g} samples/s" if variant.samples_per_s else f"{len(variant.losses)} updates"
        self.progress(f"{label}: {variant.why or rate}")
        return variant

    def _limit(self, variant: Variant) -> None:
        if self.runs.network is not None:
            self.runs.network.limit(variant.link, latency_s=variant.latency_s)

    def _label(self, variant: Variant, plan: Plan) -> str:
        is_linked = self.runs.network is not None and plan.ranks > 1
        return f"{variant.name} {at_link(variant.speed)}" if is_linked else variant.name

    def _choose_length(self, plan: Plan, minibatches: int) -> dict[str, int | None]:
        """Returns the epochs and minibatches of a run whose updates have so many.

        It has at least two updates. With rare sums, what follows its warm-up has whole periods: without an average of
        the weights it would look faster than it is.
        """
        options, period, warm_up = self.options, plan.choices.sums.period, ceil(WARM_UP / minibatches)
        if options.seconds is not None:
            update_s = minibatches * plan.batch / predict_samples_per_s(plan)
            updates = warm_up + max(2, ceil(options.seconds / update_s))
        elif options.minibatches is not None:
            updates = max(2, ceil(options.minibatches / minibatches))
        else:
            return {"epochs": options.epochs, "minibatches": None}
        if period > 1:  # the warm-up is at most half of the run
            updates = warm_up + ceil(max(warm_up, updates - warm_up) / period) * period
        count = minibatches * updates
        return {"epochs": options.epochs if options.seconds is None and period == 1 else count, "minibatches": count}

    def write(self, *, finished: bool = False) -> None:
        """Writes the comparison of the rows so far."""
        variants = tuple(row.variant for row in self.rows if row.is_known)
        self.comparison = replace(self.comparison, variants=variants, finished=finished)
        state, folder = {"verdict": self.comparison.verdict} | dict(encode(self.comparison)), self.runs.folder
        write_text(folder / STATE, json.dumps(state, indent=1) + "\n")
        if variants:
            write_text(folder / "compare.svg", comparison_svg(self.comparison))
            write_text(folder / "compare.html", comparison_page(self.comparison))


def _list_delayed(phases: Sequence[Phase], options: ComparisonOptions, cluster: Cluster) -> Iterator[_Way]:
    """Yields the methods of `read_methods`, one stage for each worker."""
    for phase in phases:
        parts = options.microbatches if properties_of(phase.name).splits_minibatch else None
        request = PlanRequest(cluster, schedule=phase.name, microbatches=phase.microbatches or parts, shape="straight")
        yield _Way(phases_text([phase]), request, options=(("compensation", phase.compensation),))


def _list_ways(options: ComparisonOptions, cluster: Cluster) -> Iterator[_Way]:
    """Yields one worker, and ways to train on several."""
    replicated = PlanRequest(cluster, shape="data-parallel")
    yield _Way(ONE_WORKER, PlanRequest(Cluster.flat(1), shape="data-parallel"), "plain")
    for text in (options.schedules or COMPARED) if options.worker_count > 1 else ():
        name, _, exchange = text.partition("+")
        first = exchange.split(",")[0]
        option = "messages" if first == "full" or CODECS.has(first) else "sums"
        exchanged: dict[str, Any] = {option: exchange} if exchange else {}
        if text == "torch":
            for title, sums, accumulated in _DDP:
                yield _Way(title, replace(replicated, sums=sums), "ddp", (("accumulated", accumulated),))
            shared = replace(replicated, schedule="1f1b", microbatches=options.worker_count)
            yield _Way("DDP, minibatch shared", shared, "ddp")
            straight = PlanRequest(cluster, schedule="1f1b", shape="straight", microbatches=options.microbatches)
            yield _Way("torch Schedule1F1B", straight, "1f1b")
        elif name == "data-parallel":
            yield _Way(text, replace(replicated, **exchanged))
        elif name == AUTO:
            yield _Way(text, PlanRequest(cluster, schedule=AUTO, allow_asynchronous=True))
        else:
            request = PlanRequest(cluster, schedule=name, shape="pipeline", all_workers=True, **exchanged)
            if properties_of(name).splits_minibatch:
                request = replace(request, microbatches=options.microbatches)
            yield _Way(text, replace(request, in_flight="full") if name == "pipedream" else request)


def predict_samples_per_s(plan: Plan) -> float:
    """Returns the simulated throughput, of the steady part of a run if it has one."""
    minibatches = max(12, 4 * plan.placement.cycle * max(plan.in_flight))  # most are between filling and draining
    return measure_steady(simulate(plan, minibatches=minibatches)).samples_per_s


def read_methods(schedules: Sequence[str]) -> tuple[Phase, ...]:
    """Reads methods with their compensation; one that flushes comes first. Raises a PlanError if all flush."""
    phases = [read_phases(text)[-1] for text in dict.fromkeys(schedules)]
    flushing = [phase for phase in phases if properties_of(phase.name).flushes]
    delayed = [phase for phase in phases if phase not in flushing]
    if not delayed:
        raise PlanError(
            f"--emulate-delay was asked for with {', '.join(schedules)}, which flush: no gradient is stale, and the "
            "losses are those of one process; name a method with stale gradients, such as pipedream"
        )
    return (*(flushing or [Phase("1f1b")]), *delayed)


def open_folder(recipe: str, out: str | os.PathLike[str] | None, settings: Mapping[str, Any]) -> Path:
    """Returns a comparison's folder. Raises a `PlanError` if it holds anything else than one of these settings."""
    if out is None:
        return Path("runs") / f"compare-{Path(recipe).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    if not find_kind(out).on_disk:
        raise PlanError(f"--out {out} was asked for, but comparisons are written on this machine; name a folder")
    folder = Path(out)
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return folder
    try:
        saved = json.loads(read_text(folder / STATE))["settings"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise PlanError(f"{folder} is not empty, and has no comparison to continue; name a new folder") from None
    for name, value in settings.items():
        if saved.get(name) != value:
            raise PlanError(
                f"{folder} has a comparison with {name} {saved.get(name)}, and {value} was asked for; give the same "
                "options to continue it, or a new folder"
            )
    return folder


def _check(options: ComparisonOptions, schedules: Sequence[str]) -> None:
    """Raises a PlanError if speeds cannot be compared."""
    for text in schedules:
        name, _, exchange = text.partition("+")
        if name not in ("torch", "data-parallel", AUTO):
            properties_of(name)  # which refuses unknown methods
        if COMPENSATIONS.has(exchange.partition(":")[0]):
            raise PlanError(
                f"--schedule {text} was given, but a compensation changes losses, and speeds are compared; add "
                "--emulate-delay to compare losses, or leave it out"
            )
    workers, cores = options.worker_count, len(os.sched_getaffinity(0))
    if workers > cores and options.device == "cpu":
        raise PlanError(
            f"{workers} workers were asked for on {cores} cores, where they would take turns; ask for at most {cores}, "
            "or predict (pipedream plan, then pipedream simulate or emulate)"
        )
    if options.links and (fastest := max(link.bytes_per_s for link in options.links)) > (
        limit := loopback_bytes_per_s()
    ):
        raise PlanError(
            f"a link of {format_link(fastest)} was asked for, but this machine's loopback carries {format_link(limit)} "
            "(measured now); ask for a slower one"
        )
