"""Checks links, sums and meshes over NCCL between several processes that share one card.

NCCL refuses two ranks on one card of one host; with an NCCL_HOSTID of its own, each takes itself for a host, and they
talk over sockets of the loopback interface.

python links_check.py JOB    # is one of the processes: JSON, see `Job`
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import loops
import torch
import torch.distributed as dist
from findings import Finding
from process_checks import start_ranks, wait_for_all
from torch import Tensor, nn

import pipedream as pd
from pipedream.runtime.comm import connections

MICROBATCHES = 4
PATIENCE_S = 90.0
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
        waits: for the whole device, after each minibatch.
    """

    name: str
    ranks: int
    method: str = "1f1b"
    stages: int = 2
    replicas: int = 1
    mesh: str = ""
    dropout: float = 0.0
    waits: bool = False


CASES = (
    Case("1f1b", 2),
    Case("zb_h1", 2, "zb_h1"),
    Case("pipedream", 2, "pipedream"),
    Case("pipedream_2bw", 2, "pipedream_2bw"),
    Case("interleaved_1f1b", 2, "interleaved_1f1b", stages=4),
    Case("chimera", 2, "chimera"),
    Case("waits", 2, waits=True),
    Case("types", 2),
    Case("large", 2),
    Case("mesh", 2, mesh="model:2", stages=1),
    Case("replicas", 3, "pipedream", replicas=2),
    Case("meshes", 4, mesh="model:2", dropout=0.1),
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
    cases: list[str]
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
        cases = [case for case in CASES if case.ranks == ranks]
        with tempfile.TemporaryDirectory() as folder:
            job = Job(folder, str(device), asdict(scale), [case.name for case in cases], bound=ranks == 3)
            began = time.monotonic()
            wait_for_all(_start(job, ranks), PATIENCE_S)
            yield Finding(f"{ranks}_ranks_s", time.monotonic() - began)
            for case in cases:
                yield from _compare(case, Path(folder), device, scale)
    for failure in ("exception", "killed"):
        yield _fail(failure, device, scale)


def _compare(case: Case, folder: Path, device: torch.device, scale: loops.Scale) -> Iterator[Finding]:
    files = [folder / f"{case.name}.{rank}.json" for rank in range(case.ranks)]
    missing = [rank for rank, file in enumerate(files) if not file.exists()]
    if missing:
        printed = (folder / f"{missing[0]}.said").read_text(encoding="utf-8")
        yield Finding(f"{case.name}_missing_ranks", len(missing), "==", 0, printed[-2000:])
        return
    answers = [json.loads(file.read_text(encoding="utf-8")) for file in files]
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


def _fail(failure: str, device: torch.device, scale: loops.Scale) -> Finding:
    """Returns how long the ranks live after one has failed."""
    with tempfile.TemporaryDirectory() as folder:
        started = _start(Job(folder, str(device), asdict(scale), ["1f1b"], fails=failure), 2)
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


def _start(job: Job, ranks: int) -> list[subprocess.Popen[str]]:
    def choose_variables(rank: int) -> dict[str, str]:
        variables = {"FAILS_FILE": str(Path(job.folder) / "fails")}
        return variables if job.device == "cpu" else variables | NCCL_ON_ONE_CARD | {"NCCL_HOSTID": f"rank{rank}"}

    return start_ranks(__file__, job, ranks, choose_variables)


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
    batches = _batches(case, scale)
    counts = (1, 1) if case.name == "large" else (scale.minibatches // 2, scale.minibatches // 2)
    answer["at_drains"], since = [], time.perf_counter()
    with _pipeline(case, device, scale, alone) as pipeline:
        answer["connect_s"], since = time.perf_counter() - since, time.perf_counter()
        for minibatches in counts:
            for _ in pipeline.train([batches[k % len(batches)] for k in range(minibatches)]):
                if case.waits:
                    loops.wait_for(device)
            loops.wait_for(device)
            if not alone:
                dist.barrier()
            answer["at_drains"].append(loops.allocated_bytes(device))
        answer["train_s"] = time.perf_counter() - since
        if device.type == "cuda":
            answer["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        return loops.copy_state(pipeline)


def run_rank(job: Job) -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # sent when the time is over
    device, scale = torch.device(job.device), loops.Scale(**job.scale)
    with ExitStack() as stack:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            stack.enter_context(mock.patch.object(connections, "has_nccl", return_value=True))
            names = {"backend": "nccl", "device_id": device} if job.bound else {"backend": "cpu:gloo,cuda:nccl"}
            dist.init_process_group(**names)
        else:
            dist.init_process_group("gloo")
        rank, folder = dist.get_rank(), Path(job.folder)
        stack.enter_context(loops.deterministic())
        cases = [case for case in CASES if case.name in job.cases]
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
