"""Files and recipes with any content: each is taken, or refused in one clear message, and nothing is overwritten."""

import copy
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from cases import make_pipeline
from hypothesis import HealthCheck, given, settings, strategies as st
from marks import slow
from torch import nn

import pipedream as pd
from pipedream.apps.training import recipe as recipes
from pipedream.core.artifact import Artifact
from pipedream.core.checkpoint import Checkpoint, ParameterGroup, SavedStage, Stored, StoredPiece
from pipedream.services.checkpoint import folders

QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}
PLAN = zoo.plan_of(zoo.make("mlp"), 2, (2, 1))
GROUP = ParameterGroup(("0.weight",), {"lr": 0.1, "betas": [0.9, 0.99]})
STAGE = SavedStage((GROUP,), {"0.weight": {"k": 1}}, {"last": 3}, 4, 4)
TENSORS = {
    "model/0.weight": Stored("float32", (6, 16), (StoredPiece((0, 0), (6, 16), "__0_0.distcp", 0, 900, 9),)),
    "model/0.bias": Stored(
        "float32",
        (6,),
        (StoredPiece((0,), (4,), "__0_0.distcp", 0, 400, 7), StoredPiece((4,), (2,), "__1_0.distcp", 0, 400, 8)),
    ),
}
CHECKPOINT = Checkpoint(
    12, 2, 2, (12,), "pipedream", 1, (STAGE, STAGE), seed=0, plan=PLAN, data={"a": 1}, random=("{}",),
    tensors=TENSORS, files={"__0_0.distcp": 900, "__1_0.distcp": 400},
)  # fmt: skip


NOUNS: dict[str, Artifact] = {
    "plan": PLAN,
    "profile": zoo.alike_layers(4),
    "cluster": pd.Cluster.flat(3, 1e9, 1e-4),
    "checkpoint": CHECKPOINT,
}
JUNK: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(), st.text(max_size=5),
    st.sampled_from([[], {}, [1], {"a": 1}, "noam", 1e308, -1e308, 10**30, "../x", [[[[]]]]]),
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    paths = [path] if path else []
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        paths += places(item, (*path, key))
    return paths


@st.composite
def spoiled(draw: st.DrawFn, noun: Artifact) -> str:
    """Draws the noun's JSON text with some values replaced, removed, added or doubled, or its letters changed."""
    data = json.loads(noun.to_json())
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(data)))
        inside = data
        for step in path[:-1]:
            inside = inside[step]
        kind = draw(st.sampled_from(["replace", "remove", "double", "other"]))
        if kind == "remove":
            del inside[path[-1]]
        elif kind == "double" and isinstance(inside, list):
            inside.append(copy.deepcopy(inside[path[-1]]))
        elif kind == "other":
            source = data
            for step in draw(st.sampled_from(places(data))):
                source = source[step]
            inside[path[-1]] = copy.deepcopy(source)
        else:
            inside[path[-1]] = copy.deepcopy(draw(JUNK))
        if not places(data):
            break
    text = json.dumps(data)
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.text(max_size=4)) + text[at + draw(st.integers(0, 30)) :]
    return text


@pytest.mark.slow
@pytest.mark.parametrize("name", NOUNS)
@settings(**QUIET)
@given(data=st.data())
def test_a_spoiled_noun_is_read_or_refused(name: str, data: st.DataObject) -> None:
    kind = type(NOUNS[name])
    text = data.draw(spoiled(NOUNS[name]))
    noun, error = tried(lambda: kind.from_json(text, "the file"), pd.errors.ArtifactError)
    if error is not None:
        assert str(error).startswith("the file")
        assert len(str(error).splitlines()) <= 3
    else:
        assert kind.from_json(noun.to_json()) == noun
        assert str(noun)


def tried(
    call: Callable[[], Any], kind: type[pd.PipelineError] = pd.PipelineError
) -> tuple[Any, pd.PipelineError | None]:
    """Returns what a call gives, or the error of this kind that it raises; any other error fails the test."""
    try:
        return call(), None
    except kind as error:
        return None, error


COMMANDS: dict[str, Callable[[str, str], list[str]]] = {
    "plan": lambda file, out: ["simulate", file, "--minibatches", "6"],
    "profile": lambda file, out: ["plan", file, "--workers", "3", "--bandwidth", "1e9", "-o", out],
    "cluster": lambda file, out: ["plan", str(Path(out).parent / "whole.json"), "--cluster", file, "-o", out],
}


