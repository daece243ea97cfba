"""The notebook of the tour runs, and shows what it says that it shows."""

import ast
import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
CELLS = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
SIMULATED = next(i for i, cell in enumerate(CELLS) if "".join(cell["source"]).startswith("## A model"))
"""Cells before this one show no measured numbers."""


class _Svg:
    """In place of IPython's, which a kernel has."""

    def __init__(self, text: str) -> None:
        self.text = text


@pytest.mark.slow
def test_the_lecturers_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("cairosvg")
    display = ModuleType("IPython.display")
    display.SVG = _Svg  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    (tmp_path / "schedules").symlink_to(EXAMPLES / "schedules")
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "tour"}
    for number, cell in enumerate(CELLS):
        if cell["cell_type"] == "code":
            printed, value = run_cell("".join(cell["source"]), space)
            if number < SIMULATED:
                assert same(printed, value, cell["outputs"]), "run the notebook again and keep its outputs"
    losses = [loss for _, loss in space["losses"]]
    assert losses[-1] < losses[0] / 2
    assert (tmp_path / "1f1b.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "1f1b.csv").read_text().splitlines()[1] == "0,F,0,0,0.0,1.0,0"


def run_cell(source: str, space: dict[str, Any]) -> tuple[str, Any]:
    """Runs a cell as a kernel does; returns what it prints and the value of its last line."""
    tree, value, printed = ast.parse(source), None, StringIO()
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(printed):
        exec(compile(tree, "tour", "exec"), space)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "tour", "eval"), space)
    return printed.getvalue(), value


def same(printed: str, value: Any, outputs: list[dict[str, Any]]) -> bool:
    for output in outputs:
        if output["output_type"] == "stream" and "".join(output["text"]) != printed:
            return False
        data = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
        if isinstance(value, _Svg) and data["image/svg+xml"].strip() != value.text.strip():
            return False
        html = data.get("text/html", "")
        if 'class="pipedream"' in html and html != value._repr_html_():
            return False
    return True
