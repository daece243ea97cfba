"""Breaks the library on purpose, one statement at a time, and checks that the tests notice each break.

    .venv/bin/python scripts/deliberate_breaks.py                  all of them, 10 to 20 minutes on two cores
    .venv/bin/python scripts/deliberate_breaks.py stash norm       those whose rows contain one of these words
    .venv/bin/python scripts/deliberate_breaks.py --list           their names and what they change
    .venv/bin/python scripts/deliberate_breaks.py --check          whether each changes exactly one place; a few seconds

The breaks are the rows of `deliberate_breaks.toml`. Each changes one place in a scratch copy; the checkout itself never
changes. The test files that are named with the break run first, then their marked tests, then all default tests, until
one fails. Exits with 1 if a break is not noticed or does not change exactly one place.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import Queue
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".toml")
COPIED = ("src", "tests", "examples", "benchmarks", "docs", "scripts")
COPIED += ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "pyproject.toml")
BROKEN = (ROOT / "src", ROOT / "benchmarks")
"""Functions are looked up in their Python files."""
ABOUT_THE_SOURCE = ("tests/test_house.py", "tests/test_packaging.py")
"""They fail for any change, or for a copy."""
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Break:
    """A change that the tests of continuous integration must notice.

    Attributes:
        name: the fault.
        function: the last part of its qualified name, or of a module's or class's, that nothing else is named.
        old: an expression or a statement of the function.
        new: what replaces it.
        around: what `old` is part of; the function if empty.
        tests: files below tests/, or tests of them, that are expected to notice.
    """

    name: str
    function: str
    old: str
    new: str
    around: str
    tests: tuple[str, ...]

    @classmethod
    def read(cls, name: str, text: str, tests: str) -> Break:
        """Reads a row of the table."""
        function, change = re.split(r":\s+", text, maxsplit=1)
        change, *around = re.split(r"\s+within ", change)
        old, arrow, new = change.partition(" -> ")
        if not arrow:
            old, new = change.removeprefix("delete "), "pass"
        return cls(name, function, old, new, "".join(around), tuple(tests.split()))

    def __str__(self) -> str:
        around = f" within {self.around}" * bool(self.around)
        return f"{self.name}\n    {self.function}: {self.old} -> {self.new}{around}"


class StaleError(Exception):
    """A break changes no place of today's code, or several."""


@dataclass(frozen=True)
class Source:
    """A Python file and its functions, classes and itself by their full names."""

    path: Path
    text: bytes
    scopes: tuple[tuple[str, ast.AST], ...]

    def segment(self, node: Any) -> slice:
        """Returns which bytes are the node's."""
        starts = [0]
        for line in self.text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return slice(starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset)


def read_breaks() -> tuple[Break, ...]:
    """Reads the table."""
    groups: dict[str, dict[str, str]] = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return tuple(Break.read(name, text, tests) for tests, rows in groups.items() for name, text in rows.items())


def locate(case: Break) -> tuple[Path, bytes]:
    """Returns the file that a break changes, and what the file becomes.

    Raises:
        StaleError: there is not exactly one such function or place, or one of the tests' files does not exist.
    """
    missing = [test for test in case.tests if not (ROOT / "tests" / test.split("::")[0]).exists()]
    if missing or not case.tests:
        raise StaleError(f"there is no tests/{missing[0]}" if missing else "it names no tests")
    source, scope = _find_function(case.function)
    if case.around:
        scope = _find(case.around, scope)[0]
    node, pattern = _find(case.old, scope, as_statement=not _is_expression(case.new))
    segment = source.segment(node)
    old, new = source.text[segment].decode(), case.new
    if isinstance(pattern, ast.expr):
        old, new = f"({old})", f"({new})"
    if not matches(node, ast.parse(old, mode="eval").body if isinstance(node, ast.expr) else ast.parse(old).body[0]):
        raise StaleError(f"{case.old} is in a string, and Python {sys.version_info[1]} does not know where")
    if ast.dump(ast.parse(old)) == ast.dump(ast.parse(new)):
        raise StaleError("it changes nothing")
    return source.path, source.text[: segment.start] + new.encode() + source.text[segment.stop :]