@pytest.mark.parametrize("name", ["plan", *(slow(name) for name in COMMANDS if name != "plan")])
@pytest.mark.filterwarnings("ignore:the workers have")
@settings(max_examples=10, **QUIET)
@given(data=st.data())
def test_the_command_on_a_spoiled_file(
    name: str, data: st.DataObject, tmp_path: Path, run_command: Callable[..., tuple[int, str, str]]
) -> None:
    file, out, whole = tmp_path / "noun.json", tmp_path / "out.json", tmp_path / "whole.json"
    NOUNS["profile"].save(whole)
    file.write_text(data.draw(spoiled(NOUNS[name])), encoding="utf-8", errors="replace")
    out.write_text("mine")
    status, _, err = run_command(*COMMANDS[name](str(file), str(out)))
    assert status in (0, 2)
    if status:
        assert err.startswith("pipedream: ")
        assert "Traceback" not in err
        assert out.read_text() == "mine", "nothing is overwritten"
    else:
        assert err == ""


@pytest.mark.slow
@settings(**QUIET)
@given(data=st.data())
def test_a_spoiled_checkpoint_is_loaded_or_refused(data: st.DataObject, saved: Path) -> None:
    manifest = (saved / folders.MANIFEST).read_text()
    text = data.draw(spoiled(Checkpoint.from_json(manifest)))
    (saved / folders.MANIFEST).write_text(text, encoding="utf-8", errors="replace")
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    try:
        _, error = tried(lambda: go_on(saved))
        assert error is None or str(error)
        assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    finally:
        (saved / folders.MANIFEST).write_text(manifest)


def go_on(saved: Path) -> None:
    with pipeline() as trained:
        trained.load(saved)
        list(trained.train(zoo.make("mlp").batches[:2]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with pipeline() as trained:
        list(trained.train(zoo.make("mlp").batches[:2]))
        return trained.save(folder)


def pipeline() -> pd.Pipeline:
    return make_pipeline("mlp", (1,), scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=3))


WORDS = st.sampled_from(
    [*"():,=1x'\n", "def recipe(", "    ", "return ", "pipedream.Recipe(", "import pipedream", "model=",
     "raise ValueError('no')", "\x00", "\ufeff", "lambda: 0", "class A:", "recipe = 3", "exit()"]
)  # fmt: skip


@settings(**QUIET)
@given(text=st.one_of(st.text(max_size=60), st.lists(WORDS, max_size=14).map("".join), st.binary(max_size=30)))
def test_a_recipes_file_is_taken_or_refused(text: str | bytes, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    data = text if isinstance(text, bytes) else text.encode("utf-8", errors="replace")
    file.write_bytes(data)
    recipe, error = tried(lambda: recipes.load_recipe(str(file)), pd.errors.RecipeError)
    if error is None:
        assert isinstance(recipe, pd.Recipe)
    else:
        assert str(file) in str(error) or "recipe()" in str(error)
    assert file.read_bytes() == data


FIELDS: dict[str, Any] = {
    "model": nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)),
    "loss": nn.functional.mse_loss,
    "optimizer": partial(torch.optim.SGD, lr=0.1),
    "train": [(torch.zeros(3, 2), torch.zeros(3, 2))] * 3,
}
VALUES = st.one_of(
    JUNK,
    st.sampled_from([
        nn.Identity(), nn.Sequential(), nn.ReLU, lambda *a: None, lambda *a: 1 / 0, lambda a: "x", lambda: 1, object(),
        [torch.zeros(2)], [(torch.zeros(3, 5), torch.zeros(3))], [()], [{"x": torch.zeros(2, 2)}], iter(()),
        ("loss", 0.1), ("accuracy", 1.0), ("loss",), torch.bfloat16, torch.int64, "local", {"m": lambda o, b: 0.0},
        {"m": 3}, torch.optim.SGD, nn.CrossEntropyLoss(), nn.LSTM(2, 2), float("nan"),
    ]),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=15, **QUIET)
@given(data=st.data())
def test_a_recipe_with_wrong_fields_is_trained_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    names = sorted(pd.Recipe.__dataclass_fields__)
    wrong = {name: data.draw(VALUES) for name in data.draw(st.lists(st.sampled_from(names), max_size=2, unique=True))}
    random.seed(0)
    fields = copy.deepcopy(FIELDS) | wrong
    out = tmp_path / "run"
    options = {"workers": 1, "minibatches": 2, "epochs": 1, "quiet": True, "checkpoint_every": 0}
    _, error = tried(lambda: pd.run(lambda: pd.Recipe(**fields), out=out, **options))
    assert error is None or (str(error) and "Traceback" not in str(error))
