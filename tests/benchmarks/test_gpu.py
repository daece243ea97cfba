"""benchmarks/gpu without a card: its rows, its limit, and of each check what a CPU can show, at the smallest sizes."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
sys.path.append(str(FOLDER))
findings, loops, profiles = (importlib.import_module(name) for name in ("findings", "loops", "profiles"))

SPEED = {"facts", "host", "throughput", "clock"}  # their bounds are a card's
SLOW = {"throughput", "equality", "precision", "memory", "clock", "compiled"}
LONG = {"host", "processes"}
TINY = ["--device", "cpu", "--scale", "tiny"]


def _module() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run = _module()
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
    assert limits == [540.0, 290.0, 40.0]
    assert [row["name"] for row in rows] == ["first", "second", "third", "fourth"]
    assert [row["ok"] for row in rows] == [False, False, True, False]
    assert [row["seconds"] for row in rows] == [250.0, 250.0, 250.0, 0.0]
    assert rows[0]["number"] == {"one": 1.0, "two": 1.0}
    assert (rows[0]["bound"], rows[0]["failed"]) == ({"two": ">= 2"}, ["two"])
    assert rows[1]["note"] == {"error": "ended with status 1: ValueError"}
    assert rows[3]["note"] == {"skipped": "the limit of 540 s was reached"}
    assert len({tuple(row) for row in rows}) == 1, "all rows have the same keys"
    assert len(run.CHECKS) == 12


@pytest.mark.parametrize(
    ("sign", "ok"), [("<=", (True, True, False)), (">=", (False, True, True)), ("==", (False, True, False))]
)
def test_a_finding_is_compared_with_its_bound(sign: str, ok: tuple[bool, ...]) -> None:
    assert tuple(findings.Finding("x", number, sign, 2.0).ok for number in (1.0, 2.0, 3.0)) == ok
    assert not findings.Finding("x", float("nan"), sign, 2.0).ok


def test_differing_weights_are_counted() -> None:
    first, other = (loops.Trained(state={"w": torch.tensor([1.0, 2.0, last])}) for last in (3.0, 3.0000002))
    assert loops.differing_bits(first, first) == 0
    assert loops.differing_bits(first, other) == 1
    assert 1e-9 < loops.distance(first, other) < 1e-6


def test_without_a_card_one_line_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_has_card", lambda: False)
    assert run.main([]) == 0
    assert capsys.readouterr().out == f"{run.NO_CARD}\n"


@pytest.mark.slow
@pytest.mark.processes
def test_a_check_that_fails_or_hangs_is_a_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows, wrong = run._start("no such check", TINY, 60.0)
    assert rows == []
    assert wrong.startswith("ended with status 1: KeyError: 'no such check'")
    assert run._start("facts", TINY, 0.2) == ([], "stopped after 0 s")
    table = tmp_path / "table.jsonl"
    assert run.main([*TINY, "--check", "nccl", "--out", str(table)]) == 0
    out = capsys.readouterr().out
    assert table.read_text(encoding="utf-8") == out
    row = json.loads(out)
    assert (row["name"], row["number"], row["note"]) == ("nccl", {}, {"skipped": "needs a CUDA device"})


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
