"""What agents read: an index of the pages, and the whole API in one page."""

import re
from pathlib import Path

import pipedream as pd
from scripts.make_llms import DOCS, ROOT, write_api, write_index


def test_every_page_and_every_public_name_is_there() -> None:
    index, api = write_index(), write_api()
    pages = [
        *DOCS.glob("*.md"),
        *ROOT.glob("benchmarks/*/README.md"),
        *map(ROOT.joinpath, ("README.md", "CHANGELOG.md")),
    ]
    missing = [page for page in pages if f"({page.relative_to(ROOT).with_suffix('.html')}): " not in index]
    assert missing == [Path(DOCS / "index.md")]
    names = {name for name in dir(pd) if callable(getattr(pd, name)) and not name.startswith("_")}
    assert not [name for name in names if not re.search(rf"^\S*\b{name}\b", api, re.M)]
