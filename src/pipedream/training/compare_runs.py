"""The runs of a comparison: each in processes of its own, on this machine or on the hosts of a slow network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipedream.core.errors import BAD_CALL, PipelineError, PlanError, WorkerError
from pipedream.core.plan.plan import Plan
from pipedream.options import TrainingOptions
from pipedream.runtime.failure.launch import launch
from pipedream.slow_links import Network
from pipedream.training.compare_worker import BEGIN_SUFFIX, WorkerJob

_GRACE_S = 10.0  # for the other workers, once one has failed
_PLAN_FILE = "plan.json"  # written into a run folder after planning, before training


class Scales(NamedTuple):
    """Factors of an emulation on all seconds and on all bytes."""

    dilation: float
    byte_scale: float


def count_for_sums(plan: Plan) -> int:
    """Returns how many minibatches a run needs to include a rare sum; 1 if none are rare."""
    period = plan.choices.sums.period
    return (1 + period) * max(plan.replicas) if period > 1 else 1


class RunFailed(Exception):
    """A run ended with an exit status and a message."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.text = text.removeprefix("pipedream: ")
        self._status = status

    @property
    def reason(self) -> str:
        """The message in a line. Raises KeyboardInterrupt if the user stopped it."""
        self._check_interrupt()
        return self.text.rpartition("\n")[2] or f"exit status {self._status}"

    def make_error(self, name: str) -> PipelineError:
        """Returns the error of a run that should not have failed. Raises KeyboardInterrupt if the user stopped it."""
        self._check_interrupt()
        if self._status == BAD_CALL:
            return PlanError(self.text or f"{name} was refused; see above")
        return WorkerError(0, f"variant {name!r}", self.text or f"its run ended with exit status {self._status}")

    def _check_interrupt(self) -> None:
        if self._status in (130, -2):
            raise KeyboardInterrupt


