"""Checks the rules of this code that formatter, linter and type checker do not know; `make check` runs it.

    .venv/bin/python scripts/check_style.py

Each file is parsed once. Prints `FILE:LINE: what is wrong` for each finding and exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "pipedream"

MAX_FUNCTION_LINES = 60  # of a body; tables may be longer
MAX_CLASS_LINES = 300
MAX_MODULES = 21  # in a folder, besides __init__

MAY_WAIT = ("services/probe/", "services/roofline/", "profiler/", "services/first_minibatch/reference_run.py")
"""Measurements, and the end of the comparison of the first minibatch, which gives its memory back."""

VAGUE_NAMES = {"asked", "behind", "found", "given", "held", "known", "made", "one", "own", "said", "seen", "wanted"}
FORBIDDEN_WORDS = {"engine", "handler", "helper", "manager", "mubatch", "tau", "util", "utils"}
FORBIDDEN_WORDS |= {"crew", "guest", "parcel", "seated"}  # words of this project alone, which nobody could guess
BASES_NAMES = {
    "_get_learning_rate",
    "get_backend",
    "get_total_train_batch_size",
}  # of methods that a base class asks for
TORCH_PACKAGES = (
    "apps.compare",
    "apps.emulate",
    "capture",
    "experts",
    "extensions.choices.messages.encoded",
    "extensions.compensations.basis_rotation.rotation",
    "extensions.clipping",
    "extensions.compiled",
    "extensions.delays",
    "extensions.deltas",
    "extensions.host_weights",
    "extensions.meshes",
    "extensions.nccl",
    "extensions.loss_scale",
    "extensions.sharded_reader",
    "extensions.shared_memory",
    "extensions.split_backward",
    "extensions.tied_weights",
    "extensions.offload",
    "extensions.recompute",
    "extensions.reducers.averages.average",
    "extensions.reducers.averages.codes",
    "extensions.reducers.averages.late",
    "extensions.reducers.averages.sparse",
    "extensions.reducers.powersgd.low_rank",
    "hf",
    "profiler",
    "runtime",
    "services",
    "sharding",
    "tensors",
    "apps.testing",
)

# Phrases of an older style of this project, which read as if translated -> how many are still left.
OLD_PHRASES = {
    r"\bbehind\b": 3,
    r"\bunless said\b": 0,
    r"\bso-manieth\b": 0,
    r": whose\.": 0,
    r"\btold\b": 0,
    r"\btells?\b(?!\()": 1,
    r"\bmend(s|ed|ing)?\b": 0,
    r"(?<!there )\bis none\b": 0,
    r"\bgoes on\b": 0,
    r"\bstands in\b": 0,
    r"\bof equals\b": 0,
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A Python file, read, parsed and walked through once."""

    path: Path
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]

    @property
    def in_package(self) -> bool:
        return self.path.is_relative_to(PACKAGE)

    def place(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}"


def read(path: Path) -> Source:
    """Reads and parses a file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    return Source(path, text, tree, tuple(ast.walk(tree)))


def check_imports() -> Iterator[str]:
    """Finds circles of imports, and imports of torch outside of its packages."""
    graph = grimp.build_graph(
        "pipedream", include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        yield f"circle of imports: {' -> '.join(reversed(error.args[1]))}"
    for module in sorted(module for module, imported in imports.items() if "torch" in imported):
        if not f"{module.removeprefix('pipedream.')}.".startswith(tuple(f"{package}." for package in TORCH_PACKAGES)):
            yield f"{module}: imports torch, which is for {', '.join(TORCH_PACKAGES)}"


def check_waits(source: Source) -> Iterator[str]:
    """Finds waits for a whole device: a receive that is posted may end only by a further act of the same process."""
    if not source.path.relative_to(PACKAGE).as_posix().startswith(MAY_WAIT):
        for line, text in enumerate(source.text.splitlines(), 1):
            if re.search(r"cuda\.(synchronize|empty_cache)\(", text):
                yield f"{source.place(line)}: waits for a whole device, which only measurements may"


def check_letters(source: Source) -> Iterator[str]:
    """Finds letters outside of ASCII."""
    for line, text in enumerate(source.text.splitlines(), 1):
        if not text.isascii():
            yield f"{source.place(line)}: not ASCII"


def check_words(source: Source) -> Iterator[str]:
    """Finds names with words that docs/glossary.md has better ones for, and `get_` before a noun."""
    stem = source.path.parent.name if source.path.stem == "__init__" else source.path.stem
    for name, line in (stem, 1), *_bound_names(source):
        if split_words(name) & FORBIDDEN_WORDS:
            yield f"{source.place(line)}: docs/glossary.md has a better word than {name}"
        elif name.startswith(("get_", "_get_")) and name not in BASES_NAMES:
            yield f"{source.place(line)}: get_ in {name} says nothing"


def split_words(name: str) -> set[str]:
    """Returns the words of a name, whether it is written_so or WrittenSo."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def check_docstrings(source: Source) -> Iterator[str]:
    """Finds modules and public classes and functions without a docstring."""
    public = [
        node for node in source.tree.body if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")
    ]
    for node in (source.tree, *public):
        if not ast.get_docstring(node):
            yield f"{source.place(getattr(node, 'lineno', 1))}: {getattr(node, 'name', 'module')} has no docstring"


