"""A run that stopped and went on: to the bit on the same plan, and as one process would on any other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import processes
import pytest
import reference
import torch
import zoo
from cases import OPTIMIZERS, Fresh, assert_near
from marks import spread
from torch import Tensor
from torch.optim import lr_scheduler

import pipedream as pd
from pipedream.core.errors import ArtifactError, WorkerError
from pipedream.runtime.checkpoint import folders, pieces
from pipedream.runtime.checkpoint.remote import RemotePath
from pipedream.training import emulate as emulate_module
from pipedream.training import loop
from pipedream.training.run_folder import CHECKPOINTS, ResumePoint, find_resume_point
from pipedream.training.train import train_recipe

EPOCHS = 6
EVERY = 10


def step(optimizer: torch.optim.Optimizer) -> Any:
    """Schedules with a state of their own: warm-up, then steps; in a list, with whole-number keys."""
    warm = lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)
    return lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.MultiStepLR(optimizer, [3, 9])], [5])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any] | None] = {
    "none": None,
    "steps": step,
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=40),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda n: 0.95**n),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=100, cycle_momentum=False),
}


@dataclass(frozen=True)
class Leg:
    """A part of a run.

    Attributes:
        stages, replicas: the plan.
        until: minibatches, since the start of the run.
    """

    replicas: tuple[int, ...]
    until: int = 30
    animal: str = "mlp"
    schedule: str = "pipedream"
    optimizer: str = "adamw"
    scheduler: str = "steps"
    depth: str = "noam"
    microbatches: int | None = None
    autocast: torch.dtype | None = None
    compensation: tuple[str, ...] = ()

    def __str__(self) -> str:
        plan = "-".join(map(str, self.replicas))
        low = "" if self.autocast is None else f" {self.autocast}"
        return " ".join(
            [f"{self.animal} {self.schedule} {plan} {self.optimizer} {self.scheduler}{low}", *self.compensation]
        )


@dataclass
class Outcome:
    """What a leg gave: losses and rates by number, and the state at its end, on rank 0."""

    losses: dict[int, float]
    rates: dict[int, float]
    state: dict[str, Tensor]
    ema: dict[str, Tensor]
    drains: list[int]


def go(leg: Leg, folder: Path, resume: Path | None, keep: int | None = None, wait: bool = False) -> Outcome:
    """Trains a leg, from a checkpoint if there is one, and saves every so many minibatches."""
    animal = zoo.make(leg.animal, torch.float64 if leg.autocast is None else torch.float32)
    plan = zoo.plan_of(zoo.make(leg.animal), len(leg.replicas), leg.replicas, leg.depth)
    losses, rates = {}, {}
    torch.manual_seed(0 if resume is None else 99)
    with pd.Pipeline(
        animal.model,
        plan,
        schedule=leg.schedule,
        loss=animal.loss,
        optimizer=groups(leg.optimizer),
        microbatches=leg.microbatches,
        scheduler=SCHEDULERS[leg.scheduler],
        compensation=leg.compensation or None,
        autocast=leg.autocast,
        ema=0.9,
        seed=3,
        check=False,
    ) as pipeline:
        if resume is not None:
            assert pipeline.load(resume) == divmod(pipeline.drain(), len(animal.batches))
        for done in pipeline.train(Fresh(animal.batches), epochs=EPOCHS - pipeline.position[0]):
            losses[done.number], rates[done.number] = done.loss, done.rate
            if (done.number + 1) % EVERY == 0:
                pipeline.save(folder, keep=keep, wait=wait)
            if done.number + 1 == leg.until:
                break
        outcome = Outcome(losses, rates, pipeline.state_dict(), pipeline.state_dict(ema=True), list(pipeline.drains))
    return outcome


def groups(kind: str) -> Callable[[list[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]:
    """Returns a factory that puts biases into a group of their own, so that stages differ in their groups."""

    def make(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        weights = [pair for pair in named if not pair[0].endswith("bias")]
        biases = [pair for pair in named if pair[0].endswith("bias")]
        options = dict(OPTIMIZERS[kind].keywords)
        decay = options.pop("weight_decay")
        parts = [{"params": weights, "weight_decay": decay}, {"params": biases, "weight_decay": 0.0}]
        return OPTIMIZERS[kind].func([part for part in parts if part["params"]], **options)

    return make


SAME = [
    *(Leg((1, 1, 1), schedule=s, microbatches=m) for s, m in [("pipedream", None), ("1f1b", 3), ("pipedream_2bw", 3)]),
    *(Leg((2, 1), schedule=s, microbatches=m) for s, m in [("pipedream", None), ("gpipe", 4), ("pipedream_2bw", 3)]),
    Leg((1, 2), schedule="pipedream_vertical_sync", optimizer="sgd", scheduler="cosine"),
    Leg((3, 1), animal="cnn", scheduler="lambda"),
    Leg((2, 1, 1), depth="full", scheduler="one cycle", optimizer="sgd"),
    Leg((2,), animal="cnn", optimizer="sgd", scheduler="none"),
    Leg((1, 1), animal="lstm"),
    Leg((1, 1), autocast=torch.bfloat16),
    # What views are made of: the velocity at the coming rate, an average of updates.
    Leg((1, 1, 1), schedule="spectrain"),
    Leg((1, 1, 1), schedule="pipemare", microbatches=2, optimizer="sgd"),
    Leg((1, 1, 1), animal="transformer", schedule="1f1b", microbatches=2, scheduler="cosine"),
    Leg((1, 1, 1), compensation=("error_feedback", "t1:25")),
    Leg((2, 1), optimizer="sgd", compensation=("spike", "gap_aware:0.9")),
    Leg((2, 1), compensation=("basis_rotation:2:by_delay", "gap_aware:0.9")),
]


@pytest.mark.parametrize(
    "leg",
    spread(
        pytest.param(case, id=str(case), marks=pytest.mark.slow if number % 8 else ())
        for number, case in enumerate(SAME)
    ),
)
def test_the_same_plan_goes_on_to_the_bit(leg: Leg, tmp_path: Path) -> None:
    check_resumed(leg, tmp_path, lambda *args: go(leg, *args))


@pytest.mark.processes
@pytest.mark.parametrize(
    "replicas", [(2, 1), (1, 1), *(pytest.param(r, marks=pytest.mark.long) for r in ((2,), (1, 1, 1)))], ids=str
)
@pytest.mark.slow
def test_several_processes_go_on_to_the_bit(replicas: tuple[int, ...], tmp_path: Path) -> None:
    leg = Leg(replicas)
    check_resumed(leg, tmp_path, lambda *args: processes.team(leg_workers(leg)).results(go, leg, *args)[0])


def leg_workers(leg: Leg) -> int:
    """Returns the workers of a leg's plan."""
    return sum(leg.replicas)