@dataclass
class Runs:
    """Runs workers: local processes, or one on each host of a network.

    Each method returns what the run wrote, and the bytes that all workers sent (None if unknown).
    """

    recipe: str
    options: TrainingOptions
    folder: Path
    network: Network | None
    count: int = 0

    def run_worker(self, kind: str, workers: int, name: str, **details: Any) -> tuple[Path, int | None]:
        """Runs a `WorkerJob` with these details; returns the file it wrote."""
        options, out = self.options, self.folder / make_folder_name(name) / f"{kind}.json"
        fields: dict[str, Any] = {"kind": kind, "recipe": self.recipe, "out": str(out), "seed": options.seed or 0}
        names = ("device", "epochs", "minibatches", "mesh", "layout", "shard_weights")
        fields |= {name: getattr(options, name) for name in names}
        arguments = ["-m", "pipedream.training.compare_worker", json.dumps(asdict(WorkerJob(**(fields | details))))]
        begin_file = out.with_name(_PLAN_FILE) if kind == "pipeline" else out.with_suffix(BEGIN_SUFFIX)
        return out, self._run(workers, arguments, begin_file)

    def train(self, plan: Plan, name: str, accumulated: int = 1) -> tuple[dict[str, Any], int | None]:
        """Runs ``pipedream train``, with `accumulated` of the recipe's batches in a minibatch; returns its summary."""
        options = self.options
        if accumulated > 1:
            plan_file = plan.save((self.folder / make_folder_name(name)).with_suffix(".plan.json"))
            details: dict[str, Any] = {"accumulated": accumulated, "plan": str(plan_file)}
            if options.minibatches is not None:
                details["minibatches"] = max(2, options.minibatches // accumulated, count_for_sums(plan))
            out, sent_bytes = self.run_worker("pipeline", plan.ranks, name, **details)
            return json.loads(out.with_name("summary.json").read_text(encoding="utf-8")), sent_bytes
        flags = ["--workers", plan.ranks, "--seed", options.seed or 0, "--device", options.device]
        flags += ["--checkpoint-every", 0]
        if options.minibatches is not None:
            flags += ["--minibatches", max(options.minibatches, count_for_sums(plan))]
        for option in ("layout", "shard_weights", "epochs"):
            if (value := getattr(options, option)) is not None:
                flags += [f"--{option.replace('_', '-')}", value]
        return self._run_command(plan, name, plan.ranks, _PLAN_FILE, "train", self.recipe, *flags, "--plan")

    def emulate(self, plan: Plan, name: str, scales: Scales, minibatches: int) -> tuple[dict[str, Any], int | None]:
        """Runs ``pipedream emulate``; returns its summary, without the scales."""
        dilation, byte_scale = scales
        flags = ["--dilation", dilation, "--byte-scale", byte_scale, "--minibatches", minibatches]
        summary, sent_bytes = self._run_command(plan, name, plan.workers, ".lock", "emulate", *flags)
        rates = {key: dilation * summary["throughput"][key] for key in ("measured_per_s", "predicted_per_s")}
        sent_bytes = None if sent_bytes is None else round(sent_bytes / byte_scale)
        return summary | {"throughput": rates, "stages": (), "seconds_to_target": None}, sent_bytes

    def _run_command(
        self, plan: Plan, name: str, workers: int, begin_name: str, *words: Any
    ) -> tuple[dict[str, Any], int | None]:
        """Runs a command on a plan, appending the plan's file; returns the summary of its run folder."""
        folder = self.folder / make_folder_name(name)
        plan_file = plan.save(folder.with_suffix(".plan.json"))
        arguments = ["-m", "pipedream", *map(str, words), str(plan_file), "--json", "--out", str(folder)]
        sent_bytes = self._run(workers, arguments, folder / begin_name)
        return json.loads((folder / "summary.json").read_text(encoding="utf-8")), sent_bytes

    def _run(self, workers: int, arguments: Sequence[str], begin_file: Path) -> int | None:
        """Runs ``python ARGUMENTS`` on each worker; returns the bytes that they sent.

        Args:
            begin_file: appears when training begins; bytes sent before that are not counted.
        """
        self.count += 1
        begin_file.parent.mkdir(parents=True, exist_ok=True)
        if self.network is not None and workers > 1:
            return self._run_on_hosts(self.network, workers, arguments, begin_file)
        if status := launch(workers, arguments, silent=True):
            raise RunFailed(status, "")
        return 0 if workers == 1 else None

    def _run_on_hosts(self, network: Network, workers: int, arguments: Sequence[str], begin_file: Path) -> int:
        processes: list[subprocess.Popen[bytes]] = []
        outputs = [self.folder / f"{begin_file.parent.name}.rank{rank}.txt" for rank in range(workers)]
        sent_before: int | None = None

        def watch() -> None:
            nonlocal sent_before
            if sent_before is None and begin_file.exists():
                sent_before = network.sent_bytes()

        try:
            for rank, (host, output) in enumerate(zip(network.hosts, outputs, strict=False)):
                variables = network.variables(rank, port=20000 + self.count) | {"WORLD_SIZE": str(workers)}
                with output.open("wb") as file:
                    processes.append(
                        subprocess.Popen(
                            host.inside(sys.executable, *arguments),
                            env=os.environ | variables,
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.DEVNULL,
                            stderr=file,
                        )
                    )
            statuses = _wait_for_all(processes, watch)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if any(statuses):
            failed_rank = next((i for i, status in enumerate(statuses) if status == BAD_CALL), 0)
            texts = [output.read_text(encoding="utf-8", errors="replace").strip() for output in outputs]
            raise RunFailed(statuses[failed_rank] or 1, texts[failed_rank] or "\n".join(filter(None, texts)))
        for output in outputs:
            if not output.stat().st_size:
                output.unlink()
        return network.sent_bytes() - (sent_before or 0)


def _wait_for_all(processes: Sequence[subprocess.Popen[bytes]], watch: Callable[[], None]) -> list[int]:
    """Waits for all processes and returns their statuses; `_GRACE_S` after one fails, kills the others."""
    failed_at_s = None
    while any(process.poll() is None for process in processes):
        if failed_at_s is None and any(process.returncode for process in processes):
            failed_at_s = time.monotonic()
        if failed_at_s is not None and time.monotonic() - failed_at_s > _GRACE_S:
            for process in processes:
                if process.poll() is None:
                    process.kill()
        watch()
        time.sleep(0.02)
    return [process.returncode for process in processes]


def make_folder_name(name: str) -> str:
    """Returns the name of a variant's folder."""
    return "".join(letter if letter.isalnum() else "_" for letter in name).replace("__", "_")


def count_cores() -> int:
    """Returns the cores that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def limit_threads(workers: int) -> Iterator[None]:
    """Context in which a lone worker has only its share of the cores."""
    previous = os.environ.get("OMP_NUM_THREADS")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    try:
        yield
    finally:
        if previous is None:
            os.environ.pop("OMP_NUM_THREADS", None)
