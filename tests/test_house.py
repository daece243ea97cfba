"""The rules for all of the code: imports, the public face, names, sizes, words."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import grimp
import pytest
from importlinter import cli as import_linter

import pipedream

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "pipedream"
FILES = sorted(PACKAGE.rglob("*.py"))
TORCH_PACKAGES = ("capture", "experts.py", "probe", "profiler", "runtime", "sharding")
WITHOUT_TORCH = ("core", "partitioner", "planner", "schedules", "verifier", "simulator", "metrics", "report")
FORBIDDEN_WORDS = {"engine", "handler", "helper", "manager", "mubatch", "tau", "util", "utils"}
FORBIDDEN_WORDS |= {"crew", "guest", "parcel", "seated"}  # words of this project alone, which nobody could guess
TORCHS_NAMES = {"get_backend"}  # of methods that a base class of torch's asks for
MOST_MODULES = 20  # in a folder
MOST_LINES = 80  # of a function's body

# Phrases of an older style of this project, which read as if translated -> how many are still left.
OLD_PHRASES = {
    r"\bbehind\b": 3,
    r"\bunless said\b": 0,
    r"\bso-manieth\b": 0,
    r": whose\.": 0,
    r"\btold\b": 0,
    r"\btells?\b": 1,
    r"\bmend(s|ed|ing)?\b": 0,
    r"(?<!there )\bis none\b": 0,
    r"\bgoes on\b": 0,
    r"\bstands in\b": 0,
    r"\bof equals\b": 0,
}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _module(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


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


def _place(file: Path, node: ast.AST) -> str:
    return f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', '')}".rstrip()


def test_imports_run_downward(capsys: pytest.CaptureFixture[str]) -> None:
    status = import_linter.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True)
    assert status == import_linter.EXIT_STATUS_SUCCESS, capsys.readouterr().out


def test_no_circles() -> None:
    graph = grimp.build_graph("pipedream", cache_dir=None)
    arrows = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(arrows).prepare()  # CycleError names the circle


def test_torch_stays_in_its_rooms() -> None:
    found = []
    for file in FILES:
        if file.relative_to(PACKAGE).parts[0] in TORCH_PACKAGES:
            continue
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported = [node.module or ""]
            else:
                continue
            if any(name.split(".")[0] == "torch" for name in imported):
                found.append(_place(file, node))
    assert not found, "imports torch"


def test_only_measurements_wait_for_a_whole_device() -> None:
    """A receive that is posted may end only by a further act of this process; what frees cached memory waits too."""
    waits = re.compile(r"cuda\.(synchronize|empty_cache)\(")
    found = {path.relative_to(PACKAGE).parts[0] for path in FILES if waits.search(path.read_text(encoding="utf-8"))}
    assert found <= {"probe", "profiler"}


def test_planning_and_studying_do_not_load_torch() -> None:
    modules = [_module(f) for f in FILES if f.relative_to(PACKAGE).with_suffix("").parts[0] in WITHOUT_TORCH]
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
    tree = _tree(PACKAGE / "__init__.py")
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
    assert {*pipedream.__all__} == {*homes, *modules, "__version__"}
    assert len(pipedream.__all__) <= 31


@pytest.mark.parametrize("name", pipedream.__all__)
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


def test_words() -> None:
    found = {
        f"{_module(file)}: {name}" for file in FILES for name in {_module(file), *_names(_tree(file))} if _is_odd(name)
    }
    assert not found, "words that docs/glossary.md has a better one for, or a get_ before a noun"


def _is_odd(name: str) -> bool:
    if _words(name) & FORBIDDEN_WORDS:
        return True
    return name not in TORCHS_NAMES and name.startswith(("get_", "_get_"))


def test_modules_and_their_public_names_are_documented() -> None:
    found = []
    for file in FILES:
        tree = _tree(file)
        public = [node for node in tree.body if isinstance(node, Definition) and not node.name.startswith("_")]
        found += [_place(file, node) for node in (tree, *public) if not ast.get_docstring(node)]
    assert not found, "no docstring"


def test_examples_in_docstrings() -> None:
    failed = [_module(file) for file in FILES if doctest.testmod(import_module(_module(file))).failed]
    assert not failed


def test_letters() -> None:
    found = [_module(file) for file in FILES if not file.read_text(encoding="utf-8").isascii()]
    assert not found, "not ASCII"


def test_folders_can_be_looked_over() -> None:
    counts = Counter(file.parent for top in (PACKAGE, ROOT / "tests") for file in top.rglob("*.py"))
    found = {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > MOST_MODULES + 1}
    assert not found, f"more than {MOST_MODULES} modules and an __init__"


def test_functions_are_short() -> None:
    """Except tables, whose body is mostly one literal or one declaration."""
    found = [
        _place(file, node)
        for file in FILES
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_long(node)
    ]
    assert not found, f"the body has more than {MOST_LINES} lines"


def _is_long(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body or _lines(body[0], body[-1]) <= MOST_LINES:
        return False
    longest = max(body, key=lambda statement: _lines(statement, statement))
    is_plain = isinstance(longest, ast.Assign | ast.AnnAssign | ast.Return | ast.Expr)
    return not (is_plain and _lines(longest, longest) > _lines(body[0], body[-1]) / 2)


def _lines(first: ast.stmt, last: ast.stmt) -> int:
    return (last.end_lineno or last.lineno) - first.lineno + 1


def test_a_table_may_be_long() -> None:
    rows = "\n".join(f"        {number}," for number in range(100))
    calls = "\n".join(f"    print({number})" for number in range(100))
    for text, is_long in ((f"def f():\n    return (\n{rows}\n    )", False), (f"def f():\n{calls}", True)):
        (function,) = ast.parse(text).body
        assert isinstance(function, ast.FunctionDef)
        assert _is_long(function) is is_long


def test_english_is_plain() -> None:
    """Phrases of the old style are refused in docstrings, comments, messages and docs."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    texts = [(file, line, text) for file in FILES for line, text in _prose(file)]
    texts += [(page, 1, page.read_text(encoding="utf-8")) for page in pages]
    for phrase, most in OLD_PHRASES.items():
        found = [
            f"{file.relative_to(ROOT)}:{line + text[: match.start()].count(chr(10))}"
            for file, line, text in texts
            for match in re.finditer(phrase, text)
        ]
        assert len(found) <= most, f"{phrase}: {' '.join(found)}"


def _prose(file: Path) -> Iterator[tuple[int, str]]:
    """Yields the comments and strings of a module, each with the line that it begins in."""
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline):
        if token.type in kinds:
            yield token.start[0], token.string


def test_deliberate_breaks_are_of_this_code() -> None:
    """Each break of scripts/deliberate_breaks.py changes one place, and names test files that exist."""
    spec = importlib.util.spec_from_file_location("deliberate_breaks", ROOT / "scripts" / "deliberate_breaks.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # dataclasses look their module up
    spec.loader.exec_module(script)
    assert len(script.BREAKS) >= 30
    assert len({one.name for one in script.BREAKS}) == len(script.BREAKS)
    stale = [f"{one.name}: {one.file}" for one in script.BREAKS if script.occurrences(one) != 1]
    assert not stale, "the text to be replaced does not occur exactly once"
    missing = [
        test for one in script.BREAKS for test in one.tests if not (ROOT / "tests" / test.split("::")[0]).exists()
    ]
    assert not missing
