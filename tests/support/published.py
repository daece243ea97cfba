"""The profiles that were published with the original PipeDream, where this machine has them."""

from pathlib import Path

import pytest

from benchmarks.scaffold import find_published


def published(model: str) -> Path:
    """Returns the path of a model's graph.txt; skips the test where there is none.

    `find_published` says where.
    """
    folder = find_published()
    if folder is not None and (folder / f"{model}.txt").exists():
        return folder / f"{model}.txt"
    pytest.skip(f"no published profile {model}.txt: PIPEDREAM_PROFILES may name the folder that has it")
