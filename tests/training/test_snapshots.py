"""Where snapshots are, who removes them, and what memory they need."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace

import commands
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from two_machines import machines, start_on, started_on_both

import pipedream
from pipedream.core.errors import PlanError, RecipeError
from pipedream.core.hardware.cluster import Cluster, Level
from pipedream.core.plan.host_memory import count_saved_bytes, count_snapshot_bytes
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.stage import Stage
from pipedream.core.units import format_bytes
from pipedream.recipe import load_recipe
from pipedream.slow_links import Network, slow_network
from pipedream.training import snapshots
from pipedream.training.snapshots import check_memory, find_snapshots, open_snapshots, remove_snapshots
from tests.training.test_restarts import ONCE, write

__all__ = ["machines"]  # the fixture


def test_snapshots_need_a_launcher(tmp_path: Path) -> None:
    write(tmp_path, "False")
    with pytest.raises(RecipeError, match="this process was not started by 'pipedream train' with"):
        pipedream.run(
            lambda seed: load_recipe(str(tmp_path / "mortal.py"), seed=seed),
            snapshot_every=4,
            out=tmp_path / "run",
            quiet=True,
        )


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Makes this process look like a worker of torchrun, on a machine with this memory."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setattr(snapshots, "MEMORY", tmp_path / "memory")
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


def test_under_torchrun_the_run_folder_names_the_snapshots(memory: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert find_snapshots(run) is None
    with pytest.raises(RecipeError, match="none was given; add --out DIR"):
        open_snapshots(4, run, is_named=False, is_resumed=False)
    folder = open_snapshots(4, run, is_named=True, is_resumed=False)
    assert folder.parent == memory
    assert folder.stat().st_mode & 0o777 == 0o700
    assert find_snapshots(run) == folder
    assert open_snapshots(4, run, is_named=True, is_resumed=True) == folder
    (folder / "minibatch-00000004").mkdir()
    new = open_snapshots(4, run, is_named=True, is_resumed=False)
    assert new != folder, "a run that begins again takes nothing from the one before"
    assert list(memory.iterdir()) == [new]
    remove_snapshots(run)
    assert not list(memory.iterdir())
    assert not list(run.iterdir())


@pytest.mark.parametrize(
    "text", ["../elsewhere", "/etc", "pipedream-snapshots-0", "pipedream-snapshots-" + "0" * 32 + "/.."]
)
def test_the_run_folder_names_no_other_place(memory: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "snapshots.txt").write_text(text)
    assert find_snapshots(tmp_path) is None


def test_what_nobody_continued_is_removed_after_a_day(memory: Path, tmp_path: Path) -> None:
    folders = {}
    for name, age_s in (("old", 90_000.0), ("recent", 80_000.0), ("used", 90_000.0)):
        folders[name] = open_snapshots(4, tmp_path / name, is_named=True, is_resumed=False)
        if name == "used":
            lock = snapshots.FolderLock(folders[name])
        os.utime(folders[name], (time.time() - age_s,) * 2)
    new = open_snapshots(4, tmp_path / "new", is_named=True, is_resumed=False)
    assert set(memory.iterdir()) == {folders["recent"], folders["used"], new}
    lock.release()


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 10**7), st.integers(0, 10**7))
def test_memory_that_is_missing_is_named(snapshot_bytes: int, copied_bytes: int, in_folder: int, free: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots.os, "statvfs", lambda _: SimpleNamespace(f_bavail=in_folder, f_frsize=1))
        patch.setattr(snapshots, "available_bytes", lambda *_: free)
        text = snapshots.describe_missing(4, Path("nothing"), snapshot_bytes, copied_bytes)
    missing = 2 * snapshot_bytes - in_folder, 2 * snapshot_bytes + copied_bytes - free
    if max(missing) <= 0:
        assert not text
        return
    assert text.startswith("--snapshot-every 4 takes ")
    assert f"are free: {format_bytes(next(size for size in missing if size > 0))} are missing; enlarge" in text


def test_each_machine_needs_memory_for_its_neighbour_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rank 3's machine has room for two snapshots of its own part, and not for that of ranks 1 and 2."""
    machines = [[0], [1, 2], [3]]
    monkeypatch.setattr(snapshots.folders, "list_machines", lambda *_: machines)
    monkeypatch.setattr(snapshots, "available_bytes", lambda *_: 10**9)
    monkeypatch.setattr(snapshots.os, "statvfs", lambda _: SimpleNamespace(f_bavail=250_000, f_frsize=1))
    saved_bytes = [10_000, 20_000, 30_000, 100_000]
    assert check_memory(None, tmp_path, saved_bytes, 0) == 2 * 150_000
    with pytest.raises(PlanError, match=r"^--snapshot-every auto takes 300 kB in /\S+ of rank 3's machine, ") as caught:
        check_memory(None, tmp_path, saved_bytes, 3)
    assert "(a snapshot has 150 kB there), and 250 kB are free: 50.0 kB are missing; enlarge" in str(caught.value)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_the_plan_counts_what_the_run_needs(replicas: list[int], data: st.DataObject) -> None:
    """On each machine; the bytes of the stages have no sum in common."""
    workers, sizes = sum(replicas), []
    while sum(sizes) < workers:
        sizes.append(data.draw(st.integers(1, workers - sum(sizes))))
    levels = (Level(max(sizes), 1e9, sizes=tuple(sizes)), Level(len(sizes), 1e8))
    plan = pipedream.Plan.uniform(len(replicas), replicas=tuple(replicas)).on(Cluster(levels, snapshots="next"))
    stages = [replace(s, parameter_bytes=100**n, optimizer_bytes=2 * 100**n) for n, s in enumerate(plan.stages)]
    plan = replace(plan, stages=tuple(stages))
    counted = {rank: 0 for rank in range(workers)}
    for ranks, row in zip(plan.placement.ranks, count_snapshot_bytes(plan), strict=True):
        for rank, size in zip(ranks, row, strict=True):
            counted[rank] += size
    machines = [list(range(*ends)) for ends in pairwise(accumulate(sizes, initial=0))]
    needs: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots.folders, "list_machines", lambda *_: machines)
        patch.setattr(snapshots, "describe_missing", lambda _, __, size, copied, where: needs.append(2 * size + copied))
        for ranks in machines:
            check_memory(4, Path("nothing"), count_saved_bytes(plan), ranks[0])
    assert needs == [sum(counted[rank] for rank in ranks) for ranks in machines]


