"""Checks over several processes that share one card: over NCCL, or through the memory of this machine.

NCCL refuses two ranks on one card of one host; with an NCCL_HOSTID of its own, each takes itself for a host, and they
talk over sockets of the loopback interface.

python rank_checks.py JOB    # is one of the processes: JSON, see `Job`; started with RANK, WORLD_SIZE and the rest
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
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import loops
import torch
import torch.distributed as dist
from findings import Finding, need_card
from torch import Tensor, nn

import pipedream as pd
from pipedream.extensions.shared_memory import pair_memory as shared_memory
from pipedream.runtime.comm import connections

sys.path.append(str(Path(__file__).parents[1]))
from scaffold import local_world, stop_processes

MICROBATCHES = 4
PATIENCE_S = 110.0
GONE_S = 15.0
"""How long the ranks may live after one of them has failed."""
NCCL_ON_ONE_CARD = {
    "NCCL_DEBUG": "WARN",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # from NCCL 2.31 on it allows what NCCL_HOSTID does before
}
NAMES = ("d_ff d_model", "d_model d_ff")
"""Dimensions of the weights of linear layers, by turns."""


@dataclass(frozen=True)
class Case:
    """What a group of ranks trains.

    Attributes:
        stages: of the plan; two workers may have four.
        replicas: of the first stage.
        waits: for the whole device, at random minibatches.
        over: 'nccl', 'memory' that the ranks share, or 'gloo', by pinned memory as between machines.
    """

    name: str
    ranks: int
    method: str = "1f1b"
    stages: int = 2
    replicas: int = 1
    mesh: str = ""
    dropout: float = 0.0
    waits: int = 0
    over: str = "nccl"

    def count_minibatches(self, scale: loops.Scale) -> tuple[int, int]:
        """Returns those of two streams, which both end with a drain."""
        if self.name == "large":
            return 1, 1
        if self.over == "nccl":
            return scale.minibatches // 2, scale.minibatches // 2
        count = scale.many_minibatches // 4
        return count // 4, count - count // 4


CASES = (
    Case("1f1b", 2),
    Case("zb_h1", 2, "zb_h1"),
    Case("pipedream", 2, "pipedream"),
    Case("pipedream_2bw", 2, "pipedream_2bw"),
    Case("interleaved_1f1b", 2, "interleaved_1f1b", stages=4),
    Case("chimera", 2, "chimera"),
    Case("waits", 2, waits=50),
    Case("types", 2),
    Case("large", 2),
    Case("mesh", 2, mesh="model:2", stages=1),
    Case("replicas", 3, "pipedream", replicas=2),
    Case("meshes", 4, mesh="model:2", dropout=0.1),
)
PROCESSES = (
    Case("2_processes", 2, dropout=0.1, waits=50, over="memory"),
    Case("2_processes_over_gloo", 2, dropout=0.1, waits=50, over="gloo"),
    Case("4_processes", 4, stages=4, dropout=0.1, over="memory"),
)


@dataclass(frozen=True)
class Job:
    """What each process does: its cases one after the other, or a failure.

    Attributes:
        folder: for what they write.
        fails: '', 'exception' or 'killed'.
        bound: the world is NCCL's alone, with a device_id.
    """

    folder: str
    device: str
    scale: dict[str, Any]
    cases: list[dict[str, Any]]
    fails: str = ""
    bound: bool = False


class Spectrum(nn.Module):
    """Gives complex and short numbers to the next stage."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return torch.fft.rfft(y), (100 * y).detach().to(torch.int16)


class Sum(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 10)

    def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:
        spectrum, numbers = parts
        return self.linear(torch.fft.irfft(spectrum, n=numbers.shape[-1]) + 0.01 * numbers)


