"""The gallery: committed pages are what the objects give today."""

import re
from xml.etree import ElementTree

from pipedream import schedules
from scripts.make_docs import DOCS, make_pages


def read_gallery() -> str:
    return (DOCS / "gallery.md").read_text(encoding="utf-8")


def test_committed_pages_are_up_to_date() -> None:
    pages = make_pages()
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    assert not stale, "run make docs, and look at the difference"
    assert not {path for path in set((DOCS / "img").glob("*.svg")) - set(pages) if path.stem in schedules.SCHEDULES}
    for path, text in pages.items():
        if path.suffix == ".svg":
            assert ElementTree.fromstring(text).get("aria-label")


def test_each_method_has_its_section() -> None:
    text = read_gallery()
    names = {True: [], False: ["With a compensation of delay"]}
    for name in reversed(schedules.SCHEDULES):
        names[schedules.properties_of(name).flushes].insert(0, name)
    assert re.findall(r"^## (.+)$", text, re.M) == names[True] + names[False]
    assert re.findall(r"^### (.+)$", text, re.M) == list(schedules.COMPENSATED)
    for name in schedules.SCHEDULES:
        assert schedules.METHODS[name].choose, f"say in its file when to choose {name}"
        assert schedules.METHODS[name].picture, f"say in its file how to draw {name}"
        assert f"(img/{name}.svg)" in text


def test_claims_are_what_the_simulation_finds() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", read_gallery(), re.M)
    compared = [row for row in rows if row[0].startswith(("bubble,", "microbatches in", "staleness", "weight sets"))]
    assert len(compared) == 4 * len(schedules.SCHEDULES)
    for name, claimed, simulated in compared:
        assert claimed in (simulated, "-"), name
