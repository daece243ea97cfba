"""The trace file, against the rules of Chrome's trace event format."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.apps.report.trace import save_trace, trace
from tests.apps.report.conftest import Simulated


def _check(events: list[dict[str, Any]]) -> None:
    """Checks the rules: fields, times that rise on a thread, slices that nest, arrows inside slices."""
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    latest: dict[tuple[int, int], float] = {}
    arrows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in events:
        assert event["ph"] in "XMsf"
        if event["ph"] == "M":
            continue
        thread = event["pid"], event["tid"]
        assert thread in named
        assert event["ts"] >= latest.get(thread, 0.0)
        latest[thread] = event["ts"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[thread].append((event["ts"], event["ts"] + event["dur"]))
        else:
            assert event["ph"] not in arrows[event["id"]]
            arrows[event["id"]][event["ph"]] = event
    for spans in slices.values():
        assert all(b[0] >= a[1] - 2e-3 for a, b in pairwise(spans)), "slices overlap"
    for pair in arrows.values():
        assert set(pair) == {"s", "f"}
        assert pair["f"]["bp"] == "e"
        assert pair["s"]["ts"] <= pair["f"]["ts"]
        for end in pair.values():
            assert any(a <= end["ts"] <= b for a, b in slices[end["pid"], end["tid"]])


@given(
    name=st.sampled_from(["gpipe", "1f1b", "pipedream"]),
    stages=st.integers(1, 4),
    total=st.integers(1, 9),
    transfer_s=st.sampled_from([0.0, 0.3, 1.7]),
)
def test_rules_of_the_format(simulated: Simulated, name: str, stages: int, total: int, transfer_s: float) -> None:
    timeline = simulated(name, stages=stages, total=total, transfer_s=transfer_s)
    events = trace(timeline)["traceEvents"]
    _check(events)
    assert sum(e["ph"] == "X" for e in events) == len(timeline.spans)
    assert sum(e["ph"] == "s" for e in events) == 2 * (stages - 1) * total


def test_a_backward_that_recomputes_begins_before_the_one_that_it_waits_for(simulated: Simulated) -> None:
    plan = pd.Plan.uniform(2)
    plan = replace(plan, stages=(replace(plan.stages[0], forward_s=9.0, recompute=True), plan.stages[1]))
    timeline = simulated("gpipe", split=2, plan=plan)
    starts_s = {span.stage: span.start_s for span in timeline.spans if (span.kind, span.index) == ("B", 0)}
    assert starts_s[0] < starts_s[1]
    _check(trace(timeline)["traceEvents"])


def test_measured_and_predicted_are_two_processes(simulated: Simulated, measured: pd.Timeline, tmp_path: Path) -> None:
    both = trace(simulated("pipedream"), measured)
    _check(both["traceEvents"])
    names = [e["args"]["name"] for e in both["traceEvents"] if e["name"] == "process_name"]
    assert names == ["simulated pipedream", "measured pipedream"]
    assert json.loads(save_trace(measured, tmp_path / "trace.json").read_text()) == trace(measured)


def test_words_of_a_backward(simulated: Simulated) -> None:
    timeline = simulated("pipedream", stages=3, total=8)
    (event,) = [e for e in trace(timeline)["traceEvents"] if e["name"] == "0B7"]
    span = next(s for s in timeline.spans if (s.kind, s.stage, s.index) == ("B", 0, 7))
    assert event["ts"] == pytest.approx(span.start_s * 1e6)
    assert event["dur"] == pytest.approx(2e6)
    assert event["args"] == {"stage": 0, "microbatch": 7, "version": 5, "applied_to": 7, "staleness": 2}
