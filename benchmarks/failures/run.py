"""Sends signals to the processes of a run, at every moment, many times, and counts what comes of it. See README.md."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import recovery
import torch

import pipedream as pd
from pipedream.apps.training.run_folder import CHECKPOINTS
from pipedream.services.checkpoint.folders import list_checkpoints

sys.path.append(str(Path(__file__).parents[1]))
from scaffold import format_row, format_table, make_parser, write_rows

HERE = Path(__file__).resolve().parent
CUTS = {"1-1": (8,), "2-1": (8,), "1-1-1": (4, 8)}
CASES = (
    ("1-1", "pipedream", "adamw"),
    ("1-1", "1f1b", "sgd"),
    ("2-1", "pipedream", "sgd"),
    ("2-1", "1f1b", "adamw"),
    ("1-1", "pipedream_2bw", "adamw"),
    ("1-1-1", "1f1b", "adamw"),
    ("2-2", "chimera", "sgd"),
    ("2-2", "chimera", "adamw"),
    ("1-1", "pipemare", "sgd"),
    ("1-1-1", "pipedream", "adamw"),
    ("1-1-1", "pipedream_2bw", "sgd"),
)
"""Plan, method, and how the job trains; Chimera's 2-2 are two workers, both of which have both stages."""

FLUSHING = {"1f1b", "chimera"}
SIGNALS = ("SIGSTOP", "SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
TARGETS = ("first", "last", "two", "launcher")
MOMENTS = {  # event in the job, and its number from 1
    "launch": None,
    "start-up": ("start", 1),
    "warm-up": ("forward", 1),
    "steady": ("forward", 6),
    "save": ("save", 1),
    "evaluation": ("evaluation", 1),
    "end": ("end", 1),
    "exit": ("exit", 1),
}
EVERY = 8  # minibatches between checkpoints
LAUNCH_S = 2.0  # within which "launch" is, from when the processes exist
SOON_S = 15.0
PATIENCE_S = 60.0
OWN_DATA = {"evaluation", "end"}  # rank 0 alone knows these moments


@dataclass
class Trial:
    """One of them, and what came of it.

    Attributes:
        number: its place in the order of the seed.
        load: the machine's load average when it was over.
        ended_s: from the signal to the end of the last process.
        exact: None where the run was left at another drain, from which it continues otherwise.
    """

    seed: int
    number: int
    plan: str
    method: str
    training: str
    signal: str
    target: str
    moment: str
    load: float = 0.0
    fired: bool = True
    ended_s: float = 0.0
    survivors: int = 0
    tracebacks: int = 0
    status: int | None = None
    message: str = ""
    checkpoint: str = ""
    exact: bool | None = None

    @property
    def good(self) -> bool:
        return self.ended_s <= SOON_S and not self.survivors and not self.tracebacks and self.exact is not False

    @property
    def drains_anywhere(self) -> bool:
        """Whether it is the same run wherever the pipeline is drained; averages of BatchNorm's statistics are not."""
        return self.method in FLUSHING and not ("2" in self.plan and self.training == "sgd")

    @property
    def ranks(self) -> int:
        return 2 if self.method == "chimera" else sum(map(int, self.plan.split("-")))


def trials(seed: int) -> list[Trial]:
    """Returns all trials, in an order of the seed's."""
    rng = random.Random(seed)
    kinds = list(product(SIGNALS, TARGETS, MOMENTS))
    rng.shuffle(kinds)
    cases = [CASES[number % len(CASES)] for number in range(len(kinds))]
    return [Trial(seed, number, *cases[number], *kind) for number, kind in enumerate(kinds)]


def order(trial: Trial) -> dict[str, object]:
    """Returns what `job.py` reads: which rank sends the signal, when, and to whom."""
    last = trial.ranks - 1
    targets = {"first": [0], "last": [last], "two": [0, last], "launcher": ["launcher"]}[trial.target]
    event, number = MOMENTS[trial.moment] or ("", 0)
    sender = 0 if trial.moment in OWN_DATA or targets == ["launcher"] else targets[0]
    return {"rank": sender, "event": event, "count": number, "signal": trial.signal, "targets": targets}


class Job:
    """A training run in a folder of its own."""

    def __init__(self, folder: Path, plan: Path, trial: Trial) -> None:
        self.folder = folder
        self.trial = trial
        self.mark = uuid.uuid4().hex
        self._fired_at = folder / "fired_at"
        self._command = ["train", str(HERE / "job.py"), "--plan", str(plan), "--schedule", trial.method]
        self._command += ["--checkpoint-every", str(EVERY), "--keep", "9", "--json"]
        self._variables = {
            "TRIAL_FOLDER": str(folder),
            "TRIAL_TRAINING": trial.training,
            "TRIAL_MARK": self.mark,
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *options: str) -> tuple[int | None, float, str]:
        """Trains; returns the exit status (None: had to be killed), when the last process ended, and its errors."""
        with (self.folder / "errors").open("w+") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "pipedream", *self._command, *options],
                env=os.environ | self._variables,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
            if MOMENTS[self.trial.moment] is None and (self.folder / "trial.json").exists():
                self._send_soon(process)
            started = time.monotonic()
            while process.poll() is None or self.list_processes():
                time.sleep(0.1)
                fired = self._fired_at
                since_s = time.time() - float(fired.read_text() or "inf") if fired.exists() else 0.0
                if since_s > PATIENCE_S or time.monotonic() - started > 5 * PATIENCE_S:
                    break
            ended = time.time()
            errors.seek(0)
            return process.poll(), ended, errors.read()

    def _send_soon(self, launcher: subprocess.Popen[bytes]) -> None:
        """Sends the trial's signal soon after its targets exist, while they import."""
        targets: Any = order(self.trial)["targets"]
        pids = [launcher.pid]
        if targets != ["launcher"]:
            while len(workers := recovery.list_children(launcher)) < self.trial.ranks:
                time.sleep(0.02)
            pids = [workers[rank] for rank in targets]
        time.sleep(random.Random(self.trial.number).uniform(0.0, LAUNCH_S))
        self._fired_at.write_text(str(time.time()))
        for pid in pids:
            os.kill(pid, getattr(signal, self.trial.signal))

    def list_processes(self) -> list[int]:
        """Returns the processes of this job that are still there."""
        return recovery.list_processes(f"TRIAL_MARK={self.mark}")

    def kill(self) -> int:
        """Kills what is left; returns how many."""
        pids = self.list_processes()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return len(pids)


