"""Writes llms.txt (https://llmstxt.org), an index of the pages, and api.txt, the whole API in one page, into a folder.

.venv/bin/python scripts/make_llms.py build/site
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pipedream.core.artifact import write_text

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TREE = re.compile(r"```\{toctree\}\n:caption: (.*)\n((?::.*\n)*)\n((?:.+\n)+)```")
DIRECTIVE = re.compile(r"^\.\. auto(module|class|function):: (\S+)\n(?:   :members:(.*)\n)?", re.M)


def find_pages() -> Iterator[tuple[str, Path]]:
    """Yields the heading and the file of each page, in the order of the site's index."""
    for caption, _, entries in TREE.findall((DOCS / "index.md").read_text(encoding="utf-8")):
        for entry in entries.split():
            for page in sorted(DOCS.glob(f"{entry}.md")):
                yield caption, page.resolve()


def write_index() -> str:
    """Returns the text of llms.txt: pages with their titles and first sentences."""
    intro = (DOCS / "index.md").read_text(encoding="utf-8").split("\n\n")[1]
    lines, heading = (
        ["# pipedream", "", f"> {' '.join(intro.split())}", "", "The whole API in one page: [api.txt](api.txt)."],
        "",
    )
    for caption, page in find_pages():
        title, *blocks = page.read_text(encoding="utf-8").removeprefix("<!--").partition("# ")[2].split("\n\n")
        prose = next((block for block in blocks if re.match(r"[A-Z`*]", block)), "")
        prose = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", " ".join(prose.split()))
        sentence = re.split(r"(?<=[.:?])\s", prose, maxsplit=1)[0].replace(":", ".")
        lines += ["", f"## {caption}", ""] if caption != heading else []
        lines.append(f"- [{title.strip()}]({page.relative_to(ROOT).with_suffix('.html')}): {sentence}")
        heading = caption
    return "\n".join(lines) + "\n"


def write_api() -> str:
    """Returns the text of api.txt: signatures and docstrings of what the pages in docs/api describe."""
    lines = ["pipedream: the whole API", "========================", ""]
    for page in ("pipedream", "schedules", "plans", "studying", "testing", "errors"):
        for kind, name, members in DIRECTIVE.findall((DOCS / "api" / f"{page}.md").read_text(encoding="utf-8")):
            lines += describe_module(name, members) if kind == "module" else describe(name, find(name))
    return "\n".join(lines) + "\n"


def find(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def describe_module(name: str, members: str) -> Iterator[str]:
    module = importlib.import_module(name)
    names = [each.strip() for each in members.split(",") if each.strip()] or list(getattr(module, "__all__", ()))
    yield from (f"module {name}", *indent(inspect.getdoc(module) or ""), "")
    for member in names or vars(module):
        value = getattr(module, member)
        is_public = not member.startswith("_") and (inspect.isclass(value) or inspect.isroutine(value))
        if is_public and (names or value.__module__ == name):
            yield from describe(f"{name}.{member}", value)


def describe(name: str, value: object) -> Iterator[str]:
    """Yields signature and docstring of a function or a class, and of the public methods that the class itself has."""
    yield from (f"{name}{sign(value)}", *indent(inspect.getdoc(value) or ""), "")
    for member, attribute in vars(value).items() if inspect.isclass(value) else ():
        function = getattr(attribute, "__func__", getattr(attribute, "fget", attribute))
        if not member.startswith("_") and inspect.isfunction(function) and function.__doc__:
            yield from (f"{name}.{member}{sign(function)}", *indent(inspect.getdoc(function) or ""), "")


def sign(value: object) -> str:
    try:
        text = str(inspect.signature(value))  # type: ignore[arg-type]
        text = re.sub(r"(: |-> )'([^']+)'", r"\1\2", text)
        return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)
    except (TypeError, ValueError):
        return "" if not dataclasses.is_dataclass(value) else "(...)"


def indent(text: str) -> list[str]:
    return [f"    {line}".rstrip() for line in text.splitlines()]


def main(folder: Path) -> None:
    write_text(folder / "llms.txt", write_index())
    write_text(folder / "api.txt", write_api())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