def test_first_replicas_save_their_stages() -> None:
    """The workers of the second stage are meshes of two ranks."""
    plan = pipedream.Plan.uniform(3, replicas=(2, 1, 2))
    stages = [replace(s, parameter_bytes=4**n, optimizer_bytes=2 * 4**n) for n, s in enumerate(plan.stages)]
    stages[1] = replace(stages[1], mesh="model:2")
    assert count_saved_bytes(replace(plan, stages=tuple(stages))) == [3, 0, 12, 12, 48, 0]


def write_with_plan(folder: Path) -> Plan:
    """Writes the recipe, and a plan, so that nothing is profiled."""
    write(folder, ONCE)
    plan = Plan((Stage(0, 3, names=tuple("012")), Stage(3, 7, names=tuple("3456"))), (2, 1), Cluster.flat(2))
    plan.save(folder / "plan.json")
    return plan


@pytest.mark.processes
@pytest.mark.slow
def test_torchrun_restarts_from_memory(tmp_path: Path) -> None:
    """Of one machine; nothing is left in its memory."""
    write_with_plan(tmp_path)
    ended = commands.run(
        *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", "-m", "pipedream", "train", "mortal.py"),
        *("--plan", "plan.json", "--out", "run", "--checkpoint-every", "0", "--snapshot-every", "4"),
        folder=tmp_path,
    )
    assert ended.status == 0, ended.err
    assert "resuming from memory, /dev/shm/pipedream-snapshots-" in ended.out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert 16 <= summary["resumed_from"] < 26
    assert [number for number, _ in json.loads((tmp_path / "run" / "losses.json").read_text())] == list(range(40))
    folder = re.search(r"resuming from memory, (/dev/shm/pipedream-snapshots-\w+)", ended.out)
    assert folder is not None
    assert not Path(folder[1]).exists()