def _find(text: str, scope: ast.AST, as_statement: bool = False) -> tuple[ast.AST, ast.AST]:
    """Returns the node that a text describes, the only one in a scope, and the pattern that found it."""
    number = re.match(r"(\d)(st|nd|rd|th) ", text)
    statement = ast.parse(text[number.end() :] if number else text).body[0]
    pattern = statement.value if isinstance(statement, ast.Expr) and not as_statement else statement
    nodes: list[Any] = [node for node in ast.walk(scope) if matches(pattern, node)]
    nodes.sort(key=lambda node: (node.lineno, node.col_offset))
    if number and len(nodes) > 1:
        nodes = nodes[int(number[1]) - 1 :][:1]
    if len(nodes) != 1:
        raise StaleError(f"{text} occurs {len(nodes)} times")
    return nodes[0], pattern


def _is_expression(text: str) -> bool:
    return isinstance(ast.parse(text).body[0], ast.Expr)


def matches(pattern: Any, node: Any) -> bool:
    """Whether a node is a pattern's: the same code, but `...` in the pattern is anything."""
    if _is_open(pattern):
        return True
    if isinstance(pattern, ast.AST):
        fields = {name for name in pattern._fields if name not in ("ctx", "kind", "type_comment")}
        if isinstance(pattern, ast.Call) and pattern.args and _is_open(pattern.args[-1]) and not pattern.keywords:
            fields.remove("keywords")
        return type(pattern) is type(node) and all(
            matches(getattr(pattern, name, None), getattr(node, name, None)) for name in fields
        )
    if isinstance(pattern, list):
        if pattern and _is_open(pattern[-1]):
            pattern, node = pattern[:-1], node[: len(pattern) - 1]
        return len(pattern) == len(node) and all(map(matches, pattern, node))
    return type(pattern) is type(node) and bool(pattern == node)


def _is_open(pattern: Any) -> bool:
    pattern = pattern.value if isinstance(pattern, ast.Expr) else pattern
    return isinstance(pattern, ast.Constant) and pattern.value is ...


def _find_function(name: str) -> tuple[Source, ast.AST]:
    scopes = [
        (source, scope)
        for source in (_parse(path) for path, names in _read_names().items() if names.issuperset(name.split(".")))
        for full_name, scope in source.scopes
        if f".{full_name}".endswith(f".{name}")
    ]
    if len(scopes) != 1:
        raise StaleError(f"{len(scopes)} functions are called {name}, in {[source.path.name for source, _ in scopes]}")
    return scopes[0]


@cache
def _read_names() -> dict[Path, set[str]]:
    """Returns the names of each file's functions and classes and of its own path."""
    definition = re.compile(r"^\s*(?:async def|def|class) (\w+)", re.MULTILINE)
    return {
        path: {*path.with_suffix("").parts, *definition.findall(path.read_text(encoding="utf-8"))}
        for folder in BROKEN
        for path in sorted(folder.rglob("*.py"))
    }


@cache
def _parse(path: Path) -> Source:
    text = path.read_bytes()
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return Source(path, text, tuple(_list_scopes(ast.parse(text), module)))


def _list_scopes(scope: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
    yield name, scope
    inner = list(ast.iter_child_nodes(scope))
    while inner:
        node = inner.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _list_scopes(node, f"{name}.{node.name}")
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            inner += ast.iter_child_nodes(node)


def _make_copies(folder: Path, count: int) -> Iterator[Path]:
    for number in range(count):
        copy = folder / str(number)
        copy.mkdir()
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "runs", "*.pt"))
            elif (ROOT / name).exists():
                shutil.copy(ROOT / name, copy / name)
        for profiles in (ROOT / "shared", *(above / "shared" for above in ROOT.parents)):
            if (profiles / "profiles").is_dir():
                (copy / "shared").symlink_to(profiles)
                break
        yield copy


