"""The benchmark of the runtime's own cost runs, and its tables have all their rows and figures."""

import re
from pathlib import Path

import pytest
from commands import Started

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "overhead" / "run.py"
ROWS = {"waiting": (5, "ours"), "compute": (7, "of torch's"), "process": (3, "in CPU time"), "memory": (6, "objects")}
ROWS |= {"connections": (6, "4")}
"""Section -> rows of its table, and the heading of the last column."""


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize(
    "section", [pytest.param(name, marks=pytest.mark.network if name == "connections" else ()) for name in ROWS]
)
def test_section_prints_its_table(section: str, tmp_path: Path) -> None:
    ended = Started((str(PROGRAM), "--quick", "--only", section), folder=tmp_path).end(300.0)
    assert ended.status == 0, ended.err
    table = [line.strip("|").split("|") for line in ended.out.splitlines() if line.startswith("|")]
    count, heading = ROWS[section]
    assert table[0][-1].strip() == heading
    assert len(table) == 2 + count
    for row in table[2:]:
        assert len(row) == len(table[0])
        assert re.match(r" -?\d[\d.,]*\b", row[-1]), row
