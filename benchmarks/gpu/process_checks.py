"""Checks over several processes on one card; their tensors go through the memory of this machine, or over gloo.

python process_checks.py JOB    # is one of them: JSON, see `Job`; started with RANK, WORLD_SIZE and the rest
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import loops
import torch
import torch.distributed as dist
from findings import Finding, need_card

from pipedream.runtime.comm import shared_memory

sys.path.append(str(Path(__file__).parents[1]))
from scaffold import local_world, stop_processes

PATIENCE_S = 110.0


@dataclass(frozen=True)
class Job:
    """What the processes loops.train.

    Attributes:
        folder: for what they write.
        waits: for the whole device, at random minibatches.
        shares_memory: messages go through shared memory, else through pinned memory and gloo as between machines.
    """

    folder: str
    device: str
    stages: int
    width: int
    samples: int
    minibatches: int
    method: str = "1f1b"
    microbatches: int = 4
    dropout: float = 0.0
    waits: int = 0
    shares_memory: bool = True
    do: str = "train"


def start_ranks(
    program: str, job: Any, ranks: int, variables: Callable[[int], dict[str, str]] = lambda rank: {}
) -> list[subprocess.Popen[str]]:
    """Starts a program with a job for each rank; what they print goes to ``<rank>.said`` in the job's folder."""
    started = []
    for rank, world in enumerate(local_world(ranks)):
        with (Path(job.folder) / f"{rank}.said").open("w", encoding="utf-8") as printed:
            started.append(
                subprocess.Popen(
                    [sys.executable, program, json.dumps(asdict(job))],
                    env=os.environ | world | {"LOCAL_RANK": "0"} | variables(rank),
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
    return started


def start_job(job: Job) -> list[subprocess.Popen[str]]:
    return start_ranks(__file__, job, job.stages)


def wait_for_all(started: list[subprocess.Popen[str]], seconds: float) -> float:
    """Returns the seconds until the last has ended; those that have not by then are killed."""
    began = time.monotonic()
    try:
        for process in started:
            process.wait(max(0.1, began + seconds - time.monotonic()))
        return time.monotonic() - began
    except subprocess.TimeoutExpired:
        for process in started:
            process.send_signal(signal.SIGUSR1)  # those that still run print where they are
        time.sleep(1.0)
        return float("inf")
    finally:
        stop_processes(started)


def run_job(job: Job) -> list[dict[str, list[float]]]:
    """Returns what each rank wrote. Raises RuntimeError if one failed, whose output goes to stderr."""
    started = start_job(job)
    wait_for_all(started, PATIENCE_S)
    for rank, process in enumerate(started):
        if process.returncode:
            for index in range(job.stages):
                printed = (Path(job.folder) / f"{index}.said").read_text(encoding="utf-8")
                print(f"rank {index} of {job.stages} printed:\n{printed}", file=sys.stderr)
            raise RuntimeError(f"rank {rank} of {job.stages} ended with status {process.returncode}: {printed[-600:]}")
    return [json.loads((Path(job.folder) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(job.stages)]


def processes(device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """Two and four processes against one, their memory and waits."""
    for stages, shares_memory in ((2, True), (2, False), (4, True)):
        with tempfile.TemporaryDirectory() as folder:
            minibatches = scale.many_minibatches // 4
            job = Job(
                folder, str(device), stages, scale.width, scale.samples, minibatches, dropout=0.1,
                waits=50 if stages == 2 else 0, shares_memory=shares_memory,
            )  # fmt: skip
            answers = run_job(job)
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
            model = loops.dense(scale.width, dropout=0.1)
            few = loops.batches_of(scale.width, scale.samples, 4)
            plan = loops.plan_of(model, few[0][0], stages)
            # The same two streams, of which each begins with the first batch.
            counts = (minibatches // 4, minibatches - minibatches // 4)
            batches = [few[k % len(few)] for count in counts for k in range(count)]
            with loops.deterministic():
                alone = loops.train(model, plan, batches, device, schedule="1f1b", microbatches=job.microbatches)
            name = f"{stages}_processes" if shares_memory else f"{stages}_processes_over_gloo"
            yield Finding(f"{name}_differing_weights", loops.differing_bits(loops.Trained(state=state), alone), "==", 0)
            growth = max(abs(answer["at_drains"][1] - answer["at_drains"][0]) for answer in answers)
            yield Finding(f"{name}_growth_bytes", growth, "==", 0, f"{minibatches} minibatches")
            if job.waits:
                longest = max((wait for answer in answers for wait in answer["waits_s"]), default=0.0)
                count = sum(len(answer["waits_s"]) for answer in answers)
                yield Finding(f"{name}_longest_wait_for_the_device_s", longest, "<=", 1.0, f"of {count}")


def death(device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """One of two processes is killed: when all are gone, and what stays of the card's memory."""
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    with tempfile.TemporaryDirectory() as folder:
        job = Job(folder, str(device), 2, scale.width, scale.samples, 1_000_000)
        started = start_job(job)
        limit = time.monotonic() + PATIENCE_S
        while not (Path(folder) / "1.started").exists() and time.monotonic() < limit and started[1].poll() is None:
            time.sleep(0.1)
        started[1].send_signal(signal.SIGKILL)
        seconds = wait_for_all(started, 30)
        printed = (Path(folder) / "0.said").read_text(encoding="utf-8")
    lines = printed.strip().splitlines()
    yield Finding("seconds_until_all_are_gone", seconds, "<=", 15, lines[-1][:300] if lines else "")
    need_card(device)
    missing = free_bytes - torch.cuda.mem_get_info(device)[0]
    yield Finding("missing_bytes_after_death", missing, "<=", 64 << 20)


def host_of_processes(device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """Seconds of a microbatch at a stage of two processes, with layers of no work."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(folder, str(device), 2, 8, 32, max(8, 2 * scale.repeats), microbatches=8)
        answers = run_job(job)
    us = max(answer["seconds"] for answer in answers) / job.microbatches * 1e6
    yield Finding("two_processes_us_of_a_microbatch", us, note="the card takes turns between its processes")


# -- one of the processes ----------------------------------------------------------------------------


def train_as_rank(job: dict[str, Any]) -> None:
    """Trains in two streams, so that there are two drains; the second is timed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # a card cannot be shared over NCCL
    rank, device = dist.get_rank(), torch.device(job["device"])
    folder = Path(job["folder"])
    model = loops.dense(job["width"], dropout=job["dropout"])
    few = loops.batches_of(job["width"], job["samples"], 4)
    plan = loops.plan_of(model, few[0][0], job["stages"], job["method"])
    if not job["shares_memory"]:
        shared_memory.is_supported = lambda: False
    answer: dict[str, Any] = {"at_drains": [], "waits_s": []}
    draws = random.Random(rank)
    with (
        loops.deterministic(),
        loops.make_pipeline(model, plan, device, schedule=job["method"], microbatches=job["microbatches"]) as pipeline,
    ):
        for minibatches in (job["minibatches"] // 4, job["minibatches"] - job["minibatches"] // 4):
            loops.wait_for(device)
            began = time.perf_counter()
            for done in pipeline.train([few[k % len(few)] for k in range(minibatches)]):
                if done.number == 1:
                    (folder / f"{rank}.started").touch()
                if len(answer["waits_s"]) < job["waits"] and draws.random() < 0.5:
                    since = time.perf_counter()
                    loops.wait_for(device)  # while receives may be posted
                    answer["waits_s"].append(time.perf_counter() - since)
            loops.wait_for(device)
            answer["seconds"] = (time.perf_counter() - began) / minibatches
            dist.barrier()
            answer["at_drains"].append(loops.allocated_bytes(device))
        state = loops.copy_state(pipeline)
    if rank == 0:
        torch.save(state, folder / "state.pt")
    (folder / f"{rank}.json").write_text(json.dumps(answer), encoding="utf-8")
    dist.destroy_process_group()


def share_card_over_nccl(job: dict[str, Any]) -> None:
    """Adds one number up over NCCL; it may refuse two ranks on one card."""
    device = torch.device(job["device"])
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    tensor = torch.ones(1, device=device)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    print(f"the sum is {tensor.item():g}")
    os._exit(0)  # leaving the group may wait for the other rank


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    request = json.loads(sys.argv[1])
    {"train": train_as_rank, "share_card_over_nccl": share_card_over_nccl}[request["do"]](request)
