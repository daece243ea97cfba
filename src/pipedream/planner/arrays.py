"""The array types of the planner. A formula that takes a number or an array serves one stage and all stages at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.integer[Any]]
FloatArray = NDArray[np.floating[Any]]
WholeArray = NDArray[np.object_]
"""Python integers of any size."""

Place = int | IntArray
"""The index of a place where a graph may be cut (`planner.tables.search_space`), or an array of them."""
Bytes = int | IntArray
Seconds = float | FloatArray
