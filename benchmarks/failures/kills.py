"""Kills at random moments: does each run end with the losses and weights that it must have, and leave nothing?"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import recovery
import torch

import pipedream as pd

MINIBATCHES = 150
_SHAPES = ((2,), (3,), (2, 1), (1, 2), (2, 2), (1, 1))
_AGREE = 1e-10
_LAUNCHERS = 0.15  # share of the trials that kill the launcher
_HANGS_S = 120.0
_ENDS_S = 15.0  # what a launcher that is killed leaves


@dataclass
class Trial:
    """One run.

    Attributes:
        kills: signals that were sent.
        lost: workers that the run went on without.
        difference: of the weights and losses to those that it must have.
        problem: 'hang', 'orphans', or other words; '' if the run ended as it must.
    """

    seed: int
    config: str = ""
    kills: int = 0
    restarts: int = 0
    lost: int = 0
    difference: float = 0.0
    problem: str = ""


def try_seed(seed: int) -> Trial:
    """Makes the trial of a seed.

    It kills one or two workers at once, up to twice; or the launcher, and repeats the command. A run that keeps its
    plan must end as one that nothing happened to; one that does not, as one process on the plans that it had.
    """
    trial, draw = Trial(seed), random.Random(seed)
    shape, kills_launcher, restarts = draw.choice(_SHAPES), draw.random() < _LAUNCHERS, draw.randint(0, 2)
    with TemporaryDirectory() as folder:
        place = Path(folder)
        options = ("--elastic", "--resume", str(place / "run"))
        with (place / "errors").open("w") as errors:
            launcher = _start(place, shape, restarts, *options, errors=errors)
            try:
                workers = sum(shape)
                recovery.wait_until(lambda: len(recovery.list_children(launcher)) == workers, launcher)
                if kills_launcher:
                    time.sleep(draw.uniform(0.0, 5.0))
                    _kill([launcher.pid], trial)
                    trial.problem = _find_left(launcher, place)
                    launcher = _start(place, shape, restarts, *options, errors=errors)
                else:
                    _kill_workers(launcher, workers, restarts, draw, trial)
                status = launcher.wait(_HANGS_S)
                trial.problem = trial.problem or _find_left(launcher, place)
                if status:
                    trial.problem = trial.problem or f"exit status {status}"
            except subprocess.TimeoutExpired:
                trial.problem = "hang"
            finally:
                launcher.kill()
                launcher.wait()
                _kill(list_processes(place))
        if not trial.problem:
            _compare(place, shape, trial)
        if trial.problem:
            print((place / "errors").read_text()[-4000:], file=sys.stderr)
    return trial


def _start(
    folder: Path, shape: tuple[int, ...], restarts: int, *more: str, errors: Any = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    plan = str(recovery.make_plan(shape).save(folder / "plan.json"))
    options = ("--plan", plan, "--minibatches", str(MINIBATCHES), *recovery.SAVES_OFTEN, *more)
    return recovery.start(folder, recovery.SOURCE, sum(shape), restarts, *options, errors=errors)


def _kill_workers(
    launcher: subprocess.Popen[bytes], alive: int, restarts: int, draw: random.Random, trial: Trial
) -> None:
    for _ in range(draw.randint(1, 2)):
        time.sleep(draw.uniform(0.0, 5.0))
        most_killed, first = draw.randint(1, 2), draw.random()
        most = alive - (restarts == 0)  # without restarts, one worker must survive
        pids = recovery.list_children(launcher)[1:]
        doomed = [
            pids[(int(first * len(pids)) + number) % len(pids)] for number in range(min(most_killed, most, len(pids)))
        ]
        _kill(doomed, trial)
        if doomed and not restarts:
            alive -= len(doomed)
        restarts = max(0, restarts - bool(doomed))


def _kill(pids: Iterable[int], trial: Trial | None = None) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            if trial is not None:
                trial.kills += 1


def list_processes(folder: Path) -> list[int]:
    """Returns those of the run in a folder."""
    return recovery.list_processes(f"FINISHED={folder / 'finished'}")


def _find_left(launcher: subprocess.Popen[bytes], folder: Path) -> str:
    """Returns 'orphans' if processes or shared memory are left soon after the end of a launcher."""
    launcher.wait(_HANGS_S)
    end_s = time.monotonic() + _ENDS_S
    while True:
        memory = [path for path in Path("/dev/shm").glob("pipedream-*") if f"-{launcher.pid}-" in path.name]
        if not memory and not list_processes(folder):
            return ""
        if time.monotonic() > end_s:
            return "orphans"
        time.sleep(0.1)


def _compare(folder: Path, shape: tuple[int, ...], trial: Trial) -> None:
    failures = json.loads((folder / "run" / "summary.json").read_text())["failures"]
    trial.restarts, trial.lost = failures["restarts"], failures["workers_lost"]
    changes: list[tuple[int, pd.Plan]] = []
    for file in sorted(folder.glob("finished.*"), key=lambda file: int(file.name.split(".")[1])):
        number = int(file.name.split(".")[2])
        changes = [*(change for change in changes if change[0] < number), (number, pd.Plan.load(file))]
    trial.config = " to ".join([recovery.make_plan(shape).config, *(plan.config for _, plan in changes)])
    ended = _read_results(folder / "run")
    expected = _emulate(folder, recovery.make_plan(shape), changes) if changes else _train_undisturbed(shape)
    trial.difference = max(
        float((value - expected[name]).abs().max()) if value.shape == expected[name].shape else float("inf")
        for name, value in ended.items()
    )
    if not trial.difference <= (_AGREE if changes else 0.0):
        trial.problem = f"difference {trial.difference:.1e}"


def _read_results(run: Path) -> dict[str, torch.Tensor]:
    """Returns the weights, and number and loss of each minibatch under the name 'losses'."""
    weights: dict[str, torch.Tensor] = torch.load(run / "weights.pt")
    losses = json.loads((run / "losses.json").read_text())
    return weights | {"losses": torch.tensor(losses, dtype=torch.float64)}


@cache
def _train_undisturbed(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    with TemporaryDirectory() as folder, _start(Path(folder), shape, 1) as launcher:
        assert launcher.wait() == 0
        return _read_results(Path(folder, "run"))


def _emulate(folder: Path, plan: pd.Plan, changes: Sequence[tuple[int, pd.Plan]]) -> dict[str, torch.Tensor]:
    """Returns what one process computes that changes its plan at these minibatches."""
    run: Path | None = None
    ends = [*(number for number, _ in changes), MINIBATCHES]
    for number, (current, end) in enumerate(zip([plan, *(later for _, later in changes)], ends, strict=True)):
        if end:
            out = folder / f"emulated{number}"
            options: dict[str, Any] = {"checkpoint_every": recovery.OFTEN, "quiet": True}
            pd.run(recovery.recipe, plan=current, minibatches=end, resume=run, out=out, **options)
            run = out
    assert run is not None
    return _read_results(run)


def run_trials(seeds: range) -> int:
    """Makes the trials, prints a line for each and one for all, also after Ctrl-C; returns the exit status."""
    trials: list[Trial] = []
    with suppress(KeyboardInterrupt):
        for seed in seeds:
            began_s = time.monotonic()
            trials.append(trial := try_seed(seed))
            print(f"{time.monotonic() - began_s:.0f} s: {trial}", flush=True)
    print(describe(trials))
    return int(not trials or any(trial.problem for trial in trials))


def describe(trials: Sequence[Trial]) -> str:
    """Returns a sentence about trials of consecutive seeds."""
    if not trials:
        return "no runs"
    unchanged, changed = [[t for t in trials if not t.problem and bool(t.lost) is lost] for lost in (False, True)]
    kills, restarts, lost = (sum(getattr(trial, name) for trial in trials) for name in ("kills", "restarts", "lost"))
    hangs, orphans = (sum(trial.problem == name for trial in trials) for name in ("hang", "orphans"))
    worst = max((trial.difference for trial in changed), default=0.0)
    failed = ", ".join(f"{trial.seed} ({trial.problem})" for trial in trials if trial.problem) or "none"
    return (
        f"{len(trials)} runs (seeds {trials[0].seed} to {trials[-1].seed}), {kills} processes killed, {restarts} "
        f"restarts, {lost} workers lost: {len(unchanged)} runs kept their workers and ended bit-equal, {len(changed)} "
        f"went on with fewer and ended equal to {worst:.1e}; {hangs} hangs, {orphans} orphans; failing seeds: {failed}"
    )
