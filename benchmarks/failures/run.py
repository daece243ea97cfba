"""Sends signals to the processes of a run, at every moment, many times, and counts what comes of it.

    python benchmarks/failures/run.py                       # 120 trials
    python benchmarks/failures/run.py --piece 1/4           # a quarter of them
    python benchmarks/failures/run.py --only SIGSTOP --only end

For each signal, target and moment there is a trial, with plans and methods in turn: how long until the last process
has ended, whether one is left, what is printed; then the run is resumed from its newest checkpoint (started again
where there is none yet) and must end with the weights of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

import torch
from torch import nn

from pipedream.capture import capture
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import LayerProfile, Profile
from pipedream.planner import manual_plan
from pipedream.runtime.checkpoint.storage import complete_checkpoints
from pipedream.training.resume import CHECKPOINTS

HERE = Path(__file__).resolve().parent
PLANS = {"1-1": ((8,), (1, 1)), "2-1": ((8,), (2, 1)), "1-1-1": ((4, 8), (1, 1, 1))}
CASES = (
    ("1-1", "pipedream"),
    ("1-1", "1f1b"),
    ("2-1", "pipedream"),
    ("1-1", "pipedream_2bw"),
    ("1-1-1", "1f1b"),
    ("1-1", "pipemare"),
    ("1-1-1", "pipedream"),
)
FLUSHING = {"1f1b"}
SIGNALS = ("SIGSTOP", "SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
TARGETS = ("first", "last", "two", "launcher")
MOMENTS = {  # event, and its number from 1
    "start-up": ("start", 1),
    "warm-up": ("forward", 1),
    "steady": ("forward", 6),
    "save": ("save", 1),
    "evaluation": ("evaluation", 1),
    "end": ("end", 1),
}
EVERY = 8  # minibatches between checkpoints
SOON_S = 15.0
PATIENCE_S = 60.0
OWN_DATA = {"evaluation", "end"}  # rank 0 alone knows these moments


@dataclass
class Trial:
    """One of them, and what came of it.

    Attributes:
        ended_s: from the signal to the end of the last process.
        exact: None where the run was left at another drain, from which a method without a flush continues otherwise.
    """

    number: int
    plan: str
    method: str
    signal: str
    target: str
    moment: str
    fired: bool = True
    ended_s: float = 0.0
    left: int = 0
    tracebacks: int = 0
    status: int | None = None
    message: str = ""
    checkpoint: str = ""
    exact: bool | None = None

    @property
    def good(self) -> bool:
        return self.ended_s <= SOON_S and not self.left and not self.tracebacks and self.exact is not False


def trials() -> Iterator[Trial]:
    """Yields all trials."""
    for number, (name, target, moment) in enumerate(product(SIGNALS, TARGETS, MOMENTS)):
        plan, method = CASES[number % len(CASES)]
        yield Trial(number, plan, method, name, target, moment)


def order(trial: Trial) -> dict[str, object]:
    """Returns what `job.py` reads: which rank sends the signal, when, and to whom."""
    last = sum(PLANS[trial.plan][1]) - 1
    targets = {"first": [0], "last": [last], "two": [0, last], "launcher": ["launcher"]}[trial.target]
    event, number = MOMENTS[trial.moment]
    sender = 0 if trial.moment in OWN_DATA or targets == ["launcher"] else targets[0]
    return {"rank": sender, "event": event, "count": number, "signal": trial.signal, "targets": targets}


class Job:
    """A training run in a folder of its own."""

    def __init__(self, folder: Path, plan: Path, method: str) -> None:
        self.folder = folder
        self.plan = plan
        self.method = method
        self.mark = uuid.uuid4().hex

    def run(self, *options: str) -> tuple[int | None, float, str]:
        """Trains; returns the exit status (None: had to be killed), when the last process ended, and its errors."""
        environment = os.environ | {"TRIAL_FOLDER": str(self.folder), "TRIAL_MARK": self.mark, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pipedream", "train", str(HERE / "job.py"), "--plan", str(self.plan)]
        command += ["--schedule", self.method, "--checkpoint-every", str(EVERY), "--keep", "9", "--json", *options]
        with (self.folder / "errors").open("w+") as errors:
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
            started = time.monotonic()
            while process.poll() is None or self.left():
                time.sleep(0.1)
                fired = self.folder / "fired_at"
                since_s = time.time() - float(fired.read_text() or "inf") if fired.exists() else 0.0
                if since_s > PATIENCE_S or time.monotonic() - started > 5 * PATIENCE_S:
                    break
            ended = time.time()
            errors.seek(0)
            return process.poll(), ended, errors.read()

    def left(self) -> list[int]:
        """Returns the processes of this job that are still there."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if self.mark.encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def kill(self) -> int:
        """Kills what is left; returns how many."""
        found = self.left()
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        return len(found)