def check_resumed(leg: Leg, folder: Path, run: Callable[..., Outcome]) -> None:
    """Trains without a stop, and again from a checkpoint in the middle; both save at the same minibatches."""
    whole = run(folder / "a", None)
    saved = folders.list_checkpoints(folder / "a")
    assert len(saved) == 3
    assert [int(path.name.split("-")[1]) for path in saved] == whole.drains
    for path in saved[:2]:
        shutil.copytree(path, folder / "b" / path.name)
        rest = run(folder / "b", folder / "b")
        assert rest.losses == {n: loss for n, loss in whole.losses.items() if n in rest.losses}
        assert rest.rates == {n: rate for n, rate in whole.rates.items() if n in rest.rates}
        assert min(rest.losses) == int(path.name.split("-")[1])
        assert rest.drains == whole.drains
        for actual, expected in ((rest.state, whole.state), (rest.ema, whole.ema)):
            assert all(torch.equal(actual[name], expected[name]) for name in expected)
        manifest, other = (folders.read_manifest(folders.list_checkpoints(folder / f)[-1]) for f in "ab")
        assert manifest.stages == other.stages
        assert manifest.random == other.random
        shutil.rmtree(folder / "b")


ACROSS = [
    [((2, 1), 10), ((1, 1, 1), 20), ((1, 2), 30)],
    [((2, 1), 10), ((1,), 20), ((1, 1, 1, 1), 30)],
    [((3,), 10), ((1, 3), 20), ((2, 2), 30)],
]