def _run_tests(copy: Path, *arguments: str) -> str | None:
    """Runs pytest in a copy; returns which test failed first, or None if all passed.

    Raises:
        RuntimeError: pytest itself cannot run.
    """
    path = os.pathsep.join([str(copy / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "CI": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"nothing, but it did not end within {TIMEOUT_S:g} s"
    if done.returncode in (0, 5):  # 5: none of the tests is marked so
        return None
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))]
    if done.returncode not in (1, 2) or not failures:
        raise RuntimeError(f"pytest {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return failures[0].split(" ", 1)[1].split(" - ")[0]


def _try(case: Break, copies: Queue[Path]) -> bool:
    """Applies a break to a free copy, runs the tests, and prints whether they notice; returns that."""
    file, broken = locate(case)
    copy = copies.get()
    path = copy / file.relative_to(ROOT)
    start = time.monotonic()
    try:
        path.write_bytes(broken)
        named, late = [f"tests/{test}" for test in case.tests], ""
        if (failed := _run_tests(copy, *named)) is None:
            late = "; by a marked test"
            failed = _run_tests(copy, *named, "-m", "slow and not long")
        if failed is None:
            late = "; the tests that are named with it passed"
            failed = _run_tests(copy, "-n", "2", *(f"--deselect={test}" for test in ABOUT_THE_SOURCE))
    finally:
        path.write_bytes(file.read_bytes())
        copies.put(copy)
    seconds = f"{time.monotonic() - start:.0f} s"
    print(f"noticed     {case.name}: {failed} ({seconds}{late})" if failed else f"NOT NOTICED {case.name} ({seconds})")
    sys.stdout.flush()
    return failed is not None


def find_stale(cases: tuple[Break, ...]) -> dict[str, str]:
    """Returns the names of the breaks that do not change exactly one place, with the reasons."""
    stale = {}
    for case in cases:
        try:
            locate(case)
        except (StaleError, SyntaxError) as error:
            stale[case.name] = str(error)
    return stale


def main() -> int:
    """Runs the script; returns its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="words of the rows of the breaks to try [default: all]")
    parser.add_argument("--list", action="store_true", help="print the breaks and exit")
    parser.add_argument("--check", action="store_true", help="only check that each break changes one place")
    parser.add_argument("--jobs", type=int, default=2, help="breaks that are tried at a time [default: 2]")
    options = parser.parse_args()
    chosen = tuple(
        case
        for case in read_breaks()
        if not options.names or any(word in f"{case} {case.tests}" for word in options.names)
    )
    if not chosen:
        parser.error("no row has one of these words; --list prints them")
    if options.list:
        print("\n".join(map(str, chosen)))
        return 0
    stale = find_stale(chosen)
    for name, reason in stale.items():
        print(f"STALE       {name}: {reason}")
    if options.check:
        print(f"{len(chosen) - len(stale)} of {len(chosen)} breaks change one place")
        return bool(stale)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pipedream-breaks-") as folder:
        copies: Queue[Path] = Queue()
        for copy in _make_copies(Path(folder), options.jobs):
            copies.put(copy)
            if (error := _run_tests(copy, "--collect-only")) is not None:
                raise RuntimeError(f"{error} cannot be collected before anything is broken")
        with ThreadPoolExecutor(options.jobs) as pool:
            noticed = list(pool.map(lambda case: _try(case, copies), [c for c in chosen if c.name not in stale]))
    minutes = (time.monotonic() - start) / 60
    print(f"{sum(noticed)} of {len(chosen)} breaks were noticed, {len(stale)} are stale, in {minutes:.1f} minutes")
    return 0 if len(noticed) == len(chosen) and all(noticed) else 1


if __name__ == "__main__":
    sys.exit(main())
