"""Tables and pictures of curves.json, written into README.md between its two marks, and beside it. See README.md."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median

from arms import Arm, Method, arms_of
from effects import EFFECTS, Effect
from pictures import Line, Panel, panels_svg
from run import CURVES, LOOKS, SEEDS, STAGES, Curve, Curves, best_step, due, load
from tasks import TASKS

import pipedream as pd
from pipedream import schedules
from pipedream.core.plan.plan import Plan

sys.path.append(str(Path(__file__).parents[1]))
from scaffold import format_table, make_parser

MARKS = ("<!-- made by report.py -->", "<!-- end -->")

FAMILIES = {
    "digits": {
        "which weights": ("sync", "naive", "naive_recompute", "pipedream", "vertical_sync", "2bw"),
        "pipelined backpropagation": ("sync", "pb", "pb_lwp", "pb_sc", "pb_lwp_sc"),
        "PipeMare": ("sync", "pb", "pipemare_t1", "pipemare_t2", "pipemare_t1_t2", "pipemare_t1_t2_t3"),
        "others": ("sync", "pipedream", "nesterov", "spectrain", "paci", "hybrid"),
        "AdamW": ("sync_adamw", "2bw_adamw", "2bw_ef", "pipedream_adamw"),
        "basis rotation": ("sync_adamw", "pipedream_adamw", "sync_rotation", "rotation", "2bw_rotation"),
    },
    "char_gpt": {
        "which weights": ("sync", "naive", "naive_recompute", "pipedream", "vertical_sync", "2bw"),
        "prediction, hybrid": ("sync", "pb", "pb_lwp", "pipeoptim", "hybrid"),
        "PipeMare": ("sync", "pb", "pipemare_t1", "pipemare_t2", "pipemare_t1_t2", "pipemare_t1_t2_t3"),
        "optimizers": ("sync", "pipedream", "2bw", "2bw_ef", "sync_nadam", "nesterov"),
        "basis rotation": ("sync", "pipedream", "sync_rotation", "rotation", "2bw_rotation"),
        "basis rotation, NAdam": ("sync_nadam", "nesterov", "sync_rotation_nadam", "rotation_nadam"),
        "Muon": ("sync_muon", "pipedream_muon", "2bw_muon", "2bw_ef_muon"),
        "momentum SGD": ("sync_sgd", "pb_sgd", "pb_lwp_sc_sgd"),
    },
}

_STAGE_TITLES = [f"{p} stages" for p in STAGES]
RANGE = {"digits": (0.5, 1.0), "char_gpt": (1.8, 3.4)}


def main() -> int:
    """Writes all that there is; returns the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--curves", type=Path, default=CURVES)
    parser.add_argument("--out", type=Path, default=CURVES.parent, help="folder of README.md and the pictures")
    options = parser.parse_args()
    curves = load(options.curves)
    if not curves:
        parser.error(f"{options.curves} has no runs; call run.py first")
    options.out.mkdir(exist_ok=True)
    page = options.out / "README.md"
    if not page.exists():
        shutil.copy(CURVES.with_name("README.md"), page)
    parts = [*_describe_runs(options.curves, curves), *_format_effects(curves)]
    for task in TASKS:
        if any(run.task == task for run in curves):
            parts += _format_table(curves, task) + _draw_pictures(curves, task, options.out)
    before, rest = page.read_text().split(MARKS[0])
    page.write_text("\n".join([before + MARKS[0], "", *parts, "", MARKS[1] + rest.split(MARKS[1])[1]]))
    return 0


def of_arm(curves: Curves, task: str, arm: str, stages: int) -> dict[int, Curve]:
    """Returns an arm's curves at the rate that it was tuned to, by seed; none where it is not tuned yet."""
    left = due(curves, task, arm, stages, 1)
    arm_stages = 1 if arms_of(task)[arm].synchronous else stages
    mine = {run: curve for run, curve in curves.items() if run[:3] == (task, arm, arm_stages)}
    tuning = {run.step: curve for run, curve in mine.items() if run.seed not in range(SEEDS)}
    if not tuning or any(run.seed not in range(SEEDS) for run in left):
        return {}
    best = best_step(tuning, task)
    return {run.seed: curve for run, curve in mine.items() if run.step == best and run.seed in range(SEEDS)}


