"""What version 0.1 has written is still read: a recipe, a plan and a checkpoint, without the fields that came later."""

import json
from pathlib import Path

import pytest
import torch
from commands import load_script

import pipedream as pd
from pipedream.services.checkpoint.folders import SavedCheckpoint, read_manifest

FILES = Path(__file__).parent / "files_of_0_1"


def test_the_plan_is_read() -> None:
    plan = pd.Plan.load(FILES / "plan.json")
    assert (plan.config, plan.update_delay) == ("2-1", (1, 0))
    assert pd.Plan.from_json(plan.to_json()) == plan


def test_the_checkpoint_is_read() -> None:
    manifest = read_manifest(SavedCheckpoint.at(FILES / "checkpoint"))
    assert (manifest.minibatches, manifest.epoch, manifest.epoch_batches, manifest.drains) == (10, 1, 2, (4, 10))
    assert (manifest.schedule, manifest.microbatches, manifest.seed) == ("pipedream", 1, 5)
    assert (manifest.phases, [str(rule) for rule in manifest.compensation]) == ("1f1b/2:4,pipedream+spike", ["spike"])
    assert [str(rule) for rule in manifest.phases_compensation or ()] == ["nesterov"]
    assert manifest.plan.update_delay == (1, 0)
    assert manifest.data is not None
    written = json.loads((FILES / "checkpoint" / "checkpoint.json").read_text(encoding="utf-8"))
    news = {"callbacks", "crc32", "extra"}
    assert set(written) | news == set(json.loads(manifest.to_json())), "otherwise the layout is that of 0.1"
    assert not manifest.has_checksums


def test_the_run_is_resumed(tmp_path: Path) -> None:
    """It continues with the losses that the earlier version had."""
    out = tmp_path / "run"
    with pytest.warns(UserWarning, match="checkpoint has no checksums, so damage may go unnoticed"):
        summary = pd.run(load_script(FILES / "recipe.py").recipe, resume=FILES / "checkpoint", out=out, quiet=True)
    assert (summary["minibatches"], summary["schedule"], summary["seed"]) == (16, "1f1b/2:4,pipedream+spike", 5)
    rows = json.loads((FILES / "losses.json").read_text(encoding="utf-8"))
    losses = json.loads((out / "losses.json").read_text(encoding="utf-8"))
    torch.testing.assert_close(losses, rows[10:], rtol=1e-5, atol=1e-6)
