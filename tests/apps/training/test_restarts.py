"""Runs that go on by themselves: restarted from their newest checkpoint, and with fewer workers."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import commands
import processes as worker_processes
import pytest
import torch
import torch.distributed as dist
from commands import Run
from hypothesis import given, strategies as st
from marks import long

import pipedream as pd
from pipedream._version import hash_sources
from pipedream.apps.training import checkpoint_cost, job, run_folder
from pipedream.apps.training.options import TrainingOptions
from pipedream.services.failure import processes, restarts
from pipedream.services.joining import joining

pytestmark = pytest.mark.processes
RECIPE = '''
import os
import signal
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pipedream


class Mortal(nn.Module):
    """Ends its process in its 26th forward, if DOOMED says so: as the last layer, that of the last rank."""

    calls = 0

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.calls += 1
            if self.calls == 26 and DOOMED:
                os.kill(os.getpid(), signal.SIGKILL)
        return x * 1


def recipe(seed=0):
    torch.manual_seed(seed)
    inputs = torch.randn(160, 8)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2), Mortal()]
    return pipedream.Recipe(
        model=nn.Sequential(*layers),
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        train=DataLoader(data, batch_size=8, shuffle=True),
        epochs=2,
    )
'''
FAULT = "rank=1,after=25,kind=kill"


def write(folder: Path, doomed: str) -> None:
    """Writes the recipe."""
    (folder / "mortal.py").write_text(RECIPE.replace("DOOMED", doomed), encoding="utf-8")


def train(folder: Path, *options: str) -> tuple[commands.Ended, dict[str, Any]]:
    """Trains by the command; returns how it ended and its summary, the one object on its standard output."""
    arguments = ["-m", "pipedream", "train", "mortal.py", "--out", "run", "--checkpoint-every", "10", *options]
    ended = commands.run(*arguments, "--json", folder=folder)
    assert ended.status == 0, ended.err
    assert not ended.orphans
    summary = json.loads(ended.out)
    assert summary == json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    return ended, summary


@pytest.mark.slow
def test_restarted_it_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    write(tmp_path, "False")
    ended, summary = train(tmp_path, "--workers", "2", "--max-restarts", "2", "--simulate-fault", FAULT)
    assert ended.err.count("restart 1 of 2 after: rank 1 was ended by SIGKILL") == 1
    assert 10 <= summary["resumed_from"] < 26, "what was saved last may still have been on its way"
    assert summary["minibatches"] == 40
    failures = summary["failures"]
    assert failures["restarts"] == 1
    assert 0 < failures["minibatches_repeated"] <= 26 - summary["resumed_from"]
    assert [row["resumed_from"] for row in failures["each"]] == [summary["resumed_from"]]
    assert 0 < failures["each"][0]["minibatches"] - summary["resumed_from"] == failures["minibatches_repeated"]
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "restarts after failures" in report
    assert f"failure after minibatch {failures['each'][0]['minibatches']}, resumed" in report
    # The plan was measured by the run that died; with it, nothing that dies gives the same weights, in one process too.
    plan, make = pd.Plan.load(tmp_path / "run" / "plan.json"), commands.load_script(tmp_path / "mortal.py").recipe
    whole = pd.run(make, plan=plan, checkpoint_every=10, out=tmp_path / "whole" / "run", quiet=True)
    assert whole["resumed_from"] is None
    assert whole["drains"] == summary["drains"]
    restarted, other = (torch.load(f / "run" / "weights.pt", weights_only=True) for f in (tmp_path, tmp_path / "whole"))
    assert all(torch.equal(restarted[name], other[name]) for name in restarted)
    losses = [json.loads((f / "run" / "losses.json").read_text()) for f in (tmp_path, tmp_path / "whole")]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_checkpoints_are_made_as_often_as_they_may(tmp_path: Path) -> None:
    """All ranks drain at the same minibatches: otherwise the run would hang."""
    write(tmp_path, "False")
    how = "--workers", "2", "--max-restarts", "1", "--checkpoint-every", "auto", "--simulate-fault", FAULT
    ended, summary = train(tmp_path, *how)
    assert ended.err.count("restart 1 of 1 after: rank 1 was ended by SIGKILL") == 1
    assert checkpoint_cost.FIRST <= summary["resumed_from"] < 26
    assert summary["checkpoints"]["seconds"] > 0
    assert summary["checkpoints"]["every"] > 1


def test_workers_on_spare_machines_are_not_started() -> None:
    words = "2 workers were asked for, 3 processes were started; .*--nnodes does not count spare machines$"
    with pytest.raises(pd.errors.PlanError, match=words):
        job._count_workers(TrainingOptions(workers=2), None, 3)
    with pytest.raises(pd.PipelineError, match=r"make the numbers equal$"):
        job._count_workers(TrainingOptions(workers=3), None, 2)


def launched(monkeypatch: pytest.MonkeyPatch, folder: Path, attempt: int) -> None:
    """Makes this process look like a worker of a launcher, in an attempt."""
    file = folder / "launch" / str(attempt) / "0" / "error.json"
    file.parent.mkdir(parents=True)
    monkeypatch.setenv(processes.LAUNCHER, "1 1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))


def _find_point(folder: Path) -> int | None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(dist.get_rank())
    point = run_folder.find_resume_point(None, folder)
    return None if point is None else point.manifest.minibatches


def test_a_machine_that_was_not_restarted_resumes_with_the_others(tmp_path: Path) -> None:
    model, batches = torch.nn.Sequential(torch.nn.Linear(4, 4)), [(torch.ones(2, 4), torch.ones(2, 4))] * 3
    options = {"loss": torch.nn.functional.mse_loss, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    with pd.Pipeline(model, pd.plan(pd.profile(model, batches[0][0]), pd.Cluster.flat(1)), **options) as pipeline:
        list(pipeline.train(batches))
        pipeline.save(tmp_path / "checkpoints")
    assert run_folder.find_resume_point(None, tmp_path) is None
    assert worker_processes.results(_find_point, 2, tmp_path) == [3, 3]


def test_losses_count_from_the_newest_plan_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks are those of the attempt that lost them; one that ended before it had a plan has that of before."""
    launched(monkeypatch, tmp_path, 3)
    plan = pd.Plan.uniform(2, replicas=(4, 1))
    attempts = [tmp_path / "launch" / str(attempt) for attempt in range(3)]
    for attempt in attempts:
        attempt.mkdir(exist_ok=True)
    assert restarts.find_survivors() == restarts.Survivors()
    plan.save(attempts[0] / "plan.json")
    survivors = restarts.find_survivors()
    assert (survivors, survivors.cluster) == (restarts.Survivors(plan, (), plan), None)
    processes.write_lost(attempts[0], [0, 3])
    processes.write_lost(attempts[2], [1])
    survivors = restarts.find_survivors()
    assert survivors.plan is not None
    assert (survivors.plan.config, survivors.lost) == ("1-1", (3, 0, 1))
    assert survivors.cluster == survivors.plan.cluster
    survivors.plan.save(attempts[1] / "plan.json")
    last = restarts.find_survivors()
    assert last == restarts.Survivors(survivors.plan, (1,), None), "rank 1 is now the last of stage 1"
    assert last.cluster is not None
    assert last.cluster.workers == 1