@pytest.mark.network
@pytest.mark.processes
@pytest.mark.parametrize(
    "lost", [(0,), pytest.param((1,), marks=pytest.mark.long), pytest.param((0, 1), marks=pytest.mark.long)]
)
def test_a_machine_that_is_lost_is_read_from_the_other_ones_memory(
    machines: Network, tmp_path: Path, lost: tuple[int, ...]
) -> None:
    """Of a machine that is lost, others have what was in memory; its disk is lost too, unless nothing else is left."""
    plan = write_with_plan(tmp_path)
    program = ("-m", "pipedream", "train", str(tmp_path / "mortal.py"), "--plan", str(tmp_path / "plan.json"))
    program += ("--out", "run", "--resume", "run")
    program += ("--snapshot-every", "4", "--checkpoint-every", "10" if lost == (0, 1) else "0")
    started = started_on_both(machines, "static", program, tmp_path, own_memory=True)
    ends = [process.end() for process in started]
    assert all(ended.status for ended in ends), [ended.err for ended in ends]
    homes = [tmp_path / f"machine{number}" for number in (0, 1)]
    for number in lost:
        shutil.rmtree(homes[number] / "memory")
        if len(lost) == 1:
            shutil.rmtree(homes[number] / "run")
    (homes[1] / "dead").touch()
    ends = [process.end() for process in started_on_both(machines, "static", program, tmp_path, own_memory=True)]
    assert [ended.status for ended in ends] == [0, 0], ends[0].err
    source = r"run/checkpoints/minibatch-\d{8}"
    if len(lost) == 1:
        source = r"memory, /dev/shm/pipedream-snapshots-\w{32}/minibatch-\d{8} \(rank "
        source += f"{lost[0]} from the memory of another machine\\)"
    resumed = re.search(rf"^resuming from {source}: minibatch (\d+), epoch 1$", ends[0].out, re.M)
    assert resumed is not None, ends[0].out
    assert 10 <= int(resumed[1]) < 26
    assert not [path for home in homes for path in (home / "memory").iterdir()]
    whole = pipedream.run(
        lambda seed: load_recipe(str(tmp_path / "mortal.py"), seed=seed),
        plan=plan,
        checkpoint_every=4,
        out=tmp_path / "whole",
        quiet=True,
    )
    assert whole["minibatches"] == 40
    weights, others = (torch.load(run / "weights.pt") for run in (homes[0] / "run", tmp_path / "whole"))
    assert lost == (0, 1) or all(torch.equal(weights[name], others[name]) for name in others)
    losses = json.loads((homes[0] / "run" / "losses.json").read_text())
    assert [number for number, _ in losses] == list(range(40))
    assert lost == (0, 1) or losses == json.loads((tmp_path / "whole" / "losses.json").read_text())


