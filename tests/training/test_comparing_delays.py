"""Methods compared by their losses: each trains as `pipedream train` does, in turns that change nothing."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pipedream
from pipedream.core.delay import DelayComparison, DelayedRun
from pipedream.core.errors import PlanError, ScheduleError, WorkerError
from pipedream.core.model.profile import Profile
from pipedream.options import TrainingOptions
from pipedream.recipe import Recipe, load_recipe
from pipedream.runtime.torch_baselines import Task, plain_loop
from pipedream.training import compare_delays as comparing
from pipedream.training.compare_delays import compare_delays, read_methods
from pipedream.training.job import profile_recipe
from pipedream.training.train import train_recipe

Run = Callable[..., tuple[int, str, str]]
RECIPE = """
from functools import partial
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import pipedream

def recipe(seed: int = 0) -> pipedream.Recipe:
    torch.manual_seed(seed)
    inputs = torch.randn(60, 8)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    hidden = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return pipedream.Recipe(
        model=nn.Sequential(*hidden, nn.Linear(8, 2)),
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5),
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.9),
        train=DataLoader(data, batch_size=6, shuffle=True),
        test=DataLoader(data, batch_size=20),
        epochs=2,
    )
"""
WITHOUT_TEST = RECIPE.replace("        test=DataLoader(data, batch_size=20),\n", "")
METHODS = ("pipedream+error_feedback",)  # after 1f1b


@cache
def _profile() -> Profile:
    folder = Path(mkdtemp())
    (folder / "small.py").write_text(RECIPE, encoding="utf-8")
    profile = profile_recipe(load_recipe(str(folder / "small.py")), runs=1)
    shutil.rmtree(folder)
    return profile


def _compare(
    folder: Path,
    turn_s: float = 0.0,
    text: str = RECIPE,
    progress: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> DelayComparison:
    recipe = folder.parent / "small.py"
    recipe.write_text(text, encoding="utf-8")
    return compare_delays(
        str(recipe),
        METHODS,
        TrainingOptions(**{"seed": 3, "epochs": 2} | options),
        pipedream.Cluster.flat(3, 1e6),
        folder,
        link="8 Mbit/s",
        profile=_profile(),
        turn_s=turn_s,
        progress=progress,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DelayComparison]:
    """A comparison in which each method has one turn."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    return folder, _compare(folder, turn_s=1e9)


def _train(folder: Path, checkpoint_every: int | None = None) -> list[list[float]]:
    """Returns the losses of `pipedream train`."""
    train_recipe(
        lambda seed: load_recipe(str(folder.parent / "small.py"), seed=seed),
        plan=pipedream.plan(_profile(), pipedream.Cluster.flat(3, 1e6), schedule="pipedream", shape="straight"),
        schedule="pipedream",
        compensation=["error_feedback"],
        seed=3,
        checkpoint_every=checkpoint_every,
        out=folder.parent / "run",
        quiet=True,
    )
    losses: list[list[float]] = json.loads((folder.parent / "run" / "losses.json").read_text())
    return losses


def test_losses_are_those_of_pipedream_train(whole: tuple[Path, DelayComparison]) -> None:
    folder, compared = whole
    reference, late = compared.runs
    assert [[i, loss] for i, loss in enumerate(late.losses)] == _train(folder)
    assert len(late.losses) == 20
    assert late.losses != reference.losses


def test_turns_change_nothing(whole: tuple[Path, DelayComparison], tmp_path: Path) -> None:
    turns: list[str] = []
    assert _compare(tmp_path / "out", progress=turns.append) == whole[1]
    assert [line.partition(",")[0] for line in turns[:-1]] == [
        "1f1b: minibatch 10",
        "pipedream+error_feedback: minibatch 12",  # two were in flight at the evaluation
        "1f1b: minibatch 20",
        "pipedream+error_feedback: minibatch 20",
    ]


