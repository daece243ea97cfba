"""What restarts have cost a run, counted in a file that outlives the workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream.runtime.failure.processes import LAUNCHER, write_lost
from pipedream.training import restarts
from pipedream.training.restarts import Restarts


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(0, 5)), max_size=4))
def test_each_restart_is_counted_with_what_was_repeated(
    tmp_path_factory: pytest.TempPathFactory, attempts: list[tuple[int, int, int]]
) -> None:
    """An attempt trains so many minibatches of so many seconds, and the next continues so many before the furthest."""
    folder, now_s = tmp_path_factory.mktemp("launch"), 1000.0
    furthest, at, furthest_s, lost_s, repeated = 0, 0, 0.0, 0.0, 0
    is_repeating, failures = False, list[dict[str, int]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LAUNCHER, "1 1")
        patch.setattr(restarts.time, "time", lambda: now_s)
        for attempt, (trains, each_s, goes_back) in enumerate([*attempts, (60, 1, 0)]):
            (folder / str(attempt) / "0").mkdir(parents=True)
            patch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / str(attempt) / "0" / "error.json"))
            patch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
            counted, before = Restarts(0), furthest
            assert Restarts(1).list_figures()["seconds_lost"] in (0.0, None)
            if is_repeating and at == furthest:
                lost_s += now_s - furthest_s
                is_repeating = False
            failures += [{"minibatches": furthest, "resumed_from": at}] if attempt else []
            counted.begin(at)
            for number in range(at, at + trains):
                now_s += each_s
                counted.note_time(number)  # as a snapshot does
                counted.finish(number)
                repeated += number < before
                if number + 1 == before:
                    lost_s += now_s - furthest_s
                    is_repeating = False
                if number + 1 >= furthest:
                    furthest, furthest_s = number + 1, now_s
            figures = counted.list_figures()
            assert figures["restarts"] == attempt
            assert figures["minibatches_repeated"] == repeated
            assert figures["each"] == failures
            assert figures["seconds_lost"] == pytest.approx(lost_s)
            at, is_repeating, now_s = max(0, furthest - goes_back), True, now_s + 5
            del counted


def test_attempts_that_trained_nothing_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for attempt, began_s in enumerate((100, 107, 120)):
        (tmp_path / str(attempt) / "0").mkdir(parents=True)
        os.utime(tmp_path / str(attempt), (began_s, began_s))
    monkeypatch.setenv(LAUNCHER, "1 1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "2" / "0" / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    counted = Restarts(0)
    counted.begin(0)
    expected: dict[str, Any] = {"restarts": 2, "workers_lost": 0, "seconds_lost": 20.0, "minibatches_repeated": 0}
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
    expected = {"restarts": 0, "workers_lost": 0, "seconds_lost": 0.0, "minibatches_repeated": 0, "each": []}
    assert counted.list_figures() == expected
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert Restarts(0).list_figures() == expected | {"restarts": 3, "seconds_lost": None, "minibatches_repeated": None}
