"""A run that stopped and went on: to the bit on the same plan, and as one process would on any other."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import fsspec
import processes
import pytest
import torch
import zoo
from cases import Case, Fresh, answer, assert_near, check_resumed, make_pipeline, run
from marks import slow, spread

import pipedream as pd
from pipedream.apps.training.run_folder import CHECKPOINTS, ResumePoint, find_resume_point
from pipedream.services.checkpoint import folders, pieces, stores
from pipedream.services.checkpoint.stores import local_folder, object_store


def leg(replicas: tuple[int, ...], epochs: int = 6, *, optimizer: str = "adamw", **more: Any) -> Case:
    """Returns a run, or its part until an epoch of five minibatches; biases have a group of their own."""
    settings = {"animal": "mlp", "schedule": "pipedream", "scheduled": "steps", "ema": 0.9, "evaluate_at": ()} | more
    optimizer = f"{optimizer} in groups"
    return Case(stages=len(replicas), replicas=replicas, epochs=epochs, optimizer=optimizer, **settings)


EVERY = (10, 20, 30)
SAME = [
    *(leg((1, 1, 1), schedule=s, microbatches=m) for s, m in [("pipedream", None), ("1f1b", 3), ("pipedream_2bw", 3)]),
    *(leg((2, 1), schedule=s, microbatches=m) for s, m in [("pipedream", None), ("gpipe", 4), ("pipedream_2bw", 3)]),
    leg((1, 2), schedule="pipedream_vertical_sync", optimizer="sgd", scheduled="cosine"),
    leg((2, 1, 1), depth="full", scheduled="one cycle", optimizer="sgd"),
    leg((2,), animal="cnn", optimizer="sgd", scheduled=False),
    leg((1, 1), animal="lstm"),
    leg((1, 1), dtype=torch.float32, autocast=torch.bfloat16),
    # What views are made of: the velocity at the coming rate, an average of updates.
    leg((1, 1, 1), schedule="spectrain"),
    leg((1, 1, 1), schedule="pipemare", microbatches=2, optimizer="sgd"),
    leg((1, 1, 1), compensation=("error_feedback", "t1:25")),
    leg((2, 1), optimizer="sgd", compensation=("spike", "gap_aware:0.9")),
    leg((2, 1), compensation=("basis_rotation:2:by_delay", "gap_aware:0.9")),
]


@pytest.mark.parametrize(
    "case",
    spread(
        [
            pytest.param(case, id=f"{case} {case.scheduled}", marks=pytest.mark.slow if number % 16 else ())
            for number, case in enumerate(SAME)
        ],
        4,
    ),
)
def test_the_same_plan_goes_on_to_the_bit(case: Case, tmp_path: Path) -> None:
    check_resumed(case, tmp_path, EVERY, partial(run, wait=False))


SYNCHRONOUS = {"schedule": "1f1b", "microbatches": 4}
ACROSS = [[(2, 1), (1, 1, 1), (1, 2)], [(2, 1), (1,), (1, 1, 1, 1)], [(3,), (1, 3), (2, 2)]]
ROWS = [(animal, plans) for plans in ACROSS for animal in ("mlp", "lstm", "transformer")]


@pytest.mark.parametrize(("animal", "plans"), spread([pytest.param(*ROWS[0]), *(slow(*row) for row in ROWS[1:])], 4))
def test_other_plans_go_on_as_one_process_would(animal: str, plans: list[tuple[int, ...]], tmp_path: Path) -> None:
    scheduled = {"mlp": "steps", "lstm": "cosine", "transformer": "one cycle"}[animal]
    resume, whole = None, leg((1,), animal=animal, scheduled=scheduled, **SYNCHRONOUS)
    expected = answer(whole)
    for i, counts in enumerate(plans):
        parts = SYNCHRONOUS | {"schedule": ("1f1b", "gpipe")[i % 2]}
        case = leg(counts, 2 * i + 2, animal=animal, scheduled=scheduled, **parts)
        outcome = run(case, tmp_path / f"{i} last", resume, EVERY, keep=1, wait=False)
        resume = tmp_path / f"{i} last"
        for number, loss in outcome.losses.items():
            assert loss == pytest.approx(expected.losses[number], rel=1e-10), number
            assert outcome.rates[number] == pytest.approx(expected.rates[number], rel=1e-12), number
    assert_near(outcome.state, expected.state, 1e-10)
    assert_near({name: outcome.ema[name] for name in expected.ema}, expected.ema, 1e-10)


@pytest.mark.processes
@pytest.mark.slow
def test_processes_go_on_with_what_one_has_saved_and_the_other_way_round(tmp_path: Path) -> None:
    team, (first, second, third) = processes.team(3), (tmp_path / name for name in "123")
    team.results(run, leg((2, 1), 2, **SYNCHRONOUS), first, None, EVERY)
    run(leg((1, 1), 4, **SYNCHRONOUS), second, first, EVERY)
    last = team.results(run, leg((1, 2), **SYNCHRONOUS), third, second, EVERY)[0]
    assert_near(last.state, answer(leg((1,), **SYNCHRONOUS)).state, 1e-10)


def test_what_does_not_fit_the_checkpoint_is_refused(tmp_path: Path) -> None:
    run(leg((1, 1), 2), tmp_path, None, EVERY)
    again = leg((1, 1), 4)
    for case, resume, words in (
        (leg((1, 1), 4, animal="cnn"), tmp_path, "has no tensor 'model/1.weight'; it is of anot"),
        (replace(again, scheduled=False), tmp_path, "saved with a learning-rate scheduler, this"),
        (replace(again, optimizer="adamw"), tmp_path, "in one group of the optimizer now"),
        (again, tmp_path / "empty", r"no complete checkpoint in .*empty"),
        (leg((1, 1), 2), None, "exists already"),
    ):
        with pytest.raises(pd.PipelineError, match=words):
            run(case, tmp_path, resume, EVERY)


def test_compensations_go_on_under_another_plan(tmp_path: Path) -> None:
    """The last update is each parameter's own, and T1 counts on where replicas and stages are others."""
    compensations = ("error_feedback:1.0", "gap_aware", "t1:40", "basis_rotation:2:one_sided")
    run(leg((2, 1), 2, compensation=compensations, scheduled=False), tmp_path / "1", None, EVERY)
    checkpoint = folders.list_checkpoints(tmp_path / "1")[0]
    manifest = folders.read_manifest(checkpoint)
    assert tuple(map(str, manifest.compensation)) == compensations
    tensors = pieces.read_tensors(checkpoint, manifest, manifest.tensors)
    assert {name.split("/")[-1] for name in tensors if name.startswith("compensation")} == {
        "last_update", "mean_square", "steps", "greatest_rate", "left", "right",
    }  # fmt: skip
    # A round of the two replicas in front holds two minibatches.
    rounds = manifest.minibatches // 2
    assert [(state.updates, state.rounds_before) for state in manifest.stages] == [(rounds, 0), (2 * rounds, 0)]
    batches, other = Fresh(zoo.make("mlp").batches), leg((1, 1, 1), compensation=compensations, scheduled=False)
    with cases.pipeline_of(other) as pipeline:
        pipeline.load(str(checkpoint))
        for optimizer in (stage_state.optimizer for stage_state in cases.stage_states(pipeline)):
            assert (optimizer.schedule.updates, optimizer.schedule.rounds) == (0, rounds)
            for name, state in optimizer.compensator.state.items():
                assert all(torch.equal(tensors[f"compensation/{name}/{key}"], state[key]) for key in state), name
        # PipeMare's T1, k of 40 updates, the first stage two updates late: 2^(k/40 - 1).
        assert pipeline.learning_rates() == pytest.approx((0.01 * 2 ** (rounds / 40 - 1), 0.01, 0.01))
        assert list(pipeline.train(batches, epochs=1))
        pipeline.save(tmp_path / "2")
    manifest = folders.read_manifest(folders.list_checkpoints(tmp_path / "2")[0])
    assert [state.rounds_before for state in manifest.stages] == [rounds] * 3
    # And one that knows of no compensation goes on from it.
    with cases.pipeline_of(replace(other, compensation=None)) as pipeline:
        pipeline.load(tmp_path / "2")
        assert list(pipeline.train(batches, epochs=1))


