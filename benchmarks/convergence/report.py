"""Tables and pictures of curves.json, written into README.md between its two marks, and beside it. See README.md."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests" / "oracles")]
from arms import arms_of
from pictures import Lines, panels_svg
from run import CURVES, LOOKS, SEEDS, STAGES, Curve, Curves, best_step, due, load
from scaffold import format_table, make_parser
from seconds import pace_of_gpt, times_of
from tasks import TASKS

from pipedream.core.units import format_link

PAGE = Path(__file__).with_name("README.md")
MARKS = ("<!-- made by report.py -->", "<!-- end -->")


@dataclass(frozen=True)
class Effect:
    """What a paper or a later study says, as a comparison of arms.

    Attributes:
        says: in words.
        source: where.
        published: figures, of the better and of the worse; empty where none are known for certain.
        task: on which it is looked for.
        better, worse: arms.
        even: 'yes' if they are alike.
    """

    says: str
    source: str
    published: str
    task: str
    better: str
    worse: str
    even: str


with Path(__file__).with_name("effects.csv").open(encoding="utf-8", newline="") as _file:
    EFFECTS = tuple(Effect(**row) for row in csv.DictReader(_file))

FAMILIES = {
    "digits": {
        "which weights": ("sync", "naive", "naive_recompute", "pipedream", "vertical_sync", "2bw"),
        "pipelined backpropagation": ("sync", "pb", "pb_lwp", "pb_sc", "pb_lwp_sc"),
        "PipeMare": ("sync", "pb", "pipemare_t1", "pipemare_t2", "pipemare_t1_t2", "pipemare_t1_t2_t3"),
        "others": ("sync", "pipedream", "nesterov", "spectrain", "paci", "hybrid"),
        "AdamW": ("sync_adamw", "2bw_adamw", "2bw_ef", "pipedream_adamw"),
        "basis rotation": ("sync_adamw", "pipedream_adamw", "sync_rotation", "rotation", "2bw_rotation"),
        "basis rotation, NAdam": ("sync_adamw", "sync_rotation_nadam", "rotation_nadam"),
    },
    "char_gpt": {
        "which weights": ("sync", "naive", "naive_recompute", "pipedream", "vertical_sync", "2bw"),
        "prediction, hybrid": ("sync", "pb", "pb_lwp", "pipeoptim", "hybrid"),
        "PipeMare": ("sync", "pb", "pipemare_t1", "pipemare_t2", "pipemare_t1_t2", "pipemare_t1_t2_t3"),
        "optimizers": ("sync", "pipedream", "2bw", "2bw_ef", "sync_nadam", "nesterov"),
        "basis rotation": ("sync", "pipedream", "sync_rotation", "rotation", "2bw_rotation", "2bw_ef_rotation"),
        "its forms": ("sync_rotation", "rotation", "rotation_one_sided"),
        "basis rotation, NAdam": (
            "sync_nadam",
            "nesterov",
            "sync_rotation_nadam",
            "rotation_nadam",
            "2bw_rotation_nadam",
        ),
        "Muon": ("sync_muon", "pipedream_muon", "pipedream_ef_muon", "2bw_muon", "2bw_ef_muon"),
        "momentum SGD": ("sync_sgd", "pb_sgd", "pb_lwp_sc_sgd"),
    },
    "char_gpt_16": {
        "AdamW": ("sync", "pipedream", "2bw"),
        "basis rotation": ("sync_rotation", "2bw_rotation", "sync_rotation_nadam", "rotation_nadam"),
        "Muon": ("sync_muon", "pipedream_muon", "pipedream_ef_muon", "2bw_ef_muon"),
    },
}

RANGE = {"digits": (0.5, 1.0), "char_gpt": (1.8, 3.4), "char_gpt_16": (1.8, 3.4)}
TARGETS = (2.1, 2.0)
RATES_BYTES_PER_S = (25e6 / 8, 100e6 / 8, 400e6 / 8, 1e9 / 8)
MIN_SEEDS = 3
"""Whose spread says whether two arms are alike."""
KINDS = {"1f1b": "synchronous 1F1B", "pipedream_2bw": "2BW", "pipedream": "PipeDream"}


def main() -> None:
    """Writes all that there is."""
    make_parser(__doc__).parse_args()
    curves = load(CURVES)
    parts = [*_describe_runs(curves), *_format_effects(curves), *_format_times(curves)]
    for task in TASKS:
        parts += _format_table(curves, task) + _draw_pictures(curves, task)
    before, rest = PAGE.read_text().split(MARKS[0])
    PAGE.write_text("\n".join([before + MARKS[0], "", *parts, "", MARKS[1] + rest.split(MARKS[1])[1]]))


def of_arm(curves: Curves, task: str, arm: str, stages: int) -> dict[int, Curve]:
    """Returns an arm's curves at the rate that it was tuned to, by seed; none where it is not tuned yet."""
    missing = due(curves, task, arm, stages, 1)
    arm_stages = 1 if arms_of(task)[arm].synchronous else stages
    mine = {run: curve for run, curve in curves.items() if run[:3] == (task, arm, arm_stages)}
    tuning = {run.step: curve for run, curve in mine.items() if run.seed not in range(SEEDS)}
    if not tuning or any(run.seed not in range(SEEDS) for run in missing):
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
    if not seeds or (even and len(seeds) < MIN_SEEDS):
        return "not tested"
    mine, theirs = (median(scores[s] for s in seeds) for scores in (better, worse))
    if math.isinf(mine) and math.isinf(theirs):
        return "not reproduced: both diverge"
    if even:
        if math.isinf(spread):
            return "not reproduced: some seeds diverge"
        if abs(theirs - mine) <= spread:
            return "reproduced"
        return f"not reproduced: it is {'worse' if mine > theirs else 'better'}"
    most = max(len(seeds) - 1, 1)
    if mine < theirs and sum(better[s] < worse[s] for s in seeds) >= most:
        return "reproduced"
    if mine > theirs and sum(better[s] > worse[s] for s in seeds) >= most:
        return "not reproduced: the contrary"
    return "not reproduced: within the seeds' spread"


