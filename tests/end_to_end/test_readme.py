"""The README and the pages of docs/ are true: their Python runs, their commands print what is shown below them.

All commands of all pages run in one folder, page by page, so a page may use what an earlier one has written. Commands
that start processes are only parsed. Links between pages are checked here without Sphinx; `make docs` checks the rest.
"""

import ast
import re
import shlex
import shutil
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import pipedream
import pipedream as pd
from pipedream.apps import cli
from pipedream.apps.training import recipe as recipes

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAMES = ("quickstart", "methods", "planning", "checkpoints", "command_line", "partition")
PAGES = [ROOT / "README.md", *(DOCS / f"{name}.md" for name in NAMES)]
LINKED = [*ROOT.glob("*.md"), *sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("benchmarks/*/README.md"))]
# `checkpoint` needs the folder that the `train` before them leaves.


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def shown() -> list[tuple[str, str]]:
    """Returns the commands whose output is shown below them, with that output."""
    consoles = [block for page in PAGES for block in blocks(page, "console")]
    parts = [part for block in consoles for part in re.split(r"^\$ ", block, flags=re.M)]
    return [(part.split("\n", 1)[0], part.split("\n", 1)[1]) for part in parts if part]


def arguments(line: str) -> list[str]:
    program, *rest = shlex.split(line)
    assert program == "pipedream"
    return rest


def trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Returns the anchors that a code host gives the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", without_code(page), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def test_the_readme_is_one_page_with_one_program() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
    assert len(blocks(ROOT / "README.md", "python")) == 1
    assert len(shown()) >= 5, "there is something to check"


@pytest.mark.slow
def test_readme_trains(capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, object] = {"__name__": "readme"}
    exec(compile(blocks(ROOT / "README.md", "python")[0], "README.md", "exec"), space)
    printed = capsys.readouterr().out
    assert "Plan " in printed
    assert "Timeline of pipedream" in printed
    losses = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("epoch")]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2
    assert "0.0.weight" in space["weights"]  # type: ignore[operator]


def test_a_script_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    script = compile(blocks(DOCS / "checkpoints.md", "python")[0], "checkpoints.md", "exec")
    exec(script, {"__name__": "script"})
    whole = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in whole] == [f"epoch {number}" for number in range(4)]
    shutil.rmtree("saved/minibatch-00000040")
    exec(script, {"__name__": "script"})
    assert capsys.readouterr() == (f"{whole[-1]}\n", "")
    exec(script, {"__name__": "script"})
    assert capsys.readouterr() == ("", "")


def test_layers_of_a_model_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    program, *others = blocks(DOCS / "models.md", "python")
    exec(compile(program, "models.md", "exec"), {"__name__": "models"})
    printed = capsys.readouterr().out
    assert f"```\n{printed}```\n" in (DOCS / "models.md").read_text(encoding="utf-8")
    for block in (*others, *blocks(DOCS / "experts.md", "python")):
        exec(compile(block, "a page", "exec"), {"__name__": "page"})


def test_quickstart_trains(capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, object] = {"__name__": "quickstart"}
    for block in blocks(DOCS / "quickstart.md", "python")[:2]:
        exec(compile(block, "quickstart.md", "exec"), space)
    printed = capsys.readouterr().out
    assert "Profile of Sequential" in printed
    assert "Plan 1-1 of Sequential" in printed
    assert "1f1b, simulated" in printed
    rows = [[ast.literal_eval(word) for word in line.split()] for line in printed.splitlines()[-5:]]
    assert [row[0] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[-1][2] < rows[0][2], "the test loss falls"
    assert sorted(space["weights"]) == ["0.bias", "0.weight", "2.bias", "2.weight", "4.bias", "4.weight"]  # type: ignore[call-overload]


def test_the_published_layouts_are_found() -> None:
    space: dict[str, Any] = {"pipedream": pipedream}
    exec(compile(blocks(DOCS / "partition.md", "python")[-2], "partition.md", "exec"), space)
    assert [str(space[name].rules) for name in ("found", "more", "whole")] == ["a:m2,c:m1", "a:m2,b:m3,c:m1", ""]
    assert space["report"].peak == 75


def test_callbacks_can_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "quickstart"}
    exec(compile(blocks(DOCS / "quickstart.md", "python")[3], "quickstart.md", "exec"), space)
    assert not list(pd.options.ModelOptions(**space["logged"]).problems())


