"""The memory benchmark runs, searches few trials, and plans for models unprofiled; bubbles are the authors' own."""

import re
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from built import Built
from commands import Started, load_benchmark
from hypothesis import given, strategies as st
from marks import long
from torch import nn

import pipedream as pd
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


def _profile(blocks: int) -> pd.Profile:
    def block() -> nn.Module:
        parts = {"norm": nn.LayerNorm(8), "inner": nn.Linear(8, 16), "outer": nn.Linear(16, 8)}
        return Built(lambda block, x: x + block.outer(torch.relu(block.inner(block.norm(x)))), **parts)

    model = nn.Sequential(nn.Embedding(11, 8), *(block() for _ in range(blocks)), nn.LayerNorm(8), nn.Linear(8, 11))
    loss = lambda output: output.float().mean()  # noqa: E731
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return pd.profile(model, torch.zeros(4, 3, dtype=torch.int64), loss=loss, optimizer=momentum, warmup=0, runs=1)


def test_a_longer_profile_has_the_bytes_of_a_longer_model() -> None:
    longer, measured = largest.lengthen(_profile(3), 6), _profile(6)
    assert longer.optimizer_bytes == measured.optimizer_bytes
    for layer, other in zip(longer.layers, measured.layers, strict=True):
        assert all(getattr(other, name) == size for name, size in asdict(layer).items() if name.endswith("_bytes"))
    assert [layer.name for layer in longer.graph.layers] == [layer.name for layer in measured.graph.layers]
    assert longer.graph.edges == measured.graph.edges


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
