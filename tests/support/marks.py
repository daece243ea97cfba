"""Which cases the default run and continuous integration have, and which this machine has."""

import importlib.util
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

slow = partial(pytest.param, marks=pytest.mark.slow)
"""A case of the slow run alone; `long` is left to `make test-all`."""
long = partial(pytest.param, marks=pytest.mark.long)
few = settings(max_examples=settings.default.max_examples // 3)
"""For a property whose examples compute much: a third of the profile's."""
needs_hf = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed; pip install torch-pipedream[hf]",
)
needs_bfloat16_lstm = pytest.mark.skipif("not torch.ops.mkldnn._is_mkldnn_bf16_supported()", reason="needs AVX-512")


def thinned(cases: Iterable[Any], every: int = 2) -> list[Any]:
    """Leaves every n-th of the cases that are not marked yet; marks a third of the others as slow, the rest as long.

    Append new ones, or others change.
    """
    parameters, count, left_out = [], 0, 0
    for case in cases:
        parameter: Any = case if hasattr(case, "marks") else pytest.param(*(case if type(case) is tuple else (case,)))
        if not parameter.marks:
            if count % every:
                parameter = (long if left_out % 3 else slow)(*parameter.values, id=parameter.id)
                left_out += 1
            count += 1
        parameters.append(parameter)
    return parameters


def spread(cases: Iterable[Any], every: int = 3) -> list[Any]:
    """Leaves every n-th of the cases that are marked slow to continuous integration, and marks the others as long."""
    parameters, count = [], 0
    for case in cases:
        parameter: Any = case if hasattr(case, "marks") else pytest.param(*(case if type(case) is tuple else (case,)))
        if any(mark.name == "slow" for mark in parameter.marks):
            if count % every:
                parameter = pytest.param(*parameter.values, id=parameter.id, marks=[*parameter.marks, pytest.mark.long])
            count += 1
        parameters.append(parameter)
    return parameters


def seeds(default: int, in_slow_run: int, total: int) -> list[Any]:
    """Returns numbers from 0 on: the first `default` unmarked, those up to `in_slow_run` slow, the others long."""
    marks = [()] * default + [pytest.mark.slow] * (in_slow_run - default) + [pytest.mark.long] * (total - in_slow_run)
    return [pytest.param(number, marks=mark) for number, mark in enumerate(marks)]


def published(model: str) -> Path:
    """Returns the path of a model's graph.txt, published with the original PipeDream; skips where there is none.

    `find_published` says where.
    """
    from benchmarks.scaffold import find_published  # here: it imports torch, which most tests need not

    folder = find_published()
    if folder is not None and (folder / f"{model}.txt").exists():
        return folder / f"{model}.txt"
    pytest.skip(f"no published profile {model}.txt: PIPEDREAM_PROFILES may name the folder that has it")