@pytest.mark.parametrize(
    ("animal", "legs"),
    spread(
        pytest.param(
            animal,
            legs,
            id=" ".join(["-".join(map(str, counts)) for counts, _ in legs] + [animal]),
            marks=() if (number, animal) in ((0, "mlp"),) else pytest.mark.slow,
        )
        for number, legs in enumerate(ACROSS)
        for animal in ("mlp", "lstm", "transformer")
    ),
)
def test_other_plans_go_on_as_one_process_would(animal: str, legs: list[tuple[Any, int]], tmp_path: Path) -> None:
    scheduler = {"mlp": "steps", "lstm": "cosine", "transformer": "one cycle"}[animal]
    expected = plain(animal, scheduler)
    resume = None
    for i, (counts, until) in enumerate(legs):
        schedule = ("1f1b", "gpipe")[i % 2]
        leg = Leg(counts, until, animal, schedule, "adamw", scheduler, microbatches=4)
        outcome = go(leg, tmp_path / f"{i} last", resume, keep=1)
        resume = tmp_path / f"{i} last"
        for number, loss in outcome.losses.items():
            assert abs(loss - expected.losses[number]) <= 1e-10 * max(1.0, abs(loss)), number
            assert outcome.rates[number] == pytest.approx(expected.rates[number], rel=1e-12), number
    assert_near(outcome.state, expected.state, 1e-10)
    assert_near({name: outcome.ema[name] for name in expected.ema}, expected.ema, 1e-10)


@pytest.mark.processes
@pytest.mark.slow
def test_processes_go_on_with_what_one_has_saved_and_the_other_way_round(tmp_path: Path) -> None:
    expected = plain("mlp", "steps")
    first = Leg((2, 1), 10, schedule="1f1b", microbatches=4)
    processes.team(3).results(go, first, tmp_path / "1", None)
    go(Leg((1, 1), 20, schedule="1f1b", microbatches=4), tmp_path / "2", tmp_path / "1")
    last = processes.team(3).results(go, Leg((1, 2), schedule="1f1b", microbatches=4), tmp_path / "3", tmp_path / "2")[
        0
    ]
    assert_near(last.state, expected.state, 1e-10)


def test_optimizer_state_is_one_processes_own(tmp_path: Path) -> None:
    saved = []
    for i, counts in enumerate([(1,), (2, 1), (1, 1, 1)]):
        go(Leg(counts, 10, schedule="1f1b", microbatches=4), tmp_path / str(i), None)
        path = folders.list_checkpoints(tmp_path / str(i))[0]
        manifest = folders.read_manifest(path)
        saved.append((manifest, pieces.read_tensors(path, manifest, manifest.tensors)))
    (manifest, alone), *others = saved
    assert {name.split("/")[-1] for name in alone if name.startswith("optimizer")} == {"step", "exp_avg", "exp_avg_sq"}
    for other_manifest, tensors in others:
        assert other_manifest.minibatches == manifest.minibatches
        assert_near(tensors, alone, 1e-10)


def plain(animal: str, scheduler: str) -> reference.Answer:
    """Returns what one process gives, from the start to the end."""
    example = zoo.make(animal)
    names = [name for stage in zoo.plan_of(zoo.make(animal), 1).stages for name in stage.names]
    return reference.plain(
        example.model, names, example.batches * EPOCHS, example.total, groups("adamw"),
        microbatches=4, seed=3, scheduler=SCHEDULERS[scheduler], ema=0.9,
    )  # fmt: skip


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    go(Leg((1, 1), 10), tmp_path, None)
    with pytest.raises(ArtifactError, match=r"has no tensor 'model/1.weight'; it is of another model"):
        go(Leg((1, 1), 20, animal="cnn"), tmp_path, tmp_path)
    with pytest.raises(ArtifactError, match=r"saved with a learning-rate scheduler, this run has none"):
        go(Leg((1, 1), 20, scheduler="none"), tmp_path, tmp_path)
    with pytest.raises(ArtifactError, match=r"no complete checkpoint in .*empty"):
        go(Leg((1, 1), 20), tmp_path, tmp_path / "empty")
    with pytest.raises(ArtifactError, match=r"exists already"):
        go(Leg((1, 1), 10), tmp_path, None)


def test_groups_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    leg = Leg((1,), 10, scheduler="none")
    go(leg, tmp_path, None)
    animal = zoo.make("mlp")
    with (
        pd.Pipeline(
            animal.model, zoo.plan_of(zoo.make("mlp"), 1), loss=animal.loss, optimizer=OPTIMIZERS["adamw"], ema=0.9
        ) as pipeline,
        pytest.raises(ArtifactError, match="in one group of the optimizer now"),
    ):
        pipeline.load(tmp_path)