def plan_file(folder: Path, trial: Trial) -> Path:
    """Writes the plan of the job's model."""
    os.environ["TRIAL_FOLDER"], os.environ["TRIAL_TRAINING"] = str(folder), trial.training
    import job

    profile = pd.profile(job.recipe().model, torch.zeros(32, 16), device="meta", as_device="A100-80GB")
    how: dict[str, Any] = {"shape": "pipeline", "schedule": "chimera", "microbatches": 4}
    if trial.method != "chimera":
        how = {"shape": trial.plan, "cuts": CUTS[trial.plan]}
    new_plan = pd.plan(profile, pd.Cluster.flat(trial.ranks), **how)
    assert new_plan.config == trial.plan, new_plan
    return new_plan.save(folder / "plan.json")


def attempt(trial: Trial, folder: Path, plan: Path, expected: dict[str, torch.Tensor]) -> None:
    """Makes a trial and notes what came of it."""
    job = Job(folder, plan, trial)
    (folder / "trial.json").write_text(json.dumps(order(trial)))
    trial.status, ended, errors = job.run("--out", str(folder / "run"))
    trial.load = os.getloadavg()[0]
    trial.survivors = job.kill()
    trial.message, trial.tracebacks = errors.strip()[-1000:], errors.count("Traceback")
    fired_at = folder / "fired_at"
    trial.fired = fired_at.exists()
    if not trial.fired:
        return
    trial.ended_s = ended - float(fired_at.read_text())
    fired_at.unlink()
    run = folder / "run"
    saved = list_checkpoints(run / CHECKPOINTS)
    trial.checkpoint = saved[-1].name if saved else "none"
    again = ("--resume", str(run)) if saved else ("--out", str(folder / "again"))
    (folder / "trial.json").unlink(missing_ok=True)  # of a moment that did not come
    status, _, errors = job.run(*again)
    job.kill()
    if status:
        trial.message += f" | resumed: {errors.strip()[-500:]}"
    same = status == 0 and equal(run if saved else folder / "again", expected)
    other_drain = trial.signal in ("SIGINT", "SIGTERM") and not trial.drains_anywhere
    trial.exact = None if other_drain and status == 0 and not same else same


def equal(run: Path, expected: dict[str, torch.Tensor]) -> bool:
    """Returns whether a run ended with these weights, and this average of them."""
    actual = weights(run)
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Returns a run's weights and their average, if it keeps one."""
    last: dict[str, torch.Tensor] = torch.load(run / "weights.pt", weights_only=True)
    if (run / "weights_ema.pt").exists():
        average = torch.load(run / "weights_ema.pt", weights_only=True)
        last |= {f"average of {name}": tensor for name, tensor in average.items()}
    return last


def read(file: Path) -> list[Trial]:
    """Returns the finished trials."""
    return [Trial(**row) for row in json.loads(file.read_text())] if file.exists() else []


