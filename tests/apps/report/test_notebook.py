"""What nouns show of themselves: a line, a table, and HTML with a picture."""

import csv
import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pipedream as pd
from pipedream.apps.report.notebook import picture
from pipedream.apps.sweep.sweep import sweep
from pipedream.plan_request import PlanRequest
from tests.apps.report.html_page import HtmlPage
from tests.planner.planned import compare

CHAIN = pd.Profile.of_chain(tuple(pd.LayerProfile(1e-3 * i, 2e-3, 1000, 2000, 5000) for i in range(1, 9)), batch=32)


@pytest.fixture(scope="module")
def nouns() -> dict[str, Any]:
    """Returns each noun, by its class."""
    plan = pd.plan(CHAIN, pd.Cluster.flat(3), schedule="1f1b", microbatches=6, shape="straight")
    timeline = pd.simulate(plan)
    program = pd.lower(pd.schedules.build("1f1b", plan, 6))
    pipelines = PlanRequest(pd.Cluster.flat(2), shape="pipeline")
    swept = {"workers": [2], "bandwidths": [1e6, 1e9], "schedules": ["naive"], "crossovers": False}
    examples = [CHAIN, plan, timeline, program, pd.verify(program), pd.metrics.run_metrics(timeline)]
    examples += [compare(CHAIN, pd.Cluster.flat(2), "gpipe", "naive", schedule="auto", microbatches=4)]
    examples += [sweep(CHAIN, pipelines, **swept)]
    return {type(noun).__name__: noun for noun in examples}


KINDS = ["Profile", "Plan", "Timeline", "Program", "Proof", "Metrics", "Comparison", "Sweep"]
ROWS = {"Profile": 8, "Plan": 3, "Proof": 3, "Metrics": 3, "Sweep": 4}


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_a_table_and_a_picture(nouns: dict[str, Any], kind: str) -> None:
    noun = nouns[kind]
    assert len(repr(noun)) < 160
    assert "\n" not in repr(noun)
    tags = HtmlPage(noun._repr_html_()).tags
    assert tags.count("svg") == (kind not in ("Proof", "Metrics", "Sweep"))
    assert kind not in ROWS or tags.count("tr") == ROWS[kind] + 1
    rows = noun.rows()
    assert len(rows) == ROWS.get(kind, len(rows)) > 1
    assert [list(row) for row in csv.DictReader(io.StringIO(noun.to_csv()))] == [list(rows[0])] * len(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_frames(nouns: dict[str, Any], kind: str) -> None:
    pytest.importorskip("pandas")
    frame = nouns[kind].to_frame()
    rows = nouns[kind].rows()
    assert list(frame.columns) == list(rows[0])
    assert len(frame) == len(rows)
    if kind == "Timeline":
        busy = frame[frame.kind.isin(["F", "B"])].assign(s=frame.end_s - frame.start_s).groupby("stage").s.sum()
        assert list(busy) == pytest.approx([stage.compute_s for stage in nouns["Plan"].stages])


def test_without_pandas(nouns: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(pd.PipelineError, match=r"pip install 'torch-pipedream\[notebook\]'"):
        nouns["Plan"].to_frame()


def test_a_long_run_is_cut(nouns: dict[str, Any]) -> None:
    timeline = pd.simulate(nouns["Plan"], minibatches=200)
    shown = timeline._repr_html_()
    assert "the first 40 of 1200 microbatches" in shown
    assert len(shown) < 100_000
    assert len(timeline.svg()) > 10 * len(timeline.svg(start_s=0, end_s=timeline.makespan_s / 20))
    drawn = nouns["Timeline"].svg(title="mine", versions=True)
    assert all(words in drawn for words in ("mine</text>", "v0</text>"))


def test_what_cannot_be_drawn_is_left_out(nouns: dict[str, Any], tmp_path: Path) -> None:
    assert picture(replace(nouns["Plan"], schedule="zbv")) == "", "whose layout the plan does not have"
    code = tmp_path / "code.py"
    code.write_text("raise SystemExit('a plan ran code')")
    assert picture(replace(nouns["Plan"], schedule=str(code))) == "", "a plan does not run the code that it names"
    assert picture(pd.Timeline("x", "measured", 1, (), 0)).startswith("<svg")
    assert picture(pd.Plan.uniform(40)) == ""


def test_equal_rows_are_shown_once() -> None:
    block = pd.LayerProfile(1e-3, 2e-3, 1000, 2000, 5000)
    ends = (pd.LayerProfile(1e-3, 2e-3, 10, 20, 50),) * 2  # two are shown apart
    profile = pd.Profile.of_chain((*ends, *[block] * 80), batch=32)
    names = [line.split("  ")[0] for line in str(profile).splitlines()[2:6]]
    assert names == ["layer0", "layer1", "layer2 .. layer81", "total"]
    assert profile._repr_html_().count("<tr>") == 4
    assert len(profile.rows()) == 82
