"""Timelines of processes whose clocks differ, as those of machines do: seconds since each one's start, with drift."""

import time

import processes
import pytest
import torch
import torch.distributed as dist
import zoo
from cases import make_pipeline
from marks import slow

import pipedream as pd
from pipedream.services.results.measurements import ClockOffset


def _train(shift_s: float, drift: float) -> tuple[pd.Timeline, float]:
    """Returns the timeline, and the seconds of the run; rank 1's clock is ahead, and faster."""
    real = time.perf_counter
    if dist.get_rank() == 1:
        time.perf_counter = lambda: shift_s + (1 + drift) * real()
    start = real()
    with make_pipeline("mlp", schedule="gpipe", microbatches=3) as pipeline:
        list(pipeline.train(zoo.make("mlp").batches, epochs=3))
        timeline = pipeline.timeline()
    return timeline, real() - start


@pytest.mark.processes
@pytest.mark.parametrize(("shift_s", "drift"), [slow(1000.0, 0.0), (-5000.0, 1e-4)])
def test_spans_of_ranks_with_other_clocks(shift_s: float, drift: float) -> None:
    (timeline, seconds), (same, _) = processes.results(_train, 2, shift_s, drift)
    assert timeline == same
    run_metrics = pd.metrics.run_metrics(timeline)
    assert run_metrics.makespan_s < seconds
    assert run_metrics.bubble < 0.999
    assert all(share > 0.001 for share in run_metrics.busy_shares)
    ends = {(span.kind, span.stage, span.index): span for span in timeline.spans if span.kind in "FB"}
    slack_s = 0.05  # half of the round trip of a ping, on a busy machine
    for (kind, stage, index), span in ends.items():
        before = ends[("F", 0, index) if kind == "F" else (kind, 1, index)]
        if (kind, stage) in (("F", 1), ("B", 0)):
            assert span.end_s >= before.end_s - slack_s, f"{kind}{index} used what {before} made"


def test_one_machines_processes_are_not_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their clock is the same; half of the shortest round trip is all that a ping can tell."""
    now = [100.0]
    answer = [0.0]

    def receive(token: torch.Tensor, src: None, group: object, tag: int, other: int) -> None:
        now[0] += 2e-5
        token[0] = now[0] - 1.5e-5 + answer[0]

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(dist, "send", lambda *args: None)
    monkeypatch.setattr(dist, "recv", receive)
    group: dist.ProcessGroup = dist.ProcessGroup.__new__(dist.ProcessGroup)
    clock = ClockOffset(group)
    assert clock.to_rank_0([1.0, 100.0]) == [1.0, 100.0]
    answer[0], now[0] = 40.0, 200.0
    clock.measure(group)
    assert clock.to_rank_0([100.0, 150.0, 200.0]) == pytest.approx([100.0, 170.0, 240.0], abs=1e-3), "linear"
    assert clock.to_rank_0([250.0]) == pytest.approx([290.0], abs=1e-3)
