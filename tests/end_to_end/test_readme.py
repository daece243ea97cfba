"""What README.md shows is what the library does: its Python runs, its commands print what stands there.

docs/design.md is held to the rooms that exist, and the links of all pages to files that exist.
"""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

import pipedream as pd
from pipedream import cli
from pipedream.recipe import load_recipe

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
STARTS_PROCESSES = ("train", "compare", "report")  # `report` needs the folder that the `train` before it leaves


def blocks(language: str) -> list[str]:
    """Returns the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def shown() -> list[tuple[str, str]]:
    """Returns the commands whose output stands below them, with that output."""
    parts = [part for block in blocks("console") for part in re.split(r"^\$ ", block, flags=re.M) if part]
    return [(part.split("\n", 1)[0], part.split("\n", 1)[1]) for part in parts]


def arguments(line: str) -> list[str]:
    program, *rest = shlex.split(line)
    assert program == "pipedream"
    return rest


def trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def test_there_is_something_to_hold() -> None:
    assert len(blocks("python")) == 3
    assert len(shown()) >= 4
    assert sum(len(block.splitlines()) for block in blocks("sh")) >= 6


def test_python_at_the_top_trains(capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, object] = {"__name__": "readme"}
    for block in blocks("python")[:2]:
        exec(compile(block, "README.md", "exec"), space)
    printed = capsys.readouterr().out
    assert "Profile of Sequential" in printed
    assert "Plan 1-1 of Sequential" in printed
    assert "1f1b, simulated" in printed
    rows = [line.split(" ", 2) for line in printed.splitlines()[-5:]]
    assert [row[0] for row in rows] == list("01234")
    losses = [ast.literal_eval(row[2])["loss"] for row in rows]
    assert losses == sorted(losses, reverse=True), "the test loss falls from epoch to epoch"
    assert sorted(space["weights"]) == ["0.bias", "0.weight", "2.bias", "2.weight", "4.bias", "4.weight"]  # type: ignore[call-overload]


def test_recipe_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "recipe.py"
    file.write_text(blocks("python")[2], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    made = load_recipe(str(file))
    assert made.name == "recipe"
    summary = pd.run(lambda seed: made, out=str(tmp_path / "run"), quiet=True)
    assert summary["epochs"] == made.epochs
    assert summary["metrics"]["accuracy"] > 0.6


@pytest.mark.parametrize(("line", "output"), shown(), ids=[line for line, _ in shown()])
def test_commands_print_what_stands_below_them(line: str, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments(line)) == 0
    assert trimmed(capsys.readouterr().out) == trimmed(output)


def test_other_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order, for each reads what the one before left; those that start processes are only parsed."""
    pytest.importorskip("sklearn", reason="the example's data set comes with scikit-learn")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for line in "".join(blocks("sh")).splitlines():
        name, *rest = arguments(line)
        if name in STARTS_PROCESSES:
            cli.load(name).make_context(name, rest)
        else:
            assert cli.main([name, *rest]) == 0, line
    assert "Plan 1-1-1-1 of DigitNet" in capsys.readouterr().out
    assert (tmp_path / "2bw.svg").read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text, re.M)
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif "://" not in target:
            assert (page.parent / target.split("#")[0]).exists(), target


def test_design_names_each_room() -> None:
    """Its table has each module of the first level, of the ground floor and of the runtime."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    found = re.search(r"^src/pipedream/\n(.*?)^tests/", text, re.M | re.S)
    assert found is not None
    drawn = {word.removesuffix(".py").strip("/,;:()") for word in found[1].split()}
    house = ROOT / "src" / "pipedream"
    rooms = {path.stem for path in house.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    inner = {path.stem for room in ("core", "runtime") for path in (house / room).glob("*.py")}
    assert sorted((rooms | inner) - {"__init__", "__main__"} - drawn) == []
