"""Methods compared by their losses: each trains as `pipedream train` does, with its stale gradients."""

import json
import re
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Run, load_script

import pipedream as pd
from pipedream.apps.compare import compare, compare_options, compare_runs, torch_baselines, variants
from pipedream.core.units import LinkSpeed
from tests.apps.compare import test_comparing

RECIPE = (
    test_comparing.RECIPE.replace("160", "60").replace("size=8", "size=6").replace('target=("loss", 10.0)', "epochs=2")
)
METHODS = ("pipedream+error_feedback",)  # after 1f1b


@cache
def _measure() -> pd.Profile:
    profile = pd.profile(test_comparing.recipe().model, torch.randn(6, 8), runs=1)
    clock: dict[str, Any] = {"forward_s": 1e-3, "backward_s": 2e-3, "forward_fixed_s": 0.0, "backward_fixed_s": 0.0}
    return replace(profile, layers=tuple(replace(layer, **clock) for layer in profile.layers))  # plans by clocks differ


@pytest.fixture(autouse=True)
def profiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The model is profiled once for all tests."""
    monkeypatch.setattr(compare_runs, "profile_recipe", lambda recipe, **how: _measure())
    (tmp_path / "small.py").write_text(RECIPE, encoding="utf-8")


def _compare(folder: Path, methods: tuple[str, ...] = METHODS, **options: Any) -> variants.RecipeComparison:
    chosen = {"seed": 3, "epochs": 2, "workers": 3, "links": (LinkSpeed(1e6),), "emulate_delay": True} | options
    comparison, _ = compare.compare_recipe(
        str(folder.parent / "small.py"), compare_options.ComparisonOptions(schedules=methods, **chosen), out=folder
    )
    return comparison


def test_losses_are_those_of_train_and_what_flushes_trains_as_a_plain_loop(tmp_path: Path) -> None:
    reference, late = _compare(tmp_path / "out").variants
    make = load_script(tmp_path / "small.py").recipe
    plan = pd.Plan.load(tmp_path / "out" / "pipedream_error_feedback" / "plan.json")
    pd.run(make, plan=plan, compensation=["error_feedback"], seed=3, out=tmp_path / "run", quiet=True)
    trained = json.loads((tmp_path / "run" / "losses.json").read_text())
    assert late.losses == tuple((6 * (number + 1), loss) for number, loss in trained)
    assert len(trained) == 20
    assert [samples for samples, _ in late.test_losses] == [72, 120], "an evaluation drains"
    assert late.test_losses[-1][1] == late.metrics["loss"]
    assert (late.samples_per_s, late.peak_bytes, late.seconds_to_target) == (None, None, None), "one process's"
    loop = torch_baselines.PlainLoop(torch_baselines.Task(make(3), 0, 1, torch.device("cpu")))
    plain = [done.loss for done in loop.train(None, until_epoch=2)]
    assert reference.name == "1f1b"
    assert [loss for _, loss in reference.losses] == pytest.approx(plain, rel=1e-5)
    assert [loss for _, loss in late.losses] != pytest.approx(plain, rel=1e-3)


def test_after_ctrl_c_the_same_command_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handler, train = signal.getsignal(signal.SIGINT), compare_runs.train_recipe

    def interrupt(make: Any, **options: Any) -> None:
        train(make, **options | {"quiet": True})
        if options["compensation"] is not None:
            raise KeyboardInterrupt

    monkeypatch.setattr(compare_runs, "train_recipe", interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            _compare(tmp_path / "out")
    finally:
        signal.signal(signal.SIGINT, handler)
    state = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [variant["name"] for variant in state["variants"]] == ["1f1b"]
    assert state["verdict"].startswith("Not all runs have finished: the same command")
    summary = tmp_path / "out" / "pipedream_error_feedback" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"interrupted": True, "minibatches": 12}))
    monkeypatch.setattr(compare_runs, "train_recipe", train)
    compared = _compare(tmp_path / "out")
    assert json.loads(summary.read_text())["resumed_from"] == 20, "it has continued its checkpoint"
    assert [len(variant.losses) for variant in compared.variants] == [20, 20]
    monkeypatch.setattr(compare_runs, "train_recipe", None)
    assert _compare(tmp_path / "out") == compared, "nothing is left to train"


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (("1f1b+spike", "pipedream"), "compensation spike was asked for with a method that flushes"),
        (("basis_rotation",), "rotates the moments of Adam"),
    ],
)
def test_a_compensation_that_does_not_fit_is_a_reason(methods: tuple[str, ...], words: str, tmp_path: Path) -> None:
    compared = _compare(tmp_path / "out", methods, minibatches=2)
    (reason,) = compared.reasons()
    assert words in reason
    assert f"note: {reason}\n" in str(compared)


def test_a_method_that_flushes_is_the_reference() -> None:
    for texts, methods in ((["paci"], ["1f1b", "paci"]), (["paci/4", "gpipe", "paci/4"], ["gpipe", "paci/4"])):
        assert [str(phase) for phase in compare.read_methods(texts)] == methods


@pytest.mark.slow
def test_the_command(run_command: Run, tmp_path: Path) -> None:
    flags = ("--emulate-delay", "--workers", 3, "--minibatches", 4, "--out", tmp_path / "out")
    command = ("compare", tmp_path / "small.py", *flags, "--link", "1gbit/s", "--schedule", "pipedream")
    shown = json.loads(run_command(*command, "--json")[1])
    assert [(row["name"], row["link"]) for row in shown["variants"]] == [("1f1b", 1.25e8), ("pipedream", 1.25e8)]
    out = run_command(*command)[1]
    assert re.search(r"^1 Gbit/s +pipedream +1-1-1, noam +\S+ +\S+ +\S+ +6 +\d ", out, re.MULTILINE)
    assert shown["verdict"] in out
