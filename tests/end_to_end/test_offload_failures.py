"""A failing disk of activations ends two workers with one message and no file, and the run can be resumed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import commands
import pytest
import torch

import pipedream
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.stage import Stage
from pipedream.recipe import load_recipe
from pipedream.runtime.stage.block_mover import BlockFile

pytestmark = [pytest.mark.processes, pytest.mark.slow]
RECIPE = '''
import os
import resource
import signal
from functools import partial
from pathlib import Path

import torch
from torch import nn

import pipedream


class Mishap(nn.Module):
    """Something happens in its 26th forward in the first attempt."""

    calls = 0

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.calls += 1
            if self.calls == 26 and "RANK" in os.environ and not Path("happened").exists():
                files = [file for file in Path("/proc/self/fd").iterdir() if file.exists()]
                blocks = [file for file in files if os.readlink(file).startswith(f"{Path.cwd()}/away/")]
                Path("happened").write_text(str(sum(file.stat().st_size for file in blocks)))
                WHAT
        return x * 1


def recipe(seed=0):
    torch.manual_seed(seed)
    blocks = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.Tanh())]
    samples = [64] * 20 + [512] * 20  # the later ones need more of the disk
    data = [(torch.randn(count, 256), torch.randint(2, (count,))) for count in samples]
    return pipedream.Recipe(
        model=nn.Sequential(*blocks[:3], Mishap(), *blocks[3:], nn.Linear(256, 2)),
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        train=data,
        epochs=1,
    )
'''
LIMIT = "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
TRAIN = ("-m", "pipedream", "train", "falls.py", "--plan", "plan.json", "--out", "run", "--checkpoint-every", "10")
SMALL = 'mount -t tmpfs -o size=1m none away && "$@"; status=$?; ls away > left; exit $status'
IN_1_MB = ("unshare", *(("--user", "--map-root-user") if os.geteuid() else ()), "--mount", "sh", "-c", SMALL, "sh")


def write(folder: Path, what: str) -> None:
    """Writes the recipe, a plan, and a folder in which others have files."""
    (folder / "falls.py").write_text(RECIPE.replace("WHAT", what), encoding="utf-8")
    stages = Stage(0, 4, names=tuple("0123")), Stage(4, 8, names=tuple("4567"))
    Plan(stages, (2, 1), Cluster.flat(2)).save(folder / "plan.json")
    for name in ("away", "other"):
        (folder / name).mkdir()
    (folder / "away" / "mine").write_text("mine\n", encoding="utf-8")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run whose activations stay in memory."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write(folder, "pass")
    pipedream.run(
        lambda seed: load_recipe(str(folder / "falls.py"), seed=seed),
        plan=Plan.load(folder / "plan.json"),
        checkpoint_every=10,
        out=folder / "run",
        quiet=True,
    )
    return read_weights(folder)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = torch.load(folder / "run" / "weights.pt", weights_only=True)
    return weights


@pytest.mark.parametrize(
    ("what", "within", "words"),
    [
        pytest.param(LIMIT, (), "File too large", id="limit"),
        pytest.param("pass", IN_1_MB, "No space left on device", id="full", marks=pytest.mark.network),
    ],
)
def test_a_full_disk_ends_a_run_that_goes_on_elsewhere(
    what: str, within: tuple[str, ...], words: str, tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    write(tmp_path, what)
    away = f"disk:{tmp_path / 'away'}"
    ended = commands.start(*TRAIN, "--workers", "2", "--activations", away, folder=tmp_path, within=within).end()
    assert (ended.status, ended.orphans) == (1, [])
    assert "Traceback" not in ended.err
    assert ended.err.count("pipedream: ") == ended.err.count("activations are offloaded to the folder") == 1, ended.err
    advice = "; free some of it, or name another folder (--activations disk:FOLDER)"
    assert f"{str(tmp_path / 'away')!r}, but: {words} (this rank has written " in ended.err
    assert advice in ended.err
    files = (tmp_path / "left").read_text().split() if within else os.listdir(tmp_path / "away")
    assert files == ([] if within else ["mine"])
    assert commands.run("-m", "pipedream", "checkpoint", "verify", "run", folder=tmp_path).status == 0
    other = ("--resume", "run", "--activations", f"disk:{tmp_path / 'other'}", "--json")
    resumed = commands.run(*TRAIN[:4], *TRAIN[6:], "--workers", "2", *other, folder=tmp_path)
    assert resumed.status == 0, resumed.err
    assert 10 <= json.loads(resumed.out)["resumed_from"] < 26
    assert not os.listdir(tmp_path / "other")
    weights = read_weights(tmp_path)
    assert all(torch.equal(weights[name], undisturbed[name]) for name in undisturbed)


def test_a_worker_that_is_killed_leaves_no_file_and_touches_none(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    write(tmp_path, KILL)
    file, data = BlockFile(str(tmp_path / "away")), bytes(range(256)) * 1024
    file.write(file.reserve(len(data)), memoryview(data))
    away = ("--activations", f"disk:{tmp_path / 'away'}")
    ended = commands.run(*TRAIN, "--workers", "2", "--max-restarts", "1", *away, "--json", folder=tmp_path)
    assert ended.status == 0, ended.err
    assert not ended.orphans
    assert ended.err.count("restart 1 of 1 after: rank 0 was ended by SIGKILL") == 1
    assert json.loads(ended.out)["failures"]["restarts"] == 1
    assert int((tmp_path / "happened").read_text()) > 1 << 19, "blocks were on disk"
    assert os.listdir(tmp_path / "away") == ["mine"]
    assert (tmp_path / "away" / "mine").read_text() == "mine\n"
    again = bytearray(len(data))
    file.read(0, memoryview(again))
    file.close()
    assert again == data
    weights = read_weights(tmp_path)
    assert all(torch.equal(weights[name], undisturbed[name]) for name in undisturbed)
