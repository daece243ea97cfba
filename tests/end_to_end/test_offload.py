"""A stage that offloads its activations to disk trains to the bit as one that keeps them."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import time
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mishaps
import processes
import pytest
import torch
import zoo
from cases import Case, check_same, run
from marks import thinned
from torch import Tensor, nn
from torch.nn import functional as F

import pipedream as pd
from pipedream.core.errors import PlanError, WorkerError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.memory import StageMemory
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.stage import Stage
from pipedream.runtime.stage import block_mover, offload, offload_place
from pipedream.runtime.stage.block_mover import BlockFile

CASES = [
    *(Case(a, "1f1b", 3, microbatches=4, optimizer="adamw", check=True) for a in zoo.NAMES),
    Case("transformer", "pipedream", 3),
    Case("transformer", "pipedream_2bw", 3, microbatches=3),
    Case("transformer", "zb_h1", 3, microbatches=6),
    Case("transformer", "interleaved_1f1b", 4, microbatches=4),
    Case("cnn", "zbv", 4, microbatches=4),
    Case("mlp", "v_half", 4, microbatches=4),
    Case("transformer", "paci", 3, microbatches=3),
    Case("cnn", "gpipe", 2, microbatches=3),
    Case("mlp", "pipemare", 3, microbatches=3),
    Case("mlp", "pipedream", 3, dtype=torch.float32, autocast=torch.bfloat16),
    Case("mlp", "xpipe", 2, microbatches=2),
    Case("cnn", "pipedream", 2, replicas=(1, 3), drain_at=-1),
]


@pytest.fixture(autouse=True)
def everything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_MIN_BYTES", 1)


@pytest.mark.parametrize("is_slow", [False, pytest.param(True, id="slow")])
@pytest.mark.parametrize("case", thinned(pytest.param(case, id=str(case)) for case in CASES))
def test_activations_on_disk_change_no_bit(
    case: Case, is_slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    if is_slow:
        slow_down(monkeypatch)
    close = offload.Offload.close
    monkeypatch.setattr(offload.Offload, "close", lambda self: (moved.append(self.moved_bytes), close(self)))
    away = run(replace(case, activations=f"disk:{tmp_path}"))
    assert sum(moved) > 0
    assert not os.listdir(tmp_path), "files have no names"
    check_same(away, run(case), 0)


def slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets threads move blocks, and passes now and then."""
    monkeypatch.setattr(block_mover, "_MIN_SLOW_S", 0.0)
    monkeypatch.setattr(block_mover, "_MIN_BYTES_PER_S", float("inf"))
    monkeypatch.setattr(block_mover, "_THREADED_BLOCKS", 20)


