"""The memory benchmark runs, and searches few trials; bubbles are the authors' own."""

import re
from pathlib import Path
from typing import Any

import pytest
from commands import Started, load_benchmark
from hypothesis import given, strategies as st
from marks import long

from pipedream.workflows.methods import score

RUN = Path(__file__).parents[2] / "benchmarks" / "memory" / "run.py"
largest, bubble = load_benchmark("memory", "largest", "bubble")


@given(most=st.integers(0, 400), first=st.integers(0, 500), least=st.integers(1, 8))
def test_largest_count_is_found_in_few_trials_if_the_first_is_close(most: int, first: int, least: int) -> None:
    tried: list[int] = []

    def trains(count: int) -> bool:
        tried.append(count)
        return count <= most

    expected = max(most, least - 1)
    assert largest.find_largest(first, trains, least) == expected
    assert len(set(tried)) == len(tried)
    assert min(tried) >= least
    off = abs(max(least, min(first, 400)) - expected)
    assert len(tried) <= 2 + 2 * off.bit_length()


@pytest.mark.slow
@pytest.mark.parametrize("model", [*bubble.MODELS[:3], *map(long, bubble.MODELS[3:])], ids=lambda model: model.name)
def test_bubbles_are_about_those_of_the_paper_of_roundpipe(model: Any) -> None:
    predicted = [100 * score(bubble.make_plan(model, method)).bubble for method in bubble.METHODS]
    assert predicted[:2] == pytest.approx(model.published[:2], abs=0.06), "of 1F1B"
    assert predicted[2] < model.published[2] + 6.5, "the paper recomputes before gradients arrive, in rounds"
    assert predicted[3] < model.published[3] + 0.7


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize(("part", "rows"), [("bytes", 6), ("slots", 1), ("largest", 2), ("bubble", 2)])
def test_it_runs_in_its_smallest_size(part: str, rows: int, tmp_path: Path) -> None:
    ended = Started((str(RUN), "--size", "test", "--only", part), folder=tmp_path).end(300.0)
    assert ended.status == 0, ended.err
    table = [line for line in ended.out.splitlines() if re.match(r"\| (one worker|1F1B|1-1-1|Qwen3|median)", line)]
    assert len(table) == rows, ended.out
    assert not any("| 0 |" in line or "| - |" in line for line in table if part == "largest"), ended.out
