"""Benchmarks run in small, and their tables have all rows and figures."""

import re
from pathlib import Path

import pytest
from commands import Started

FOLDER = Path(__file__).parents[2] / "benchmarks"
OVERHEAD = {
    "waiting": (5, "ours"),
    "compute": (7, "of torch's"),
    "process": (3, "in CPU time"),
    "memory": (6, "objects"),
}
OVERHEAD |= {"connections": (6, "4")}
TABLES = {f"overhead --quick --only {part}": table for part, table in OVERHEAD.items()}
TABLES["less_communication --tasks digits --stages 2 --seeds 1 --updates 4"] = 10, "sent for an update, 2 stages"
"""Command -> rows of its table, and the heading of the last column."""


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize(
    "command", [pytest.param(row, marks=pytest.mark.network if "connections" in row else ()) for row in TABLES]
)
def test_prints_its_table(command: str, tmp_path: Path) -> None:
    benchmark, *options = command.split()
    ended = Started((str(FOLDER / benchmark / "run.py"), *options), folder=tmp_path).end(300.0)
    assert ended.status == 0, ended.err
    table = [line.strip("|").split("|") for line in ended.out.splitlines() if line.startswith("|")]
    count, heading = TABLES[command]
    assert table[0][-1].strip() == heading
    assert len(table) == 2 + count
    for row in table[2:]:
        assert len(row) == len(table[0])
        assert re.match(r" -?\d[\d.,]*\b", row[-1]), row
