"""The rules of the house: arrows, circles, the face, words. Rules for a room's content are tested in its room."""

from __future__ import annotations

import ast
import doctest
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import grimp
import pytest
from importlinter import cli as import_linter

import pipedream

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "src" / "pipedream"
FILES = sorted(HOUSE.rglob("*.py"))
TORCH_ROOMS = ("capture", "probe", "profiler", "runtime")
WITHOUT_TORCH = ("core", "planner", "schedules", "verifier", "simulator", "metrics", "report")
FORBIDDEN_WORDS = {"engine", "handler", "helper", "manager", "mubatch", "tau", "util", "utils"}
FORMER_FACE = {"Op", "Placement", "Program", "Stage"}  # they still resolve
TORCHS_NAMES = {"get_backend"}  # of methods that a base class of torch's asks for

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _module(file: Path) -> str:
    return ".".join(file.relative_to(HOUSE.parent).with_suffix("").parts).removesuffix(".__init__")


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _names(tree: ast.Module) -> set[str]:
    """Returns the names that a module makes up itself; names that it only uses are others' choice."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, Definition):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def _words(name: str) -> set[str]:
    """Returns the words of a name, whether it is written_so or WrittenSo."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def _exported(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            exported: list[str] = ast.literal_eval(node.value)
            return exported
    return []


every_file = pytest.mark.parametrize("file", FILES, ids=_module)


def test_imports_run_downward(capsys: pytest.CaptureFixture[str]) -> None:
    status = import_linter.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True)
    assert status == import_linter.EXIT_STATUS_SUCCESS, capsys.readouterr().out


def test_no_circles() -> None:
    graph = grimp.build_graph("pipedream", cache_dir=None)
    arrows = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(arrows).prepare()  # CycleError names the circle


@every_file
def test_torch_stays_in_its_rooms(file: Path) -> None:
    if file.relative_to(HOUSE).parts[0] in TORCH_ROOMS:
        return
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported = [node.module or ""]
        else:
            continue
        assert not [name for name in imported if name.split(".")[0] == "torch"], f"line {node.lineno} imports torch"


def test_planning_and_studying_do_not_load_torch() -> None:
    modules = [_module(f) for f in FILES if f.relative_to(HOUSE).with_suffix("").parts[0] in WITHOUT_TORCH]
    program = (
        "import importlib, sys\n"
        f"for name in ['pipedream', *{modules!r}]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'importing {name} loads torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_face_says_each_name_once() -> None:
    """Its three lists (for editors, for star imports, for first use) hold the same names from the same homes."""
    tree = _tree(HOUSE / "__init__.py")
    checking = next(node for node in tree.body if isinstance(node, ast.If))
    homes = {
        alias.name: (node.module or "").removeprefix("pipedream").removeprefix(".")
        for node in checking.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    modules = {name: homes.pop(name) for name in pipedream._MODULES}
    assert set(modules.values()) == {""}
    assert homes == pipedream._HOMES
    assert {*pipedream.__all__} == {*homes, *modules, "__version__"} - FORMER_FACE
    assert len(pipedream.__all__) <= 21


@pytest.mark.parametrize("name", [*pipedream.__all__, *sorted(FORMER_FACE)])
def test_face_resolves(name: str) -> None:
    value = getattr(pipedream, name)
    assert getattr(value, "__name__", name).split(".")[-1] == name


def test_face_shows_what_a_user_needs_and_nothing_else() -> None:
    program = "import pipedream, pipedream.cli, pipedream.workflows.plan; print(*dir(pipedream))"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.split()
    assert shown == sorted(pipedream.__all__)


def test_face_refuses_other_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        pipedream.plam  # noqa: B018


def test_words_of_a_name() -> None:
    assert _words("_RunManager.get_IOChunk2") == {"run", "manager", "get", "io", "chunk"}


@every_file
def test_words(file: Path) -> None:
    for name in {_module(file), *_names(_tree(file))}:
        assert not _words(name) & FORBIDDEN_WORDS, f"{name}: see docs/glossary.md"
        assert name in TORCHS_NAMES or not name.startswith(("get_", "_get_")), f"{name}: a noun needs no get"


@every_file
def test_module_and_its_public_names_are_documented(file: Path) -> None:
    tree = _tree(file)
    assert ast.get_docstring(tree), "the module does not say what it is for"
    definitions = {node.name: node for node in tree.body if isinstance(node, Definition)}
    for name in _exported(tree):
        assert name not in definitions or ast.get_docstring(definitions[name]), f"{name} has no docstring"


@every_file
def test_public_names_are_exported(file: Path) -> None:
    """What has no underscore is in `__all__`, and what is in `__all__` exists."""
    tree = _tree(file)
    public = {node.name for node in tree.body if isinstance(node, Definition) and not node.name.startswith("_")}
    exported = set(_exported(tree))
    assert public <= exported, f"not in __all__: {sorted(public - exported)}"
    module = import_module(_module(file))
    assert not [name for name in exported if file != HOUSE / "__init__.py" and not hasattr(module, name)]


@every_file
def test_examples_in_docstrings(file: Path) -> None:
    assert doctest.testmod(import_module(_module(file))).failed == 0


@every_file
def test_letters(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.isascii(), "not ASCII: " + "".join(sorted({letter for letter in text if not letter.isascii()}))
