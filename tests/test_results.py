"""The comparison of results with those of a table, `scripts/check_results.py`: what has changed is named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import load_script

SCRIPT = load_script(Path(__file__).parents[1] / "scripts" / "check_results.py")
CASES = SCRIPT.sys.modules["result_cases"]
WEIGHTS = torch.linspace(-1, 2, 1001, dtype=torch.float64)


def entries() -> dict[str, Any]:
    """A trained model's, of the columns that need no training, and a plan's."""
    trained = {"weights": CASES.describe_numbers(WEIGHTS), "saved": "0a", "manifest": "0b"}
    return {"trained": trained, "random/03": SCRIPT.compute(SCRIPT.list_work()["random/03"], Path())}


def test_a_table_has_what_was_written_and_equal_results_do_not_differ(tmp_path: Path) -> None:
    SCRIPT.write_table(tmp_path / "results.txt", entries())
    machine, table = SCRIPT.read_table(tmp_path / "results.txt")
    assert (machine, table) == (SCRIPT.describe_machine(), entries())
    assert set(table["random/03"]) == {"plan", "makespan", "memory"}
    assert not [*SCRIPT.list_differences(entries(), table, exact=True)]


ROUNDED, CHANGED = WEIGHTS * (1 + 1e-12), WEIGHTS.clone()
CHANGED[500] += 1e-3


@pytest.mark.parametrize(
    ("name", "column", "value", "is_named", "is_exactly_named"),
    [
        ("trained", "weights", CASES.describe_numbers(ROUNDED), False, True),
        ("trained", "weights", CASES.describe_numbers(CHANGED), True, True),
        ("trained", "weights", CASES.describe_numbers(WEIGHTS.flip(0)), True, True),
        ("trained", "saved", "0c", False, True),
        ("trained", "manifest", "0c", True, True),
        ("random/03", "makespan", "3.0", True, True),
        ("random/03", "memory", "1/1", True, True),
    ],
)
def test_a_changed_value_is_named(name: str, column: str, value: str, is_named: bool, is_exactly_named: bool) -> None:
    table, changed = entries(), entries()
    changed[name][column] = value
    for exact, expected in ((False, is_named), (True, is_exactly_named)):
        lines = [*SCRIPT.list_differences(changed, table, exact)]
        assert lines == [f"{name}: {column} {table[name][column]} -> {value}"] * expected


def test_what_is_new_missing_or_refused_is_named() -> None:
    changed = {"trained": {"raised": "PlanError"}, "random/99": {}}
    assert [line.split(" ", 2)[:2] for line in SCRIPT.list_differences(changed, entries(), exact=False)] == [
        ["random/03:", "only"],
        ["random/99:", "not"],
        ["trained:", "manifest"],
    ]


def test_a_digest_ignores_what_is_left_out_and_the_last_digits() -> None:
    value = {"a": [1.0, {"b": 2}], "c": 3}
    assert CASES.digest(value) == CASES.digest({"c": 3, "a": [1.0 + 1e-15, {"b": 2}]})
    assert CASES.digest(value) != CASES.digest({"a": [1.0 + 1e-9, {"b": 2}], "c": 3})
    assert CASES.digest(value, "c") == CASES.digest(value | {"c": 4}, "c") != CASES.digest(value)