def judged(better: dict[int, float], worse: dict[int, float], spread: float, even: bool) -> str:
    """Returns whether an effect shows.

    Args:
        better, worse: seed -> score, which is to be small.
        spread: of the scores of one arm over the seeds.
        even: the effect is that there is none: medians no further apart than the spread.
    """
    seeds = sorted(set(better) & set(worse))
    if len(seeds) < SEEDS:
        return "not run"
    mine, theirs = (median(scores[s] for s in seeds) for scores in (better, worse))
    if math.isinf(mine) and math.isinf(theirs):
        return "no, both diverge"
    if even:
        if math.isinf(spread):
            return "no, some seeds diverge"
        return "yes" if abs(theirs - mine) <= spread else f"no, it is {'worse' if mine > theirs else 'better'}"
    if mine < theirs and sum(better[s] < worse[s] for s in seeds) >= SEEDS - 1:
        return "yes"
    if mine > theirs and sum(better[s] > worse[s] for s in seeds) >= SEEDS - 1:
        return "no, the contrary"
    return "no, within the seeds' spread"


def _collect_scores(curves: dict[int, Curve], task: str) -> dict[int, float]:
    return {seed: curve.score(task)[0] for seed, curve in curves.items()}


def _describe_runs(path: Path, curves: Curves) -> list[str]:
    places = json.loads(path.read_text())["environments"]
    cases = {
        (task, name, 1 if arm.synchronous else stages)
        for task in TASKS
        for name, arm in arms_of(task).items()
        for stages in STAGES
    }
    done = sum(not due(curves, *case, SEEDS) for case in cases)
    took = sum(curve.seconds for curve in curves.values())
    longest = max(curve.seconds for curve in curves.values())
    return [
        *(f"- {about['date']}, {about['machine']}, {about['software']}" for about in places),
        f"- {done} of {len(cases)} done (an arm, a task, a number of stages): {len(curves)} runs, "
        f"{took / 60:.0f} minutes of one core, the longest {longest:.0f} s",
        "",
    ]


def _format_effects(curves: Curves) -> list[str]:
    rows = []
    for effect in EFFECTS:
        arms = f"{effect.task}: {effect.better} {'=' if effect.even else '>'} {effect.worse}"
        cells = (_format_cell(curves, effect, p) for p in STAGES)
        rows.append([effect.says, effect.source, effect.published or "not at hand", arms, *cells])
    return [
        "### Published, and here",
        "",
        "Each cell: better arm to worse arm (medians), and whether the effect shows. "
        f"*yes*: better in the median and for {SEEDS - 1} of {SEEDS} seeds (same first weights, same data); "
        "for parity (=): the medians are no further apart than the second arm's seeds.",
        "",
        format_table("|".join(["published", "source", "figures there", "arms", *_STAGE_TITLES]), "l", rows),
        "",
    ]


def _format_cell(curves: Curves, effect: Effect, stages: int) -> str:
    better, worse = (
        _collect_scores(of_arm(curves, effect.task, arm, stages), effect.task) for arm in (effect.better, effect.worse)
    )
    if not better or not worse:
        return "not run"
    spread = max(worse.values()) - min(worse.values())
    shown = " to ".join(_format_score(median(scores.values()), effect.task) for scores in (better, worse))
    return f"{shown}: {judged(better, worse, spread, effect.even)}"


def _format_score(score: float, task: str) -> str:
    if not math.isfinite(score):
        return "diverged"
    return f"{100 * (1 - score):.1f}%" if TASKS[task].metric == "accuracy" else f"{score:.3f}"


def _format_table(curves: Curves, task: str) -> list[str]:
    name = "accuracy" if TASKS[task].metric == "accuracy" else "loss, nats a character"
    rows = []
    for arm in arms_of(task).values():
        cells = []
        for p in STAGES:
            arm_stages = of_arm(curves, task, arm.name, p)
            scores = sorted(_collect_scores(arm_stages, task).values())
            if not scores:
                cells.append("not run")
                continue
            low, high = sorted((_format_score(scores[0], task), _format_score(scores[-1], task)))
            cells.append(
                f"{_format_score(median(scores), task)} ({low} to {high}), {next(iter(arm_stages.values())).rate:.3g}"
            )
        if arm.synchronous:
            cells = [cells[0]] + ["the same"] * (len(STAGES) - 1)
        rows.append([arm.name, arm.about, arm.source, *cells])
    return [
        f"### {task}: {name} at the end",
        "",
        "Median (least to greatest) of the seeds, and the tuned rate.",
        "",
        format_table("|".join(["arm", "what", "source", *_STAGE_TITLES]), "lllr", rows),
        "",
    ]


