"""How far asynchronous training gets, update for update: tunes and trains every arm, and writes its curves.

See README.md. What curves.json has is not run again; it is written after every run.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests" / "oracles")]
import torch
from arms import ARMS, arms_of
from scaffold import make_parser
from serial import Output, train
from steppers import STEPPERS
from tasks import TASKS

from pipedream.profiler.device import name_processor

CURVES = Path(__file__).with_name("curves.json")
TUNING_SEED = 100
SEEDS = 5
STAGES = (2, 4, 8, 16)
GRID = (-4, -2, 0, 2)
WIDEST = 8
"""Powers of two, times the task's own rate: those tried first, and the furthest. Where gradients are very late there is
more than one good rate, far apart."""
LOOKS = 20


class Run(NamedTuple):
    """One training: an arm, its stages (1 where it is synchronous), the seed, the power of two of its rate."""

    task: str
    arm: str
    stages: int
    seed: int
    step: int

    def __str__(self) -> str:
        return "/".join(map(str, self))


class Point(NamedTuple):
    """What the newest weights of all stages do on the test samples after so many updates."""

    updates: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Curve:
    """What a run gave.

    Attributes:
        rate: learning rate.
        seconds: of a core that it took.
        points: at regular updates; it ends early where the loss is no number.
    """

    rate: float
    seconds: float
    points: tuple[Point, ...]

    def scores(self, task: str) -> list[float]:
        """Returns what is to be small, at each point: the share of errors, or the loss; infinite where it diverged."""
        scores = [1 - p.accuracy if TASKS[task].metric == "accuracy" else p.loss for p in self.points]
        scores = [
            value if math.isfinite(point.loss) else math.inf for value, point in zip(scores, self.points, strict=True)
        ]
        return scores + [math.inf] * (LOOKS - len(scores))

    def score(self, task: str) -> tuple[float, float]:
        """Returns what tuning goes by: the mean of the last three scores, then of the losses."""
        losses = [point.loss for point in self.points[-3:]]
        return sum(self.scores(task)[-3:]) / 3, sum(losses) / len(losses) if len(self.points) == LOOKS else math.inf


Curves = dict[Run, Curve]


def trained(run: Run) -> Curve:
    """Trains, and returns the curve."""
    task, arm = TASKS[run.task], arms_of(run.task)[run.arm]
    rate = task.rates[arm.optimizer] * 2.0**run.step
    optimizer = partial(STEPPERS[arm.optimizer], lr=rate)
    annealed = max(1, round(max(turn.method.rescheduled for turn in arm.turns) * task.updates))
    x, y = task.data()[1]
    begin, points = time.process_time(), []

    def watch(updates: int, loss: float, compute_output: Output) -> bool:
        if not math.isfinite(loss):
            return False
        if updates * LOOKS // task.updates > (updates - 1) * LOOKS // task.updates:
            output = compute_output(x)
            accuracy = (output.argmax(-1) == y).double().mean().item()
            points.append(Point(updates, task.loss(output, y).item(), accuracy))
            return math.isfinite(points[-1].loss)
        return True

    units, batches = task.model(run.seed), task.batches(run.seed)
    train(units, run.stages, arm, optimizer, task.loss, batches, task.factor, watch, annealed=annealed)
    return Curve(rate, time.process_time() - begin, tuple(points))


def due(curves: Curves, task: str, arm: str, stages: int, seeds: int) -> list[Run]:
    """Returns the runs that an arm needs next, which do not need each other; none where it is done."""
    arm_here = arms_of(task)[arm]
    stages = 1 if arm_here.synchronous else stages
    tuning = {run.step: curve for run, curve in curves.items() if run[:4] == (task, arm, stages, TUNING_SEED)}
    missing = [step for step in GRID if step not in tuning]
    if not missing:
        best = best_step(tuning, task)
        beside = [best - 1, best + 1]
        missing = [step for step in beside if step not in tuning and abs(step) <= WIDEST]
    if missing:
        return [Run(task, arm, stages, TUNING_SEED, step) for step in missing]
    runs = [Run(task, arm, stages, seed, best) for seed in range(seeds)]
    return [run for run in runs if run not in curves]


def best_step(tuning: dict[int, Curve], task: str) -> int:
    """Returns the power of two that gave the best score; of those that all diverged, the least."""
    return min(tuning, key=lambda step: (tuning[step].score(task), step))


# -- keeping ---------------------------------------------------------------------------------------


def load(path: Path) -> Curves:
    """Reads curves.

    Raises:
        SystemExit: they are of other settings.
    """
    if not path.exists():
        return {}
    data = json.loads(path.read_text())
    if not data.get("settings", {}).items() <= settings().items():
        sys.exit(
            f"{path} has runs of other settings ({data.get('settings')}, not {settings()}): move it away, or give --out"
        )
    curves = {}
    for key, (rate, seconds, points) in data["curves"].items():
        task, arm, *numbers = key.split("/")
        curves[Run(task, arm, *map(int, numbers))] = Curve(rate, seconds, tuple(Point(*point) for point in points))
    return curves


def save(path: Path, curves: Curves) -> None:
    """Writes curves, whole or not at all."""
    lines = []
    for run, c in sorted(curves.items()):
        points = [[p.updates, float(f"{p.loss:.6g}"), round(p.accuracy, 5)] for p in c.points]
        lines.append(f"{json.dumps(str(run))}: {json.dumps([c.rate, round(c.seconds, 1), points])}")
    head = json.dumps({"settings": settings(), "environments": _list_environments(path)})
    text = head[:-1] + ', "curves": {\n' + ",\n".join(lines) + "\n}}\n"
    beside = path.with_suffix(".part")
    beside.write_text(text)
    beside.replace(path)


def settings() -> dict[str, Any]:
    """Returns what the runs depend on, as JSON values."""
    return {name: task.settings() for name, task in TASKS.items()}


def _list_environments(path: Path) -> list[dict[str, str]]:
    """Returns where the runs of a file were made, each with its last day; this machine is the last."""
    environment = {
        "machine": f"{os.cpu_count()} cores of {name_processor()}, {platform.system()}",
        "software": f"Python {platform.python_version()}, torch {torch.__version__}",
    }
    environments = json.loads(path.read_text())["environments"] if path.exists() else []
    return [other for other in environments if not other.items() >= environment.items()] + [
        {"date": str(date.today()), **environment}
    ]


# -- running ---------------------------------------------------------------------------------------


def main() -> None:
    """Runs what is to do."""
    parser = make_parser(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--stages", nargs="+", type=int, choices=STAGES, default=STAGES)
    parser.add_argument("--arms", nargs="+", choices=sorted({arm.name for arm in ARMS}), help="all unless said")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--budget-s", type=float, default=math.inf, help="after which no further runs begin")
    parser.add_argument("--jobs", type=int, default=1, help="processes; each computes in one thread")
    parser.add_argument("--out", type=Path, default=CURVES)
    options = parser.parse_args()
    curves, begin = load(options.out), time.monotonic()
    cases = [
        (task, arm, stages)
        for task in options.tasks
        for arm in arms_of(task)
        for stages in options.stages
        if stages in TASKS[task].stages and (not options.arms or arm in options.arms)
    ]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for case in cases:
            while (runs := due(curves, *case, options.seeds)) and time.monotonic() - begin < options.budget_s:
                for run, curve in zip(runs, pool.map(trained, runs), strict=True):
                    curves[run] = curve
                    save(options.out, curves)
                    end = curve.points[-1] if curve.points else Point(0, math.nan, 0.0)
                    print(
                        f"{run}: rate {curve.rate:.4g}, after {end.updates} updates loss {end.loss:.4f}, "
                        f"accuracy {end.accuracy:.3f}; {curve.seconds:.1f} s",
                        flush=True,
                    )
    remaining = [case for case in cases if due(curves, *case, options.seeds)]
    print(
        f"{len(cases) - len(remaining)} of {len(cases)} arms done in {time.monotonic() - begin:.0f} s"
        + ("; call again" * bool(remaining))
    )


if __name__ == "__main__":
    main()
