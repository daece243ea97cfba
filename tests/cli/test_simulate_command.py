"""The command `pipedream simulate`: its options for stragglers and for sums."""

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import pipedream as pd
from pipedream import cli
from pipedream.core.plan.stage import Stage

MB = 10**6
MINE = """
from pipedream.schedules import Method, build

def mine(plan, microbatches=None):
    return build("gpipe", plan, microbatches)

METHODS = (Method(mine),)
"""


def simulate_json(capfd: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capfd.readouterr()
    assert cli.main(["simulate", *arguments, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_slow_ranks_and_jitter(capfd: pytest.CaptureFixture[str]) -> None:
    run = ("--uniform", "2", "--minibatches", "40")
    plain = simulate_json(capfd, *run)
    assert plain["makespan_s"] == pytest.approx(40 * 3 + 3)
    # Versions, activations and gradients, each of 1 MB; free messages have no bytes.
    assert [row["peak_bytes"] for row in plain["per_rank"]] == [(2 + 2 + 1) * MB, (1 + 1 + 1) * MB]
    sent = simulate_json(capfd, *run, "--transfer-s", "0.25")
    assert [row["peak_bytes"] for row in sent["per_rank"]] == [(3 + 2 + 3) * MB, (2 + 1 + 2 + 3) * MB]
    assert sent["makespan_s"] > plain["makespan_s"]
    slow = simulate_json(capfd, *run, "--slow", "0=1.5", "--slow", "1=2")
    assert slow["makespan_s"] == pytest.approx(40 * 6 + 4.5)
    first, again, other = (simulate_json(capfd, *run, "--jitter", "0.2", "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again != other
    assert first["makespan_s"] != plain["makespan_s"]


def test_sums_may_be_charged_whole(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = (Stage(0, 1, 2, 1.0, 27.0, parameter_bytes=9 << 20),)
    path = str(pd.Plan(rows, (1,), pd.Cluster.flat(2, 1 << 20)).save(tmp_path / "plan.json"))
    assert simulate_json(capfd, path, "--minibatches", "2")["makespan_s"] == pytest.approx(28.0 + 4.0)
    assert simulate_json(capfd, path, "--minibatches", "2", "--no-overlap")["makespan_s"] == pytest.approx(28.0 + 9.0)


@pytest.mark.parametrize(
    ("text", "message"), [("1", "--slow '1' is not known; write RANK=FACTOR"), ("4=2", "the ranks are 0 to 1")]
)
def test_nonsense_is_refused(text: str, message: str, refused: Callable[..., str]) -> None:
    assert message in refused("simulate", "--uniform", "2", "--slow", text)


def test_seconds_of_a_weight_gradient(capfd: pytest.CaptureFixture[str]) -> None:
    """m (f + i + w) + (p - 1)(f + i - w): by default each is half of the backward."""
    run = ("--uniform", "4", "--schedule", "zb_h1", "--microbatches", "8", "--backward-s", "2")
    assert simulate_json(capfd, *run)["makespan_s"] == pytest.approx(8 * 3 + 3 * 1)
    assert simulate_json(capfd, *run, "--weight-s", "0.5")["makespan_s"] == pytest.approx(8 * 3 + 3 * 2)
    assert [row["peak_in_flight"] for row in simulate_json(capfd, *run)["per_rank"]] == [4, 4, 4, 4]


def test_files_of_a_run(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = pd.Plan.uniform(2).save(tmp_path / "plan.json")
    files = [option for name in ("svg", "csv", "trace") for option in (f"--{name}", str(tmp_path / f"run.{name}"))]
    assert cli.main(["simulate", str(path), "--minibatches", "3", *files]) == 0
    assert (tmp_path / "run.svg").read_text().startswith("<svg xmlns=")
    with (tmp_path / "run.csv").open() as rows:
        ops = [row for row in csv.DictReader(rows) if row["kind"] in "FBU"]
    assert len(ops) == 2 * 3 * 3
    assert ops[0] == dict(rank="0", kind="F", stage="0", index="0", start_s="0.0", end_s="1.0", version="0")
    assert [row["version"] for row in ops if row["kind"] == "U"] == [""] * 6
    trace = json.loads((tmp_path / "run.trace").read_text())["traceEvents"]
    assert {"0F0", "1B2"} <= {event["name"] for event in trace}


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["pdf", "png"])
def test_pictures_of_other_formats(capfd: pytest.CaptureFixture[str], tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("cairosvg")
    picture = tmp_path / f"run.{suffix}"
    assert cli.main(["simulate", "--uniform", "2", "--svg", str(picture)]) == 0
    assert picture.read_bytes().startswith({"pdf": b"%PDF", "png": b"\x89PNG"}[suffix])


def test_a_picture_is_never_of_another_kind(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    for command in (["simulate", "--uniform", "2"], ["show", "1f1b"]):
        assert "write name.svg, .pdf or .png" in refused(*command, "--svg", str(tmp_path / "run.jpg"))
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "cairosvg", None)
            assert cli.main([*command, "--svg", str(tmp_path / "run.pdf")]) == 2
        assert "pip install 'torch-pipedream[pictures]'" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_stages_of_a_worker_share_its_seconds(capfd: pytest.CaptureFixture[str]) -> None:
    """All methods run one model: a worker is as busy with two stages as with one."""
    busy = {}
    for name in ("1f1b", "interleaved_1f1b", "zbv", "chimera"):
        summary = simulate_json(capfd, "--uniform", "4", "--schedule", name, "--microbatches", "8")
        busy[name] = [row["busy_s"] for row in summary["per_rank"]]
    assert set(map(tuple, busy.values())) == {(24.0,) * 4}
    assert cli.main(["simulate", "--uniform", "4", "--schedule", "interleaved_1f1b", "--chunks", "3"]) == 0
    assert "each worker has 3 stages of 1.00 s per microbatch" in capfd.readouterr().out


def test_stages_of_a_worker_share_its_bytes(capfd: pytest.CaptureFixture[str]) -> None:
    """A worker has a quarter of one model: with one stage, with two, and with three that round it."""
    peaks = {}
    for name, chunks in (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("zbv", 2), ("chimera", 1)):
        options = ["--chunks", str(chunks)] if chunks == 3 else []
        summary = simulate_json(capfd, "--uniform", "4", "--schedule", name, "--microbatches", "12", *options)
        peaks[name, chunks] = [row["peak_bytes"] for row in summary["per_rank"]]
    assert peaks["1f1b", 1] == [6 * MB, 5 * MB, 4 * MB, 3 * MB]
    # Weights, 11 to 5 activations of half a stage, and the gradients of all stages.
    assert peaks["interleaved_1f1b", 2] == [(1 + count / 2 + 1) * MB for count in (11, 9, 7, 5)]
    assert peaks["interleaved_1f1b", 3][0] == pytest.approx((1 + 15 / 3 + 1) * MB, rel=1e-5)
    assert peaks["zbv", 2][0] <= peaks["1f1b", 1][0] + MB // 2, "it waits with gradients of half a stage"
    # Each stage has two replicas, so gradients of a bucket are there twice.
    assert peaks["chimera", 1] == [(2 + count + 2 + 1) * MB for count in (3, 4, 4, 3)]


def test_methods_are_compared(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A file of the user's own is a row among the others, and its figures are those of `simulate` for it alone."""
    file, picture = tmp_path / "mine.py", tmp_path / "methods.svg"
    file.write_text(MINE)
    names = ("1f1b", "zb_h1", "zbv", "chimera", "pipedream", str(file))
    chosen = [word for name in names for word in ("--schedule", name)]
    run = ("--uniform", "4", "--microbatches", "8")
    compared = simulate_json(capfd, *run, *chosen, "--svg", str(picture))
    rows = {row["schedule"]: row for row in compared["methods"]}
    assert (compared["workers"], tuple(rows)) == (4, names)
    for name in names:
        alone = simulate_json(
            capfd, *(run if name != "pipedream" else ("--uniform", "4", "--minibatches", "8")), "--schedule", name
        )
        assert (rows[name]["makespan_s"], rows[name]["bubble"]) == (alone["makespan_s"], alone["bubble"])
        assert rows[name]["staleness"] == max(row["staleness"] for row in alone["per_rank"])
    columns = {name: [rows[name][key] for key in ("activations", "weights", "messages")] for name in names}
    assert columns == {
        "1f1b": [1, 1, 6], "zb_h1": [1, 1, 6], "zbv": [1, 1, 12], "chimera": [1, 2, 6], "pipedream": [1, 4, 6],
        str(file): [2, 1, 6],
    }  # fmt: skip
    drawn = ElementTree.fromstring(picture.read_text())
    words = [text.text or "" for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    labels = ["1f1b", "zb_h1", "zbv", "chimera (weights x2)", "pipedream (weights x4)", str(file)]
    assert set(labels) <= set(words)
    assert cli.main(["simulate", *run, *chosen]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == list(names)


def test_a_method_that_does_not_fit_says_why_in_its_row(
    capfd: pytest.CaptureFixture[str], refused: Callable[..., str]
) -> None:
    chosen = ("--uniform", "3", "--schedule", "chimera", "--schedule", "1f1b")
    failed, worked = simulate_json(capfd, *chosen)["methods"]
    assert (failed["makespan_s"], worked["makespan_s"]) == (None, pytest.approx(3 * 16 + 2 * 3))
    assert "even number of workers, found 3" in failed["why"]
    assert cli.main(["simulate", *chosen]) == 0
    assert "chimera - - - - - - - (two pipelines" in " ".join(capfd.readouterr().out.split())
    assert "did you mean 1f1b" in refused("simulate", *chosen, "--schedule", "1f1")
    for more in (("--grid",), ("--csv", "run.csv")):
        assert "2 methods were given; they are compared on equal stages" in refused("simulate", *chosen, *more)


def test_a_layout_without_chunks_is_said(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(pd.Plan.uniform(4).save(tmp_path / "plan.json"))
    assert cli.main(["simulate", path, "--schedule", "interleaved_1f1b"]) == 0
    assert "each worker has 1 stage of 3.00 s per microbatch" in capfd.readouterr().out


def test_a_piped_grid_has_a_line_a_rank(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["simulate", "--uniform", "3", "--minibatches", "200", "--grid"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line[:6] for line in lines[-4:]] == ["time  ", "rank 0", "rank 1", "rank 2"]
    assert all(len(line) > 2000 for line in lines[-3:])


def test_units_have_no_powers_of_ten(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = (Stage(0, 1, 1, 31e-6, 59e-6),)
    path = str(pd.Plan(rows, (1,), pd.Cluster.flat(1), batch=64).save(tmp_path / "plan.json"))
    assert cli.main(["simulate", path, "--minibatches", "30", "--grid"]) == 0
    out = capfd.readouterr().out
    assert "e+" not in out
    assert "1240 us" in out