def main() -> None:
    """Makes the trials that are left, appends each to the file, and prints the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", action="append", default=[], help="a signal, target, moment, plan or method")
    parser.add_argument("--seed", type=int, default=0, help="of the order, and of who gets which plan and method")
    parser.add_argument("--trials", type=int, help="no more than this many")
    parser.add_argument("--number", type=int, action="append", default=[], help="this trial, even if it is finished")
    parser.add_argument("--table", action="store_true", help="make no trials")
    parser.add_argument("-o", "--output", type=Path, default=HERE / "trials.json")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and its children
    done = read(options.output)
    over = {(trial.seed, trial.number) for trial in done} - {(options.seed, number) for number in options.number}
    chosen = [
        t
        for t in trials(options.seed)
        if (t.seed, t.number) not in over
        and (not options.number or t.number in options.number)
        and all(word in (t.signal, t.target, t.moment, t.plan, t.method, t.training) for word in options.only)
    ]
    with tempfile.TemporaryDirectory(prefix="trials-") as scratch:
        base = Path(scratch)
        cases: dict[tuple[str, ...], tuple[Path, dict[str, torch.Tensor]]] = {}
        for trial in [] if options.table else chosen[: options.trials]:
            case = (trial.plan, trial.method, trial.training)
            if case not in cases:
                whole = base / "-".join(case)
                whole.mkdir()
                new_plan = plan_file(whole, trial)
                status, _, errors = Job(whole, new_plan, trial).run("--out", str(whole / "run"))
                assert status == 0, errors[:1000]
                cases[case] = new_plan, weights(whole / "run")
            folder = base / str(trial.number)
            folder.mkdir()
            attempt(trial, folder, *cases[case])
            shutil.rmtree(folder)
            done.append(trial)
            write_rows(options.output, map(asdict, done))
            print(line(trial), flush=True)
    print(table(done))


def line(trial: Trial) -> str:
    """Returns a trial in one line."""
    exact = {True: "exact", False: "DIFFERS", None: "other drain"}[trial.exact]
    words = [f"{trial.plan:5} {trial.method:13} {trial.training:5}"]
    words += [f"{trial.signal:7} {trial.target:8} {trial.moment:10}", f"load {trial.load:.0f}"]
    if not trial.fired:
        return f"{trial.number:3}  " + "  ".join([*words, f"ended before the moment: {trial.message}"])
    words += [f"{trial.ended_s:5.1f} s, {exact}", "" if trial.good else "BAD", trial.message.replace("\n", " ")[:300]]
    return f"{trial.number:3}  " + "  ".join(words)


def table(done: list[Trial]) -> str:
    """Returns the counts, and the seconds from the signal to the end of the last process."""
    done = [trial for trial in done if trial.fired]
    heads = f"trials | over {SOON_S:g} s | left | tracebacks | exact | other drain | median s | worst s"
    parts = []
    for what, names in (("signal", SIGNALS), ("target", TARGETS), ("moment", tuple(MOMENTS)), ("method", METHODS)):
        groups = {name: [trial for trial in done if getattr(trial, what) == name] for name in names}
        rows = [[name, *counts(mine)] for name, mine in groups.items() if mine]
        parts.append("\n" + format_table(f"{what} | {heads}", "lr", rows))
    parts.append(format_row(["all", *counts(done)]) if done else "no trials")
    return "\n".join([*parts, "", matrix(done)])


METHODS = tuple(dict.fromkeys(method for _, method, _ in CASES))


def counts(trials: list[Trial]) -> list[str]:
    """Returns one row of a table."""
    seconds = [trial.ended_s for trial in trials]
    numbers = [
        len(trials),
        sum(second > SOON_S for second in seconds),
        sum(trial.survivors for trial in trials),
        sum(trial.tracebacks for trial in trials),
        sum(trial.exact is True for trial in trials),
        sum(trial.exact is None for trial in trials),
    ]
    return [*map(str, numbers), f"{median(seconds):.1f}", f"{max(seconds):.1f}"]


def matrix(done: list[Trial]) -> str:
    """Returns the seconds of each signal, target and moment; the longest of several trials."""
    rows = []
    for name, target in product(SIGNALS, TARGETS):
        cells = []
        for moment in MOMENTS:
            mine = [t for t in done if (t.signal, t.target, t.moment) == (name, target, moment)]
            cells.append(f"{max(t.ended_s for t in mine):.1f}" if mine else "")
        rows.append([name, target, *cells])
    return format_table("|".join(["signal", "target", *MOMENTS]), "llr", rows)


if __name__ == "__main__":
    main()
