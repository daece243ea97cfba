"""What papers and later studies say of asynchronous pipeline training, as comparisons of arms: effects.csv."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Effect:
    """Something published.

    Attributes:
        says: in words.
        source: where.
        published: figures, of the better and of the worse; empty where none are known for certain.
        task: on which it is looked for.
        better, worse: arms.
        even: that they are alike.
    """

    says: str
    source: str
    published: str
    task: str
    better: str
    worse: str
    even: bool


with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as _file:
    EFFECTS = tuple(Effect(*row[:-1], even=row[-1] == "yes") for row in csv.reader(_file) if row[0] != "says")