def test_recipe_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "recipe.py"
    file.write_text(blocks(DOCS / "quickstart.md", "python")[2], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    recipe = recipes.load_recipe(str(file))
    assert recipe.name == "recipe"
    summary = pipedream.run(lambda seed: recipe, out=str(tmp_path / "run"), quiet=True)
    assert summary["epochs"] == recipe.epochs
    assert summary["recipe_sha256"] == sha256(file.read_bytes()).hexdigest()[:12]
    assert summary["metrics"]["accuracy"] > 0.6


@pytest.mark.parametrize(
    ("line", "output"),
    [
        pytest.param(line, output, id=line, marks=pytest.mark.slow if line.startswith("pipedream layout") else ())
        for line, output in shown()
    ],
)
def test_commands_print_what_is_shown(
    line: str, output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(arguments(line)) == 0
    assert trimmed(capsys.readouterr().out) == trimmed(output)


def other_commands() -> list[list[str]]:
    """Returns the commands whose output is not shown, each once."""
    lines = "".join(block for page in PAGES for block in blocks(page, "sh")).splitlines()
    return [arguments(line) for line in dict.fromkeys(lines)]


def test_other_commands_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for name, *rest in other_commands():
        cli.load(name).make_context(name, rest)


@pytest.mark.slow
def test_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason="the example's data set comes with scikit-learn")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for name, *rest in other_commands():
        if name not in ("train", "compare", "checkpoint"):
            assert cli.main([name, *rest]) == 0, (name, *rest)
    assert "Plan 1-1-1-1 of DigitNet" in capsys.readouterr().out
    assert (tmp_path / "2bw.svg").read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.parametrize("page", LINKED, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        target_page = page.parent / path if path else page
        assert target_page.is_file(), f"{target} is no file; a link to a folder does not work on the site"
        if anchor:
            assert anchor in anchors(target_page), target


@pytest.mark.parametrize("page", LINKED, ids=named)
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths in backticks, such as `core/plan/depth.py`, lead to a file or a folder of the package or the repository."""
    if page.name == "CHANGELOG.md":
        return
    tops = {path.name for path in (ROOT / "src" / "pipedream").iterdir()} | {"src", "examples", "docs", "scripts"}
    for path in re.findall(r"`([\w.]+/[\w./]*)`", without_code(page)):
        if path.split("/")[0] in tops and "NAME" not in path:
            assert (ROOT / "src" / "pipedream" / path).exists() or (ROOT / path).exists(), path


def test_architecture_names_each_package() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    package = ROOT / "src" / "pipedream"
    for folder in [package, package / "runtime"]:
        for path in folder.iterdir():
            if (path / "__init__.py").exists():
                assert f"`{path.name}/`" in text, path
    for path in package.glob("*.py"):
        assert path.name.startswith("_") or f"`{path.name}`" in text, path


def test_glossary_has_names_that_exist() -> None:
    """A class that the glossary names exists, once; no word has two entries, and none is also a word to avoid."""
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    classes = Counter(name for source in sources for name in re.findall(r"^ *class (\w+)[(:]", source, re.M))
    assert {name: classes[name] for name in set(re.findall(r"`([A-Z][a-z]\w+)`", text)) if classes[name] != 1} == {}
    words = [word for row in rows for word in row[0].split(", ") if len(row) == 3 and row[0] != "word"]
    assert [word for word, count in Counter(words).items() if count > 1 and not word.startswith("--")] == []
    avoided = {word for row in rows if len(row) == 3 for word in row[2].split(", ")} - {"not", "---", ""}
    assert sorted(avoided & set(words)) == ["tag"], "a tag is gloo's, and only gloo's"
