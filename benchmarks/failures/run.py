"""Ends and stops workers in the middle of their work, many times, and counts what comes of it.

    python benchmarks/failures/run.py                # all trials, once each
    python benchmarks/failures/run.py --rounds 2 --only SIGSTOP

For each plan, rank, signal and moment: a training run in which that rank gets the signal at that moment; how long
until the last process has ended, whether one is left, what is said; then the run continues from its newest checkpoint
(from the start where there is none yet) and must end with the weights of a run that nothing happened to, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import nn

from pipedream.capture import capture
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import LayerProfile, Profile
from pipedream.planner import manual_plan
from pipedream.runtime.checkpoint.storage import complete_checkpoints, read_manifest
from pipedream.training.resume import CHECKPOINTS

HERE = Path(__file__).resolve().parent
PLANS = {"2-1": ((8,), (2, 1)), "1-1-1": ((4, 8), (1, 1, 1))}
MOMENTS = ("warm-up", "steady", "drain", "save")
SIGNALS = ("SIGKILL", "SIGSTOP")
EVERY = 24  # minibatches between checkpoints
PATIENCE_S = 120.0


@dataclass
class Trial:
    """One of them, and what came of it."""

    plan: str
    rank: int
    signal: str
    moment: str
    restarts: int = 0
    stopped_s: float = 0.0
    hung: bool = False
    orphans: int = 0
    messages: int = 0
    message: str = ""
    checkpoint: str = ""
    equal: bool = False


def trials(rounds: int, only: str | None) -> Iterator[Trial]:
    """Yields all trials; in those with restarts the launcher goes on by itself."""
    for _ in range(rounds):
        for plan in PLANS:
            for rank in range(3):
                for signal in SIGNALS:
                    for moment in MOMENTS:
                        if only in (None, signal, moment, plan):
                            yield Trial(plan, rank, signal, moment)
                    if only in (None, signal, plan, "restart"):
                        yield Trial(plan, rank, signal, "steady", restarts=1)


def event(trial: Trial, drained: int) -> dict[str, object]:
    """Returns when the job shall send the signal: at which event on the rank, and its number from 1."""
    counts = PLANS[trial.plan][1]
    mine = next((r, i) for s, r in enumerate(counts) for i in range(r) if sum(counts[:s]) + i == trial.rank)
    held, replica = mine
    last = len(range(replica, drained, held))  # the rank's backwards before the first drain
    what, number = {
        "warm-up": ("forward", 1),
        "steady": ("forward", 40 // held),
        "drain": ("backward", last),
        "save": ("save", 2),
    }[trial.moment]
    return {"rank": trial.rank, "signal": trial.signal, "event": what, "count": number}


class Job:
    """A training run in a folder of its own."""

    def __init__(self, folder: Path, plan: Path) -> None:
        self.folder = folder
        self.plan = plan
        self.mark = uuid.uuid4().hex

    def run(self, *options: str) -> tuple[int | None, str]:
        """Trains; returns the exit status (None: had to be killed) and what was said on standard error."""
        environment = os.environ | {"TRIAL_FOLDER": str(self.folder), "TRIAL_MARK": self.mark}
        command = [sys.executable, "-m", "pipedream", "train", str(HERE / "job.py"), "--plan", str(self.plan)]
        command += ["--checkpoint-every", str(EVERY), "--keep", "9", "--json", *options]
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, said = process.communicate(timeout=PATIENCE_S)
            return process.returncode, said
        except subprocess.TimeoutExpired:
            for pid in self.left():
                os.kill(pid, 9)
            process.kill()
            return None, process.communicate()[1]

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


def plan_file(folder: Path, name: str) -> Path:
    """Writes the plan of the job's model."""
    sys.path.insert(0, str(HERE))
    from job import recipe

    model = recipe().model
    assert isinstance(model, nn.Module)
    graph = capture(model, (torch.zeros(8, 16),)).graph
    rows = tuple(LayerProfile(1e-3, 2e-3, 512, 64) for _ in graph.layers)
    cuts, counts = PLANS[name]
    plan = manual_plan(Profile("Sequential", graph, rows, 8), Cluster.flat(3), cuts, counts)
    return plan.save(folder / f"{name}.json")