def regression(seed: int) -> pd.Recipe:
    """Returns a recipe of 4 epochs of 5 minibatches."""
    torch.manual_seed(7)
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(5)]
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    how = {"loss": torch.nn.functional.mse_loss, "optimizer": partial(torch.optim.SGD, lr=1e-3)}
    return pd.Recipe(model=model, train=data, test=data, target=("loss", 1e9), epochs=4, **how)


OPTIONS: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2, "workers": 2, "quiet": True}


def test_a_resumed_run_reports_all_of_it(tmp_path: Path) -> None:
    """Seconds, evaluations, target and losses are carried through the checkpoint."""
    first = pd.run(regression, epochs=2, out=tmp_path / "a", **OPTIONS)
    saved = folders.read_manifest(folders.list_checkpoints(tmp_path / "a" / CHECKPOINTS)[-1])
    rest = pd.run(regression, resume=tmp_path / "a", out=tmp_path / "b", **OPTIONS)
    assert rest["evaluations"][:2] == first["evaluations"] == saved.extra["evaluations"]
    assert [row["minibatches"] for row in rest["evaluations"]] == [5, 10, 15, 20]
    seconds = [row["seconds"] for row in rest["evaluations"]]
    assert seconds == sorted(seconds)
    assert rest["seconds_to_target"] == first["seconds_to_target"] == seconds[0]
    assert rest["seconds"] > rest["train_seconds"] > saved.extra["train_seconds"] > 0
    assert saved.extra["seconds"] > saved.extra["train_seconds"]
    assert [number for number, _ in json.loads((tmp_path / "b" / "losses.json").read_text())] == list(range(20))


