"""Which cases the default run has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any]) -> list[Any]:
    """Marks as slow every second of the cases that are not marked yet."""
    parameters = []
    is_kept = False
    for case in cases:
        parameter: Any = case if hasattr(case, "marks") else pytest.param(case)
        if not parameter.marks:
            is_kept = not is_kept
            if not is_kept:
                parameter = pytest.param(*parameter.values, id=parameter.id, marks=pytest.mark.slow)
        parameters.append(parameter)
    return parameters
