"""Comparing ways to train: what torch offers trains as a plain loop does, and bad input is refused at once."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import commands
import processes
import pytest
import torch
from commands import Refused
from hypothesis import given, strategies as st
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

import pipedream as pd
from pipedream import slow_links
from pipedream.apps.compare import compare, compare_options, compare_runs, variants
from pipedream.apps.compare.torch_baselines import DataParallel, OneFOneB, PlainLoop, Task
from pipedream.apps.training import loop
from pipedream.core.cold import count_warm_up

CPU = torch.device("cpu")
RECIPE = """
from functools import partial
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
import pipedream

def recipe(seed: int = 0) -> pipedream.Recipe:
    torch.manual_seed(seed)
    inputs = torch.randn(160, 8)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    hidden = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return pipedream.Recipe(
        model=nn.Sequential(*hidden, nn.Linear(8, 2)),
        loss=functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5),
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.7),
        train=DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1)),
        test=DataLoader(data, batch_size=20),
        metrics={"accuracy": lambda output, labels: (output.argmax(1) == labels).float().mean()},
        target=("loss", 10.0),
    )
"""


def recipe(**changed: Any) -> pd.Recipe:
    """Returns the recipe of an epoch of five whole minibatches and a half."""
    space: dict[str, Any] = {}
    exec(RECIPE.replace("160", "44"), space)
    return replace(space["recipe"](), **changed)


def task(*microbatches: int, rank: int = 0, workers: int = 1, **changed: Any) -> Task:
    return Task(recipe(**changed), rank, workers, CPU, *microbatches)


def train(rival: Any, epochs: int) -> loop.TrainingLoop:
    policy = loop.CheckpointPolicy(Path("nowhere"), 0, 0)
    trained = loop.TrainingLoop(rival, rival.recipe, Console(quiet=True), 1, policy, time.perf_counter())
    trained.train(epochs, None, 0.0)
    return trained


def test_plain_loop_trains_as_the_pipeline_does(tmp_path: Path) -> None:
    trained = train(PlainLoop(task()), 2)
    how: dict[str, Any] = {"workers": 1, "schedule": "1f1b", "microbatches": 1, "epochs": 2, "quiet": True}
    summary = pd.run(recipe, out=tmp_path / "run", **how)
    figures = trained.list_figures()
    assert figures["metrics"] == pytest.approx(summary["metrics"], rel=1e-6)
    for actual, expected in zip(figures["evaluations"], summary["evaluations"], strict=True):
        assert actual == pytest.approx(expected | {"seconds": actual["seconds"]}, rel=1e-6)
    losses = json.loads((tmp_path / "run" / "losses.json").read_text())
    assert [number for number, _ in losses] == [number for number, _ in trained.losses] == list(range(12))
    assert [loss for _, loss in trained.losses] == pytest.approx([loss for _, loss in losses], rel=1e-6)
    assert min(trained.samples_per_s) > 0
    assert figures["seconds_to_target"] > 0


WAYS: dict[str, tuple[int, float]] = {  # samples of an update, bound
    **{"shared": (8, 1e-5), "1f1b": (8, 1e-5), "own": (16, 1e-5)},
    **{"fp16": (16, 1e-2), "every:1": (16, 1e-5), "accumulated": (32, 1e-5)},
}


def _train_each_way() -> dict[str, dict[str, Any]]:
    # Schedule1F1B takes minibatches of one size only.
    equal = {"rank": torch.distributed.get_rank(), "workers": 2}
    equal["train"] = DataLoader(recipe().train.dataset, batch_size=8, drop_last=True)  # type: ignore[attr-defined]
    of_stages = task(4, **equal)
    layers = [(str(number), layer) for number, layer in enumerate(of_stages.recipe.model)]
    rivals = DataParallel(task(4, **equal)), OneFOneB(of_stages, [layers[:3], layers[3:]]), DataParallel(task(**equal))
    by_less = (DataParallel(task(**equal), sums=sums) for sums in ("float16", "every:1"))
    return dict(zip(WAYS, map(_list_figures, (*rivals, *by_less, DataParallel(task(**equal), 2))), strict=True))


def _list_figures(rival: PlainLoop) -> dict[str, Any]:
    trained = train(rival, 2)
    numbers, losses = zip(*trained.losses, strict=True)
    summed = rival.sum_over_workers(losses)
    return {"metrics": trained.metrics, "numbers": numbers, "losses": summed, "samples": rival.samples}


@pytest.mark.slow
@pytest.mark.processes
def test_torchs_ways_give_the_plain_loops_weights() -> None:
    """What is left of an epoch of 5 minibatches of 8 is left out. SGD of averaged gradients averages SGD's steps."""
    of_ranks, data = processes.team(2).results(_train_each_way), recipe().train.dataset  # type: ignore[attr-defined]
    for way, (samples, bound) in WAYS.items():
        used = torch.utils.data.Subset(data, range(40 // samples * samples))
        alone = _list_figures(PlainLoop(task(train=DataLoader(used, batch_size=samples))))
        for figures in (ways[way] for ways in of_ranks):
            assert figures["metrics"] == pytest.approx(alone["metrics"], rel=bound), way
            assert figures["losses"] == pytest.approx(alone["losses"], rel=bound), way
            assert figures["samples"] == 2 * len(used), way
            assert figures["numbers"][-1] + 1 == (10 if samples == 8 else 8), "minibatches of the recipe"


def test_an_accumulating_worker_sums_its_gradients_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last update is what the epoch still has, and is summed once, too."""
    summed: list[bool] = []

    class OneProcess(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module, self.syncs = module, True

        @contextmanager
        def no_sync(self) -> Iterator[None]:
            self.syncs = False
            yield
            self.syncs = True

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            summed.append(self.syncs)
            return self.module(inputs)

    monkeypatch.setattr("pipedream.apps.compare.torch_baselines.DistributedDataParallel", OneProcess)
    rival = DataParallel(task(test=None, target=None), 4)
    rows = [(done.number, done.samples, done.ends_epoch) for done in rival.train(None, until_epoch=1)]
    assert rows == [(3, 32, False), (5, 12, True)]
    assert summed == [False, False, False, True, False, True]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PlainLoop(task(ema=0.9)), "has ema, which"),
        (lambda: PlainLoop(task(scheduler=ReduceLROnPlateau)), "ReduceLROnPlateau follows evaluations"),
        (lambda: OneFOneB(task(3, workers=2), [[("0", nn.Linear(8, 2))], []]), "but 8 samples are split into 3"),
    ],
)
def test_what_torchs_ways_do_not_train(make: Callable[[], PlainLoop], words: str) -> None:
    with pytest.raises(pd.PipelineError, match=words):
        make()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--link 400+5ms", "--link 400+5ms is 400 B/s; did you mean 400mbit/s+5ms?"),
        ("--link 25mbit/s+-50ms", "--link 25mbit/s+-50ms: '-50ms' is not a latency; write for example 50ms or 0.05s"),
        ("--link 5_parsec", "--link 5 parsec: '5 parsec' is not a bandwidth"),
        ("--link 1tbit/s", "a link of 1000 Gbit/s was asked for, but this machine's loopback carries"),
        ("--workers 1000", "1000 workers were asked for on "),
        ("--schedule pipedreem", "pipedreem"),
        ("--schedule 1f1b+spike", "a compensation changes losses, and speeds are compared; add --emulate-delay"),
        ("--seconds 2 --minibatches 8", "--seconds 2 was given with --minibatches 8; leave one out"),
        ("--out .", "is not empty, and has no comparison to continue; name a new folder"),
        ("--out s3://bucket/run", "--out s3://bucket/run was asked for, but comparisons are written on this mach"),
        ("--emulate-delay --schedule 1f1b --schedule gpipe", "with 1f1b, gpipe, which flush: no gradient is stale"),
        ("--emulate-delay --schedule pipedream+spyke", "spyke"),
        ("--emulate-delay --link 1gbit/s --link 1mbit/s", "2 links were given with --emulate-delay"),
    ],
)
def test_bad_input(options: str, words: str, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.py").write_text(RECIPE, encoding="utf-8")
    assert words in refused("compare", "small.py", *(option.replace("_", " ") for option in options.split()))
    assert {*os.listdir()} <= {"small.py", "__pycache__"}


class FakeRuns:
    """Stands in for `Runs.run`: writes run folders, in which each run is as fast as predicted; two of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[tuple[str, int, str]] = []
        self.options: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, BaseException] = {}
        profile = pd.profile(recipe().model, torch.randn(8, 8), runs=1)

        def run(self_: compare_runs.Runs, kind: str, workers: int, name: str, **options: Any) -> Path:
            self.ran.append((kind, workers, name))
            self.options[name] = options
            if name in self.failures:
                raise self.failures[name]
            folder = self_.folder / name
            if kind == "profile":
                profile.save(folder / "profile.json")
                return folder
            plan = pd.Plan.load(options["plan"])
            plan.save(folder / "plan.json")
            (folder / "losses.json").write_text("[[0, 0.75], [1, 0.5]]")
            summary = {"throughput": {"measured_per_s": compare.predict_samples_per_s(plan)}, "minibatches": 2,
                       "bubble": {"measured": None}, "memory": {"measured_bytes": 8}, "seconds_to_target": None,
                       "interrupted": False, "metrics": {}}  # fmt: skip
            (folder / "summary.json").write_text(json.dumps(summary))
            return folder

        monkeypatch.setattr(compare_runs.Runs, "run", run)


def test_a_comparison_continues_with_the_runs_that_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(RECIPE, encoding="utf-8")
    fake, out = FakeRuns(monkeypatch), tmp_path / "out"
    options = compare_options.ComparisonOptions(
        schedules=("torch", "1f1b", "data-parallel+diloco:30", "pipedream"), minibatches=4
    )
    continued = partial(compare.compare_recipe, str(tmp_path / "small.py"), out=out)
    fake.failures["1f1b"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        continued(options)
    torchs = [
        *("DDP", "DDP, accumulating 8", "DDP, fp16", "DDP, fp16, accumulating 8", "local SGD, every 8"),
        *("DDP, minibatch shared", "torch Schedule1F1B"),
    ]
    fake.failures = {"1f1b": pd.errors.WorkerError(0, "stage 1", "the loss is not finite")}
    fake.ran.clear()
    lines: list[str] = []
    comparison, _ = continued(options, progress=lines.append)
    assert re.match(r"3 of 11 rows to train, predicted to take [1-9]", lines[0])
    assert fake.ran == [("pipeline", 2, name) for name in ("1f1b", "data_parallel_diloco_30", "pipedream")]
    assert fake.options["pipedream"]["checkpoint_every"] == 0
    assert {name: chosen["minibatches"] for name, chosen in fake.options.items() if name != "profile"} == {
        "one_worker": 4, "DDP": 4, "DDP_accumulating_8": 32, "DDP_fp16": 4, "DDP_fp16_accumulating_8": 32,
        "local_SGD_every_8": 28, "DDP_minibatch_shared": 4, "torch_Schedule1F1B": 4,
        "1f1b": 4, "data_parallel_diloco_30": 72, "pipedream": 4,
    }  # fmt: skip
    assert comparison.reasons() == ("1f1b has no figures: rank 0, stage 1: the loss is not finite",)
    rows = {variant.name: variant for variant in comparison.variants}
    assert [rows[name].samples_per_update for name in (*torchs, "pipedream")] == [16, 128, 16, 128, 16, 8, 8, 8]
    assert rows["pipedream"].losses == ((8, 0.75), (16, 0.5))
    assert rows["data-parallel+diloco:30"].approximation == "sums=diloco:30"
    assert comparison.verdict in (out / "compare.html").read_text().replace("&#x27;", "'")
    for text in ("[" * 99_999, "{}", "[[0, 0.75]"):
        (out / "pipedream" / "summary.json").write_text(text)
        with pytest.raises(pd.PipelineError, match=r"cannot read the results in .*pipedream: .*; remove it"):
            continued(options)
    with pytest.raises(pd.PipelineError, match="has a comparison with minibatches 4, and 5 was asked for"):
        continued(compare_options.ComparisonOptions(schedules=options.schedules, minibatches=5))


def test_what_cannot_train_is_found_first_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(RECIPE.replace("loss=", "clip_grad_norm=1.0, loss=", 1), encoding="utf-8")
    fake, out = FakeRuns(monkeypatch), tmp_path / "out"
    options = compare_options.ComparisonOptions(schedules=("torch", "pipedream", "1f1b"), minibatches=4)
    rows: list[dict[str, str]] = []
    for failing in ("one_worker", "1f1b", "DDP"):
        fake.failures = {failing: KeyboardInterrupt()}
        shutil.rmtree(out / failing, ignore_errors=True)
        with pytest.raises(KeyboardInterrupt):
            compare.compare_recipe(str(tmp_path / "small.py"), options, out=out)
        state = json.loads((out / "compare.json").read_text())
        rows.append({row["name"]: " ".join(row["why"].split()[:4]) for row in state["variants"]})
    refused = {"torch Schedule1F1B": "the recipe clips the", "pipedream": "clip_grad_norm by the global"}
    assert rows[0] == refused, "before anything is trained"
    assert rows[1] == dict.fromkeys(["one worker", *(name for name, *_ in compare._DDP)], "") | {
        "DDP, minibatch shared": ""} | refused  # fmt: skip
    assert rows[2] == {name: why for name, why in rows[1].items() if name != "DDP"}, "those after it stay"
    assert {name for kind, _, name in fake.ran if kind != "ddp"} == {"profile", "one_worker", "1f1b"}


@pytest.mark.parametrize(("schedules", "rows", "total_s"), [((), 4, 369), (("data-parallel+diloco:30",), 5, 520)])
def test_rows_of_minutes_need_their_name(schedules: tuple[str, ...], rows: int, total_s: int, tmp_path: Path) -> None:
    lines: list[str] = []
    options, runs = compare_options.ComparisonOptions(schedules=schedules), compare_runs.Runs("", tmp_path, 0, "cpu")
    comparer = compare._Comparer(options, runs, variants.RecipeComparison("small", 2), lines.append)
    seconds = {"one worker": 300.0, "a": 9.0, "b": 30.0, "c": 30.0, "rare": 151.0}
    way = compare._Way("any", pd.plan_request.PlanRequest())
    comparer.rows = [compare._Row(way, variants.Variant(name), seconds=s) for name, s in seconds.items()]
    comparer._train = lambda row: row.variant  # type: ignore[method-assign]
    comparer.train()
    reason = "rare has no figures: it would take about 151 s; name it by --schedule to train it"
    assert comparer.comparison.reasons() == (() if schedules else (reason,))
    assert lines == [f"{rows} of 5 rows to train, predicted to take {total_s} s, besides starts and evaluations"]


def test_hosts_say_how_far_their_profile_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = SimpleNamespace(inside=lambda *command: command)
    network: Any = SimpleNamespace(hosts=(host, host), variables=lambda rank, port: {"RANK": f"{rank}"})
    code = "import os, sys; print('profiling', os.environ['RANK'], '\\nother', file=sys.stderr)"
    assert compare_runs.Runs("", tmp_path, 0, "cpu")._run_on_hosts(network, 2, ["-c", code]) == (0, "")
    assert capsys.readouterr().err == "profiling 0 \n"


@given(
    seconds=st.floats(0.0, 10.0),
    bytes_per_s=st.floats(1e5, 1e9),
    sums=st.sampled_from(["full", "every:4", "every:30"]),
    shared=st.booleans(),
)
def test_a_run_has_its_seconds_after_its_warm_up(seconds: float, bytes_per_s: float, sums: str, shared: bool) -> None:
    """In the part that `TrainingLoop` counts, at the predicted rate: at least two updates, and whole periods."""
    layers = tuple(pd.LayerProfile(0.1, 0.2, output_bytes=4, parameter_bytes=100_000) for _ in range(2))
    profile, cluster = pd.Profile.of_chain(layers, batch=16), pd.Cluster.flat(2, bytes_per_s)
    request: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2} if shared else {}
    plan = pd.plan(profile, cluster, shape="data-parallel", sums=sums, **request)
    runs: Any = None
    comparer = compare._Comparer(
        compare_options.ComparisonOptions(seconds=seconds), runs, variants.RecipeComparison("small", 2), print
    )
    minibatches = 1 if shared else 2  # of an update
    count = comparer._choose_length(plan, minibatches)["minibatches"]
    assert count is not None
    updates, rest = divmod(count, minibatches)
    warm_up = -(-count_warm_up(count) // minibatches)
    assert rest == 0
    assert updates - warm_up >= 2
    period = plan.choices.sums.period
    assert period == 1 or (updates - warm_up) % period == 0, "an average of the weights counts as often as it happens"
    rate = compare.predict_samples_per_s(plan) / (16 * minibatches)
    assert updates - 12 // minibatches >= seconds * rate - 1e-6
    assert updates <= 2 * (period + 12) + seconds * rate


def test_one_worker_is_measured_once_others_predicted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is the planner's choice over slow links. Of one microbatch, activation and gradient cross in turn."""

    def limit(rate: float, latency_s: float) -> None:
        if latency_s:
            raise slow_links.LinkError("no netem")

    monkeypatch.setattr(compare._Comparer, "_check", lambda *row: None)
    fake, links = FakeRuns(monkeypatch), compare_options._read_links(["8kbit/s", "16kbit/s", "1e6+50ms"])
    profile = pd.Profile.of_chain((pd.LayerProfile(0.01, 0.02, 4000, 40_000),) * 2, batch=8)
    runs: Any = compare_runs.Runs("small.py", tmp_path, 0, "cpu", SimpleNamespace(limit=limit))  # type: ignore[arg-type]
    comparer = compare._Comparer(
        compare_options.ComparisonOptions(), runs, variants.RecipeComparison("small", 2), lambda line: None
    )
    for link, name in zip(links, ("auto", "auto", "1f1b"), strict=True):
        options = compare_options.ComparisonOptions(schedules=(name,), microbatches=1)
        for way in compare._list_ways(options, options.make_cluster(link)):
            comparer.rows.append(comparer.plan(way, link, profile, recipe()))
    comparer.train()
    assert [name for _, _, name in fake.ran] == ["one_worker"], "it is measured once"
    *alone, piped = comparer.comparison.variants
    pairs = [(name, link) for link in links for name in (variants.ONE_WORKER, "auto")][:5]
    assert [(row.name, row.speed, row.samples_per_s) for row in alone] == [(*p, alone[0].samples_per_s) for p in pairs]
    assert (piped.why, piped.samples_per_s) == ("no netem", None)
    assert piped.predicted_per_s == pytest.approx(8 / (2 * (0.01 + 0.02) + 2 * (4000 / 1e6 + 0.05)))
    assert comparer.comparison.verdict.endswith("; at 8 Mbit/s + 50 ms only one worker ran.")


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.processes
def test_compares_over_links(tmp_path: Path) -> None:
    """All rows, with the bytes that crossed the links."""
    (tmp_path / "small.py").write_text(RECIPE, encoding="utf-8")
    options = ["--workers", "2", "--link", "40mbit/s", "--microbatches", "4", "--json"]
    for method in ("torch", "data-parallel", "data-parallel+powersgd:1", "1f1b", "1f1b+int4", "auto"):
        options += ["--schedule", method]
    ended = commands.run("-m", "pipedream", "compare", "small.py", *options, folder=tmp_path, timeout_s=600.0)
    assert (ended.status, ended.orphans) == (0, []), ended.err
    comparison = json.loads(ended.out)
    rows = {row["name"]: row for row in comparison["variants"]}
    assert [row["why"] for row in rows.values()] == [""] * 13
    assert rows["1f1b+int4"]["approximation"] == "messages=int4"
    weights_bytes = 4 * (3 * 72 + 18)
    for name, samples in (("DDP", 16), ("DDP, minibatch shared", 8)):  # two workers send the weights' gradients once
        assert rows[name]["bytes_per_sample"] > 2 * weights_bytes / samples
    loss = rows[variants.ONE_WORKER]["metrics"]["loss"]
    for name in ("DDP, minibatch shared", "torch Schedule1F1B", "1f1b"):
        assert rows[name]["metrics"]["loss"] == pytest.approx(loss, rel=1e-5), name
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "compare.json").read_text()) == comparison
    assert (folder / "compare.svg").is_file()
