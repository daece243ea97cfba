"""The speed-up benchmark runs, and its tables follow from its rows."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Started

FOLDER = Path(__file__).parents[2] / "benchmarks" / "speedup"


@pytest.fixture
def curve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("curve", "models"):  # other folders have a models.py, too
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("curve")
    for name in ("curve", "models"):
        sys.modules.pop(name, None)


def _rows(rho: float, ddp: float, pipedream: float) -> list[dict[str, Any]]:
    common = {"model": "vgg", "rho": rho, "bytes_per_s": 1e8 / rho, "others": 0.0}
    solo = common | {"variant": "solo", "samples_per_s": 50.0, "compute_s": 0.1, "parameter_bytes": 1e7}
    figures = {"torch DDP": ddp, "PipeDream, full": pipedream}
    rows = [
        common | {"variant": name, "samples_per_s": rate, "least": rate, "most": rate, "predicted_per_s": 100.0,
                  "bytes_per_sample": rate * 1e3, "message_bytes": 1000}
        for name, rate in figures.items()
    ]  # fmt: skip
    return [solo, *rows]


def test_tables_show_ratios_that_are_never_rounded_up(curve: Any) -> None:
    text = curve.tables([*_rows(1.0, 50.0, 99.99), *_rows(4.0, 16.0, 98.0)])
    assert "| PipeDream, full / torch DDP | 1.99 (1.00) | 6.12 (1.00) |" in text
    assert "PipeDream, 2BW and 1F1B: median 0.99, 0.98 to 1.00, 2 of 2 at least 0.90" in text
    assert "the paper's 5.28 of VGG-16: at rho 3.3 (VGG-like)" in text


def test_a_variant_that_was_refused_has_no_figure(curve: Any) -> None:
    rows = _rows(1.0, 50.0, 99.0)
    rows[1] = {key: value for key, value in rows[1].items() if key != "samples_per_s"} | {"why": "no"}
    assert "| torch DDP | 2 microbatches | - |" in curve.tables(rows)


@pytest.mark.network
@pytest.mark.processes
@pytest.mark.long
def test_it_runs_in_its_smallest_size(tmp_path: Path) -> None:
    ended = Started((str(FOLDER / "run.py"), "--size", "test", "--only", "curve", "--out", "out"), folder=tmp_path).end(
        400.0
    )
    assert ended.status == 0, ended.err
    assert "| torch DDP | 2 microbatches |" in ended.out
    rows = json.loads((tmp_path / "out" / "rows.json").read_text())["curve"]["rows"]
    assert all(row["samples_per_s"] > 0 for row in rows)
    assert (tmp_path / "out" / "gpt.svg").read_text().startswith("<svg")
