"""A stage that offloads its activations trains to the bit as one that keeps them.

A worker without a GPU refuses to offload; these tests let it, so that all but the copies of a GPU runs.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from built import Built, Watched
from cases import Case, check_same, run
from marks import slow
from torch import nn
from torch.nn import functional as F

import pipedream as pd
from pipedream.core.plan.choices import Choices
from pipedream.core.plan.memory import StageMemory
from pipedream.runtime.session import session
from pipedream.runtime.stage import offload
from pipedream.runtime.stage.block_mover import BlockMover

CASES = [
    Case("mlp", "1f1b", 3, microbatches=4, optimizer="adamw", check=True),
    Case("transformer", "pipedream", 3),
    Case("lstm", "1f1b", 3, microbatches=4, optimizer="adamw"),
    Case("transformer", "zb_h1", 3, microbatches=6),
    Case("cnn", "zbv", 4, microbatches=4),
    Case("transformer", "paci", 3, microbatches=3),
    Case("mlp", "pipemare", 3, microbatches=3),
    Case("mlp", "xpipe", 2, microbatches=2),
    slow(Case("transformer", "pipedream_2bw", 3, microbatches=3)),
    slow(Case("transformer", "interleaved_1f1b", 4, microbatches=4)),
    slow(Case("cnn", "gpipe", 2, microbatches=3)),
    slow(Case("mlp", "pipedream", 3, dtype=torch.float32, autocast=torch.bfloat16)),
    slow(Case("cnn", "pipedream", 2, replicas=(1, 3), evaluate_at=())),
]


@pytest.fixture
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "check_activations", lambda *_: None)
    monkeypatch.setattr(offload, "_MIN_BYTES", 1)


@pytest.mark.usefixtures("on_cpus")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_offloaded_activations_change_no_bit(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    close = offload.Offload.close
    monkeypatch.setattr(offload.Offload, "close", lambda self: (moved.append(self.moved_bytes), close(self)))
    away = run(replace(case, activations="host"))
    assert sum(moved) > 0
    check_same(away, run(case), 0)


def train(activations: str | None, model: nn.Sequential, **options: Any) -> None:
    """Trains a row of modules with the first two in stage 0, and each other one in a stage."""
    names = [tuple(map(str, range(2))), *((str(i),) for i in range(2, len(model)))]
    stages = [pd.Stage(int(stage_names[0]), int(stage_names[-1]) + 1, names=stage_names) for stage_names in names]
    plan = pd.Plan(tuple(stages), tuple(range(len(stages), 0, -1)), pd.Cluster.flat(len(stages)))
    data = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(12)]
    options = {"loss": F.mse_loss, "optimizer": partial(torch.optim.SGD, lr=0.01), "check": False} | options
    with pd.Pipeline(model, plan, activations=activations, **options) as pipeline:
        list(pipeline.train(data))


@pytest.mark.usefixtures("on_cpus")
@pytest.mark.parametrize("waits", [True, False])
def test_what_waits_elsewhere_is_not_in_the_workers_memory(waits: bool) -> None:
    gc.disable()  # what is freed is freed at once, and not by chance
    try:
        watched = Watched()
        train("host" if waits else None, nn.Sequential(nn.Linear(8, 8), watched, *make_linears(6)))
    finally:
        gc.enable()
    # One in its forward, at most one still to be copied, at most one copied back ahead.
    assert watched.most <= 3 if waits else watched.most == 7


@pytest.mark.usefixtures("on_cpus")
def test_only_the_stages_of_the_plan_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    stages, packing = [], offload.Offload.packing

    def watch(self: offload.Offload, stage: int, *arguments: Any) -> Any:
        stages.extend([stage] * self.moves(stage))
        return packing(self, stage, *arguments)

    monkeypatch.setattr(offload.Offload, "packing", watch)
    rows = tuple(pd.Stage(at, at + 1, names=(str(at),), offload=at == 1) for at in range(3))
    plan = pd.Plan(rows, (3, 2, 1), pd.Cluster.flat(3), choices=Choices(activations="host"))
    data = [(torch.randn(4, 8), torch.randn(4, 8))] * 5
    with pd.Pipeline(
        nn.Sequential(*make_linears(3)), plan, loss=F.mse_loss, optimizer=torch.optim.SGD, check=False
    ) as pipeline:
        list(pipeline.train(data))
    assert stages == [1] * 5


def make_linears(count: int) -> list[nn.Linear]:
    return [nn.Linear(8, 8) for _ in range(count)]


@pytest.mark.usefixtures("on_cpus")
def test_a_tensor_that_is_written_after_it_was_saved_is_an_error() -> None:
    with pytest.raises(pd.errors.WorkerError, match="written in place after the operation that saved it"):
        train("host", nn.Sequential(nn.Linear(8, 8), Built(lambda self, x: x.exp().add_(1.0)), *make_linears(2)))


@pytest.mark.usefixtures("on_cpus")
@pytest.mark.parametrize("copy", ["_copy_out", "_copy_back"])
def test_a_copy_that_fails_ends_the_run(copy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory can be pinned")

    monkeypatch.setattr(BlockMover, copy, fail)
    with pytest.raises(pd.errors.WorkerError, match="no memory can be pinned"):
        train("host", nn.Sequential(*make_linears(4)))


DISK = "activations='disk:/x' was asked for, and disks are no longer used; take schedule='roundpipe', recompute='auto'"


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("host", "the workers are CPUs, whose memory is the host's; give none"),
        ("disk:/x", DISK),
        ("ram", "activations='ram' was asked for; give 'host' or 'none'"),
    ],
)
def test_a_place_that_cannot_hold_activations_is_refused(where: str, words: str, tmp_path: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: train(where, nn.Sequential(*make_linears(3))),
        lambda: pd.run(make_recipe, out=tmp_path / "a", activations=where, quiet=True),
        lambda: pd.run(partial(make_recipe, where), out=tmp_path / "b", quiet=True),
    ]
    for call in calls:
        with pytest.raises(pd.errors.PlanError, match=words):
            call()


def test_a_host_with_too_little_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = {"offload": True, "optimizer_bytes": 800, "memory": StageMemory(moved_bytes=2_000_000)}
    stages = tuple(pd.Stage(at, at + 1, names=(str(at),), **moved) for at in range(2))
    choices = Choices(activations="host", optimizer_state="host")
    plan = pd.Plan(stages, (2, 1), pd.Cluster.flat(2), choices=choices)
    for free_bytes, words in (
        (3_999_999, r"offloaded to the memory of one machine and need 4\.00 MB, .* 1\.00 B are missing"),
        (4_000_000, r"optimizer state of 2 stages were .* need 1\.60 kB, 1\.60 kB more than the 0 B that are free"),
        (4_001_600, "the workers are CPUs"),
    ):
        monkeypatch.setattr(pd.pipeline, "host_bytes", lambda size=free_bytes: size)
        with pytest.raises(pd.errors.PlanError, match=words):
            pd.Pipeline(nn.Sequential(*make_linears(2)), plan, loss=F.mse_loss, optimizer=torch.optim.SGD)


def make_recipe(activations: str | None = None) -> pd.Recipe:
    data = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(4)]
    optimizer = partial(torch.optim.SGD, lr=0.01)
    return pd.Recipe(nn.Sequential(*make_linears(3)), F.mse_loss, optimizer, data, activations=activations)


def test_a_plan_of_an_earlier_version_says_what_to_do() -> None:
    stages = pd.Stage(0, 1, names=("0",), offload=True), pd.Stage(1, 2, names=("1",))
    text = pd.Plan(stages, (2, 1), pd.Cluster.flat(2), choices=Choices(activations="host")).to_json()
    cluster = '"memory_bytes": null,\n  "disk_bytes_per_s": 1e9, "disk_s_per_byte": 0.0,'
    older = text.replace('"offload": true', '"offload": 1.0').replace('"offload": false', '"offload": 0.0')
    older = older.replace('"memory_bytes": null,', cluster, 1)
    assert older.count("disk") == 2
    assert pd.Plan.from_json(older) == pd.Plan.from_json(text)
    with pytest.raises(pd.PipelineError, match=DISK):
        pd.Plan.from_json(older.replace('"host"', '"disk:/x"'))