@pytest.mark.network
@pytest.mark.processes
@pytest.mark.slow
def test_a_machine_that_waits_replaces_a_lost_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A third machine stands by: torchrun lets it wait, as two are enough. The second one is lost with all it has."""
    write(tmp_path, 'os.environ.get("RANK") == "1" and not Path("../dead").exists()')
    recipe = tmp_path / "mortal.py"
    text = recipe.read_text(encoding="utf-8").replace('Path("dead")', 'Path("../dead")')
    recipe.write_text(text.replace("os.kill(os.getpid(), signal.SIGKILL)", "signal.pause()"), encoding="utf-8")
    program = ("--max-restarts", "1", "-m", "pipedream", "train", str(recipe), "--out", "run", "--resume", "run")
    program += ("--snapshot-every", "4", "--checkpoint-every", "0")
    # Torch's agents otherwise keep the address of the store that they share, and a new one waits for it in vain.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with slow_network((3,), (None,)) as machines:
        start = partial(start_on, machines, rendezvous="c10d", program=program, folder=tmp_path, own_memory=True)
        first, lost = start(rank=0), start(rank=1)
        first.wait_for_file("run/plan.json")
        standby = start(rank=2)
        first.wait_for_file("../dead")
        lost.signal(signal.SIGKILL, group=True)
        lost.end()
        ends = [first.end(), standby.end()]
    assert [ended.status for ended in ends] == [0, 0], ends[0].err + ends[1].err
    out = ends[0].out
    source = (
        r"memory, /dev/shm/pipedream-snapshots-\w{32}/minibatch-\d{8} \(rank 1 from the memory of another machine\)"
    )
    resumed = re.search(rf"^resuming from {source}: minibatch (\d+), epoch 1$", out, re.M)
    assert resumed is not None, out
    assert 16 <= int(resumed[1]) < 26
    assert out.count("\nPlan ") == 2, "the same"
    assert len(set(re.findall("^Plan .*", out, re.M))) == 1
    losses = json.loads((tmp_path / "machine0" / "run" / "losses.json").read_text())
    assert [number for number, _ in losses] == list(range(40))
    assert not [path for rank in (0, 2) for path in (tmp_path / f"machine{rank}" / "memory").iterdir()]


@pytest.mark.network
@pytest.mark.processes
@pytest.mark.slow
def test_a_lost_machine_comes_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Meanwhile the other one has both workers, so the run ends as if nothing had happened.

    Each of the two torchruns counts its own restarts: the first one 1, the one that comes back none.
    """
    (tmp_path / "whole").mkdir()
    size = 'os.environ.get("WORLD_SIZE")'
    mark = f'(mark := Path("..", "alone" if {size} == "1" else "dead")).exists()'
    write(tmp_path, f'(os.environ.get("RANK"), {size}) != ("0", "2") and not {mark}')
    write(tmp_path / "whole", "False")
    recipe = tmp_path / "mortal.py"
    text = recipe.read_text(encoding="utf-8").replace('Path("dead").touch()', "mark.touch()").replace("26", "14")
    recipe.write_text(text.replace("os.kill(os.getpid(), signal.SIGKILL)", "signal.pause()"), encoding="utf-8")
    program = ("--max-restarts", "1", "-m", "pipedream", "train", str(recipe), "--out", "run", "--resume", "run")
    program += ("--snapshot-every", "4", "--checkpoint-every", "0")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with slow_network((2,), (None,)) as machines:
        start = partial(start_on, machines, rendezvous="c10d", program=program, folder=tmp_path, own_memory=True)
        first, second = start(rank=0, nodes="1:2"), start(rank=1, nodes="1:2")
        first.wait_for_file("../dead", 240.0)
        second.signal(signal.SIGKILL, group=True)
        second.end()
        shutil.rmtree(tmp_path / "machine1")
        first.wait_for_file("../alone", 240.0)
        ends = [process.end(240.0) for process in (first, start(rank=1, nodes="1:2"))]
    assert [ended.status for ended in ends] == [0, 0], ends[0].err + ends[1].err
    out = ends[0].out
    resumed = re.findall(r"^resuming from memory, \S+( \(.*\))?: minibatch (\d+), epoch \d$", out, re.M)
    assert [where for where, _ in resumed] == ["", " (rank 1 from the memory of another machine)"], out
    numbers = [int(number) for _, number in resumed]
    assert 4 <= numbers[0] < numbers[1] < numbers[0] + 14
    for start_of_line in ("Plan", "snapshots take"):
        lines = re.findall(f"^{start_of_line} .*", out, re.M)
        assert lines == lines[:1] * 3
    run, whole = tmp_path / "machine0" / "run", tmp_path / "whole" / "run"
    pipedream.run(
        lambda seed: load_recipe(str(tmp_path / "whole" / "mortal.py"), seed=seed),
        plan=pipedream.Plan.load(run / "plan.json"),
        checkpoint_every=4,
        out=whole,
        quiet=True,
    )
    weights, others = (torch.load(folder / "weights.pt") for folder in (run, whole))
    assert all(torch.equal(weights[name], others[name]) for name in others)
    losses = [json.loads((folder / "losses.json").read_text()) for folder in (run, whole)]
    assert losses[0] == losses[1]
    assert not [path for rank in (0, 1) for path in (tmp_path / f"machine{rank}" / "memory").iterdir()]
