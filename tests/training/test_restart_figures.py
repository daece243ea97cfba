"""What restarts have cost a run, counted in a file that outlives the workers."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from pipedream.runtime.failure.processes import LAUNCHER, write_lost
from pipedream.training.restarts import Restarts


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=4))
def test_each_restart_is_counted_with_what_was_repeated(
    tmp_path_factory: pytest.TempPathFactory, attempts: list[tuple[int, int]]
) -> None:
    """An attempt trains so many minibatches, and the next one continues so many before the furthest."""
    folder, furthest, resumed_from, repeated = tmp_path_factory.mktemp("launch"), 0, 0, 0
    failures: list[dict[str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LAUNCHER, "1 1")
        for attempt, (trains, goes_back) in enumerate([*attempts, (20, 0)]):
            (folder / str(attempt) / "0").mkdir(parents=True)
            patch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / str(attempt) / "0" / "error.json"))
            patch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
            counted, before = Restarts(0), furthest
            failures += [{"minibatches": furthest, "resumed_from": resumed_from}] if attempt else []
            counted.begin(resumed_from)
            for number in range(resumed_from, resumed_from + trains):
                counted.finish(number)
                repeated += number < before
                furthest = max(furthest, number + 1)
            figures = counted.list_figures()
            assert figures["restarts"] == attempt
            assert figures["minibatches_repeated"] == repeated
            assert figures["each"] == failures
            resumed_from = max(0, furthest - goes_back)


def test_attempts_that_trained_nothing_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for attempt in range(3):
        (tmp_path / str(attempt) / "0").mkdir(parents=True)
    monkeypatch.setenv(LAUNCHER, "1 1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "2" / "0" / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    counted = Restarts(0)
    counted.begin(0)
    expected: dict[str, Any] = {"restarts": 2, "workers_lost": 0, "minibatches_repeated": 0}
    expected["each"] = [{"minibatches": 0, "resumed_from": 0}]  # the second has not begun
    assert counted.list_figures() == expected
    write_lost(tmp_path / "0", [1, 3])
    write_lost(tmp_path / "2", [0])  # by the next one
    assert counted.list_figures() == expected | {"workers_lost": 2}


def test_under_another_launcher_only_restarts_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCHER, raising=False)
    counted = Restarts(0)
    counted.begin(0)
    counted.finish(0)
    expected = {"restarts": 0, "workers_lost": 0, "minibatches_repeated": 0, "each": []}
    assert counted.list_figures() == expected
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert Restarts(0).list_figures() == expected | {"restarts": 3, "minibatches_repeated": None}