class Watched(nn.Module):
    """Counts its results that are in memory at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[Any] = []
        self.most = 0

    def forward(self, x: Tensor) -> Tensor:
        output = torch.exp(x)  # keeps its result
        self.alive.append(weakref.ref(output.untyped_storage()))
        self.most = max(self.most, sum(ref() is not None for ref in self.alive))
        return output * 2.0


def train(activations: str | None, model: nn.Sequential, **options: Any) -> None:
    """Trains a row of modules with the first two in stage 0, and each other one in a stage."""
    names = [tuple(map(str, range(2))), *((str(i),) for i in range(2, len(model)))]
    stages = [Stage(int(stage_names[0]), int(stage_names[-1]) + 1, names=stage_names) for stage_names in names]
    plan = Plan(tuple(stages), tuple(range(len(stages), 0, -1)), Cluster.flat(len(stages)))
    data = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(12)]
    options = {"loss": F.mse_loss, "optimizer": partial(torch.optim.SGD, lr=0.01), "check": False} | options
    with pd.Pipeline(model, plan, activations=activations, **options) as pipeline:
        list(pipeline.train(data))


@pytest.mark.parametrize(("waits", "is_slow"), [(True, False), (True, True), (False, False)])
def test_what_waits_on_disk_is_not_in_memory(
    waits: bool, is_slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_slow:
        slow_down(monkeypatch)
    gc.disable()  # what is freed is freed at once, and not by chance
    try:
        watched = Watched()
        train(f"disk:{tmp_path}" if waits else None, nn.Sequential(nn.Linear(8, 8), watched, *make_linears(6)))
    finally:
        gc.enable()
    # One in its forward, at most one unwritten, at most one read ahead.
    assert watched.most <= 3 if waits else watched.most == 7


def test_a_stage_moves_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    close = offload.Offload.close
    monkeypatch.setattr(offload.Offload, "close", lambda self: (moved.append(self.moved_bytes), close(self)))
    data = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(13)]
    model = nn.Sequential(nn.Linear(8, 8), *(nn.Sigmoid() for _ in range(8)), nn.Linear(8, 8))  # eight results alike
    for share in (1.0, 0.5):
        stages = (Stage(0, 9, names=tuple(map(str, range(9))), offload=share), Stage(9, 10, names=("9",)))
        plan = Plan(stages, (2, 1), Cluster.flat(2), activations=f"disk:{tmp_path}")
        with pd.Pipeline(model, plan, loss=F.mse_loss, optimizer=torch.optim.SGD, check=False) as pipeline:
            list(pipeline.train(data))
    whole, half = filter(None, moved)
    first = whole // 13  # the first forward, whose bytes are not known before, moves all
    assert half == first + (whole - first) // 2


def make_linears(count: int) -> list[nn.Linear]:
    return [nn.Linear(8, 8) for _ in range(count)]


def test_a_tensor_that_is_written_after_it_was_saved_is_an_error(tmp_path: Path) -> None:
    class Overwriting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            return y.add_(1.0)

    with pytest.raises(WorkerError, match="written in place after the operation that saved it"):
        train(f"disk:{tmp_path}", nn.Sequential(nn.Linear(8, 8), Overwriting(), *make_linears(2)))


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("disk:/no/such/folder", "no file can be made in '/no/such/folder' \\(No such file or directory\\)"),
        ("host", "the workers are CPUs, whose memory is the host's; give disk:FOLDER"),
        ("disk", "give 'host', 'disk:FOLDER' or 'none'"),
    ],
)
def test_a_place_that_cannot_hold_activations_is_refused(place: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        train(place, nn.Sequential(*make_linears(3)))


def test_a_disk_with_too_little_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_place.shutil, "disk_usage", lambda folder: SimpleNamespace(free=3_000_000))
    stages = (
        Stage(0, 1, names=("0",), offload=1.0, memory=StageMemory(moved_bytes=5_000_000)),
        Stage(1, 2, names=("1",)),
    )
    plan = Plan(stages, (2, 1), Cluster.flat(2), activations=f"disk:{tmp_path}")
    with pytest.raises(PlanError, match=r"takes 5\.00 MB of .* where 3\.00 MB are free, 2\.00 MB too few"):
        pd.Pipeline(nn.Sequential(*make_linears(2)), plan, loss=F.mse_loss, optimizer=torch.optim.SGD)


def test_a_host_with_too_little_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [
        Stage(at, at + 1, names=(str(at),), offload=1.0, optimizer_bytes=800, memory=StageMemory(moved_bytes=2_000_000))
        for at in range(2)
    ]
    plan = Plan(tuple(stages), (2, 1), Cluster.flat(2), activations="host", optimizer_state="host")
    for free_bytes, words in (
        (3_999_999, r"offloaded to the memory of one machine and need 4\.00 MB, .* 1\.00 B are missing"),
        (4_000_000, r"optimizer state of 2 stages were .* need 1\.60 kB, 1\.60 kB more than the 0 B that are free"),
        (4_001_600, "the workers are CPUs"),
    ):
        monkeypatch.setattr(pd.pipeline, "host_bytes", lambda size=free_bytes: size)
        with pytest.raises(PlanError, match=words):
            pd.Pipeline(nn.Sequential(*make_linears(2)), plan, loss=F.mse_loss, optimizer=torch.optim.SGD)


def make_recipe(activations: str | None = None) -> pd.Recipe:
    data = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(4)]
    optimizer = partial(torch.optim.SGD, lr=0.01)
    return pd.Recipe(nn.Sequential(*make_linears(3)), F.mse_loss, optimizer, data, activations=activations)


def test_a_run_whose_plan_offloads_nothing_needs_the_folder_that_was_asked_for(tmp_path: Path) -> None:
    refusal = r"^activations='disk:/no/such' was asked for, but no file can be made .*disk:FOLDER, or none\)"
    with pytest.raises(PlanError, match=refusal):
        pd.run(make_recipe, out=tmp_path / "a", activations="disk:/no/such", quiet=True)
    with pytest.raises(PlanError, match=refusal):
        pd.run(partial(make_recipe, "disk:/no/such"), out=tmp_path / "b", quiet=True)
    for number, activations in enumerate(("none", "")):
        recipe = partial(make_recipe, "disk:/no/such")
        pd.run(recipe, out=tmp_path / str(number), activations=activations, quiet=True)
    pd.run(partial(make_recipe, "none"), out=tmp_path / "c", quiet=True)


def test_a_resumed_run_without_its_disk_says_what_its_plan_offloads(tmp_path: Path) -> None:
    stages = Stage(0, 2, names=("0", "1"), offload=1.0), Stage(2, 3, names=("2",))
    away, run_folder = tmp_path / "away", tmp_path / "run"
    away.mkdir()
    plan = Plan(stages, (2, 1), Cluster.flat(2), activations=f"disk:{away}")
    pd.run(make_recipe, plan=plan, out=run_folder, checkpoint_every=2, minibatches=2, quiet=True)
    away.rmdir()
    offloaded = (
        rf"^the plan 1-1 \(activations: 100%, 0% of the stages' offloaded to disk:{away}, .*\) was asked for, but "
    )
    for changes in ({}, {"memory_bytes": 10**9}):  # the same plan, and a new one
        with pytest.raises(PlanError, match=f"{offloaded}no file can be made .*disk:FOLDER, or none\\)"):
            pd.run(make_recipe, resume=run_folder, quiet=True, **changes)
    pd.run(make_recipe, resume=run_folder, activations="none", quiet=True)
    assert not Plan.load(run_folder / "plan.json").activations


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_ends_the_run_with_its_folder(
    number: int, is_slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, writes = os.pwrite, itertools.count()

    def fail(file: int, data: memoryview, at: int) -> int:
        if is_slow and next(writes) < 20:
            return pwrite(file, data, at)
        raise OSError(number, os.strerror(number))

    if is_slow:
        slow_down(monkeypatch)
    monkeypatch.setattr(os, "pwrite", fail)
    advice = f"{'free some of it' if number == errno.ENOSPC else 'check its disk'}, or name another folder"
    with pytest.raises(WorkerError, match=f"activations are offloaded to the folder '{tmp_path}', but: .*{advice}"):
        train(f"disk:{tmp_path}", nn.Sequential(*make_linears(4)))


def test_a_folder_that_is_removed_during_a_run_does_not_matter(tmp_path: Path) -> None:
    folder = tmp_path / "away"
    folder.mkdir()
    done: list[int] = []

    def remove(output: Tensor, target: Tensor) -> Tensor:
        done.append(1)
        if len(done) == 8:  # all files are open
            folder.rmdir()
        return F.mse_loss(output, target[1])

    train(f"disk:{folder}", nn.Sequential(*make_linears(4)), loss=remove)
    assert len(done) == 12


def test_a_folder_that_is_removed_before_all_files_are_open_ends_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "away"
    folder.mkdir()
    with pytest.raises(WorkerError, match=r"away', but: No such file or directory .*; make it again, or name another"):
        train(f"disk:{folder}", nn.Sequential(nn.Linear(8, 8), Removing(folder), *make_linears(3)))


class Removing(nn.Module):
    """Removes a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, x: Tensor) -> Tensor:
        if self.folder.exists():
            self.folder.rmdir()
        return x * 1.0


