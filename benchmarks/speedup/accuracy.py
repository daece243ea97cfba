"""Seconds to a target, end to end, on two hosts with a slow link between them.

One worker, torch's DDP with its means to send less, data parallelism with approximate sums, and pipelines train the
digits, the characters and the text (accuracy_recipe.py) for the same epochs. Learning rates are tuned for each of them,
without a link.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from accuracy_recipe import ASKED, recipe
from scaffold import format_range, format_table
from worker_processes import Disturbance

from pipedream import Cluster, Plan, Profile, plan as make_plan
from pipedream.apps.compare.compare_runs import Runs
from pipedream.apps.compare.variants import DDP, ONE_WORKER, format_ratio
from pipedream.apps.report.charts import curve_svg
from pipedream.core.plan.sum_method import SumMethod
from pipedream.core.units import format_bytes, format_link, format_number
from pipedream.slow_links import Network, slow_network

ACCUMULATED = 8  # minibatches that each worker accumulates for an update
PARTS = 2  # microbatches of a minibatch, for DDP with the pipeline's batch
QUIET, TRIES = 0.05, 2  # share of the cores that others may take; at most so many runs until that is so
FAST = 50e6  # bytes per second that plans of a training without link are made for


@dataclass(frozen=True)
class Way:
    """How a row trains.

    Attributes:
        minibatches: that enter an update.
        plan: arguments of `pipedream.plan`.
        kind: of `compare_runs.run_job`.
        accumulated: minibatches that each worker accumulates.
    """

    minibatches: int
    plan: dict[str, Any]
    kind: str = "pipeline"
    accumulated: int = 1


def _copies(sums: str = "full", accumulated: int = 1, kind: str = "pipeline") -> Way:
    return Way(2 * accumulated, {"shape": "data-parallel", "sums": sums}, kind, accumulated)


def _pipeline(schedule: str, **how: Any) -> Way:
    return Way(1, {"shape": "pipeline", "all_workers": True, "schedule": schedule} | how)


VARIANTS: dict[str, Way] = {
    ONE_WORKER: Way(1, {"shape": "data-parallel"}, "plain"),
    DDP: _copies(kind="ddp"),
    "DDP, minibatch shared": Way(1, {"shape": "data-parallel", "schedule": "1f1b", "microbatches": PARTS}, "ddp"),
    "DDP, fp16": _copies("float16", kind="ddp"),
    "DDP, fp16, accumulating 8": _copies("float16", ACCUMULATED, "ddp"),
    "local SGD, every 8": _copies("every:8", kind="ddp"),
    "local SGD, every 32": _copies("every:32", kind="ddp"),
    "PowerSGD 1": _copies("powersgd:1"),
    "PowerSGD 4": _copies("powersgd:4"),
    "PowerSGD 4, minibatch shared": Way(
        1, {"shape": "data-parallel", "schedule": "1f1b", "microbatches": PARTS, "sums": "powersgd:4"}
    ),
    "PowerSGD 4, accumulating 8": _copies("powersgd:4", ACCUMULATED),
    "DiLoCo, every 30": _copies("diloco:30"),
    "sparse sums, every 30": _copies("sparse:30,0.02"),
    "1F1B": _pipeline("1f1b"),
    "1F1B, int8": _pipeline("1f1b", messages="int8"),
    "1F1B, int4": _pipeline("1f1b", messages="int4"),
    "PipeDream, noam": _pipeline("pipedream"),
    "PipeDream, full": _pipeline("pipedream", in_flight="full"),
    "PipeDream, full, int8": _pipeline("pipedream", in_flight="full", messages="int8"),
    "PipeDream, full, int4": _pipeline("pipedream", in_flight="full", messages="int4"),
    "2BW": _pipeline("pipedream_2bw"),
    "2BW, int8": _pipeline("pipedream_2bw", messages="int8"),
    "2BW, int4": _pipeline("pipedream_2bw", messages="int4"),
}
_ALL = {"int8": "int8,int8,int8", "int4": "int4,int4,int4"}  # of activations, gradients and evaluations
_FULL_DEPTH = {"1F1B": "1f1b", "2BW": "pipedream_2bw", "PipeDream": "pipedream"}
VARIANTS |= {
    f"{title}, full, all in {name}": _pipeline(schedule, in_flight="full", messages=messages)
    for title, schedule in _FULL_DEPTH.items()
    for name, messages in _ALL.items()
}


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        metric: that decides, and the target's.
        rate: in the middle of those that are tried.
        minibatches: of an epoch; None: all data.
        microbatches: of a minibatch, where a method splits it; None: two in profiles, each method's own number in runs.
        variants: its own rows; () for those of the size.
        tuning_seed: of the trainings that try rates.
    """

    name: str
    metric: str
    rate: float
    epochs: int
    minibatches: int | None
    microbatches: int | None = None
    variants: tuple[str, ...] = ()
    tuning_seed: int = 100

    def describe_request(self, rate: float, *, batch: int = 1, each_update: int = 1) -> str:
        """Returns what the recipe reads."""
        numbers = {"rate": rate, "epochs": self.epochs, "minibatches": self.minibatches}
        return json.dumps({"task": self.name, "batch": batch, "each_update": each_update} | numbers)


