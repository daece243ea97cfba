"""The student of schedules: from a schedule's file and a plan to the figure of a paper and the numbers in it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from commands import run as command

from pipedream.core.model.profile import LayerProfile, Profile

MINE = Path(__file__).parents[2] / "examples" / "schedules" / "two_by_two.py"


@pytest.mark.slow
def test_from_a_schedule_to_a_figure(tmp_path: Path) -> None:
    pytest.importorskip("cairosvg")
    layers = tuple(LayerProfile(1e-3 * (1 + i % 3), 2e-3, 4000, 8000, 9000) for i in range(12))
    Profile.of_chain(layers, batch=32).save(tmp_path / "model.profile.json")

    def pipedream(line: str) -> str:
        ended = command("-m", "pipedream", *line.replace("MINE", str(MINE)).split(), folder=tmp_path)
        assert ended.status == 0, ended.err
        return ended.out

    assert "; the simulation agrees" in pipedream("show MINE --stages 4 --verify")
    pipedream("plan model.profile.json --workers 4 --straight --schedule MINE --microbatches 8 -o model.plan.json")
    assert "rank 3 | " in pipedream("show model.plan.json --schedule MINE")
    report = json.loads(pipedream("simulate model.plan.json --schedule MINE --svg figure.pdf --csv figure.csv --json"))
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
    with (tmp_path / "figure.csv").open() as rows:
        spans = list(csv.DictReader(rows))
    busy_s = [0.0] * 4
    for span in spans:
        if span["kind"] in "FBU":
            busy_s[int(span["rank"])] += float(span["end_s"]) - float(span["start_s"])
    assert busy_s == pytest.approx([row["busy_s"] for row in report["per_rank"]])
    assert {int(span["index"]) for span in spans if span["kind"] == "F"} == set(range(8))