class Noise(nn.Module):
    """Draws for a tensor that no rank shards."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.rand_like(x) if self.training else x


class Fails(nn.Module):
    """Fails at rank 1, in the 10th forward."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.device.type != "meta":
            self.calls += 1
            if self.calls == 10 and os.environ.get("RANK") == "1":
                Path(os.environ["FAILS_FILE"]).touch()
                raise ArithmeticError("the planted failure")
        return x


def links(device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """Ranks over NCCL against one process, and the end of all ranks after a failure of one."""
    if device.type == "cuda":
        version = ".".join(map(str, torch.cuda.nccl.version()))
        yield Finding("nccl_version", float(".".join(version.split(".")[:2])), note=version)
    for ranks in sorted({case.ranks for case in CASES}):
        yield from _run([case for case in CASES if case.ranks == ranks], device, scale)
    for failure in ("exception", "killed"):
        yield _fail(CASES[0], failure, device, scale)


def processes(device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """Two and four processes against one, their memory and waits."""
    for case in PROCESSES:
        yield from _run([case], device, scale)


def death(device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """One of two processes is killed: when all are gone, and what stays of the card's memory."""
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    yield _fail(PROCESSES[0], "killed", device, scale)
    need_card(device)
    missing = free_bytes - torch.cuda.mem_get_info(device)[0]
    yield Finding("missing_bytes_after_death", missing, "<=", 64 << 20)


def host_of_processes(device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """Seconds of a microbatch at a stage of two processes, with layers of no work."""
    case = Case("host", 2, over="memory")
    small = replace(scale, width=8, samples=32, many_minibatches=4 * max(8, 2 * scale.repeats))
    with tempfile.TemporaryDirectory() as folder:
        wait_for_all(_start([case], folder, device, small), PATIENCE_S)
        answers, missing = _read_answers(case, Path(folder))
    if missing:
        raise RuntimeError(missing.note)
    us = max(answer["minibatch_s"] for answer in answers) / MICROBATCHES * 1e6
    yield Finding("two_processes_us_of_a_microbatch", us, note="the card takes turns between its processes")


def _run(cases: list[Case], device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    """Trains cases of as many ranks, one after the other, and compares each with one process."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = wait_for_all(_start(cases, folder, device, scale), PATIENCE_S)
        yield Finding(f"{cases[0].ranks}_ranks_s" if len(cases) > 1 else f"{cases[0].name}_s", seconds)
        for case in cases:
            yield from _compare(case, Path(folder), device, scale)


def _read_answers(case: Case, folder: Path) -> tuple[list[dict[str, Any]], Finding | None]:
    """Returns what each rank wrote, or what the first one printed that did not write."""
    files = [folder / f"{case.name}.{rank}.json" for rank in range(case.ranks)]
    missing = [rank for rank, file in enumerate(files) if not file.exists()]
    if missing:
        printed = (folder / f"{missing[0]}.said").read_text(encoding="utf-8")
        return [], Finding(f"{case.name}_missing_ranks", len(missing), "==", 0, printed[-2000:])
    return [json.loads(file.read_text(encoding="utf-8")) for file in files], None


def _compare(case: Case, folder: Path, device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    answers, missing = _read_answers(case, folder)
    if missing:
        yield missing
        return
    growth = max(abs(answer["at_drains"][1] - answer["at_drains"][0]) for answer in answers)
    seconds = [max(answer[key] for answer in answers) for key in ("connect_s", "train_s")]
    note = "connected in {:.1f} s, trained in {:.1f} s".format(*seconds)
    yield Finding(f"{case.name}_growth_bytes", growth, "==", 0, note)
    if case.name == "large" and device.type == "cuda":
        reserved = max(answer["reserved_bytes"] for answer in answers)
        yield Finding("large_reserved_bytes", reserved, "<=", 1 << 30, "64 microbatches of 32 MiB")
    state = loops.Trained(state=torch.load(folder / f"{case.name}.pt", weights_only=True))
    with loops.deterministic():
        expected = loops.Trained(state=_train(case, device, scale, {}, alone=True))
    if case.mesh:  # sums of a product that is sharded are rounded otherwise
        yield Finding(f"{case.name}_distance", loops.distance(state, expected), "<=", 1e-5)
    else:
        yield Finding(f"{case.name}_differing_weights", loops.differing_bits(state, expected), "==", 0)
    if case.over != "nccl" and case.waits:
        waits_s = [wait_s for answer in answers for wait_s in answer["waits_s"]]
        longest = max(waits_s, default=0.0)
        yield Finding(f"{case.name}_longest_wait_for_the_device_s", longest, "<=", 1.0, f"of {len(waits_s)}")


def _fail(case: Case, failure: str, device: torch.device, scale: loops.Scale) -> Finding:
    """Returns how long the ranks live after one has failed."""
    with tempfile.TemporaryDirectory() as folder:
        started = _start([case], folder, device, scale, failure)
        file, limit = Path(folder) / "fails", time.monotonic() + PATIENCE_S / 2
        while not file.exists() and time.monotonic() < limit and started[1].poll() is None:
            time.sleep(0.05)
        if failure == "killed":
            started[1].send_signal(signal.SIGKILL)
        seconds = wait_for_all(started, 2 * GONE_S) if file.exists() else float("inf")
        codes = [process.wait() for process in started]
        printed = "".join(path.read_text(encoding="utf-8")[-1000:] for path in sorted(Path(folder).glob("*.said")))
    name = f"{failure}_seconds_until_all_are_gone"
    if 0 in codes:
        return Finding(name, float("inf"), "<=", GONE_S, f"ended with the statuses {codes}: {printed}")
    return Finding(name, seconds, "<=", GONE_S, "" if seconds <= GONE_S else printed)


def _start(
    cases: list[Case], folder: str, device: torch.device, scale: loops.Scale, fails: str = ""
) -> list[subprocess.Popen[str]]:
    ranks, on_card = cases[0].ranks, device.type == "cuda" and cases[0].over == "nccl"

    def choose_variables(rank: int) -> dict[str, str]:
        variables = {"FAILS_FILE": str(Path(folder) / "fails")}
        return variables | NCCL_ON_ONE_CARD | {"NCCL_HOSTID": f"rank{rank}"} if on_card else variables

    job = Job(folder, str(device), asdict(scale), list(map(asdict, cases)), fails, bound=ranks == 3)
    return start_ranks(__file__, job, ranks, choose_variables)


def start_ranks(
    program: str, job: Job, ranks: int, variables: Callable[[int], dict[str, str]] = lambda rank: {}
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


# -- what each process runs ---------------------------------------------------------------------------


def _model(case: Case, scale: loops.Scale, fails: bool = False) -> nn.Module:
    torch.manual_seed(loops.SEED)
    if case.name == "types":
        return nn.Sequential(Spectrum(scale.width), Sum(scale.width))
    layers = 2 if case.name == "large" else 8
    model = loops.dense(scale.width, layers, case.dropout)
    if case.name == "meshes":
        model = nn.Sequential(*model[:5], Noise(), *model[5:])
    return nn.Sequential(*model[:-1], Fails(), model[-1]) if fails else model


def _batches(case: Case, scale: loops.Scale) -> list[tuple[Tensor, Tensor]]:
    if case.name != "large":
        return loops.batches_of(scale.width, scale.samples, 4)
    samples = 64 * (32 * 2**20 // 4 if scale.width > 8 else 64) // scale.width
    return [(torch.ones(samples, scale.width), torch.zeros(samples, dtype=torch.int64))]


def _pipeline(case: Case, device: torch.device, scale: loops.Scale, alone: bool, fails: bool = False) -> pd.Pipeline:
    model = _model(case, scale, fails)
    replicas = (case.replicas, *[1] * (case.stages - 1))
    x = _batches(case, scale)[0][0][:8]
    plan = loops.plan_of(model, x, case.stages, case.method, replicas=replicas if case.replicas > 1 else ())
    options: dict[str, Any] = {}
    if case.mesh and not alone:
        linear = [name for name, parameter in model.named_parameters() if parameter.dim() == 2]
        names = {weight: NAMES[at % 2] for at, weight in enumerate(linear)}
        names |= {weight.replace("weight", "bias"): "d_ff" for weight in linear[::2]}
        plan, options["layout"] = plan.with_mesh(case.mesh), pd.Layout("d_ff:model", names=names)
    parts = 64 if case.name == "large" else None if case.method == "pipedream" else MICROBATCHES
    options |= {"schedule": case.method, "microbatches": parts, "sample": x, "check": case.name != "large"}
    return loops.make_pipeline(model, plan, device, **options)


def _train(
    case: Case, device: torch.device, scale: loops.Scale, answer: dict[str, Any], *, alone: bool
) -> dict[str, Tensor]:
    """Trains in two streams, so that there are two drains; returns the weights."""
    batches, draws = _batches(case, scale), random.Random(0 if alone else dist.get_rank())
    began_s = time.perf_counter()
    answer |= {"at_drains": [], "waits_s": []}
    with _pipeline(case, device, scale, alone) as pipeline:
        connected_s = time.perf_counter()
        for minibatches in case.count_minibatches(scale):
            stream_s = time.perf_counter()
            for _ in pipeline.train([batches[k % len(batches)] for k in range(minibatches)]):
                if len(answer["waits_s"]) < case.waits and draws.random() < 0.5:
                    since_s = time.perf_counter()
                    loops.wait_for(device)  # while receives may be posted
                    answer["waits_s"].append(time.perf_counter() - since_s)
            loops.wait_for(device)
            answer["minibatch_s"] = (time.perf_counter() - stream_s) / minibatches
            if not alone:
                dist.barrier()
            answer["at_drains"].append(loops.allocated_bytes(device))
        answer |= {"connect_s": connected_s - began_s, "train_s": time.perf_counter() - connected_s}
        if device.type == "cuda":
            answer["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        return loops.copy_state(pipeline)


def run_rank(job: Job) -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # sent when the time is over
    device, scale = torch.device(job.device), loops.Scale(**job.scale)
    cases = [Case(**case) for case in job.cases]
    if cases[0].over == "gloo":
        shared_memory.is_supported = lambda: False
    with ExitStack() as stack:
        if device.type == "cuda" and cases[0].over == "nccl":
            torch.cuda.set_device(device)
            stack.enter_context(mock.patch.object(connections, "has_nccl", return_value=True))
            names = {"backend": "nccl", "device_id": device} if job.bound else {"backend": "cpu:gloo,cuda:nccl"}
            dist.init_process_group(**names)
        else:
            dist.init_process_group("gloo")
        rank, folder = dist.get_rank(), Path(job.folder)
        stack.enter_context(loops.deterministic())
        if job.fails:
            _train_until_failure(job, cases[0], device, scale, rank)
        for case in cases:
            answer: dict[str, Any] = {}
            torch.manual_seed(rank)  # nothing may depend on it
            state = _train(case, device, scale, answer, alone=False)
            if rank == 0:
                torch.save(state, folder / f"{case.name}.pt")
            (folder / f"{case.name}.{rank}.json").write_text(json.dumps(answer), encoding="utf-8")
        dist.destroy_process_group()


def _train_until_failure(job: Job, case: Case, device: torch.device, scale: loops.Scale, rank: int) -> None:
    batches = _batches(case, scale)
    with _pipeline(case, device, scale, alone=False, fails=job.fails == "exception") as pipeline:
        for done in pipeline.train(batches[k % len(batches)] for k in range(1_000_000)):
            if job.fails == "killed" and rank == 1 and done.number == 3:
                Path(os.environ["FAILS_FILE"]).touch()


if __name__ == "__main__":
    run_rank(Job(**json.loads(sys.argv[1])))