DIGITS = Task("digits", "accuracy", 0.01, 5, None)
CHARACTERS = Task("characters", "loss", 0.004, 8, 30)
TEXT = Task(
    "text", "loss", 0.001, 8, 32, 8,
    (
        ONE_WORKER, "DDP, fp16", "local SGD, every 8", "local SGD, every 32", "PowerSGD 4",
        "PowerSGD 4, minibatch shared", "PowerSGD 4, accumulating 8", "DiLoCo, every 30", "sparse sums, every 30",
        *(name for name in VARIANTS if ", all in " in name),
    ),
    tuning_seed=0,
)  # fmt: skip
TASKS = {task.name: task for task in (DIGITS, CHARACTERS, TEXT)}


@dataclass(frozen=True)
class Size:
    """How much is run.

    Attributes:
        rates: factors on the task's rate that are tried; one alone is taken.
        links: bytes per second.
        variants: () for those of each task, or all.
        tries: runs over a link, until other processes leave the cores alone.
    """

    tasks: tuple[Task, ...]
    seeds: int
    rates: tuple[float, ...]
    links: tuple[float, ...] = (50e6,)
    variants: tuple[str, ...] = ()
    tries: int = 1


SIZES = {
    "test": Size((Task("digits", "accuracy", 0.01, 1, 4),), 1, (1.0,), variants=(DDP, "PipeDream, full")),
    "short": Size((Task("digits", "accuracy", 0.01, 3, None),), 1, (1.0,), variants=(DDP, "PipeDream, full", "2BW")),
    "full": Size((*TASKS.values(),), 3, (0.5, 1.0, 2.0, 4.0), (3.125e6, 12.5e6, 50e6), tries=TRIES),
}