def plan_file(folder: Path, name: str) -> Path:
    """Writes the plan of the job's model."""
    sys.path.insert(0, str(HERE))
    os.environ["TRIAL_FOLDER"] = str(folder)
    from job import recipe

    model = recipe().model
    assert isinstance(model, nn.Module)
    graph = capture(model, (torch.zeros(8, 16),)).graph
    rows = tuple(LayerProfile(1e-3, 2e-3, 512, 64) for _ in graph.layers)
    cuts, counts = PLANS[name]
    plan = manual_plan(Profile("Sequential", graph, rows, 8), Cluster.flat(sum(counts)), cuts, counts)
    return plan.save(folder / f"{name}.json")


def attempt(trial: Trial, folder: Path, plan: Path, wanted: dict[str, torch.Tensor]) -> None:
    """Makes a trial and notes what came of it."""
    job = Job(folder, plan, trial.method)
    (folder / "trial.json").write_text(json.dumps(order(trial)))
    trial.status, ended, said = job.run("--out", str(folder / "run"))
    trial.left = job.kill()
    trial.message, trial.tracebacks = said.strip()[-1000:], said.count("Traceback")
    trial.fired = (folder / "fired_at").exists()
    if not trial.fired:
        return
    trial.ended_s = ended - float((folder / "fired_at").read_text())
    run = folder / "run"
    saved = complete_checkpoints(run / CHECKPOINTS)
    trial.checkpoint = saved[-1].name if saved else "none"
    again = ("--resume", str(run)) if saved else ("--out", str(folder / "again"))
    (folder / "fired_at").unlink()
    status, _, said = job.run(*again)
    job.kill()
    if status != 0:
        trial.message += f" | resumed: {said.strip()[-500:]}"
    same = status == 0 and equal(run if saved else folder / "again", wanted)
    asynchronous = trial.method not in FLUSHING
    trial.exact = None if trial.signal == "SIGINT" and asynchronous and status == 0 and not same else same


def equal(run: Path, wanted: dict[str, torch.Tensor]) -> bool:
    """Returns whether a run ended with these weights, and this average of them."""
    found = weights(run)
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Returns a run's weights and their average."""
    last: dict[str, torch.Tensor] = torch.load(run / "weights.pt", weights_only=True)
    average = torch.load(run / "weights_ema.pt", weights_only=True)
    return last | {f"average of {name}": tensor for name, tensor in average.items()}


def main() -> None:
    """Makes the trials, writes them after each, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="a signal, target, moment, plan or method")
    parser.add_argument("--piece", default="1/1", help="which of how many pieces, e.g. 2/4")
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of finished pieces only")
    parser.add_argument("-o", "--output", type=Path, default=HERE / "trials.json")
    options = parser.parse_args()
    if options.table:
        print(table([Trial(**row) for file in options.table for row in json.loads(file.read_text())]))
        return
    piece, pieces = map(int, options.piece.split("/"))
    chosen = [
        t
        for t in trials()
        if t.number % pieces == piece - 1
        and all(word in (t.signal, t.target, t.moment, t.plan, t.method) for word in options.only)
    ]
    done: list[Trial] = []
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        plans: dict[str, Path] = {}
        wanted: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
        for trial in chosen:
            case = (trial.plan, trial.method)
            if trial.plan not in plans:
                plans[trial.plan] = plan_file(base, trial.plan)
            if case not in wanted:
                whole = base / "-".join(case)
                status, _, said = Job(base, plans[trial.plan], trial.method).run("--out", str(whole))
                assert status == 0, said
                wanted[case] = weights(whole)
            folder = base / str(trial.number)
            folder.mkdir()
            attempt(trial, folder, plans[trial.plan], wanted[case])
            shutil.rmtree(folder)
            done.append(trial)
            options.output.write_text(json.dumps([asdict(one) for one in done], indent=1) + "\n")
            print(line(trial), flush=True)
    print(table(done))


def line(trial: Trial) -> str:
    """Returns a trial in one line."""
    exact = {True: "exact", False: "DIFFERS", None: "other drain"}[trial.exact]
    words = [f"{trial.plan:5} {trial.method:13} {trial.signal:7} {trial.target:8} {trial.moment:10}"]
    words += [f"{trial.ended_s:5.1f} s, {exact}", "" if trial.good else "BAD", trial.message.replace("\n", " ")[:300]]
    return f"{trial.number:3}  " + "  ".join(words if trial.fired else [words[0], "ended before the moment"])


def table(done: list[Trial]) -> str:
    """Returns the counts, and the seconds from the signal to the end of the last process."""
    done = [trial for trial in done if trial.fired]
    rows = [
        "",
        f"| signal | trials | over {SOON_S:g} s | left | tracebacks | exact | other drain | median s | worst s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in (*SIGNALS, "all"):
        mine = [trial for trial in done if name in (trial.signal, "all")]
        if not mine:
            continue
        seconds = [trial.ended_s for trial in mine]
        counts = [
            len(mine),
            sum(one > SOON_S for one in seconds),
            sum(trial.left for trial in mine),
            sum(trial.tracebacks for trial in mine),
            sum(trial.exact is True for trial in mine),
            sum(trial.exact is None for trial in mine),
        ]
        rows.append(f"| {name} | {' | '.join(map(str, counts))} | {median(seconds):.1f} | {max(seconds):.1f} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
