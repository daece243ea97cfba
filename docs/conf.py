"""Sphinx settings of the documentation site; `make docs` builds it into build/site.

The source folder is the repository itself, so that a relative link between pages, or from a page to a file, is the same
on the site and on a code host.
"""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring

from pipedream import __version__

project = "pipedream"
author = "The pipedream authors"
copyright = "The pipedream authors, MIT licence"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "docs/**.md",
    "docs/api/**.md",
    "benchmarks/*/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
exclude_patterns = [".*", "build", "dist", "runs", "src", "tests", "**/__pycache__"]

myst_heading_anchors = 3  # headings have the anchors that a code host gives them
suppress_warnings = [
    "myst.header",
    "ref.python",  # `workers` in a docstring may be that of several classes
]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"
python_use_unqualified_type_names = True
napoleon_use_ivar = True
default_role = "py:obj"  # `Name` in a docstring is a link where the name is on the site, else code

nitpicky = True  # a reference that leads nowhere is an error
nitpick_ignore_regex = [("py:obj", ".*"), ("py:.*", r"(?!pipedream\.).*")]  # others' names are not on this site

# Napoleon takes "where it ends: None at the start" on a property to mean that its type is "where it ends".
GoogleDocstring._parse_attribute_docstring = lambda self: list(self._consume_to_end())

html_theme = "furo"
html_title = f"pipedream {__version__}"
html_static_path = ["site"]
html_css_files = ["tables.css"]
html_copy_source = False
html_show_sphinx = False


def _redirect(app: Sphinx, error: Exception | None) -> None:
    """Writes the index.html that leads to the first page, which is in a folder."""
    if error is None:
        page = '<!DOCTYPE html><meta http-equiv="refresh" content="0; url=docs/index.html"><title>pipedream</title>\n'
        Path(app.outdir, "index.html").write_text(page, encoding="utf-8")


def _plain(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Makes a docstring valid markup: bars are bars, and a module's ends where it draws for readers of the source."""
    if what == "module":
        lines[:] = takewhile(lambda line: not line.startswith(" "), list(lines))
    lines[:] = [line if "``" in line else line.replace("|", r"\|") for line in lines]


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", _plain)
    app.connect("build-finished", _redirect)
