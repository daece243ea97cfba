"""A rank of a mesh takes the bytes that are predicted."""

import ctypes
import gc
import os
from functools import partial
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from built import Built
from loaders import DrawnAnew
from torch import nn
from torch.nn import functional as F

import pipedream as pd
from pipedream.services.results.memory import tensor_bytes

WIDTH, BATCH = 768, 256
DATA = DrawnAnew(3, lambda: (torch.randn(BATCH, WIDTH), torch.randint(WIDTH, (BATCH,))))
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
NAMES = {"*.up.weight": "d_ff d_model", "*.up.bias": "d_ff", "*.down.weight": "d_model d_ff"}
CUT = pd.Layout("batch:data, d_ff:model", names=NAMES)
SHARDED = pd.Layout("batch:data", shard_weights="data")
CASES: dict[str, tuple[pd.Layout, str, dict[str, Any]]] = {
    "weights that are sharded": (CUT, "model:2", {"schedule": "pipedream"}),
    "sums of microbatches": (CUT, "data:2", {"schedule": "1f1b", "microbatches": 4}),
    "sharded": (SHARDED, "data:2", {"schedule": "pipedream"}),
}
Case = tuple[pd.Layout, pd.Plan, dict[str, Any]]


def _make_model() -> nn.Sequential:
    torch.manual_seed(0)
    forward = lambda module, x: x + module.down(F.gelu(module.up(module.norm(x))))  # noqa: E731
    up, down = partial(nn.Linear, WIDTH, 4 * WIDTH), partial(nn.Linear, 4 * WIDTH, WIDTH)
    return nn.Sequential(*(Built(forward, norm=nn.LayerNorm(WIDTH), up=up(), down=down()) for _ in range(4)))


def _plan(layout: pd.Layout) -> list[Case]:
    x, y = next(iter(DATA))
    cases = [(mesh, how) for of, mesh, how in CASES.values() if of is layout]
    options = {"layout": layout, "meshes": [mesh for mesh, _ in cases], "optimizer": SGD, "warmup": 0, "runs": 1}
    profile = pd.profile(_make_model(), x, loss=lambda output: F.cross_entropy(output, y), **options)
    ranks = pd.Cluster.flat(4)
    return [(layout, pd.plan(profile, ranks, shape="1-1", mesh=mesh, **how), how) for mesh, how in cases]


def _read_status(name: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith(name)))


def _measure_peaks(cases: list[Case]) -> list[tuple[int, int, int]]:
    """Returns, for each case, this rank's predicted peak, what the kernel saw, and what the run reports.

    malloc returns what is freed at once; modules and caches are there after the first minibatches.
    """
    libc, peaks = ctypes.CDLL(None), []
    for number, value in ((-8, 1), (-3, 1 << 16), (-1, 1 << 16)):  # arenas, thresholds of mmap and trim
        libc.mallopt(number, value)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)  # the user's choice, which the runtime leaves alone
    for layout, plan, how in cases:
        with pd.Pipeline(
            _make_model(), plan, layout=layout, loss=F.cross_entropy, optimizer=SGD, check=False, **how
        ) as pipeline:
            list(pipeline.train(DATA, epochs=1))
            (stage, stage_state), *_ = pipeline._session.workers_here.lead.stage_states.items()
            gc.collect()
            libc.malloc_trim(0)
            base = tensor_bytes(stage_state) - _read_status("VmRSS")
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
            list(pipeline.train(DATA, epochs=2))
            measured = base + _read_status("VmHWM")
            peaks.append((plan.stages[stage].peak_bytes, measured, pipeline.timeline().peak_bytes[stage]))
        del pipeline, stage_state
        gc.collect()
    return peaks


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_peaks_are_as_predicted() -> None:
    for peaks in processes.results(_measure_peaks, 4, [*_plan(CUT), *_plan(SHARDED)]):
        for name, (predicted, measured, reported) in zip(CASES, peaks, strict=True):
            assert predicted == pytest.approx(measured, rel=0.1), name
            assert predicted == pytest.approx(reported, rel=0.15), name  # which is read at some moments only