def test_compensations_go_on_under_another_plan(tmp_path: Path) -> None:
    """The last update is each parameter's own, and T1 counts on where replicas and stages are others."""
    compensations = ("error_feedback:1", "gap_aware", "t1:40", "basis_rotation:2:one_sided")
    first = Leg((2, 1), 10, compensation=compensations, scheduler="none")
    go(first, tmp_path / "1", None)
    path = folders.list_checkpoints(tmp_path / "1")[0]
    manifest = folders.read_manifest(path)
    assert [str(rule) for rule in manifest.compensation] == [
        "error_feedback:1.0", "gap_aware", "t1:40", "basis_rotation:2:one_sided",
    ]  # fmt: skip
    tensors = pieces.read_tensors(path, manifest, manifest.tensors)
    assert {name.split("/")[-1] for name in tensors if name.startswith("compensation")} == {
        "last_update", "mean_square", "steps", "greatest_rate", "left", "right",
    }  # fmt: skip
    # A round of the two replicas in front holds two minibatches.
    rounds = manifest.minibatches // 2
    assert [(state.updates, state.rounds_before) for state in manifest.stages] == [(rounds, 0), (2 * rounds, 0)]
    animal = zoo.make("mlp")
    plan = zoo.plan_of(animal, 3, (1, 1, 1))
    settings: dict[str, Any] = {"loss": animal.loss, "optimizer": groups("adamw"), "seed": 3}
    with pd.Pipeline(animal.model, plan, schedule="pipedream", compensation=compensations, **settings) as pipeline:
        pipeline.load(path)
        for worker in pipeline._session.local.workers:
            for stage, stage_state in worker.stage_states.items():
                assert (stage_state.optimizer.updates, stage_state.optimizer.rounds) == (0, rounds)
                for name, state in stage_state.optimizer.compensator.state.items():
                    for key, tensor in state.items():
                        assert torch.equal(tensor, tensors[f"compensation/{name}/{key}"]), (stage, name, key)
        # PipeMare's T1, k of 40 updates, the first stage two updates late: 2^(k/40 - 1).
        assert pipeline.learning_rates() == pytest.approx((0.01 * 2 ** (rounds / 40 - 1), 0.01, 0.01))
        again = list(pipeline.train(Fresh(animal.batches), epochs=1))
        assert again
        pipeline.save(tmp_path / "2")
    manifest = folders.read_manifest(folders.list_checkpoints(tmp_path / "2")[0])
    assert [state.rounds_before for state in manifest.stages] == [rounds] * 3
    # And one that knows of no compensation goes on from it.
    with pd.Pipeline(zoo.make("mlp").model, plan, schedule="pipedream", **settings) as pipeline:
        pipeline.load(tmp_path / "2")
        assert list(pipeline.train(Fresh(animal.batches), epochs=1))


def regression(seed: int) -> pd.Recipe:
    """Returns a recipe of 4 epochs of 5 minibatches."""
    torch.manual_seed(7)
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(5)]
    torch.manual_seed(seed)
    return pd.Recipe(
        model=torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)),
        loss=torch.nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        train=data,
        test=data,
        target=("loss", 1e9),
        epochs=4,
    )


OPTIONS: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2, "workers": 2, "quiet": True}


def test_a_resumed_run_reports_all_of_it(tmp_path: Path) -> None:
    """Seconds, evaluations, target and losses are carried through the checkpoint."""
    first = train_recipe(regression, epochs=2, out=tmp_path / "a", **OPTIONS)
    saved = folders.read_manifest(folders.list_checkpoints(tmp_path / "a" / CHECKPOINTS)[-1])
    assert [row["minibatches"] for row in first["evaluations"]] == [5, 10]
    assert saved.extra["evaluations"] == first["evaluations"]
    rest = train_recipe(regression, resume=tmp_path / "a", out=tmp_path / "b", **OPTIONS)
    assert rest["evaluations"][:2] == first["evaluations"]
    assert [row["minibatches"] for row in rest["evaluations"]] == [5, 10, 15, 20]
    seconds = [row["seconds"] for row in rest["evaluations"]]
    assert seconds == sorted(seconds)
    assert rest["seconds_to_target"] == first["seconds_to_target"] == seconds[0]
    assert rest["seconds"] > rest["train_seconds"] > saved.extra["train_seconds"] > 0
    assert saved.extra["seconds"] > saved.extra["train_seconds"]
    assert [number for number, _ in json.loads((tmp_path / "b" / "losses.json").read_text())] == list(range(20))