def _collect_scores(curves: dict[int, Curve], task: str) -> dict[int, float]:
    return {seed: curve.score(task)[0] for seed, curve in curves.items()}


def _describe_runs(curves: Curves) -> list[str]:
    places = json.loads(CURVES.read_text())["environments"]
    cases = {
        (task, name, 1 if arm.synchronous else stages)
        for task in TASKS
        for name, arm in arms_of(task).items()
        for stages in TASKS[task].stages
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
        arms = f"{effect.task}: {effect.better} {'=' if effect.even else '>'} {effect.worse}" if effect.task else "-"
        cells = (_format_cell(curves, effect, p) for p in STAGES)
        rows.append([effect.says, effect.source, effect.published or "not at hand", arms, *cells])
    return [
        "### Published, and here",
        "",
        "Each cell: better arm to worse arm (medians), and whether the effect shows. "
        "*reproduced*: better in the median and for all seeds but one (same first weights, same data); for parity (=): "
        f"the medians are no further apart than the second arm's seeds. There are {SEEDS} seeds; with 16 stages (the "
        "GPT of 16 blocks) often one, too few to judge parity.",
        "",
        format_table("|".join(["published", "source", "figures there", "arms", *_title_stages(STAGES)]), "l", rows),
        "",
    ]


def _title_stages(stages: Iterable[int]) -> list[str]:
    return [f"{p} stages" for p in stages]


def _format_cell(curves: Curves, effect: Effect, stages: int) -> str:
    task = next((name for name in (effect.task, f"{effect.task}_{stages}") if _has(name, effect, stages)), None)
    if task is None:
        return "not tested"
    better, worse = (_collect_scores(of_arm(curves, task, arm, stages), task) for arm in (effect.better, effect.worse))
    if not better or not worse:
        return "not tested"
    spread = max(worse.values()) - min(worse.values())
    shown = " to ".join(_format_score(median(scores.values()), task) for scores in (better, worse))
    return f"{shown}: {judged(better, worse, spread, bool(effect.even))}"


def _has(task: str, effect: Effect, stages: int) -> bool:
    return task in TASKS and stages in TASKS[task].stages and {effect.better, effect.worse} <= set(arms_of(task))


# -- time to a loss --------------------------------------------------------------------------------


def _format_times(curves: Curves) -> list[str]:
    """Returns the table of the GPT's seconds to each of `TARGETS` over links."""
    parts = [
        "### Seconds to a loss over slow links",
        "",
        "Predicted for the GPT, one block a layer, as one core of an AMD EPYC computes it (2026-11-27): 0.6 ms for a "
        "forward of a block, twice that for a backward, 0.1 to 1.5 ms for its update; 66 kB a message, 0.1 ms of "
        "latency. Of each method the arm with the fewest seconds, in brackets; synchronous 1F1B takes p, 2p or 4p "
        "microbatches, whichever is fastest. A loss is reached when the median of the seeds is below it; the rate "
        "still falls then, so a shorter run would reach it sooner.",
        "",
    ]
    titles = "|".join(["stages", "links", "one worker", *KINDS.values()])
    cuts = [(task, p) for task in ("char_gpt", "char_gpt_16") for p in TASKS[task].stages]
    for target in TARGETS:
        rows = []
        for task, p in cuts:
            for bytes_per_s in RATES_BYTES_PER_S:
                times = [_find_fastest(curves, task, "1f1b", 1, bytes_per_s, target)]
                times += [_find_fastest(curves, task, kind, p, bytes_per_s, target) for kind in KINDS]
                cells = ["not reached" if math.isinf(time[0]) else f"{time[0]:.2f} s ({time[1]})" for time in times]
                best = times.index(min(times))
                cells[best] = f"**{cells[best]}**"
                rows.append([str(p), format_link(bytes_per_s), *cells])
        parts += [f"To {target} nats a character:", "", format_table(titles, "rrr", rows), ""]
    return parts


def _find_fastest(
    curves: Curves, task: str, kind: str, stages: int, bytes_per_s: float, target: float
) -> tuple[float, str]:
    """Returns the seconds of the fastest arm of a kind of method, and its name; infinite if none reaches the target."""
    fastest = (math.inf, "")
    for arm in arms_of(task).values():
        if [turn.method.schedule for turn in arm.turns] != [kind]:
            continue
        updates = _count_updates(of_arm(curves, task, arm.name, stages), task, target)
        if updates is None:
            continue
        pace = pace_of_gpt(arm, TASKS[task].layers // stages, bytes_per_s)
        for split in (1, 2, 4) if kind == "1f1b" and stages > 1 else (1,):
            if stages * split <= TASKS[task].batch:
                seconds = times_of(arm, stages, TASKS[task].updates, [updates], pace, split)[0]
                fastest = min(fastest, (seconds, arm.name))
    return fastest


def _count_updates(curves: dict[int, Curve], task: str, target: float) -> int | None:
    """Returns the updates after which the median score of the seeds is below the target; None if it never is."""
    columns = zip(*(curve.scores(task) for curve in curves.values()), strict=True)
    look = next((look for look, scores in enumerate(columns, 1) if median(scores) <= target), None)
    return None if look is None else -(-TASKS[task].updates * look // LOOKS)


def _format_score(score: float, task: str) -> str:
    if not math.isfinite(score):
        return "diverged"
    return f"{100 * (1 - score):.1f}%" if TASKS[task].metric == "accuracy" else f"{score:.3f}"


def _format_table(curves: Curves, task: str) -> list[str]:
    name = "accuracy" if TASKS[task].metric == "accuracy" else "loss, nats a character"
    rows = []
    for arm in arms_of(task).values():
        cells = []
        for p in TASKS[task].stages:
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
            cells = [cells[0]] + ["the same"] * (len(cells) - 1)
        rows.append([arm.name, arm.about, arm.source, *cells])
    return [
        f"### {task}: {name} at the end",
        "",
        "Median (least to greatest) of the seeds, and the tuned rate.",
        "",
        format_table("|".join(["arm", "what", "source", *_title_stages(TASKS[task].stages)]), "lllr", rows),
        "",
    ]


def _draw_pictures(curves: Curves, task: str) -> list[str]:
    texts = []
    for by, label in (("updates", "updates"), ("time", "simulated time, in forwards of a minibatch at a stage")):
        rows = []
        for title, names in FAMILIES[task].items():
            row = {f"{title}, {p} stages": _make_lines(curves, task, names, p, by) for p in TASKS[task].stages}
            if any(row.values()):
                rows.append(row)
        if not rows:
            continue
        low, high = RANGE[task]
        metric = "accuracy" if TASKS[task].metric == "accuracy" else "loss"
        picture = panels_svg(rows, title=f"{task}: {metric}", x_label=label, y_label=metric, low=low, high=high)
        file = f"{task}_{by}.svg"
        PAGE.with_name(file).write_text(picture)
        texts += [f"![{task}: {metric} against {label}]({file})", ""]
    return texts


def _make_lines(curves: Curves, task: str, names: Sequence[str], stages: int, by: str) -> Lines:
    lines, updates = {}, TASKS[task].updates
    at = [-(-updates * look // LOOKS) for look in range(1, LOOKS + 1)]
    for name in names:
        runs = [curve.scores(task) for curve in of_arm(curves, task, name, stages).values()]
        if not runs:
            continue
        columns = [sorted(scores) for scores in zip(*runs, strict=True)]
        if TASKS[task].metric == "accuracy":
            columns = [[1 - score for score in reversed(scores)] for scores in columns]
        xs: Sequence[float] = at if by == "updates" else times_of(arms_of(task)[name], stages, updates, at)
        lines[name] = [(x, scores[0], median(scores), scores[-1]) for x, scores in zip(xs, columns, strict=True)]
    return lines


if __name__ == "__main__":
    main()
