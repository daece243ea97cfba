"""The gallery: committed pages are what the objects give today."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pipedream.schedules import COMPENSATED, METHODS, SCHEDULES, build, uniform
from scripts.make_docs import DOCS, make_pages


@pytest.fixture(scope="module")
def pages() -> dict[Path, str]:
    return make_pages()


def test_committed_pages_are_up_to_date(pages: dict[Path, str]) -> None:
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    assert not stale, "run make docs, and look at the difference"
    orphans = set((DOCS / "img").glob("*.svg")) - set(pages)
    assert not {path for path in orphans if path.stem in SCHEDULES}


def test_each_method_has_its_section(pages: dict[Path, str]) -> None:
    text = pages[DOCS / "gallery.md"]
    flushing, late = (
        [name for name in SCHEDULES if build(name, uniform(name, 2)).flushes is flag] for flag in (True, False)
    )
    assert re.findall(r"^## (.+)$", text, re.M) == [*flushing, *late, "With a compensation of delay"]
    assert re.findall(r"^### (.+)$", text, re.M) == list(COMPENSATED)
    for name in SCHEDULES:
        assert METHODS[name].choose, f"say in its file when to choose {name}"
        assert METHODS[name].picture, f"say in its file how to draw {name}"
        assert f"(img/{name}.svg)" in text


def test_claims_are_what_the_simulation_finds(pages: dict[Path, str]) -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", pages[DOCS / "gallery.md"], re.M)
    compared = [row for row in rows if row[0].startswith(("bubble,", "microbatches in", "staleness", "weight sets"))]
    assert len(compared) == 4 * len(SCHEDULES)
    for name, claimed, simulated in compared:
        assert claimed in (simulated, "-"), name


def test_pictures_are_well_formed(pages: dict[Path, str]) -> None:
    for path, text in pages.items():
        if path.suffix == ".svg":
            assert ElementTree.fromstring(text).get("aria-label")