def test_a_loops_own_values_are_kept(tmp_path: Path) -> None:
    animal = zoo.make("mlp")
    plan = zoo.plan_of(zoo.make("mlp"), 2)
    with pd.Pipeline(animal.model, plan, loss=animal.loss, optimizer=OPTIMIZERS["sgd"]) as pipeline:
        with pytest.raises(ArtifactError, match=r"extra cannot be kept in a checkpoint.*Tensor"):
            pipeline.save(tmp_path, extra={"best": torch.ones(1)})
        pipeline.save(tmp_path, extra={"best": 0.5})
    with pd.Pipeline(animal.model, plan, loss=animal.loss, optimizer=OPTIMIZERS["sgd"]) as pipeline:
        pipeline.load(tmp_path)
        assert pipeline.extra == {"best": 0.5}


def test_one_command_starts_and_continues_a_run(tmp_path: Path) -> None:
    """Only the folder that the run writes may be without a checkpoint."""
    run = tmp_path / "run"
    assert find_resume_point(run, run) is None
    assert find_resume_point(str(run), run) is None
    for out in (None, tmp_path / "other"):
        with pytest.raises(ArtifactError, match=r"no complete checkpoint in .*run to resume from"):
            find_resume_point(run, out)


@pytest.mark.slow
def test_a_run_folder_at_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is complete there: a machine that has nothing else continues the run."""
    monkeypatch.chdir(tmp_path)
    url = "memory://bucket/gpt"
    store = RemotePath(url)
    train_recipe(regression, epochs=2, out=url, resume=url, **OPTIONS)
    shutil.rmtree("runs")
    with pytest.raises(ArtifactError, match="holds checkpoints of an earlier run"):
        train_recipe(regression, out=url, **OPTIONS)
    shutil.rmtree("runs")
    rest = train_recipe(regression, epochs=3, resume=url, **OPTIONS)
    assert rest["resumed_from"] == 10
    assert [number for number, _ in json.loads((store / "losses.json").read_text())] == list(range(15))
    folder = Path("runs", "memory", "bucket", "gpt")
    files = sorted(path.name for path in folder.iterdir())
    assert "report.html" in files
    assert sorted(path.name for path in store.glob("*")) == sorted([*files, CHECKPOINTS])
    with (store / "weights.pt").open("rb") as file:
        assert file.read() == (folder / "weights.pt").read_bytes()
    assert [folders.parse_minibatches(p.name) for p in folders.list_checkpoints(store / CHECKPOINTS)] == [10, 15]
    store.remove_folder()


@pytest.mark.slow
def test_a_run_folder_that_cannot_be_copied_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = "memory://bucket/gpt"
    write = RemotePath.write_bytes

    def limited(self: RemotePath, data: bytes) -> None:
        if self.name == "weights.pt":
            raise OSError("the credentials have expired")
        write(self, data)

    monkeypatch.setattr(RemotePath, "write_bytes", limited)
    with pytest.raises(WorkerError, match="credentials have expired") as caught:
        train_recipe(regression, epochs=1, out=url, **OPTIONS)
    folder = Path("runs", "memory", "bucket", "gpt")
    assert (folder / "report.html").exists()
    assert f"the files are in {folder}" in str(caught.value)
    assert f"--resume {url} only what is missing" in str(caught.value)
    RemotePath(url).remove_folder()


@pytest.mark.slow
def test_losses_that_cannot_be_saved_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"

    def full(path: Path, text: str) -> None:
        if folders.list_checkpoints(run / CHECKPOINTS):
            raise ArtifactError(f"cannot write {path}: No space left on device; free space")

    monkeypatch.setattr(loop, "write_text_at", full)
    with pytest.raises(WorkerError, match=r"saving the losses so far: .*No space left") as caught:
        train_recipe(regression, out=run, **OPTIONS)
    assert f"checkpoints in {run / CHECKPOINTS} are intact" in str(caught.value)
    assert pieces.verify_checkpoint(folders.list_checkpoints(run / CHECKPOINTS)[0]).minibatches == 5


def test_restarts_go_on_from_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another run was resumed into it, and where the whole command is repeated; not from another run's."""
    a, b, other = (tmp_path / name for name in ("a", "b", "other"))
    train_recipe(regression, epochs=1, out=a, **OPTIONS)
    train_recipe(regression, epochs=3, resume=a, out=b, **OPTIONS)
    train_recipe(regression, minibatches=7, checkpoint_every=2, out=other, **OPTIONS)
    first = find_resume_point(a, None)
    assert first is not None
    for restarts in "01":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        for resume in (a, first.path):
            point = find_resume_point(resume, b)
            assert point is not None
            assert (point.manifest.minibatches, point.folder) == (15, b)
        for out in (None, tmp_path / "new", a):
            point = find_resume_point(a, out)
            assert point is not None
            assert point.path == first.path
        oldest = folders.list_checkpoints(b / CHECKPOINTS)[0]
        point = find_resume_point(oldest, b)
        assert point is not None
        assert point.path == oldest, "the run goes back"
        with pytest.raises(ArtifactError, match=r"was to be resumed, but the run folder holds .* of another run"):
            find_resume_point(a, other)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    rest = train_recipe(regression, resume=a, out=b, **OPTIONS)
    assert (rest["resumed_from"], rest["minibatches"]) == (15, 20)
    assert [number for number, _ in json.loads((b / "losses.json").read_text())] == list(range(20))


