"""The promise of the library: a pipeline trains as plain PyTorch would.

A flushing method gives the parameters of one process; an asynchronous one those of its published update
rule, computed one minibatch after the other.
"""

from __future__ import annotations

import pytest
import zoo
from cases import ASYNCHRONOUS, FLUSHING, Case, check, run

KINDS = {"mlp": "sgd", "cnn": "adamw", "lstm": "sgd", "transformer": "adamw"}
PARTS = {"naive": 2, "gpipe": 4, "1f1b": 5, "pipedream": None, "pipedream_vertical_sync": None, "pipedream_2bw": 4}

EVERYTHING = [
    Case(animal, schedule, stages, optimizer=KINDS[animal], microbatches=PARTS[schedule])
    for animal in zoo.NAMES
    for schedule in (*FLUSHING, *ASYNCHRONOUS)
    for stages in ((1, 2, 3, 4) if animal == "mlp" else (4,) if schedule == "naive" else (3, 4))
]


@pytest.mark.parametrize("case", EVERYTHING, ids=str)
def test_every_method_trains_every_animal_as_plain_pytorch(case: Case) -> None:
    outcome = run(case)
    assert len(outcome.dones) >= 50
    check(case, outcome)
    assert len(outcome.drains) == 2, "one evaluation in the middle, and the end; none at an epoch's border"
