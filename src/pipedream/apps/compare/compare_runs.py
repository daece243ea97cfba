"""The run folders of a comparison: started, written by workers (``python -m ... KIND RECIPE OPTIONS``), and read.

Workers are processes of this machine, or of the hosts of a slow network.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from pipedream.apps.compare.torch_baselines import DataParallel, OneFOneB, PlainLoop, Task
from pipedream.apps.compare.variants import Variant
from pipedream.apps.training import run_folder
from pipedream.apps.training.job import capture_recipe, profile_recipe
from pipedream.apps.training.loop import CheckpointPolicy, TrainingLoop
from pipedream.apps.training.recipe import load_recipe
from pipedream.apps.training.train import train_recipe
from pipedream.core.artifact import read_text, write_text
from pipedream.core.errors import BAD_CALL, ArtifactError, PipelineError, PlanError, WorkerError
from pipedream.core.plan.plan import Plan
from pipedream.runtime.activity import Terminated
from pipedream.runtime.comm import process_group
from pipedream.services.checkpoint.stores import open_store
from pipedream.services.failure.guard import guard_job
from pipedream.services.failure.launch import launch, set_threads
from pipedream.services.failure.processes import write_error
from pipedream.services.joining import joining
from pipedream.services.probe.core_times import CoreTimes
from pipedream.slow_links import Network

_SENT = "sent_bytes.json"  # of all workers, from their start to their end


@dataclass
class Runs:
    """Runs workers, on the hosts of a network or in local processes, and reads the folders that they write."""

    recipe: str
    folder: Path
    seed: int
    device: str
    network: Network | None = None
    count: int = 0

    def run(self, kind: str, workers: int, name: str, **more: Any) -> Path:
        """Runs `run_job` with these options, without workers in this process; returns the folder it wrote.

        Raises:
            PlanError: the workers refused it.
            WorkerError: a worker failed.
            KeyboardInterrupt: Ctrl-C or SIGTERM.
        """
        folder = self.folder / name
        options = {"seed": self.seed, "device": self.device, "out": str(folder), **more}
        if not workers:
            with redirect_stdout(sys.stderr):
                run_job(kind, self.recipe, options)
            return folder
        arguments = ["-m", "pipedream.apps.compare.compare_runs", kind, self.recipe, json.dumps(options)]
        self.count += 1
        folder.mkdir(parents=True, exist_ok=True)
        if self.network is not None and workers > 1:
            sent_before = self.network.sent_bytes()
            status, text = self._run_on_hosts(self.network, workers, arguments)
            write_text(folder / _SENT, str(self.network.sent_bytes() - sent_before))
        else:
            with redirect_stderr(io.StringIO()) as messages:
                status = launch(workers, arguments, silent=True)
            text = messages.getvalue()
        if status in (130, -2):
            raise KeyboardInterrupt
        if status in (Terminated.STATUS, -15):
            raise Terminated
        if status:
            text = text.strip().removeprefix("pipedream: ") or f"exit status {status}"
            text = text.rpartition("\n")[2] if "Traceback" in text else text
            raise PlanError(text) if status == BAD_CALL else WorkerError(0, name, text)
        return folder

    def train(self, variant: Variant, plan: Plan, kind: str, *, is_here: bool = False, **more: Any) -> Variant:
        """Trains on a plan; returns the variant with its figures, or why it has none.

        Args:
            is_here: all workers run in this process, and continue what the folder holds.
        """
        folder, more = self.folder / variant.folder, {"plan": str(self.folder / f"{variant.folder}.plan.json"), **more}
        plan.save(Path(more["plan"]))
        if is_here:
            more["resume"] = str(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            more |= {"checkpoint_every": 0} if kind == "pipeline" else {}
        try:
            self.run(kind, 0 if is_here else plan.ranks, variant.folder, **more)
        except PipelineError as error:
            return replace(variant, why=" ".join(str(error).split()))
        return self.read(variant, is_here=is_here) or variant

    def read(self, variant: Variant, *, is_here: bool) -> Variant | None:
        """Returns the variant with its figures, as `train` does; None if its run has not ended."""
        measured = read_run(self.folder / variant.folder, variant)
        if measured is None or not is_here:
            return measured
        # The seconds and bytes of one process are not those of several workers.
        return replace(variant, metrics=measured.metrics, losses=measured.losses, test_losses=measured.test_losses)

    def _run_on_hosts(self, network: Network, workers: int, arguments: Sequence[str]) -> tuple[int, str]:
        """Runs ``python ARGUMENTS`` on each host; returns the status of the first that failed, and its output."""
        processes: list[subprocess.Popen[bytes]] = []
        outputs = [self.folder / f"rank{rank}.txt" for rank in range(workers)]
        try:
            for rank, (host, output) in enumerate(zip(network.hosts, outputs, strict=False)):
                variables = network.variables(rank, port=20000 + self.count) | {"WORLD_SIZE": str(workers)}
                with output.open("wb") as file:
                    process = subprocess.Popen(
                        host.inside(sys.executable, *arguments),
                        env=os.environ | variables,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=file,
                    )
                    processes.append(process)
            with outputs[0].open(encoding="utf-8", errors="replace") as lines:
                while not (failed := [rank for rank, process in enumerate(processes) if process.poll()]):
                    is_done = all(process.poll() == 0 for process in processes)
                    for line in lines:
                        if line.startswith("profiling"):  # as local workers do
                            print(line, end="", file=sys.stderr, flush=True)
                    if is_done:
                        return 0, ""
                    time.sleep(0.02)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return processes[failed[0]].returncode, outputs[failed[0]].read_text(encoding="utf-8", errors="replace")


def read_run(folder: Path, variant: Variant) -> Variant | None:
    """Returns the variant with the figures of its run folder; None if the run has not ended.

    Raises:
        ArtifactError: a file is damaged.
    """
    try:
        summary, losses = (json.loads(read_text(folder / name)) for name in ("summary.json", "losses.json"))
        if summary["interrupted"]:
            return None
        batch, sent = Plan.load(folder / "plan.json").batch, folder / _SENT
        # The last one is made even where no epoch ends, and is no row then.
        last = summary["metrics"] | {"minibatches": summary["minibatches"]}
        tests = [row for row in (*summary.get("evaluations", ()), last) if "loss" in row]
        return replace(
            variant,
            samples_per_s=summary["throughput"]["measured_per_s"],
            bytes_per_sample=int(read_text(sent)) / (summary["minibatches"] * batch) if sent.exists() else None,
            bubble=summary["bubble"]["measured"],
            peak_bytes=summary["memory"]["measured_bytes"],
            seconds_to_target=summary["seconds_to_target"],
            slowness=summary.get("slowness") or 1.0,
            metrics=summary["metrics"],
            losses=tuple((batch * (number + 1), loss) for number, loss in losses),
            test_losses=tuple(
                dict.fromkeys((batch * row["minibatches"], row["loss"]) for row in tests if "loss" in row)
            ),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ArtifactError(
            f"cannot read the results in {folder}: {error}; remove it, and the run is repeated"
        ) from None


def run_job(kind: str, recipe: str, options: dict[str, Any]) -> None:
    """Runs this rank's part of a job; rank 0 writes files into the folder `out`.

    Args:
        kind: 'profile' measures the recipe on all workers at the same time. The others train a plan: 'pipeline' as
            ``pipedream train``, 'plain', 'ddp' and '1f1b' as torch itself does.
        options: of `profile_recipe` or `train_recipe`; 'ddp' also takes `accumulated`.
    """
    if kind == "pipeline":
        train_recipe(lambda seed: load_recipe(recipe, seed=seed), **options | {"plan": Plan.load(options["plan"])})
        return
    began_s, device = time.perf_counter(), joining.process_device(options["device"])
    out = Path(options.pop("out"))
    rank, workers = joining.join_group(device, check_software=False)
    set_threads(workers)
    with guard_job(rank, workers):
        loaded = load_recipe(recipe, seed=options["seed"])
        if kind == "profile":
            files = {"profile.json": profile_recipe(loaded, on_all_ranks=True, **options).to_json()}
        else:
            files = _train_rival(kind, Task(loaded, rank, workers, device), options, began_s)
        for name, text in files.items() if rank == 0 else ():
            write_text(out / name, text + "\n")
        process_group.wait_for_all()


def _train_rival(kind: str, task: Task, options: dict[str, Any], began_s: float) -> dict[str, str]:
    """Trains as torch does, in the loop of ``pipedream train``; returns the files of its run folder: name -> text."""
    plan, recipe = Plan.load(options["plan"]), task.recipe
    task = task._replace(parts=plan.microbatches)
    rival: Any
    if kind == "1f1b":
        captured = capture_recipe(recipe, device=str(task.device))
        rival = OneFOneB(task, [captured.stage(stage.first, stage.last) for stage in plan.stages])
    elif kind == "ddp":
        rival = DataParallel(task, options.get("accumulated", 1), str(plan.choices.sums))
    else:
        rival = PlainLoop(task)
    loop = TrainingLoop(rival, recipe, Console(quiet=True), 1, CheckpointPolicy(open_store(""), 0, 0), began_s)
    begin_times = CoreTimes.now()
    if interrupt := loop.train(options["epochs"] or recipe.epochs, options["minibatches"], 0.0):
        raise interrupt
    summary = loop.list_figures() | {
        "schedule": f"torch, {kind}",
        "recipe": recipe.name,
        "seed": options["seed"],
        "workers": plan.workers,
        "slowness": max(run_folder.gather_slowness(begin_times)) if task.device.type == "cpu" else 1.0,
        "throughput": {"measured_per_s": median(loop.samples_per_s or [rival.samples / loop.train_s])},
        "bubble": {"measured": None},
        "memory": {"of": "the fullest worker", "measured_bytes": rival.measure_peak()},
        "versions": run_folder.list_versions(),
        "interrupted": False,
    }
    numbers, losses = zip(*loop.losses, strict=True)
    rows = json.dumps(list(zip(numbers, rival.sum_over_workers(losses), strict=True)))
    return {"plan.json": plan.to_json(), "losses.json": rows, "summary.json": json.dumps(summary, indent=1)}


if __name__ == "__main__":
    status = 0
    try:
        run_job(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
    except PipelineError as error:
        write_error(f"pipedream: {error}")
        print(f"pipedream: {error}", file=sys.stderr)
        status = BAD_CALL
    sys.stderr.flush()
    # gloo may abort an interpreter that shuts down, and destroying the group sometimes waits for ever for its thread.
    os._exit(status)