@pytest.mark.parametrize("ahead", [True, False])
def test_a_disk_that_cannot_be_read_ends_the_run_with_its_folder(
    ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if ahead:
        slow_down(monkeypatch)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(WorkerError, match=rf"the folder '{tmp_path}', but: Input/output error .*; check its disk, or"):
        train(f"disk:{tmp_path}", nn.Sequential(*make_linears(4)))


@pytest.mark.processes
def test_two_workers_of_a_machine_need_room_for_both(tmp_path: Path) -> None:
    for end in processes.launch(mishaps.train_on_a_small_disk, 2, str(tmp_path)):
        assert "takes 9.00 MB of" in str(end.error)
        assert "where 6.00 MB are free, 3.00 MB too few" in str(end.error)


@pytest.mark.processes
def test_workers_that_measure_their_disks_plan_alike(tmp_path: Path) -> None:
    first, second = processes.results(mishaps.plan_on_unequal_disks, 2, str(tmp_path))
    assert first == second
    cluster = Plan.from_json(first).cluster
    assert (cluster.disk_bytes_per_s, cluster.disk_s_per_byte) == (1e9, 2e-10), "the slower one's of each"


def test_the_time_that_moving_takes_of_a_core_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    quick = offload.measure_core_time(str(tmp_path))
    write = BlockFile.write

    def write_slowly(file: BlockFile, offset: int, data: memoryview) -> None:
        end_s = time.thread_time() + 0.005
        while time.thread_time() < end_s:
            pass
        write(file, offset, data)

    monkeypatch.setattr(BlockFile, "write", write_slowly)
    slow = offload.measure_core_time(str(tmp_path))
    assert slow > quick + 0.005 / (2 * 131_072) / 2, "5 ms for blocks of 131,072 bytes, there and back"
    assert torch.get_num_threads() == threads
    assert not os.listdir(tmp_path)


def test_little_of_a_small_disk_is_written_to_measure_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_place.shutil, "disk_usage", lambda folder: SimpleNamespace(free=8 << 20))
    sizes: set[int] = set()
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: (sizes.add(at + len(data)), pwrite(file, data, at))[1])
    assert offload_place.measure_disk(str(tmp_path)) > 0
    assert max(sizes) == 1 << 18


def test_a_full_disk_is_named_when_it_is_to_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(PlanError, match=rf"to '{tmp_path}', but .* failed: No space left on device; free some"):
        offload_place.measure_disk(str(tmp_path))
    with pytest.raises(PlanError, match=rf"to '{tmp_path}', as a trial shows: .*No space left on device .*; free some"):
        offload.measure_core_time(str(tmp_path))


def test_a_network_file_system_gives_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, mounts = os.stat(tmp_path).st_dev, tmp_path / "mountinfo"
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts.write_text(
        "22 1 0:7 / / rw - ext4 /dev/sda1 rw\n"
        f"36 22 {number} / /data rw,noatime shared:1 master:2 - nfs4 server:/data rw,vers=4.2\n"
    )
    monkeypatch.setattr(offload_place, "_MOUNTS", mounts)
    monkeypatch.setattr(offload_place, "_MAX_MEASURED_BYTES", 1 << 16)
    with pytest.warns(UserWarning, match=r"on a network file system \(nfs4\) at .*/s; a local disk is faster"):
        train(f"disk:{tmp_path}", nn.Sequential(*make_linears(3)))


def test_the_file_system_of_a_folder_is_known() -> None:
    assert offload_place.find_file_system("/proc") == "proc"