def test_code_may_not_change_between_attempts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    restarts.check_code_stays("under no launcher of ours", 0)
    launched(monkeypatch, tmp_path, 1)
    restarts.check_code_stays("x = 2\n", 1)  # another rank may come first
    for rank in (0, 1):
        restarts.check_code_stays("x = 1\n", rank)
    with pytest.raises(pd.PipelineError, match=r"restart 1 must continue .* its file has changed .'-x = 1'.; put"):
        restarts.check_code_stays("x = 2\n", 1)
    before = joining.name_code()
    for name, value in (("__version__", "0.2"), ("hash_sources", lambda: "0" * 12)):
        monkeypatch.setattr(joining, name, value)
        now = joining.name_code()
        with pytest.raises(pd.errors.RecipeError) as refusal:
            restarts.check_code_stays("x = 1\n", 1)
        assert f"restart 1 must continue with {before}, but rank 1 has {now}; install" in str(refusal.value)


def test_the_digest_is_of_all_sources(tmp_path: Path) -> None:
    digests = []
    for name, text in (("a.py", "x = 1\n"), ("a.py", "x = 2\n"), ("b/a.py", "x = 2\n"), ("b/b.py", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        hash_sources.cache_clear()
        digests.append(hash_sources(tmp_path))
    assert len({*digests}) == 4
    (tmp_path / "a.py").unlink()
    assert hash_sources(tmp_path) == digests[-1], "a fork has what its launcher has imported"
    hash_sources.cache_clear()


REPLICAS = """


class Report(pipedream.callbacks.Callback):
    def on_worker_lost(self, pipeline, ranks):
        LOST
        with Path("lost.txt").open("a") as file:
            print(pipeline.rank, pipeline.drain(), ranks, file=file)


make = recipe


def recipe(seed=0):
    torch.set_default_dtype(torch.float64)
    base = make(seed)
    torch.set_default_dtype(torch.float32)
    return dataclasses.replace(base, callbacks=[Report()])
"""


def write_replicas(folder: Path, workers: int, lost: str = "pass") -> None:
    """Writes a recipe whose first layer, on rank 1 of so many workers, ends its process; `lost` is done of its loss."""
    text = RECIPE.replace("import os", "import dataclasses\nimport os").replace("26", "8")
    text = text.replace(", Mortal()", "").replace("layers = [", "layers = [Mortal(), ") + REPLICAS.replace("LOST", lost)
    doomed = f'(os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) == ("1", "{workers}")'
    folder.mkdir(exist_ok=True)
    (folder / "mortal.py").write_text(text.replace("DOOMED", doomed), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [(2,), long((3, 1))], ids=["2", "3-1"])
def test_without_a_replica_the_others_do_the_rest(tmp_path: Path, replicas: tuple[int, ...]) -> None:
    """As one process does that runs the plan, and from the checkpoint on the plan with a replica fewer."""
    write_replicas(tmp_path, sum(replicas))
    make = commands.load_script(tmp_path / "mortal.py").recipe
    profile = pd.profile(make(0).model, make(0).first_batch()[0])
    plan = pd.plan(profile, pd.Cluster.flat(sum(replicas)), shape=replicas)
    plan.save(tmp_path / "plan.json")
    ended, summary = train(tmp_path, "--plan", "plan.json", "--elastic", "--checkpoint-every", "4")
    fewer = f"{sum(replicas) - 1}"
    assert f"continuing with one worker fewer, {fewer}, after: rank 1 was ended by SIGKILL" in ended.err
    resumed = summary["resumed_from"]
    assert 4 <= resumed < 40
    assert summary["failures"]["restarts"] == summary["failures"]["workers_lost"] == 1
    lost = sorted((tmp_path / "lost.txt").read_text(encoding="utf-8").splitlines())
    assert lost == [f"{rank} {resumed} (1,)" for rank in range(sum(replicas) - 1)]
    reduced = restarts.drop_worker(plan, 1)
    assert reduced is not None
    assert pd.Plan.load(tmp_path / "run" / "plan.json").config == reduced.config
    assert not (tmp_path / "run" / "profile.json").exists(), "nothing is measured to plan again"
    common: dict[str, Any] = {"checkpoint_every": 4, "quiet": True}
    pd.run(make, plan=plan, minibatches=resumed, out=tmp_path / "a", **common)
    pd.run(make, plan=reduced, resume=tmp_path / "a", out=tmp_path / "b", **common)
    states = [torch.load(tmp_path / run / "weights.pt", weights_only=True) for run in ("run", "b")]
    assert all(torch.allclose(states[0][name], states[1][name], rtol=0, atol=1e-10) for name in states[0])
    losses = [json.loads((tmp_path / run / "losses.json").read_text(encoding="utf-8")) for run in ("run", "b")]
    assert losses[0][resumed:] == [[number, pytest.approx(loss, abs=1e-10)] for number, loss in losses[1][resumed:]]
    assert len(losses[0]) == len(losses[1]) == 40


@pytest.mark.slow
def test_a_loss_is_told_once_more_if_nobody_heard_of_it(tmp_path: Path) -> None:
    """Rank 0 is killed while it hears that rank 1 is lost."""
    write_replicas(tmp_path, 3, "(pipeline.rank, ranks) == (0, (1,)) and os.kill(os.getpid(), signal.SIGKILL)")
    ended, summary = train(tmp_path, "--config", "3", "--elastic", "--checkpoint-every", "4")
    assert "continuing with one worker fewer, 1, after: rank 0 was ended by SIGKILL" in ended.err
    assert summary["failures"]["workers_lost"] == 2
    lost = (tmp_path / "lost.txt").read_text(encoding="utf-8").splitlines()
    assert lost[-1] == f"0 {summary['resumed_from']} (1, 0)"


@pytest.mark.slow
def test_with_fewer_workers_it_plans_again_and_goes_on(tmp_path: Path) -> None:
    """What replicas were to exchange is dropped with them."""
    write(tmp_path, '(os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) == ("2", "3")')
    options = ("--config", "2-1", "--schedule", "1f1b", "--sums", "powersgd:1", "--elastic")
    ended, summary = train(tmp_path, *options, "--checkpoint-every", "1")
    assert (summary["workers"], summary["minibatches"]) == (2, 40)
    assert summary["resumed_from"] >= 1
    assert "continuing with one worker fewer, 2, after: rank 2 was ended by SIGKILL" in ended.err


@pytest.mark.parametrize(
    ("end", "length"), [((), 40), long(("--minibatches", "25"), 25)], ids=["epochs", "minibatches"]
)
def test_a_finished_run_has_nothing_left_to_do(
    run_command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: tuple[str, ...], length: int
) -> None:
    write(tmp_path, "False")
    monkeypatch.chdir(tmp_path)
    command = ("train", "mortal.py", "--workers", 1, "--out", "run", "--checkpoint-every", 10, *end)
    assert run_command(*command)[::2] == (0, "")
    # Its folder is not taken for a new run.
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    status, _, error = run_command(*command)
    assert (status, "earlier run; continue it (--resume run)" in error) == (2, True), error
    assert {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")} == before
    weights = Path("run", "weights.pt").read_bytes()
    assert run_command(*command, "--resume", "run")[::2] == (0, "")
    again = json.loads(Path("run", "summary.json").read_text(encoding="utf-8"))
    assert again["resumed_from"] == again["minibatches"] == length
    assert Path("run", "weights.pt").read_bytes() == weights


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=4))
def test_each_restart_is_counted(tmp_path_factory: pytest.TempPathFactory, attempts: list[tuple[int, int]]) -> None:
    """An attempt trains so many minibatches, and the next one continues so many before the furthest."""
    folder, furthest, resumed_from, repeated = tmp_path_factory.mktemp("run"), 0, 0, 0
    failures: list[dict[str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        for attempt, (trains, goes_back) in enumerate([*attempts, (20, 0)]):
            launched(patch, folder, attempt)
            counted, before = restarts.Restarts(0), furthest
            failures += [{"minibatches": furthest, "resumed_from": resumed_from}] if attempt else []
            counted.begin(resumed_from)
            for number in range(resumed_from, resumed_from + trains):
                counted.finish(number)
                repeated += number < before
                furthest = max(furthest, number + 1)
            expected = {"restarts": attempt, "workers_lost": 0, "minibatches_repeated": repeated, "each": failures}
            assert counted.list_figures() == expected
            resumed_from = max(0, furthest - goes_back)


def test_attempts_that_trained_nothing_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for attempt in range(3):
        launched(monkeypatch, tmp_path, attempt)
    counted = restarts.Restarts(0)
    counted.begin(0)
    each = [{"minibatches": 0, "resumed_from": 0}]  # the second has not begun
    expected = {"restarts": 2, "workers_lost": 0, "minibatches_repeated": 0, "each": each}
    assert counted.list_figures() == expected
    processes.write_lost(tmp_path / "launch" / "0", [1, 3])
    processes.write_lost(tmp_path / "launch" / "2", [0])  # by the next one
    assert counted.list_figures() == expected | {"workers_lost": 2}
    monkeypatch.delenv(processes.LAUNCHER)  # under another one only restarts are known
    expected = {"restarts": 2, "workers_lost": 0, "minibatches_repeated": None, "each": []}
    assert restarts.Restarts(0).list_figures() == expected