@pytest.mark.slow
def test_without_evaluations_turns_end_at_checkpoints(tmp_path: Path) -> None:
    late = _compare(tmp_path / "out", text=WITHOUT_TEST).runs[1]
    assert [[i, loss] for i, loss in enumerate(late.losses)] == _train(tmp_path / "out", checkpoint_every=10)
    assert (late.is_finished, late.metrics) == (True, {})


def test_what_flushes_trains_as_a_plain_loop(whole: tuple[Path, DelayComparison]) -> None:
    folder, compared = whole
    reference, late = compared.runs
    recipe = load_recipe(str(folder.parent / "small.py"), seed=3)
    figures = plain_loop(Task(recipe, 3, 1, torch.device("cpu"))).train(2, None)
    assert reference.method == "1f1b"
    assert reference.metrics == pytest.approx(figures["metrics"], rel=1e-5)
    assert late.metrics["loss"] != pytest.approx(figures["metrics"]["loss"], rel=1e-3)


def test_after_ctrl_c_the_same_command_gives_the_page_of_a_whole_run(
    whole: tuple[Path, DelayComparison], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, minibatch = signal.getsignal(signal.SIGINT), comparing._Turn.on_minibatch

    def interrupt(turn: Any, pipeline: Any, done: Any) -> None:
        minibatch(turn, pipeline, done)
        if done.number == 14 and not pipeline.schedule.flushes:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(comparing._Turn, "on_minibatch", interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            _compare(tmp_path / "out", turn_s=1e9)
    finally:
        signal.signal(signal.SIGINT, handler)
    monkeypatch.setattr(comparing._Turn, "on_minibatch", minibatch)
    state = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [row["updates"] for row in state["methods"]] == [20, 0]
    assert state["verdict"].startswith("Not all methods have finished: the same command")
    resumed = _compare(tmp_path / "out", turn_s=1e9)
    for name in ("compare.html", "compare.json"):
        assert (tmp_path / "out" / name).read_text() == (whole[0] / name).read_text()
    page = (whole[0] / "compare.html").read_text()
    assert page.count("<polyline") == 4
    assert resumed.verdict in page.replace("&#x27;", "'")
    monkeypatch.setattr(comparing, "train_recipe", None)
    assert _compare(tmp_path / "out") == resumed, "nothing is left to train"
    with pytest.raises(PlanError, match=r"has a comparison with seed 3, and 4 was asked for; give the same options"):
        _compare(tmp_path / "out", seed=4)


def test_a_method_that_diverges_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(make: Callable[[int], Recipe], **options: Any) -> dict[str, Any]:
        if options["schedule"] == "pipedream":
            raise WorkerError(0, "stage 2, B of microbatch 4", "the loss is not finite")
        return train_recipe(make, **options)

    monkeypatch.setattr(comparing, "train_recipe", diverge)
    compared = _compare(tmp_path / "out", turn_s=1e9, minibatches=5)
    assert [(len(run.losses), run.is_finished) for run in compared.runs] == [(5, True), (0, True)]
    assert "pipedream+error_feedback ended after 0 updates: rank 0" in str(compared)
    assert "1f1b is predicted to be the first" in compared.verdict


def test_seconds_until_the_loss_of_the_reference() -> None:
    """Losses fall by 1 an update, late ones by half of that; a mean is over a tenth of 40."""
    falling = tuple(float(-i) for i in range(40))
    runs = DelayedRun("1f1b", True, 10.0, falling), DelayedRun("late", False, 40.0, tuple(x / 2 for x in falling))
    compared = DelayComparison("small", 4, 5, "1 Gbit/s", tuple(replace(run, is_finished=True) for run in runs))
    reference, late = compared.runs
    assert compared.average_losses(reference)[:2] == [-1.5, -2.5]
    assert compared.reach_reference(reference) == 40 * 5 / 10.0
    assert compared.reach_reference(late) is None
    longer = replace(late, losses=tuple(float(-i) for i in range(60)))
    assert compared.reach_reference(longer) == 40 * 5 / 40.0
    assert [row["predicted_s"] for row in compared.rows()] == [20.0, 5.0]
    assert "1f1b is predicted to be the first at its own loss, after 20.0 s." in compared.verdict


def test_a_method_that_flushes_is_the_reference() -> None:
    methods = [[str(phase) for phase in read_methods(texts)] for texts in (["paci"], ["paci/4", "gpipe", "paci/4"])]
    assert methods == [["1f1b", "paci"], ["gpipe", "paci/4"]]


@pytest.mark.parametrize(
    ("optimizer", "compensation"),
    [
        (partial(torch.optim.NAdam, lr=0.1), "basis_rotation"),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), "nesterov"),
        (partial(torch.optim.SGD, lr=0.1), "error_feedback"),
    ],
)
def test_the_compensation_fits_the_optimizer(optimizer: Any, compensation: str) -> None:
    recipe: Any = SimpleNamespace(optimizer=optimizer)
    late = "pipedream_2bw", "pipedream"
    assert comparing._choose_methods(recipe) == ("1f1b", *late, *(f"{name}+{compensation}" for name in late))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--schedule", "1f1b", "--schedule", "gpipe"), "with 1f1b, gpipe, which flush: no gradient is stale"),
        (("--schedule", "pipedreem"), "pipedreem"),
        (("--schedule", "pipedream+spyke"), "spyke"),
        (("--workers", "4"), "--emulate-delay was given with --workers 4, but it trains straight stages"),
        (("--link", "1gbit/s", "--link", "1mbit/s"), "2 links were given with --emulate-delay"),
        (("--link", "1gbit/s,1mbit/s"), "4 stages on 4 workers, 2 rates of 1 levels of the network were asked for"),
        (("--stages", "4", "--hosts", "3x1", "--link", "1gbit/s,1gbit/s"), "4 stages on 3 workers"),
        (("--out", "."), "is not empty, and has no comparison to continue; name a new folder"),
    ],
)
def test_bad_input(
    flags: tuple[str, ...], words: str, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.py").write_text(RECIPE, encoding="utf-8")
    assert words in refused("compare", "small.py", "--emulate-delay", *flags)
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["small.py"]


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (("1f1b+spike", "pipedream"), "compensation spike was asked for with a method that flushes"),
        (("pipedream+basis_rotation",), "rotates the moments of Adam, .*, found SGD, which keeps no such moments"),
        (("basis_rotation",), "found SGD"),
    ],
)
def test_a_compensation_is_refused_before_any_method_trains(
    methods: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    (tmp_path / "small.py").write_text(RECIPE, encoding="utf-8")
    with pytest.raises(ScheduleError, match=words):
        compare_delays(
            str(tmp_path / "small.py"), methods, TrainingOptions(), pipedream.Cluster.flat(3), tmp_path / "out",
            profile=_profile(),
        )  # fmt: skip
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["profile.json"]


def test_flags_that_need_emulate_delay(refused: Callable[..., str]) -> None:
    message = "pipedream: --stages 4 was given without --emulate-delay; add it, or leave --stages 4 out\n"
    assert refused("compare", "small.py", "--stages", 4) == message


def test_the_command(run_command: Run, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(RECIPE, encoding="utf-8")
    profile = _profile().save(tmp_path / "small.profile.json")
    flags = ("--emulate-delay", "--stages", 3, "--minibatches", 4, "--profile", profile, "--out", tmp_path / "out")
    flags = (*flags, "--link", "1gbit/s", "--schedule", "pipedream")
    status, out, _ = run_command("compare", tmp_path / "small.py", *flags, "--json")
    assert status == 0
    shown = json.loads(out)
    assert list(shown) == ["verdict", "methods"]
    assert [(row["method"], row["updates"], row["flushes"]) for row in shown["methods"]] == [
        ("1f1b", 4, True),
        ("pipedream", 4, False),
    ]
    assert all(row["predicted_s"] == pytest.approx(24 / row["predicted_per_s"]) for row in shown["methods"])
    status, out, _ = run_command("compare", tmp_path / "small.py", *flags)
    assert status == 0
    assert re.search(r"^pipedream +4 ", out, re.MULTILINE)
    assert shown["verdict"] in out