def test_a_loops_own_values_are_kept(tmp_path: Path) -> None:
    with make_pipeline("mlp") as pipeline:
        with pytest.raises(pd.PipelineError, match=r"extra cannot be kept in a checkpoint.*Tensor"):
            pipeline.save(tmp_path, extra={"best": torch.ones(1)})
        pipeline.save(tmp_path, extra={"best": 0.5})
    with make_pipeline("mlp") as pipeline:
        pipeline.load(tmp_path)
        assert pipeline.extra == {"best": 0.5}


def test_one_command_starts_and_continues_a_run(tmp_path: Path) -> None:
    """Only the folder that the run writes may be without a checkpoint."""
    run = tmp_path / "run"
    assert find_resume_point(run, run) is find_resume_point(str(run), run) is None
    for out in (None, tmp_path / "other"):
        with pytest.raises(pd.PipelineError, match=r"no complete checkpoint in .*run to resume from"):
            find_resume_point(run, out)


@pytest.mark.slow
def test_a_run_folder_at_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is complete there: a machine that has nothing else continues the run."""
    monkeypatch.chdir(tmp_path)
    url = "memory://bucket/gpt"
    store = stores.open_store(url)
    pd.run(regression, epochs=2, out=url, resume=url, **OPTIONS)
    shutil.rmtree("runs")
    with pytest.raises(pd.PipelineError, match="holds checkpoints of an earlier run"):
        pd.run(regression, out=url, **OPTIONS)
    shutil.rmtree("runs")
    assert pd.run(regression, epochs=3, resume=url, **OPTIONS)["resumed_from"] == 10
    assert [number for number, _ in json.loads(store.read_text("losses.json"))] == list(range(15))
    folder = Path("runs", "memory", "bucket", "gpt")
    files = sorted(path.name for path in folder.iterdir())
    assert "report.html" in files
    assert store.list_names() == sorted([*files, CHECKPOINTS, "losses"])
    with store.open("weights.pt") as file:
        assert file.read() == (folder / "weights.pt").read_bytes()
    assert [saved.minibatches for saved in folders.list_checkpoints(store.within(CHECKPOINTS))] == [10, 15]
    fsspec.filesystem("memory").rm("/bucket/gpt", recursive=True)


@pytest.mark.slow
def test_a_run_folder_that_cannot_be_copied_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = "memory://bucket/gpt"
    create = object_store.ObjectStore.create

    def limited(self: object_store.ObjectStore, path: str) -> Any:
        if path == "weights.pt":
            raise OSError("the credentials have expired")
        return create(self, path)

    monkeypatch.setattr(object_store.ObjectStore, "create", limited)
    with pytest.raises(pd.PipelineError, match="credentials have expired") as caught:
        pd.run(regression, epochs=1, out=url, **OPTIONS)
    folder = Path("runs", "memory", "bucket", "gpt")
    assert (folder / "report.html").exists()
    assert f"the files are in {folder}" in str(caught.value)
    assert f"--resume {url} only what is missing" in str(caught.value)
    fsspec.filesystem("memory").rm("/bucket/gpt", recursive=True)


@pytest.mark.slow
def test_losses_that_cannot_be_saved_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"

    def full(store: local_folder.LocalFolder, path: str, text: str) -> None:
        if folders.list_checkpoints(run / CHECKPOINTS):
            raise pd.errors.ArtifactError(f"cannot write {path}: No space left on device; free space")

    monkeypatch.setattr(local_folder.LocalFolder, "write_text", full)
    with pytest.raises(pd.PipelineError, match=r"saving the losses so far: .*No space left") as caught:
        pd.run(regression, out=run, **OPTIONS)
    assert f"checkpoints in {run / CHECKPOINTS} are intact" in str(caught.value)
    assert pieces.verify_checkpoint(folders.list_checkpoints(run / CHECKPOINTS)[0]).minibatches == 5


def test_restarts_go_on_from_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another run was resumed into it, and where the whole command is repeated; not from another run's."""
    a, b, other = (tmp_path / name for name in ("a", "b", "other"))
    pd.run(regression, epochs=1, out=a, **OPTIONS)
    pd.run(regression, epochs=3, resume=a, out=b, **OPTIONS)
    pd.run(regression, minibatches=7, checkpoint_every=2, out=other, **OPTIONS)
    find: Any = find_resume_point
    first = find(a, None).checkpoint
    for restarts in "01":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        for resume in (a, str(first)):
            point = find(resume, b)
            assert (point.manifest.minibatches, point.folder) == (15, stores.open_store(b))
        assert {find(a, out).checkpoint for out in (None, tmp_path / "new", a)} == {first}
        oldest = folders.list_checkpoints(b / CHECKPOINTS)[0]
        assert find(str(oldest), b).checkpoint == oldest, "the run goes back"
        with pytest.raises(pd.PipelineError, match=r"was to be resumed, but the run folder holds .* of another run"):
            find(a, other)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    rest = pd.run(regression, resume=a, out=b, **OPTIONS)
    assert (rest["resumed_from"], rest["minibatches"]) == (15, 20)
    assert [number for number, _ in json.loads((b / "losses.json").read_text())] == list(range(20))


