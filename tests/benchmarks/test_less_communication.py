"""The benchmark of what encodings cost trains, keeps its rows and prints its tables."""

import json
from pathlib import Path

import commands
import pytest

RUN = str(Path(__file__).parents[2] / "benchmarks" / "less_communication" / "run.py")


@pytest.mark.slow
@pytest.mark.long
def test_trains_what_is_missing(tmp_path: Path) -> None:
    options = ("--tasks", "digits", "--stages", "2", "--seeds", "1", "--updates", "4", "--out", "kept")
    ended = commands.run(RUN, *options, folder=tmp_path, timeout_s=200.0)
    assert ended.status == 0, ended.err
    rows = json.loads((tmp_path / "kept" / "rows.json").read_text())
    assert [(row["method"], row["messages"]) for row in rows] == [
        (method, messages) for method in ("1f1b", "pipedream_2bw") for messages in ("full", "bfloat16", "int8", "int4")
    ]
    sent = {row["messages"]: row["bytes_per_update"] for row in rows if row["method"] == "1f1b"}
    assert sent["full"] > 1.9 * sent["bfloat16"] > 3 * sent["int8"] > 5 * sent["int4"]
    again = commands.run(RUN, "--out", "kept", "--again", folder=tmp_path)
    assert again.status == 0, again.err
    assert again.out.count("| int8 |") == 2