def _draw_pictures(curves: Curves, task: str, folder: Path) -> list[str]:
    texts = []
    for by, label in (("updates", "updates"), ("time", "simulated time, in forwards of a minibatch at a stage")):
        rows = []
        for title, names in FAMILIES[task].items():
            row = [
                Panel(
                    f"{title}, {p} stages", [line for name in names for line in _make_lines(curves, task, name, p, by)]
                )
                for p in STAGES
            ]
            if any(panel.lines for panel in row):
                rows.append(row)
        if not rows:
            continue
        low, high = RANGE[task]
        metric = "accuracy" if TASKS[task].metric == "accuracy" else "loss"
        picture = panels_svg(rows, title=f"{task}: {metric}", x_label=label, y_label=metric, low=low, high=high)
        file = f"{task}_{by}.svg"
        (folder / file).write_text(picture)
        texts += [f"![{task}: {metric} against {label}]({file})", ""]
    return texts


def _make_lines(curves: Curves, task: str, arm: str, stages: int, by: str) -> Iterable[Line]:
    arm_stages = of_arm(curves, task, arm, stages)
    if not arm_stages:
        return
    updates = TASKS[task].updates
    at = [-(-updates * look // LOOKS) for look in range(1, LOOKS + 1)]
    xs: Sequence[float] = at if by == "updates" else times_of(arms_of(task)[arm], stages, updates, at)
    runs = [curve.scores(task) for curve in arm_stages.values()]
    columns = [sorted(scores) for scores in zip(*runs, strict=True)]
    if TASKS[task].metric == "accuracy":
        columns = [[1 - score for score in reversed(scores)] for scores in columns]
    points = [(x, scores[0], median(scores), scores[-1]) for x, scores in zip(xs, columns, strict=True)]
    yield Line(arm, points)


# -- simulated time ---------------------------------------------------------------------------------
# Stages are equal and messages cost nothing. The unit is a forward of a whole minibatch at one stage; a backward takes
# 2. A method that splits a minibatch has p microbatches of 1/p of that; that small microbatches are less efficient is
# left out. A change of methods drains the pipeline, and fills it again.

SETTLED = 32
"""Minibatches after which a pipeline of at most eight stages repeats itself."""


def times_of(arm: Arm, stages: int, updates: int, at: list[int]) -> list[float]:
    """Returns the time at which each of these numbers of updates has been made, of so many in all."""
    times, begin, first = [], 0.0, 0
    for turn in arm.turns:
        last = round(turn.until * updates)
        period, fill = _find_paces(turn.method, stages)
        times += [begin + fill + (n - first) * period for n in at if first < n <= last]
        begin, first = begin + fill + (last - first) * period, last
    return times


@cache
def _find_paces(method: Method, p: int) -> tuple[float, float]:
    """Returns the time of an update in a full pipeline, and what filling and draining one takes beside that."""
    m = method.microbatches(p) or 1
    plan = Plan.uniform(p, 1 / m, 2 / m)
    if method.rule == "recompute":
        plan = replace(plan, stages=tuple(replace(stage, recompute=True) for stage in plan.stages))
    # What differs in the weights alone has the same order, at the depth of its own clock.
    late = tuple(method.late(p, s) for s in range(p))
    name = "1f1b" if method.flushes else "pipedream_2bw" if m > 1 else "pipedream"
    if name == "pipedream" and late[0] > p - 1:
        plan = replace(plan, in_flight=tuple(count + 1 for count in late), depth_mode="hand")
    schedule = schedules.build(name, plan, m if m > 1 else None)
    if method.flushes:
        return pd.simulate(plan, schedule=schedule).makespan_s, 0.0
    some, more = (pd.simulate(plan, schedule=schedule, minibatches=n).makespan_s for n in (SETTLED, 2 * SETTLED))
    period = (more - some) / SETTLED
    return period, some - SETTLED * period


if __name__ == "__main__":
    raise SystemExit(main())