def test_results_of_an_earlier_run_are_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, a = tmp_path / "done", tmp_path / "a"
    train_recipe(regression, epochs=1, out=done, checkpoint_every=0, **OPTIONS)
    train_recipe(regression, epochs=1, out=a, **OPTIONS)
    weights = (done / "weights.pt").read_bytes()
    plan = pd.Plan.load(done / "plan.json")
    for run in (
        lambda: train_recipe(regression, out=done, checkpoint_every=0, **OPTIONS),
        lambda: train_recipe(regression, out=done, resume=a, **OPTIONS),
        lambda: train_recipe(regression, out=done, resume=done, **OPTIONS),
    ):
        for name in ("weights.pt", "summary.json"):
            with pytest.raises(ArtifactError, match=f"{done} holds {name} of an earlier run; give another folder"):
                run()
            (done / name).rename(tmp_path / name)
        for name in ("weights.pt", "summary.json"):
            (tmp_path / name).rename(done / name)
    assert (done / "weights.pt").read_bytes() == weights
    monkeypatch.setattr(emulate_module, "_join_group", lambda plan: (0, 1))
    with pytest.raises(ArtifactError, match=r"holds .* of an earlier run"):
        pd.emulate(plan, out=a, minibatches=1, quiet=True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # a worker was lost while it wrote them
    train_recipe(regression, epochs=1, out=done, checkpoint_every=0, **OPTIONS)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.chdir(tmp_path)
    train_recipe(regression, epochs=2, resume=a, out="a", **OPTIONS)  # its own folder, written otherwise


def test_all_losses_are_in_the_run_folder(tmp_path: Path) -> None:
    """Also those of minibatches that a method without a flush finishes after the last one asked for."""
    options = OPTIONS | {"schedule": "pipedream", "microbatches": None}
    first = train_recipe(regression, minibatches=7, out=tmp_path, **options)
    assert first["minibatches"] > 7
    numbers = [number for number, _ in json.loads((tmp_path / "losses.json").read_text())]
    assert numbers == list(range(first["minibatches"]))
    train_recipe(regression, resume=tmp_path, **options)
    assert [number for number, _ in json.loads((tmp_path / "losses.json").read_text())] == list(range(20))


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "[[0, 1.0",
        "\0" * 9,
        "{}",
        "[]",
        "[[0]]",
        '[["a", 1]]',
        "[[1e400, 1]]",
        "[" * 99_999,
        "[[0, 1], [2, 1]]",
    ],
    ids=lambda text: str(text)[:9],
)
def test_damaged_losses_are_warned_of(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "losses.json"
    if text is not None:
        file.write_text(text)
    point = ResumePoint(tmp_path, SimpleNamespace(extra={}, minibatches=3), tmp_path)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=f"{file} lacks losses of the 3 minibatches before the checkpoint"):
        assert len(point.losses) == (2 if text == "[[0, 1], [2, 1]]" else 0)
    file.write_text("[[1, 0.5], [2, NaN], [3, 1.0]]")
    assert [number for number, _ in point.losses] == [1, 2], "an earlier run in another folder had the first"


def test_a_checkpoint_without_the_order_of_the_data_is_refused(tmp_path: Path) -> None:
    train_recipe(regression, epochs=1, out=tmp_path, **OPTIONS)
    file = folders.list_checkpoints(tmp_path / CHECKPOINTS)[0] / folders.MANIFEST
    manifest = json.loads(file.read_text())
    del manifest["crc32"]
    for data in ({}, None):
        file.write_text(json.dumps(manifest | {"data": data}))
        with pytest.raises(ArtifactError, match="it has no state of the data, whose order would begin anew"):
            train_recipe(regression, resume=tmp_path, **OPTIONS)
