"""The command `pipedream simulate`: its options for stragglers and for sums."""

import csv
import json
import sys
from pathlib import Path

import pytest
from commands import Answer, Refused, Run

import pipedream as pd
from tests.apps.cli.test_data_runs_no_code import METHOD

MB = 10**6


def test_slow_ranks_and_jitter(answer: Answer) -> None:
    run = ("simulate", "--uniform", "2", "--minibatches", "40")
    plain = answer(*run)
    assert plain["makespan_s"] == pytest.approx(40 * 3 + 3)
    # Versions, activations and gradients, each of 1 MB; free messages have no bytes.
    assert [row["peak_bytes"] for row in plain["per_rank"]] == [(2 + 2 + 1) * MB, (1 + 1 + 1) * MB]
    sent = answer(*run, "--transfer-s", "0.25")
    assert [row["peak_bytes"] for row in sent["per_rank"]] == [(3 + 2 + 3) * MB, (2 + 1 + 2 + 3) * MB]
    assert sent["makespan_s"] > plain["makespan_s"]
    assert answer(*run, "--slow", "0=1.5", "--slow", "1=2")["makespan_s"] == pytest.approx(40 * 6 + 4.5)
    first, again, other = (answer(*run, "--jitter", "0.2", "--seed", seed) for seed in (1, 1, 2))
    assert first == again != other
    assert first["makespan_s"] != plain["makespan_s"]


def test_sums_may_be_charged_whole(answer: Answer, tmp_path: Path) -> None:
    rows = (pd.Stage(0, 1, 2, 1.0, 27.0, parameter_bytes=9 << 20),)
    path = pd.Plan(rows, (1,), pd.Cluster.flat(2, 1 << 20)).save(tmp_path / "plan.json")
    for options, seconds in (((), 28.0 + 4.0), (("--no-overlap",), 28.0 + 9.0)):
        assert answer("simulate", path, "--minibatches", 2, *options)["makespan_s"] == pytest.approx(seconds)


def test_seconds_of_a_weight_gradient(answer: Answer) -> None:
    """m (f + i + w) + (p - 1)(f + i - w): by default each is half of the backward."""
    run = ("simulate", "--uniform", 4, "--schedule", "zb_h1", "--microbatches", 8, "--backward-s", 2)
    halves = answer(*run)
    assert halves["makespan_s"] == pytest.approx(8 * 3 + 3 * 1)
    assert answer(*run, "--weight-s", "0.5")["makespan_s"] == pytest.approx(8 * 3 + 3 * 2)
    assert [row["peak_in_flight"] for row in halves["per_rank"]] == [4, 4, 4, 4]


def test_files_of_a_run(run_command: Run, files: Path) -> None:
    pd.Plan.uniform(2).save("uniform.json")
    names = [word for name in ("svg", "csv", "trace") for word in (f"--{name}", f"run.{name}")]
    assert run_command("simulate", "uniform.json", "--minibatches", 3, *names)[0] == 0
    assert Path("run.svg").read_text().startswith("<svg xmlns=")
    with Path("run.csv").open() as rows:
        ops = [row for row in csv.DictReader(rows) if row["kind"] in "FBU"]
    assert len(ops) == 2 * 3 * 3
    assert ops[0] == dict(rank="0", kind="F", stage="0", index="0", start_s="0.0", end_s="1.0", version="0")
    assert [row["version"] for row in ops if row["kind"] == "U"] == [""] * 6
    assert {"0F0", "1B2"} <= {event["name"] for event in json.loads(Path("run.trace").read_text())["traceEvents"]}


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "begin"), [("pdf", b"%PDF"), ("png", b"\x89PNG")])
def test_pictures_of_other_formats(run_command: Run, tmp_path: Path, suffix: str, begin: bytes) -> None:
    pytest.importorskip("cairosvg")
    picture = tmp_path / f"run.{suffix}"
    assert run_command("simulate", "--uniform", "2", "--svg", picture)[0] == 0
    assert picture.read_bytes().startswith(begin)


def test_a_picture_is_never_of_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    for command in (["simulate", "--uniform", "2"], ["show", "1f1b"]):
        assert "write name.svg, .pdf or .png" in refused(*command, "--svg", tmp_path / "run.jpg")
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "cairosvg", None)
            assert "pip install 'torch-pipedream[pictures]'" in refused(*command, "--svg", tmp_path / "run.pdf")
    assert not list(tmp_path.iterdir())


