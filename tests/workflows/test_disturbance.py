"""A profile that other work has disturbed is measured again, and decides nothing."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pipedream as pd
from pipedream.workflows.disturbance import describe_disturbance
from tests.planner.planned import compare


def profile_of(seconds: float, spread_s: float = 0.0) -> pd.Profile:
    return pd.Profile.of_chain((pd.LayerProfile(seconds, seconds, 0, 0, forward_spread_s=spread_s),) * 2)


def test_runs_far_apart_disturb_one_thread_too() -> None:
    assert describe_disturbance(profile_of(1.0, 2.0), 4.0, 1) == ""
    assert "runs were 4.20 s apart, at medians of 4.00 s;" in describe_disturbance(profile_of(1.0, 2.1), 1.0, 1)


@pytest.mark.parametrize(("slowness", "kept_s"), [([1.4], 3.0), ([4.0, 1.0], 2.0), ([4.0, 3.0, 3.0], 1.0)])
def test_another_try_or_no_verdict(slowness: list[float], kept_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    left, seconds = iter(slowness), iter([3.0, 2.0, 1.0])
    times = SimpleNamespace(slowness_until=lambda end: next(left))
    monkeypatch.setattr("pipedream.workflows.profile.CoreTimes", SimpleNamespace(now=lambda: times))
    reasons = []

    def measure(*chain: Any, reason: str, **options: Any) -> pd.Profile:
        reasons.append(reason)
        return profile_of(next(seconds))

    monkeypatch.setattr("pipedream.profiler.measure", measure)
    monkeypatch.setattr("pipedream.profiler.count_threads", lambda: 2)
    profile = pd.profile(torch.nn.Linear(2, 2), torch.ones(1, 2))
    assert (profile.layers[0].forward_s, next(left, None)) == (kept_s, None)
    assert [bool(reason) for reason in reasons] == [False, True, True][: len(slowness)]
    verdict = compare(profile, pd.Cluster.flat(2)).verdict
    assert verdict.startswith("none, as other work disturbed the measurement: 2 threads") == (slowness[-1] > 1.5)
