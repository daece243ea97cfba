"""Predicted against measured throughput: plans of up to four workers over links of three speeds. See README.md."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from math import ceil
from pathlib import Path

from models import MODELS
from scipy.stats import spearmanr

import pipedream as pd
from pipedream import Cluster, Plan, Profile, metrics
from pipedream.slow_links import Network, slow_network, why_not

sys.path.append(str(Path(__file__).parents[1]))
from scaffold import Environment, format_table, make_parser, parse_quick, stop_if, write_rows
from scatter import Pair, scatter_svg
from worker_processes import REAL, Workers, worker_processes

RATES = {"100 mbit/s": 12.5e6, "400 mbit/s": 50e6, "1 gbit/s": 125e6}
"""Name -> bytes per second."""

PLANS = (
    ("1-1", "noam"), ("1-1", "full"), ("2", "noam"),
    ("1-1-1", "noam"), ("2-1", "noam"), ("1-2", "noam"),
    ("1-1-1-1", "noam"), ("1-1-1-1", "full"), ("3-1", "noam"), ("2-1-1", "noam"), ("2-2", "noam"), ("4", "noam"),
)  # fmt: skip
"""Workers of the stages, and the depth."""

LATENCY_S = 1e-4
_WORKER = str(Path(__file__).with_name("worker.py"))
_SEGMENT_S = 6.0  # of what is emulated
_FREE_S = 1.0  # of what computes, in each of as many runs
_QUIET = 0.05  # share of the cores' time that others may take
_DILATION = 4  # so many times as long, over links so many times as slow


@dataclass(frozen=True)
class Row:
    """One plan, predicted and measured; seconds are of a minibatch.

    Attributes:
        real: computed; otherwise emulated.
        dilation: it ran so many times as slow, at a steady pace; all seconds are as if it had not.
        stage_s: the planner's, of the slowest stage; no latency shows in it.
        predicted_s: the simulator's, in the steady state.
        segments_s: measured, one after the other.
        others: share of the cores' time that other processes took meanwhile.
        drift: how much the profiles taken before, between and after its runs differ.
        plan: that was run, as JSON, so that it can be predicted again.
    """

    model: str
    link: str
    config: str
    depth: str
    real: bool
    stage_s: float
    predicted_s: float
    segments_s: tuple[float, ...]
    others: float = 0.0
    drift: float = 0.0
    plan: str = ""
    dilation: int = 1

    @property
    def disturbed(self) -> float:
        """The larger of both shares."""
        return max(self.others, abs(self.drift))

    @property
    def measured_s(self) -> float:
        """Median of the segments."""
        return statistics.median(self.segments_s)

    @property
    def error(self) -> float:
        """By how much the measured throughput lies above the predicted one."""
        return self.predicted_s / self.measured_s - 1

    @property
    def compute(self) -> str:
        """How the plan computed: at a steady pace, as fast as it could, or not at all."""
        return "emulated" if not self.real else "paced" if self.dilation > 1 else "free"


def main() -> None:
    options = _parse_options()
    if options.again:
        rows = []
        for row in json.loads(options.again.read_text()):
            plan = Plan.from_json(row["plan"])
            again = {"stage_s": plan.slowest_stage_s, "predicted_s": _predict_s(plan)}
            rows.append(Row(**row | again | {"segments_s": tuple(row["segments_s"])}))
        _write_rows(rows, options.out)
        return
    stop_if(why_not(), "prediction")
    place = Environment()
    shapes = [plan for plan in PLANS if plan[0] in options.plans]
    rows = []
    counts = [_count_workers(config) for config, _ in shapes]
    profiles: dict[str, Profile] = {}
    with slow_network((max(counts),), (None,)) as network:
        for count in sorted({REAL, *counts}):
            with worker_processes(network, count, _WORKER) as workers:
                profiles = profiles or {name: workers.profile(name) for name in options.models}
                rows += _Bench(workers, network, options).measure_all(shapes, profiles)
    print(place.describe(f"{options.rounds} segments a plan") + "\n" + _describe_profiles(profiles))
    _write_rows(rows, options.out)


def _write_rows(rows: list[Row], folder: Path | None) -> None:
    if folder:
        write_rows(folder / "rows.json", map(asdict, rows))
        (folder / "prediction.svg").write_text(_plot(rows))
    print(_format_tables(rows))


def _parse_options() -> argparse.Namespace:
    parser = make_parser(__doc__, "three plans, one rate, short segments")
    parser.add_argument("--again", type=Path, metavar="ROWS.JSON", help="predict again what was measured before")
    parser.add_argument("--every", action="store_true", help="each plan and model over each rate, and not over one")
    parser.add_argument("--rounds", type=int, default=3, help="segments of each plan, of which the median counts")
    parser.add_argument("--free", action="store_true", help="what computes does so as fast as it can, not at a pace")
    parser.add_argument("--patience", type=float, default=120, help="seconds for running again what other processes "
                        "disturb")  # fmt: skip
    configs = sorted({config for config, _ in PLANS})
    parser.add_argument("--plans", nargs="+", choices=configs, default=configs)
    parser.add_argument("--rates", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--out", type=Path, help="folder for rows.json and prediction.svg")
    return parse_quick(parser, plans=["1-1", "2-1", "2-2"], rates=["400 mbit/s"], patience=0, every=True)


@dataclass(frozen=True)
class _Bench:
    """Measures plans of as many workers as there are processes."""

    workers: Workers
    network: Network
    options: argparse.Namespace

    def measure_all(self, shapes: list[tuple[str, str]], profiles: dict[str, Profile]) -> Iterator[Row]:
        """Yields a row for each plan, each model and each rate."""
        for link, model, shape in product(self.options.rates, profiles, shapes):
            turn = (PLANS.index(shape) + list(MODELS).index(model)) % len(RATES)
            if _count_workers(shape[0]) != len(self.workers.workers):
                continue
            if not self.options.every and turn != list(RATES).index(link):
                continue
            row = self._measure_least_disturbed(link, model, profiles[model], shape)
            print(f"  {model}: {' | '.join(_list_cells(row))}", file=sys.stderr, flush=True)
            yield row

    def _measure_least_disturbed(self, link: str, model: str, profile: Profile, shape: tuple[str, str]) -> Row:
        """Measures a plan again while something disturbs it and there is patience left."""
        best: Row | None = None
        while True:
            began = time.monotonic()
            row = self._measure(link, model, profile, shape)
            if best is None or row.disturbed < best.disturbed:
                best = row
            if best.disturbed <= _QUIET or self.options.patience <= 0:
                return best
            self.options.patience -= time.monotonic() - began

    def _measure(self, link: str, model: str, profile: Profile, shape: tuple[str, str]) -> Row:
        config, depth = shape
        real = len(self.workers.workers) <= REAL
        cluster = Cluster.flat(_count_workers(config), RATES[link], LATENCY_S)
        profiles, drift = [], 0.0
        if real and self.options.free:
            plan = pd.plan(self.workers.profile(model), cluster, shape=config, in_flight=depth)
            seconds, others = [], 0.0
            for _ in range(self.options.rounds):
                profiles.append(self.workers.profile(model))
                lasted, other_s = self._run(plan, link, _FREE_S, model)
                seconds.append(statistics.median(lasted))
                others = max(others, other_s)
            # A machine is not always equally fast: predict from profiles taken before, between and after the runs.
            profiles.append(self.workers.profile(model))
            works = [p.forward_s + p.backward_s + p.loss_s + p.update_s for p in profiles]
            drift = (max(works) - min(works)) / statistics.median(works)
            cuts = tuple(stage.first for stage in plan.stages[1:])
            plan = pd.plan(_average(profiles), cluster, shape=config, cuts=cuts, in_flight=plan.in_flight)
        else:
            plan = pd.plan(profile, cluster, shape=config, in_flight=depth)
            layers = (model, profile.to_json()) if real else ()
            seconds, others = self._run(plan, link, _SEGMENT_S, *layers, dilation=_DILATION)
        return Row(
            model, link, config, depth, real, plan.slowest_stage_s, _predict_s(plan), tuple(seconds), others, drift,
            plan.to_json(), 1 if profiles else _DILATION,
        )  # fmt: skip

    def _run(
        self, plan: Plan, link: str, segment_s: float, model: str | None = None, profile: str | None = None,
        dilation: int = 1,
    ) -> tuple[list[float], float]:  # fmt: skip
        """Returns the seconds of a minibatch in each segment, undilated, and the share that others took meanwhile.

        Args:
            model: whose layers compute; emulated where there is none.
            profile: at the pace of this one, as JSON, or as fast as it can.
        """
        turn = plan.placement.cycle
        self.network.limit(None)
        how = {"plan": plan.to_json(), "model": model, "profile": profile, "dilation": dilation}
        how["warm"] = turn * ceil(2 * max(map(int.__mul__, plan.in_flight, plan.replicas)) / turn)
        how["segment"] = turn * max(1, ceil(segment_s / (plan.slowest_stage_s * dilation) / turn))
        limit = partial(self.network.limit, RATES[link] / dilation)
        seconds, disturbance = self.workers.run_segments(how | {"segments": self.options.rounds}, limit)
        return [taken_s / dilation for taken_s in seconds], disturbance.share()


def _average(profiles: list[Profile]) -> Profile:
    """Returns the mean of profiles of a model."""
    count = len(profiles)
    seconds = ("forward_s", "backward_s", "forward_fixed_s", "backward_fixed_s")
    layers = tuple(
        replace(rows[0], **{name: sum(getattr(row, name) for row in rows) / count for name in seconds})
        for rows in zip(*(profile.layers for profile in profiles), strict=True)
    )
    update_s, loss_s = (sum(getattr(profile, name) for profile in profiles) / count for name in ("update_s", "loss_s"))
    return replace(profiles[0], layers=layers, update_s=update_s, loss_s=loss_s)


def _predict_s(plan: Plan) -> float:
    """Returns the simulated seconds of a minibatch in the steady state."""
    timeline = pd.simulate(plan, minibatches=60 * plan.placement.cycle)
    return 1 / metrics.steady_metrics(timeline, skip=4 * plan.placement.cycle).throughput_per_s


def _count_workers(config: str) -> int:
    return sum(map(int, config.split("-")))


# -- what is printed --------------------------------------------------------------------------------


def _format_tables(rows: Sequence[Row]) -> str:
    """Returns a table for each model, and the summary."""
    titles = "plan | depth | compute | link | slowest stage | predicted | measured (least to most) | error | others"
    parts = []
    for model in dict.fromkeys(row.model for row in rows):
        cells = [_list_cells(row) for row in rows if row.model == model]
        parts += [f"### {model}\n", format_table(f"{titles} | drift", "llllr", cells) + "\n"]
    parts += [
        "### Summary\n",
        "Error: of the predicted throughput, measured over predicted, minus one. Goals: median 5%, worst 15%, "
        "rank 0.9.\n",
        format_table("which | plans | median error | worst | Spearman's rank correlation", "lr", _summarise(rows)),
    ]
    return "\n".join(parts)


def _list_cells(row: Row) -> Iterator[str]:
    yield from (row.config, row.depth, row.compute, row.link)
    yield from (f"{row.stage_s * 1e3:.1f} ms", f"{row.predicted_s * 1e3:.1f} ms")
    least, most = (pick(row.segments_s) * 1e3 for pick in (min, max))
    yield f"{row.measured_s * 1e3:.1f} ms ({least:.1f} to {most:.1f})"
    yield from (f"{row.error:+.1%}", f"{row.others:.0%}", f"{row.drift:+.0%}" if row.drift else "")


def _summarise(rows: Sequence[Row]) -> Iterator[Sequence[object]]:
    groups: dict[str, list[Row]] = {"all but free": [row for row in rows if row.compute != "free"]}
    for row in groups["all but free"]:
        for name in (row.model, row.link):
            groups.setdefault(name, []).append(row)
    for row in rows:
        groups.setdefault(row.compute, []).append(row)
    for name, group in groups.items():
        if not group:
            continue
        errors = [abs(row.error) for row in group]
        seconds = [(row.predicted_s, row.measured_s) for row in group]
        rank = spearmanr(seconds).statistic if len(group) > 1 else 1.0
        yield name, len(group), f"{statistics.median(errors):.1%}", f"{max(errors):.1%}", f"{rank:.3f}"


def _plot(rows: Sequence[Row]) -> str:
    """Returns an SVG: a point a plan, minibatches per second predicted and measured; filled where it computed."""
    pairs = []
    for row in rows:
        label = f"{row.model}, {row.config}, {row.depth}, {row.link}"
        pairs.append(Pair(1 / row.predicted_s, 1 / row.measured_s, label, row.link, row.real))
    return scatter_svg(pairs, title="Plans predicted and measured", unit="minibatches/s", tolerance=0.15)


def _describe_profiles(profiles: dict[str, Profile]) -> str:
    """Returns a list in Markdown of what was profiled."""
    return "".join(
        f"- {name}: {(p.forward_s + p.backward_s + p.update_s + p.loss_s) * 1e3:.0f} ms a minibatch on one core, "
        f"weights {p.parameter_bytes / 1e6:.0f} MB\n"
        for name, p in profiles.items()
    )


if __name__ == "__main__":
    main()