def test_stages_of_a_worker_share_its_seconds(answer: Answer, run_command: Run, tmp_path: Path) -> None:
    """All methods run one model: a worker is as busy with two stages as with one."""
    for name in ("1f1b", "interleaved_1f1b", "zbv", "chimera"):
        summary = answer("simulate", "--uniform", 4, "--schedule", name, "--microbatches", 8)
        assert [row["busy_s"] for row in summary["per_rank"]] == [24.0] * 4, name
    printed = run_command("simulate", "--uniform", 4, "--schedule", "interleaved_1f1b", "--chunks", 3)[1]
    assert "each worker has 3 stages of 1.00 s per microbatch" in printed
    path = pd.Plan.uniform(4).save(tmp_path / "plan.json")
    printed = run_command("simulate", path, "--schedule", "interleaved_1f1b")[1]
    assert "each worker has 1 stage of 3.00 s per microbatch" in printed, "a plan has no chunks"


def test_stages_of_a_worker_share_its_bytes(answer: Answer) -> None:
    """A worker has a quarter of one model: with one stage, with two, and with three that round it."""
    peaks = {}
    for name, chunks in (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("zbv", 2), ("chimera", 1)):
        options = ["--chunks", chunks] if chunks == 3 else []
        summary = answer("simulate", "--uniform", 4, "--schedule", name, "--microbatches", 12, *options)
        peaks[name, chunks] = [row["peak_bytes"] for row in summary["per_rank"]]
    assert peaks["1f1b", 1] == [6 * MB, 5 * MB, 4 * MB, 3 * MB]
    # Weights, 11 to 5 activations of half a stage, and the gradients of all stages.
    assert peaks["interleaved_1f1b", 2] == [(1 + count / 2 + 1) * MB for count in (11, 9, 7, 5)]
    assert peaks["interleaved_1f1b", 3][0] == pytest.approx((1 + 15 / 3 + 1) * MB, rel=1e-5)
    assert peaks["zbv", 2][0] <= peaks["1f1b", 1][0] + MB // 2, "it waits with gradients of half a stage"
    # Each stage has two replicas, so gradients of a bucket are there twice.
    assert peaks["chimera", 1] == [(2 + count + 2 + 1) * MB for count in (3, 4, 4, 3)]


def test_methods_are_compared(answer: Answer, run_command: Run, tmp_path: Path) -> None:
    """A file of the user's own is a row among the others, and its figures are those of `simulate` for it alone."""
    file, picture = tmp_path / "mine.py", tmp_path / "methods.svg"
    file.write_text(METHOD)
    names = ("1f1b", "zb_h1", "zbv", "chimera", "pipedream", str(file))
    run = ("simulate", "--uniform", 4)
    chosen = (*run, "--microbatches", 8, *(word for name in names for word in ("--schedule", name)))
    compared = answer(*chosen, "--svg", picture)
    rows = {row["schedule"]: row for row in compared["methods"]}
    assert (compared["workers"], tuple(rows)) == (4, names)
    for name, row in rows.items():
        alone = answer(*run, "--schedule", name, "--minibatches" if name == "pipedream" else "--microbatches", 8)
        assert (row["makespan_s"], row["bubble"]) == (alone["makespan_s"], alone["bubble"])
        assert row["staleness"] == max(rank["staleness"] for rank in alone["per_rank"])
    assert {name: [row[key] for key in ("activations", "weights", "messages")] for name, row in rows.items()} == {
        "1f1b": [1, 1, 6], "zb_h1": [1, 1, 6], "zbv": [1, 1, 12], "chimera": [1, 2, 6], "pipedream": [1, 4, 6],
        str(file): [2, 1, 6],
    }  # fmt: skip
    drawn = picture.read_text()
    assert all(f">{name}<" in drawn for name in ("1f1b", "chimera (weights x2)", "pipedream (weights x4)", file))
    assert [line.split()[0] for line in run_command(*chosen)[1].splitlines()[1:-1]] == list(names)


def test_a_method_that_does_not_fit_says_why_in_its_row(answer: Answer, run_command: Run, refused: Refused) -> None:
    chosen = ("simulate", "--uniform", 3, "--schedule", "chimera", "--schedule", "1f1b")
    failed, worked = answer(*chosen)["methods"]
    assert (failed["makespan_s"], worked["makespan_s"]) == (None, pytest.approx(3 * 16 + 2 * 3))
    assert "even number of workers, found 3" in failed["why"]
    assert "chimera - - - - - - - (two pipelines" in " ".join(run_command(*chosen)[1].split())
    assert "did you mean 1f1b" in refused(*chosen, "--schedule", "1f1")
    for more in (("--grid",), ("--csv", "run.csv")):
        assert "2 methods were given; they are compared on equal stages" in refused(*chosen, *more)


def test_a_piped_grid_has_a_line_a_rank(run_command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run_command("simulate", "--uniform", 3, "--minibatches", 200, "--grid")[1].splitlines()
    assert [line[:6] for line in lines[-4:]] == ["time  ", "rank 0", "rank 1", "rank 2"]
    assert all(len(line) > 2000 for line in lines[-3:])
