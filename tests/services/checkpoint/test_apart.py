"""Machines that share no folder: each keeps its part of a checkpoint, and all of them together resume."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist

from pipedream.services.checkpoint import folders, pieces
from pipedream.services.checkpoint.stores.store import name_checkpoint
from tests.services.checkpoint import saving


def train(base: Path, machines: dict[int, str], counts: tuple[int, ...], epochs: int, resume: bool) -> dict[str, Any]:
    """Trains in ./run, of which each machine has its own; saves after each epoch."""
    home = base / machines[dist.get_rank()]
    home.mkdir(exist_ok=True)
    os.chdir(home)
    return saving.run("run", counts, epochs, 2, "run" if resume else None)


@pytest.mark.processes
@pytest.mark.slow
def test_each_machine_keeps_its_part(tmp_path: Path) -> None:
    three = {0: "one", 1: "one", 2: "two"}
    whole = processes.results(train, 3, tmp_path / "..", dict.fromkeys(three, tmp_path.name), (2, 1), 4, False)[0]
    shutil.rmtree(tmp_path / "run")
    processes.results(train, 3, tmp_path, three, (2, 1), 3, False)
    first, two = tmp_path / "one" / "run", tmp_path / "two" / "run"
    assert [path.name for path in folders.list_checkpoints(first)] == ["minibatch-00000010", "minibatch-00000015"]
    newest = name_checkpoint(15)
    assert saving.names(first / newest) == [".metadata", "__0_0.distcp", "__1_0.distcp", "checkpoint.json"]
    assert saving.names(two / newest) == ["__2_0.distcp"]
    assert saving.names(two) == [name_checkpoint(number) for number in (5, 10, 15)], "one more than asked for"
    # The machines come back in another order: rank 0 has no manifest, and other stages than before.
    losses = processes.results(train, 3, tmp_path, {0: "two", 1: "one", 2: "one"}, (2, 1), 4, True)[0]
    assert all(torch.equal(losses[name], whole[name]) for name in whole)
    assert [path.name for path in folders.list_checkpoints(two)] == ["minibatch-00000020"]
    # Gathered, they are a checkpoint like any other.
    gathered = folders.gather_parts([first, two / newest], tmp_path / "gathered")
    assert gathered.locate("") == tmp_path / "gathered" / newest
    assert pieces.verify_checkpoint(gathered) == folders.read_shared_manifest(gathered, None)[0]
    # One of them is lost.
    shutil.rmtree(first / newest)
    shutil.rmtree(two / name_checkpoint(20))
    lost = processes.launch(train, 2, tmp_path, {0: "one", 1: "one"}, (1, 1), 4, True)
    assert "__2_0.distcp" in str(lost[0].error)
    assert str(lost[0].error) == str(lost[1].error)


def test_parts_that_do_not_fit_are_refused(
    run_command: Callable[..., tuple[int, str, str]], refused: Callable[..., str], tmp_path: Path
) -> None:
    first, second, out = (tmp_path / name for name in ("first", "second", "out"))
    (path,) = saving.save(first / "checkpoints", (1,), epochs=1)
    part = second / "checkpoints" / path.name
    part.mkdir(parents=True)
    Path(str(path), "__0_0.distcp").rename(part / "__0_0.distcp")
    assert "has a whole __0_0.distcp" in refused("checkpoint", "gather", first, "-o", out)
    assert "has a manifest" in refused("checkpoint", "gather", second, "-o", out)
    status, words, _ = run_command("checkpoint", "gather", first, second, "-o", out)
    assert (status, "intact" in words) == (0, True)
    assert "exists already" in refused("checkpoint", "gather", first, second, "-o", out)
    assert refused("checkpoint", "gather", first)