def attempt(trial: Trial, folder: Path, plan: Path, wanted: dict[str, torch.Tensor], drained: int) -> None:
    """Makes a trial and notes what came of it."""
    job = Job(folder, plan)
    (folder / "trial.json").write_text(json.dumps(event(trial, drained)))
    more = ["--max-restarts", str(trial.restarts)] if trial.restarts else []
    status, said = job.run("--out", str(folder / "run"), *more)
    ended = time.time()
    trial.hung = status is None
    assert (folder / "fired_at").exists(), f"the signal was never sent: {said}"
    trial.orphans = len(job.left())
    trial.message = said.strip()
    trial.messages = len([line for line in said.splitlines() if f"rank {trial.rank}" in line])
    run = folder / "run"
    if trial.restarts:
        trial.equal = status == 0 and same(run, wanted)
        return
    trial.stopped_s = ended - float((folder / "fired_at").read_text())
    saved = complete_checkpoints(run / CHECKPOINTS)
    trial.checkpoint = saved[-1].name if saved else "none"
    if saved:
        status, said = job.run("--resume", str(run))
    else:
        run = folder / "again"
        status, said = job.run("--out", str(run))
    if status != 0:
        trial.message += f" | going on: {said}"
    trial.equal = status == 0 and same(run, wanted)


def same(run: Path, wanted: dict[str, torch.Tensor]) -> bool:
    """Tells whether a run ended with these weights, and this average of them."""
    found = weights(run)
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Returns a run's weights and their average."""
    last = torch.load(run / "weights.pt", weights_only=True)
    average = torch.load(run / "weights_ema.pt", weights_only=True)
    return last | {f"average of {name}": tensor for name, tensor in average.items()}


def main() -> None:
    """Makes the trials and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", help="a signal, a moment, a plan, or 'restart'")
    parser.add_argument("-o", "--output", type=Path, default=HERE / "trials.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        plans = {name: plan_file(base, name) for name in PLANS}
        wanted, drained = {}, {}
        for name, plan in plans.items():
            whole = Job(base, plan)
            status, said = whole.run("--out", str(base / f"whole {name}"))
            assert status == 0, said
            wanted[name] = weights(base / f"whole {name}")
            first = complete_checkpoints(base / f"whole {name}" / CHECKPOINTS)[0]
            drained[name] = read_manifest(first).minibatches
        done = []
        for number, trial in enumerate(trials(options.rounds, options.only)):
            folder = base / str(number)
            folder.mkdir()
            attempt(trial, folder, plans[trial.plan], wanted[trial.plan], drained[trial.plan])
            shutil.rmtree(folder)
            done.append(trial)
            print(f"{number + 1:3}  {line(trial)}", flush=True)
    options.output.write_text(json.dumps([asdict(trial) for trial in done], indent=1) + "\n")
    print(table(done))


def line(trial: Trial) -> str:
    """Returns a trial in one line."""
    seconds = "restarted" if trial.restarts else f"{trial.stopped_s:7.1f} s"
    bad = "" if trial.equal and not trial.hung and not trial.orphans else "BAD  "
    return f"{trial.plan:5} rank {trial.rank}  {trial.signal}  {trial.moment:8} {seconds}  {bad}{trial.message}"


def table(done: list[Trial]) -> str:
    """Returns the counts, and the seconds from the signal to the end of the last process."""
    rows = ["", "signal   moment    trials  hung  orphans  equal  median s  worst s"]
    for signal in SIGNALS:
        for moment in (*MOMENTS, "restart"):
            mine = [t for t in done if t.signal == signal and ("restart" if t.restarts else t.moment) == moment]
            if not mine:
                continue
            seconds = [t.stopped_s for t in mine]
            times = f"{median(seconds):8.1f}  {max(seconds):7.1f}" if moment != "restart" else f"{'-':>8}  {'-':>7}"
            hung, left, equal = (sum(bool(getattr(t, what)) for t in mine) for what in ("hung", "orphans", "equal"))
            rows.append(f"{signal}  {moment:8}  {len(mine):6}  {hung:4}  {left:7}  {equal:5}  {times}")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
