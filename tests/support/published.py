"""The profiles that were published with the original PipeDream, where this machine has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


def published(model: str) -> Path:
    """Returns the path of a model's graph.txt; skips the test where there is none.

    They are looked for in the folder that PIPEDREAM_PROFILES names, then in ``shared/profiles`` beside this checkout
    or above it.
    """
    named = os.environ.get("PIPEDREAM_PROFILES")
    folders = [Path(named)] if named else [place / "shared" / "profiles" for place in (_ROOT, *_ROOT.parents)]
    for folder in folders:
        if (folder / f"{model}.txt").exists():
            return folder / f"{model}.txt"
    pytest.skip(f"no published profile {model}.txt: PIPEDREAM_PROFILES may name the folder that has it")
