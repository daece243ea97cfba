"""What a lost worker costs: with a replica, replaced, planned again; random kills; one kill a minute. See README.md.

The recipe is recovery.py's, of which a minibatch takes 20 ms.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

import pipedream as pd

sys.path.append(str(Path(__file__).parents[1]))
import recovery
from scaffold import Environment, collect_rounds, format_quartiles, format_table, make_parser

SOURCE = Path(__file__).parents[2] / "src"
MEMORY = ("--snapshot-every", str(recovery.SNAPSHOT_EVERY))
CASES: dict[str, tuple[tuple[int, ...], int, int, tuple[str, ...]]] = {
    "a replica of 2-1-1, a snapshot of each minibatch": ((2, 1, 1), 0, 1, ("--elastic", "--snapshot-every", "1")),
    "a replica of 2-1-1": ((2, 1, 1), 0, 1, ("--elastic", *MEMORY)),
    "one of 4 data parallel": ((4,), 0, 3, ("--elastic", *MEMORY)),
    "a stage of 1-1-1-1, replaced": ((1, 1, 1, 1), 1, 3, MEMORY),
    "the same, from disk": ((1, 1, 1, 1), 1, 3, ()),
    "a stage of 1-1-1-1, planned again for 3": ((1, 1, 1, 1), 0, 3, ("--straight", "--elastic", *MEMORY)),
}
"""Name -> replicas, restarts, the rank that is killed, options."""
MINIBATCHES = 150
_SHAPES = ((2,), (3,), (2, 1), (1, 2), (2, 2), (1, 1))
_AGREE = 1e-10


def make_plan(shape: tuple[int, ...]) -> pd.Plan:
    recipe = recovery.recipe()
    profile = pd.profile(recipe.model, recipe.first_batch()[0])
    return pd.plan(profile, pd.Cluster.flat(sum(shape)), shape=shape)


def measure(name: str) -> tuple[float, int]:
    """Returns the seconds from the kill to the next finished minibatch, and the minibatches that are repeated."""
    shape, restarts, victim, more = CASES[name]
    with TemporaryDirectory() as folder:
        # A run that was given a plan has no profile, and has to measure one to plan again.
        plan_options = [] if "--straight" in more else ["--plan", str(make_plan(shape).save(Path(folder, "plan.json")))]
        return recovery.time_recovery(SOURCE, sum(shape), restarts, victim, *plan_options, *more)


def kill_at_random(draw: random.Random) -> float:
    """Kills workers at random, at times two at once; returns the greatest difference to what one process computes.

    That follows the plans that the run had, each from the snapshot on from which it was begun.
    """
    shape = draw.choice(_SHAPES)
    plan = make_plan(shape)
    with TemporaryDirectory() as folder:
        place, workers = Path(folder), sum(shape)
        options = ("--plan", str(plan.save(place / "plan.json")), "--elastic", "--minibatches", str(MINIBATCHES))
        restarts = draw.randint(0, 2)
        with recovery.start(place, SOURCE, workers, restarts, *options, *MEMORY) as launcher:
            recovery.wait_until(lambda: len(recovery.list_workers(launcher, workers + 1)) > workers, launcher)
            alive = workers
            for _ in range(draw.randint(1, 2)):
                time.sleep(draw.uniform(0.0, 5.0))
                doomed = draw.sample(range(alive), min(draw.randint(1, 2), alive - (restarts == 0)))
                pids = recovery.list_workers(launcher, alive)
                for rank in doomed:
                    with suppress(ProcessLookupError, IndexError):
                        os.kill(pids[rank], signal.SIGKILL)
                if doomed and restarts == 0:
                    alive -= len(doomed)
                restarts = max(0, restarts - bool(doomed))
            assert launcher.wait(120) == 0, launcher.returncode
        assert not [path for path in Path("/dev/shm").glob("pipedream-*") if f"-{launcher.pid}-" in path.name]
        changes = sorted(
            (int(attempt), int(number), file)
            for file in place.glob("finished.*")
            for _, attempt, number in [file.name.split(".")]
        )
        weights = torch.load(place / "run" / "weights.pt")
        expected = emulate(place, plan, [(number, pd.Plan.load(file)) for _, number, file in changes])
        print(shape, [(number, pd.Plan.load(file).config) for _, number, file in changes], flush=True)
        return max(float((weights[name] - expected[name]).abs().max()) for name in weights)


def emulate(folder: Path, plan: pd.Plan, changes: Sequence[tuple[int, pd.Plan]]) -> dict[str, torch.Tensor]:
    """Returns the weights of one process that changes its plan at these minibatches."""
    run: Path | None = None
    ends = [*(number for number, _ in changes), MINIBATCHES]
    for number, (current, end) in enumerate(zip([plan, *(later for _, later in changes)], ends, strict=True)):
        if end == 0 or (number and end == ends[number - 1]):
            continue
        out = folder / f"emulated{number}"
        pd.run(
            recovery.recipe,
            plan=current,
            minibatches=end,
            resume=run,
            out=out,
            checkpoint_every=recovery.SNAPSHOT_EVERY,
            quiet=True,
        )
        run = out
    assert run is not None
    weights: dict[str, torch.Tensor] = torch.load(run / "weights.pt")
    return weights


def measure_goodput(name: str, minutes: int) -> float:
    """Returns the minibatches a second of a run of which a worker is killed in the middle of each minute."""
    shape = (1, 1)
    with TemporaryDirectory() as folder:
        place = Path(folder)
        plan = ("--plan", str(make_plan(shape).save(place / "plan.json")), "--epochs", "1000000")
        if name == "torchrun":
            launcher = start_torchrun(place, sum(shape), *plan)
        else:
            more = MEMORY if name == "memory" else ()
            launcher = recovery.start(place, SOURCE, sum(shape), 10**6, *plan, *more)
        finished = place / "finished"
        with launcher:
            recovery.wait_until(finished.exists, launcher)
            began_s = time.monotonic()
            for minute in range(minutes):
                time.sleep(max(0.0, began_s + 60 * minute + 30 - time.monotonic()))
                if name != "undisturbed":
                    os.kill(recovery.list_workers(launcher, sum(shape))[-1], signal.SIGKILL)
            time.sleep(max(0.0, began_s + 60 * minutes - time.monotonic()))
            rows = finished.read_text().splitlines()
            launcher.send_signal(signal.SIGTERM)
        return max(int(row.split()[1]) for row in rows) / (60 * minutes)


def start_torchrun(folder: Path, workers: int, *more: str) -> subprocess.Popen[bytes]:
    """Starts the run under torchrun, which restarts it from disk."""
    options = ["--nproc-per-node", str(workers), "--max-restarts", "1000000", "-m", "pipedream", "train"]
    run = [recovery.__file__, "--out", str(folder / "run"), "--checkpoint-every", str(recovery.EVERY), *more]
    variables = {"PYTHONPATH": str(SOURCE), "FINISHED": str(folder / "finished")}
    command = [sys.executable, "-m", "torch.distributed.run", *options, *run]
    return subprocess.Popen(command, env=os.environ | variables, stdout=-3, stderr=-3)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--only", action="append", help="part of the name of a case; repeatable")
    parser.add_argument("--kills", action="store_true", help="kills at random moments; compare the weights")
    parser.add_argument("--seed", type=int, default=0, help="number of the first of the random kills")
    parser.add_argument("--goodput", type=int, metavar="MINUTES", help="with a failure in each minute")
    options = parser.parse_args()
    environment = Environment()
    if options.kills:
        differences = [kill_at_random(random.Random(options.seed + trial)) for trial in range(options.trials)]
        assert max(differences) < _AGREE, differences
        print(f"{environment.describe(f'{options.trials} runs')}\ngreatest difference {max(differences):.1e}")
        return 0
    if options.goodput:
        names = ["undisturbed", "memory", "disk", "torchrun"]
        rates = collect_rounds(lambda name: measure_goodput(name, options.goodput), names, options.trials)
        best = median(rates["undisturbed"])
        rows = [(name, f"{median(each):.1f}", f"{median(each) / best:.1%}") for name, each in rates.items()]
        print(f"{environment.describe(f'{options.trials} runs of {options.goodput} minutes')}\n")
        print(format_table("restart from | minibatches/s | of undisturbed", "lrr", rows))
        return 0
    names = [name for name in CASES if not options.only or any(part in name for part in options.only)]
    table = []
    for name, each in collect_rounds(measure, names, options.trials).items():
        seconds, repeated = zip(*each, strict=True)
        quartiles = format_quartiles(seconds, "{:.2f} s".format)
        table.append((name, quartiles, f"{max(seconds):.2f} s", f"{median(repeated):g}"))
    print(f"{environment.describe(f'{options.trials} trials')}\n")
    print(format_table("lost | median (quartiles) | worst | minibatches repeated", "lrrr", table))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