def check_lengths(source: Source) -> Iterator[str]:
    """Finds long functions and classes."""
    for node in source.nodes:
        if isinstance(node, Function) and _is_long(node):
            yield f"{source.place(node.lineno)}: the body of {node.name} is over {MAX_FUNCTION_LINES} lines"
        elif isinstance(node, ast.ClassDef) and _count_lines(node, node) > MAX_CLASS_LINES:
            yield f"{source.place(node.lineno)}: class {node.name} is over {MAX_CLASS_LINES} lines"


def _is_long(function: Function) -> bool:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body or _count_lines(body[0], body[-1]) <= MAX_FUNCTION_LINES:
        return False
    # A table: most of the body is a single literal or declaration.
    longest = max(body, key=lambda statement: _count_lines(statement, statement))
    is_plain = isinstance(longest, ast.Assign | ast.AnnAssign | ast.Return | ast.Expr)
    return not (is_plain and _count_lines(longest, longest) > _count_lines(body[0], body[-1]) / 2)


def _count_lines(first: ast.stmt, last: ast.stmt) -> int:
    return (last.end_lineno or last.lineno) - first.lineno + 1


def check_folders(sources: list[Source]) -> Iterator[str]:
    """Finds folders that have too many modules to be looked over."""
    counts = Counter(source.path.parent for source in sources if source.path.stem != "__init__")
    for folder, count in counts.items():
        if count > MAX_MODULES:
            yield f"{folder.relative_to(ROOT)}: {count} modules, more than {MAX_MODULES}"


def check_phrases(texts: dict[str, str]) -> Iterator[str]:
    """Finds phrases of the old style in modules and pages, where there are more than allowed."""
    for phrase, most in OLD_PHRASES.items():
        places = [
            f"{name}:{line}"
            for name, text in texts.items()
            if re.search(phrase, text)
            for line, words in enumerate(text.splitlines(), 1)
            for _ in re.finditer(phrase, words)
        ]
        if len(places) > most:
            yield from (f"{place}: {phrase}, of which {most} may be left" for place in places)


def check_vague_names(sources: list[Source]) -> Iterator[str]:
    """Finds names that do not say what they hold."""
    for source in sources:
        for name, line in _bound_names(source):
            if name.strip("_") in VAGUE_NAMES:
                yield f"{source.place(line)}: {name} does not say what it holds"


def _bound_names(source: Source) -> Iterator[tuple[str, int]]:
    """Yields the names that a module makes up itself, with their lines; the names that it only uses are not its own."""
    for node in source.nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno
            case ast.alias(asname=str(name)):
                yield name, node.lineno
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno


FILE_CHECKS: tuple[Callable[[Source], Iterator[str]], ...] = (
    check_waits,
    check_letters,
    check_words,
    check_docstrings,
    check_lengths,
)


def main() -> int:
    """Runs the script; returns its exit status."""
    folders = (PACKAGE, *(ROOT / name for name in ("tests", "benchmarks", "examples", "scripts")))
    sources = [read(path) for folder in folders for path in sorted(folder.rglob("*.py"))]
    package = [source for source in sources if source.in_package]
    findings = [finding for check in FILE_CHECKS for source in package for finding in check(source)]
    findings += check_imports()
    findings += check_folders([source for source in sources if source.in_package or "tests" in source.path.parts])
    pages = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    texts = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in pages}
    findings += check_phrases(texts | {str(source.path.relative_to(ROOT)): source.text for source in package})
    findings += check_vague_names(sources)
    print("\n".join(findings), end="\n" if findings else "")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
