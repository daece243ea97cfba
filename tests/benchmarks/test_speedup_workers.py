"""The emulated workers of benchmarks/speedup: what they measure, and the tables of it."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from published import published

FOLDER = Path(__file__).parents[2] / "benchmarks" / "speedup"


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "workers", raising=False)
    return importlib.import_module("workers")


@pytest.mark.network
@pytest.mark.long
def test_emulated_workers_beside_the_prediction(workers: ModuleType) -> None:
    published("gnmt")
    rows = json.loads(json.dumps(workers.measure("test", lambda line: None)))
    assert [row["workers"] for row in rows] == [4, 4, 4]
    assert {row["config"] for row in rows} >= {"4", "1-1-1-1"}
    assert all(len(row["segments_s"]) == 3 and min(row["segments_s"]) > 0 for row in rows)
    text = workers.tables(rows)
    assert "**emulated**" in text
    assert len([line for line in text.splitlines() if line.startswith("| GNMT-8")]) == 3


def test_table_is_relative_to_its_first_row_and_says_how_far_the_prediction_was_off(workers: ModuleType) -> None:
    common = {"cluster": "pipedream-a", "machines": 1, "table": "speed-up", "model": "GNMT-8", "schedule": "pipedream"}
    common |= {"workers": 4, "microbatches": None, "dilation": 4.0, "byte_scale": 0.5, "own": 0.2, "others": 0.01}
    slow = {"shape": "data-parallel", "config": "4", "paper": None, "predicted_s": 2.0, "segments_s": [2.0, 2.5, 3.0]}
    fast = {"shape": "straight", "config": "1-1-1-1", "paper": 1.5, "predicted_s": 1.0, "segments_s": [1.0, 1.0, 1.25]}
    text = workers.tables([common | slow, common | fast])
    assert "| GNMT-8 | 1x4 (A) | 4 | data parallel |  | 1.00 | 1.00 (0.83 to 1.25) | -20.0% | 4 | 0.5 |" in text
    assert "| 1-1-1-1 | pipedream | 1.50 | 2.00 | 2.50 (2.00 to 2.50) | +0.0% | 4 | 0.5 |" in text
    assert "1 of 2 runs are within 10%" in text