def test_results_of_an_earlier_run_are_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, a = tmp_path / "done", tmp_path / "a"
    pd.run(regression, epochs=1, out=done, checkpoint_every=0, **OPTIONS)
    pd.run(regression, epochs=1, out=a, **OPTIONS)
    weights = (done / "weights.pt").read_bytes()
    plan = pd.Plan.load(done / "plan.json")
    for again in ({"checkpoint_every": 0}, {"resume": a}, {"resume": done}):
        for name in ("weights.pt", "summary.json"):
            with pytest.raises(pd.PipelineError, match=f"{done} holds {name} of an earlier run; give another folder"):
                pd.run(regression, out=done, **OPTIONS | again)
            (done / name).rename(tmp_path / name)
        for name in ("weights.pt", "summary.json"):
            (tmp_path / name).rename(done / name)
    assert (done / "weights.pt").read_bytes() == weights
    monkeypatch.setattr("pipedream.apps.emulate.emulate._join_group", lambda plan: (0, 1))
    with pytest.raises(pd.PipelineError, match=r"holds .* of an earlier run"):
        pd.emulate(plan, out=a, minibatches=1, quiet=True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # a worker was lost while it wrote them
    pd.run(regression, epochs=1, out=done, checkpoint_every=0, **OPTIONS)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.chdir(tmp_path)
    pd.run(regression, epochs=2, resume=a, out="a", **OPTIONS)  # its own folder, written otherwise


def test_all_losses_are_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that a method without a flush finishes late, and after resumes, also from an older checkpoint."""
    monkeypatch.setattr("pipedream.apps.training.run_folder._FILE_LOSSES", 3)
    read: Any = lambda run: json.loads((tmp_path / run / "losses.json").read_text())  # noqa: E731
    drained = {"schedule": "pipedream", "microbatches": None}
    count = pd.run(regression, minibatches=7, out=tmp_path / "l", **OPTIONS | drained)["minibatches"]
    assert [number for number, _ in read("l")] == list(range(max(count, 8)))
    a, b, options = tmp_path / "a", tmp_path / "b", OPTIONS | {"checkpoint_every": 2}
    pd.run(regression, out=tmp_path / "whole", **OPTIONS)
    pd.run(regression, minibatches=7, out=a, **options)
    pd.run(regression, minibatches=12, resume=a, out=b, **options)
    written, write = [], local_folder.LocalFolder.write_text

    def note(store: local_folder.LocalFolder, path: str, text: str) -> None:
        written.append((path, len(json.loads(text))))
        write(store, path, text)

    monkeypatch.setattr(local_folder.LocalFolder, "write_text", note)
    oldest = folders.list_checkpoints(b / CHECKPOINTS)[0]
    assert oldest.minibatches == 10
    with (b / "losses" / "00000009.json").open("w") as file:  # of a run that was killed after minibatch 12
        json.dump([read("whole")[9], [10, 9], [11, 9]], file)
    pd.run(regression, minibatches=14, resume=oldest.locate(""), out=b, **options)
    assert written == [("losses/00000009.json", 3), *[("losses/00000012.json", 2)] * 2]
    pd.run(regression, resume=b, **options)
    assert read("b") == read("whole")


DAMAGED = None, "", "[[0, 1.0", "\0" * 9, "{}", "[[0]]", '[["a", 1]]', "[[1e400, 1]]", "[" * 99_999, "[[4, 1]]"


@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: str(text)[:9])
def test_damaged_losses_and_profiles_warn(text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipedream.apps.training.run_folder._FILE_LOSSES", 3)
    first, file = (tmp_path / "losses" / f"0000000{number}.json" for number in (0, 3))
    file.parent.mkdir()
    first.write_text("[[1, 0.5], [2, NaN]]")
    point = ResumePoint(None, SimpleNamespace(extra={}, minibatches=5), stores.open_store(tmp_path))  # type: ignore[arg-type]
    if text is not None:
        file.write_text(text)
    (tmp_path / "profile.json").write_text(text or "")
    with pytest.warns(UserWarning, match=r"going on without the profile .*profile.json \("):
        assert point.profile is None
    with pytest.warns(UserWarning, match=rf"losses of the 5 minibatches .* lacking \({file}: .*; the weights are not"):
        assert [number for number, _ in point.losses] == [1, 2]
    file.write_text("[[3, 0.5], [4, 0.5], [5, 1.0]]")
    assert [number for number, _ in point.losses] == [1, 2, 3, 4], "an earlier run in another folder had the first"


def test_a_checkpoint_without_the_order_of_the_data_is_refused(tmp_path: Path) -> None:
    pd.run(regression, epochs=1, out=tmp_path, **OPTIONS)
    file = Path(folders.list_checkpoints(tmp_path / CHECKPOINTS)[0].locate(folders.MANIFEST))
    manifest = json.loads(file.read_text())
    del manifest["crc32"]
    for data in ({}, None):
        file.write_text(json.dumps(manifest | {"data": data}))
        with pytest.raises(pd.PipelineError, match="it has no state of the data, whose order would begin anew"):
            pd.run(regression, resume=tmp_path, **OPTIONS)
