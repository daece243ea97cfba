"""benchmarks/gpu without a card: its rows, its limit, and of each check what a CPU can show, at the smallest sizes."""

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import load_script

import pipedream as pd

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
sys.path.append(str(FOLDER))
profiles = importlib.import_module("profiles")

SPEED = {"host", "throughput", "store", "recurrent", "clock"}  # their bounds are a card's
SLOW = {"facts", "waits", "equality", "precision", "memory"}
LONG = {"host", "links", "processes", "death", "throughput", "store", "clock", "compiled"}
TINY = ["--device", "cpu", "--scale", "tiny"]


run = load_script(FOLDER / "run.py")
sys.path.remove(str(FOLDER))  # other benchmarks have a run.py, too


@pytest.fixture(autouse=True)
def _modules_of_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


class Clock:
    """Moves only when a check takes its seconds."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def _finding(name: str, ok: bool = True) -> dict[str, Any]:
    return {"name": name, "number": 1.0, "bound": ">= 2" if not ok else "", "ok": ok, "note": ""}


def test_every_check_has_a_row_until_the_limit() -> None:
    clock, limits = Clock(), []

    def start(name: str, left_s: float) -> tuple[list[dict[str, Any]], str]:
        limits.append(left_s)
        clock.now_s += 250.0
        return {
            "first": ([_finding("one"), _finding("two", ok=False)], ""),
            "second": ([_finding("three")], "ended with status 1: ValueError"),
            "third": ([_finding("four")], ""),
        }[name]

    rows = list(run.rows(["first", "second", "third", "fourth"], start, limit_s=540.0, now_s=clock))
    assert limits == [run.CHECK_LIMIT_S, run.CHECK_LIMIT_S, 40.0]
    assert [row["name"] for row in rows] == ["first", "second", "third", "fourth"]
    assert [row["ok"] for row in rows] == [False, False, True, False]
    assert [row["seconds"] for row in rows] == [250.0, 250.0, 250.0, 0.0]
    assert rows[0]["number"] == {"one": 1.0, "two": 1.0}
    assert (rows[0]["bound"], rows[0]["failed"]) == ({"two": ">= 2"}, ["two"])
    assert rows[1]["note"] == {"error": "ended with status 1: ValueError"}
    assert rows[3]["note"] == {"skipped": "the limit of 540 s was reached"}
    assert len({tuple(row) for row in rows}) == 1, "all rows have the same keys"


@pytest.mark.parametrize(("cuda", "build"), [(None, "CPUs alone"), ("12.9", "CUDA 12.9, which")])
def test_a_card_that_torch_cannot_use_fails(
    cuda: str | None, build: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100'\n", encoding="utf-8")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(run, "_has_card", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert run.main([]) == 1
    line = capsys.readouterr().out
    assert line.startswith("the card GPU 0: NVIDIA H100 cannot be used")
    assert f"torch {torch.__version__} is a build for {build}" in line
    monkeypatch.setattr(run, "_ask_driver", lambda *arguments: [])
    assert (run.main([]), capsys.readouterr().out) == (0, f"{run.NO_CARD}\n"), "without a card"


@pytest.mark.slow
@pytest.mark.processes
def test_a_check_that_fails_is_a_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "table.jsonl"
    rows, wrong = run._start("no such check", TINY, 60.0, table)
    assert rows == []
    assert wrong.startswith("ended with status 1: Traceback")
    assert wrong.endswith("KeyError: 'no such check'")
    assert run.main([*TINY, "--check", "nccl", "--out", str(table)]) == 0
    out = capsys.readouterr().out
    assert table.read_text(encoding="utf-8") == out
    about, row = map(json.loads, out.splitlines())
    assert (about["name"], about["ok"], set(about)) == ("about", True, set(row))
    assert (row["name"], row["number"], row["note"]) == ("nccl", {}, {"skipped": "needs a CUDA device"})


@pytest.mark.slow
@pytest.mark.processes
def test_what_a_check_printed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        """
import faulthandler, signal, sys, time
faulthandler.register(signal.SIGUSR1)
print('{"name": "first"}', flush=True)
print("x" * 5000 + "the end", file=sys.stderr, flush=True)
if "hang" in sys.argv:
    time.sleep(60)
sys.exit(3)
""",
        encoding="utf-8",
    )
    monkeypatch.setattr(run, "__file__", str(program))
    for name, limit_s, begin in (("fail", 60.0, "ended with status 3: x"), ("hang", 2.0, "stopped after 2 s: ")):
        rows, wrong = run._start(name, [], limit_s, tmp_path / "table.jsonl")
        assert rows == [{"name": "first"}]
        assert wrong.startswith(begin)
        assert len(wrong) < run.NOTED_CHARACTERS + 40
        errors = (tmp_path / f"table.{name}.stderr").read_text(encoding="utf-8")
        assert "x" * 5000 + "the end" in errors
        assert ("most recent call first" in errors) == (name == "hang")


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _marks(name: str) -> list[pytest.MarkDecorator]:
    if name in LONG:
        return [pytest.mark.long, pytest.mark.processes]
    return [pytest.mark.slow] if name in SLOW else []


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of the compiler
@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in run.CHECKS if name != "nccl"])
def test_each_check_runs_on_a_cpu(name: str) -> None:
    rows = list(run.one_check(name, "cpu", "tiny"))
    assert rows
    json.dumps(rows)
    if name not in SPEED:  # of a few minibatches of several processes the memory is not yet constant
        ignored = "growth_bytes" if name == "processes" else "no name"
        assert [finding for finding in rows if not finding["ok"] and ignored not in finding["name"]] == []


@pytest.mark.slow
def test_the_models_of_the_profiles_are_the_published_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = {}
    with torch.device("meta"):
        for name, (build, data, _, _) in profiles.MODELS.items():
            model = build()
            x, y = data(2)
            assert model(x).flatten(0, -2).shape[0] == len(y)
            parameters[name] = sum(parameter.numel() for parameter in model.parameters())
    # GPT-2 medium has 354,823,168 with a head that shares the words' table.
    assert parameters == {"vgg16": 138_357_544, "resnet50": 25_557_032, "gpt2_medium": 354_823_168 + 50_257 * 1024}
    small = (lambda: profiles.gpt2_medium(1, 64, 50), lambda n: (torch.ones(n, 4).long(), torch.ones(4 * n).long()))
    monkeypatch.setitem(profiles.MODELS, "small", (*small, 2, None))
    profiles.write_profile("small", torch.device("cpu"), tmp_path, runs=1)
    assert profiles.Profile.load(tmp_path / "small.json").batch == 2


@pytest.mark.parametrize(("model", "config"), [("vgg16", "3-1"), ("resnet50", "4")])
def test_profiles_of_an_h200_give_the_papers_answers(model: str, config: str) -> None:
    """PipeDream, table 1: VGG-16 gets a replicated first stage and one more, ResNet-50 plain data parallelism."""
    profile = profiles.Profile.load(FOLDER / "h200" / f"{model}.json")
    assert profile.device == "cuda: NVIDIA H200"
    assert pd.plan(profile, pd.Cluster.flat(4), schedule="pipedream").config == config


@pytest.mark.slow
def test_predictions_for_an_h200_are_near_its_profiles() -> None:
    roofline = load_script(FOLDER.parent / "roofline" / "run.py")
    ratios = [float(row.split("|")[5]) for row in list(roofline.compare_with_gpu())[1:]]
    assert len(ratios) == 6
    assert all(0.8 <= ratio <= 1.15 for ratio in ratios), ratios