def measure(
    size: str,
    log: Callable[[str], None],
    *,
    tasks: Sequence[str] = (),
    links: Sequence[float] = (),
    variants: Sequence[str] = (),
    seeds: int | None = None,
    rates: Sequence[float] = (),
    profiles: Path | None = None,
    earlier: Sequence[dict[str, Any]] = (),
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Returns a row for each run, those that tune a rate included.

    Args:
        size: 'test', 'short' or 'full'.
        tasks, links, variants, seeds, rates: others than those of the size.
        profiles: folder for the profile of each task, so that a later call makes the same plans; by default none.
        earlier: rows that are not measured again.
        keep: gets the rows so far after each run.
    """
    few, rows = SIZES[size], list(earlier)
    few = replace(few, variants=tuple(variants) or few.variants, rates=tuple(rates) or few.rates)
    few = few if seeds is None else replace(few, seeds=seeds)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one worker has as many as each of two
    with tempfile.TemporaryDirectory() as folder, slow_network((2,), (None,)) as network:
        for task in few.tasks:
            if tasks and task.name not in tasks:
                continue
            bench = _Bench(task, few, network, Path(folder, task.name), profiles)
            for run in bench.list_runs(rows, links or few.links):
                rows.append(bench.run(run, rows))
                keep(rows)
                log(json.dumps({key: value for key, value in rows[-1].items() if key != "evaluations"}))
    return rows


@dataclass
class _Bench:
    """The runs of one task."""

    task: Task
    size: Size
    network: Network
    folder: Path
    profiles: Path | None
    _count: int = 0

    def list_runs(self, rows: Sequence[dict[str, Any]], links: Sequence[float]) -> Iterator[dict[str, Any]]:
        """Yields the runs that `rows` lacks, which may grow: rates, seeds without a link, seeds over links."""
        common, variants = {"task": self.task.name}, self.size.variants or self.task.variants or tuple(VARIANTS)
        tuned = common | {"seed": self.task.tuning_seed, "bytes_per_s": None}
        planned = [tuned | {"variant": name, "rate": self.task.rate * factor}
                  for name in variants for factor in self.size.rates if len(self.size.rates) > 1]  # fmt: skip
        yield from (run for run in planned if not any(run.items() <= row.items() for row in rows))
        for link in (None, *links):
            for seed in range(self.size.seeds):
                for name in variants:
                    rate = _find_best_rate(rows, self.task.name, name) or self.task.rate * self.size.rates[0]
                    run = common | {"variant": name, "seed": seed, "bytes_per_s": link, "rate": rate}
                    if not any(run.items() <= row.items() for row in rows):
                        yield run

    @cached_property
    def target(self) -> float:
        """The recipe's; it may have changed since a row was trained."""
        os.environ[ASKED] = self.task.describe_request(self.task.rate)
        return float(recipe().target[1])

    @cached_property
    def profile(self) -> Profile:
        file = self.profiles / f"{self.task.name}.profile.json" if self.profiles else None
        if file is not None and file.exists():
            return Profile.load(file)
        os.environ[ASKED] = self.task.describe_request(self.task.rate)
        self.network.limit(None)
        folder = self._make_runs(self.task.tuning_seed).run(
            "profile", 2, "profile", runs=10, microbatches=self.task.microbatches or PARTS
        )
        profile = Profile.load(folder / "profile.json")
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            profile.save(file)
        return profile

    def count_timed_epochs(self, name: str) -> int:
        """Returns how many epochs are timed over a link: one to fill the pipeline, then periods of averages."""
        way = VARIANTS[name]
        period = SumMethod.parse(way.plan.get("sums", "full")).period
        each = self.task.minibatches
        return 2 if each is None else 1 + max(1, round(period * way.minibatches / each))

    def run(self, run: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns a row: what the training comes to, and over a link the seconds of its first epochs.

        A training that `rows` have from another link, of the same plan, is not run again.
        """
        link = run["bytes_per_s"]
        plan, way = self._make_plan(run["variant"], link or FAST), VARIANTS[run["variant"]]
        stages = [(stage.first, stage.last) for stage in plan.stages]
        # A pipeline that flushes trains alike at any depth.
        depth = () if way.plan.get("schedule") == "1f1b" else (plan.in_flight, plan.update_delay)
        cuts = str((stages, *depth) if way.kind == "pipeline" else None)
        same = {key: run[key] for key in ("task", "variant", "seed", "rate")} | {"cuts": cuts}
        row = next((row for row in rows if same.items() <= row.items()), None)
        row = run | (row or self._train(run, plan, None, self.task.epochs) | same) | {"bytes_per_s": link}
        epochs = _count_epochs(
            [evaluation[self.task.metric] for evaluation in row["evaluations"]], self.task, self.target
        )
        row |= {"target": self.target, "epochs_to_target": epochs}
        if link is None:
            return row
        # Seeds differ in what is learned, not in seconds: one of them is timed.
        alike = {key: row[key] for key in ("task", "variant", "rate", "cuts", "bytes_per_s")}
        timed = next((other["timed"] for other in rows if alike.items() <= other.items() and "timed" in other), None)
        return row | _reach(row, timed or self._time(run, plan), self.task.epochs)

    def _time(self, run: dict[str, Any], plan: Plan) -> dict[str, Any]:
        """Returns the seconds, the bytes and the rate of the first epochs over a link, with their evaluations."""
        best: dict[str, Any] = {}
        epochs = self.count_timed_epochs(run["variant"])
        for _ in range(self.size.tries):
            disturbance = Disturbance(lambda: sum(os.times()[:4]))
            trained = self._train(run, plan, run["bytes_per_s"], epochs)
            others = disturbance.share()
            if not best or others < best["others"]:
                ends_s = [evaluation["seconds"] for evaluation in trained["evaluations"]]
                best = {name: trained[name] for name in ("samples_per_s", "epoch_bytes")} | {
                    "epochs": epochs,
                    "first_epoch_s": ends_s[0],
                    "epoch_s": (ends_s[-1] - ends_s[0]) / (epochs - 1),
                    "others": others,
                }
            if best["others"] <= QUIET:
                break
        return best

    def _make_runs(self, seed: int) -> Runs:
        self._count += 1
        file, folder = str(Path(__file__).with_name("accuracy_recipe.py")), self.folder / str(self._count)
        return Runs(file, folder, seed, "cpu", self.network, count=10 * self._count)

    def _make_plan(self, name: str, bytes_per_s: float) -> Plan:
        way, workers = VARIANTS[name], 1 if name == ONE_WORKER else 2
        how, microbatches = way.plan, self.task.microbatches
        if microbatches is not None and how.get("schedule") in ("1f1b", "pipedream_2bw"):
            how = {"microbatches": microbatches} | how
        plan = make_plan(self.profile, Cluster.flat(workers, bandwidth_bytes_per_s=bytes_per_s), **how)
        return _accumulate(plan, way.accumulated) if way.kind == "pipeline" and way.accumulated > 1 else plan

    def _train(self, run: dict[str, Any], plan: Plan, bytes_per_s: float | None, epochs: int) -> dict[str, Any]:
        way = VARIANTS[run["variant"]]
        batch = plan.batch // self.profile.batch
        os.environ[ASKED] = self.task.describe_request(run["rate"], batch=batch, each_update=way.minibatches // batch)
        self.network.limit(bytes_per_s)
        runs = self._make_runs(run["seed"])
        options = {"checkpoint_every": 0} if way.kind == "pipeline" else {"accumulated": way.accumulated}
        plan_file = plan.save(runs.folder / "run.plan.json")
        folder = runs.run(way.kind, plan.ranks, "run", plan=str(plan_file), epochs=epochs, minibatches=None, **options)
        summary, sent = json.loads((folder / "summary.json").read_text(encoding="utf-8")), folder / "sent_bytes.json"
        return {
            "metric": self.task.metric,
            "samples_per_s": summary["throughput"]["measured_per_s"],
            "epoch_bytes": int(sent.read_text()) / epochs if sent.exists() else 0,
            "final": summary["metrics"][self.task.metric],
            "loss": summary["metrics"]["loss"],
            "evaluations": summary["evaluations"],
        }


def _accumulate(plan: Plan, accumulated: int) -> Plan:
    """Returns a data-parallel plan in which each worker accumulates this many minibatches for an update."""
    count = plan.workers * accumulated
    return replace(plan, schedule="1f1b", batch=count * plan.batch, microbatches=count)


def _count_epochs(values: Sequence[float], task: Task, target: float) -> int | None:
    """Returns the epochs after which the target was reached; None if it was not."""
    sign = -1 if task.metric == "loss" else 1
    return next((epoch for epoch, value in enumerate(values, 1) if sign * value >= sign * target), None)


def _reach(row: dict[str, Any], timed: dict[str, Any], trained_epochs: int) -> dict[str, Any]:
    """Returns the fields of a training whose first epochs were timed over a link.

    The bytes of an epoch are those by which the whole training and its first epochs differ: what the start and the end
    of a run send, such as its weights, is in neither.
    """
    epochs, more = row["epochs_to_target"], trained_epochs - timed["epochs"]
    each_bytes = (trained_epochs * row["epoch_bytes"] - timed["epochs"] * timed["epoch_bytes"]) / more
    return {
        "timed": timed,
        "samples_per_s": timed["samples_per_s"],
        "seconds_to_target": None if epochs is None else timed["first_epoch_s"] + (epochs - 1) * timed["epoch_s"],
        "bytes_to_target": None if epochs is None else epochs * each_bytes,
        "others": timed["others"],
    }


def _find_best_rate(rows: Sequence[dict[str, Any]], task: str, variant: str) -> float | None:
    """Returns the rate with the least loss of those that were tried."""
    tried = [row for row in _select_tried(rows, task) if row["variant"] == variant]
    return min(tried, key=lambda row: row["loss"])["rate"] if tried else None


def _select_tried(rows: Sequence[dict[str, Any]], task: str) -> list[dict[str, Any]]:
    seed = TASKS[task].tuning_seed
    return [row for row in rows if (row["task"], row["seed"], row["bytes_per_s"]) == (task, seed, None)]


def tables(rows: list[dict[str, Any]]) -> str:
    """Returns for each task and link what each variant reached, and the rates that were tried."""
    timed, parts = _select_timed(rows), []
    for task in dict.fromkeys(row["task"] for row in rows):
        mine = [row for row in timed if row["task"] == task]
        parts += [_format_table([row for row in mine if row["bytes_per_s"] == link])
                  for link in sorted({row["bytes_per_s"] for row in mine})]  # fmt: skip
        if tried := _select_tried(rows, task):
            parts.append(_format_rates(tried))
    return "\n\n".join(parts)


def _select_timed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows over a link, of each variant's best rate."""
    return [
        row
        for row in rows
        if row["bytes_per_s"] and _find_best_rate(rows, row["task"], row["variant"]) in (None, row["rate"])
    ]


_PICTURE_PX = 860, 380


def pictures(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Returns a picture of each task that was timed over several links: file name -> SVG."""
    svg_by_name = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        seconds: dict[str, dict[float, list[float | None]]] = {}
        for row in _select_timed(rows):
            if row["task"] == task:
                seconds.setdefault(row["variant"], {}).setdefault(row["bytes_per_s"], []).append(
                    row["seconds_to_target"]
                )
        alone = {link: _find_median(runs) for link, runs in seconds.get(ONE_WORKER, {}).items()}
        curves = {
            name: [
                (math.log(link), alone_s / middle_s)
                for link in sorted(over)
                if (alone_s := alone.get(link)) and (middle_s := _find_median(over[link]))
            ]
            for name, over in seconds.items()
        }
        if len(alone) > 1:
            ranked = sorted(curves.items(), key=lambda curve: -curve[1][0][1] if curve[1] else 0.0)
            svg_by_name[f"{task}_to_target.svg"] = curve_svg(
                {f"{points[0][1]:.2g}x {name}": points for name, points in ranked if points},
                title=f"Two workers to the target of the {task}",
                width_px=_PICTURE_PX[0],
                height_px=_PICTURE_PX[1],
                x_label="link rate, on a logarithmic axis",
                y_label="seconds of one worker over those of two; left of a name: over the slowest link",
                x_ticks={math.log(link): format_link(link) for link in alone},
                standalone=True,
            )
    return svg_by_name


def _format_table(rows: list[dict[str, Any]]) -> str:
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        runs.setdefault(row["variant"], []).append(row)
    baseline, metric, seeds = rows[0], rows[0]["metric"], len(next(iter(runs.values())))
    reference = DDP if DDP in runs else ONE_WORKER
    reference_s = _find_median(row["seconds_to_target"] for row in runs[reference]) if reference in runs else None
    titles = f"variant | learning rate | {metric} at the end | s to target | {reference}'s over them | bytes to target"
    table_rows = []
    for name, variant_runs in runs.items():
        seconds = [row["seconds_to_target"] for row in variant_runs]
        middle = _find_median(seconds)
        table_row = [
            name,
            f"{variant_runs[0]['rate']:g}",
            format_range([row["final"] for row in variant_runs], lambda value: f"{value:.3f}"),
            _format_reached(seconds, lambda value: f"{value:.1f}"),
            "-" if middle is None or reference_s is None else format_ratio(reference_s / middle),
            _format_reached([row["bytes_to_target"] for row in variant_runs], format_bytes),
            format_range([row["samples_per_s"] for row in variant_runs], format_number),
            f"{max(row['others'] for row in variant_runs):.0%}",
        ]
        table_rows.append(table_row)
    head = f"### {baseline['task']}, {format_link(baseline['bytes_per_s'])}\n\n"
    head += f"Target: {metric} {baseline['target']:g}. Medians of {seeds} seed{'s' * (seeds > 1)} (their range).\n\n"
    return head + format_table(f"{titles} | samples/s | others' share of the cores", "lr", table_rows)


def _format_rates(rows: list[dict[str, Any]]) -> str:
    """Returns what each rate came to with the tuning seed; the one that is taken has the least loss."""
    rates = sorted({row["rate"] for row in rows})
    table_rows = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        finals = {row["rate"]: row["final"] for row in rows if row["variant"] == name}
        best = _find_best_rate(rows, rows[0]["task"], name)
        cells = [f"{'**' * (rate == best)}{finals[rate]:.3f}{'**' * (rate == best)}" if rate in finals else "-"
                 for rate in rates]  # fmt: skip
        table_rows.append([name, *cells])
    title = f"{rows[0]['metric']} at the end, by learning rate"
    head = f"Learning rates tried on the {rows[0]['task']}; that with the least loss is taken:"
    return f"{head}\n\n{format_table('|'.join([title, *(f'{rate:g}' for rate in rates)]), 'lr', table_rows)}"


def _find_median(values: Iterable[float | None]) -> float | None:
    """Returns the median; None if the target was not always reached."""
    numbers = list(values)
    return None if None in numbers else median(numbers)


def _format_reached(values: list[float | None], words: Callable[[float], str]) -> str:
    """Returns the median and the range; says how many runs have no value."""
    if None in values:
        return f"not reached by {values.count(None)} of {len(values)}"
    return format_range(values, words)
