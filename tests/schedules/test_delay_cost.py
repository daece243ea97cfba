"""What stale gradients cost is said as it was measured."""

import sys
from pathlib import Path
from statistics import median

import pytest

from pipedream.schedules import delay_cost
from pipedream.schedules.delay_cost import describe_delay_cost

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "convergence"))

import report
from run import CURVES, load

ARMS = {
    ("pipedream", "AdamW"): {"": "pipedream", "basis_rotation": "rotation"},
    ("pipedream", "NAdam of beta_1 0.99"): {"": "nesterov", "basis_rotation": "rotation_nadam"},
    ("pipedream", "Muon"): {"": "pipedream_muon", "error_feedback": "pipedream_ef_muon"},
    ("pipedream", "momentum SGD"): {"": "pipedream", "nesterov": "nesterov"},
    ("pipedream_2bw", "AdamW"): {"": "2bw", "error_feedback": "2bw_ef", "basis_rotation": "2bw_rotation"},
    ("pipedream_2bw", "Muon"): {"": "2bw_muon", "error_feedback": "2bw_ef_muon"},
    ("pipedream_2bw", "momentum SGD"): {"": "2bw"},
}
CURVES_OF_ARMS = load(CURVES)


def score(task: str, arm: str, stages: int) -> float:
    curves = report.of_arm(CURVES_OF_ARMS, task, arm, stages).values()
    return (100 if task == "digits" else 1) * median(curve.score(task)[0] for curve in curves)


@pytest.mark.parametrize("key", ARMS, ids=str)
def test_the_costs_are_those_of_the_benchmark(key: tuple[str, str]) -> None:
    assert delay_cost._COSTS.keys() == ARMS.keys()
    assert delay_cost._COSTS[key].keys() == ARMS[key].keys()
    optimizer = key[1]
    task, bound = ("digits", 0.06) if "SGD" in optimizer else ("char_gpt", 0.006)
    synchronous = {"Muon": "sync_muon", "NAdam of beta_1 0.99": "sync_nadam"}
    reference = score(task, synchronous.get(optimizer, "sync"), 1)
    for compensation, arm in ARMS[key].items():
        measured = [score(task, arm, stages) - reference for stages in (2, 4, 8)]
        assert delay_cost._COSTS[key][compensation] == pytest.approx(measured, abs=bound), arm


def test_the_next_number_of_stages_is_meant_and_the_best_compensation_named() -> None:
    assert "with 4 stages" in describe_delay_cost("pipedream", 3)
    assert describe_delay_cost("pipedream", 20) == describe_delay_cost("pipedream", 8)
    assert "with compensation" in describe_delay_cost("pipedream_2bw", 4)
    assert "(" not in describe_delay_cost("pipedream_2bw", 4, "basis_rotation")
    assert not describe_delay_cost("pipedream", 4, "spike")
    assert not describe_delay_cost("pipedream", 1)
    assert not describe_delay_cost("1f1b", 4)
