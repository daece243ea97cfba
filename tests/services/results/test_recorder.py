"""Spans of a worker on a GPU, whose clock is read through events: without waiting for the device, and to the
microsecond after days.
"""

from itertools import pairwise

import pytest
import torch
from fake_cuda import FakeCuda

from pipedream.services.results.recorder import SpanRecorder as Recorder

GPU = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda().install(monkeypatch)


@pytest.fixture
def recorder(cuda: FakeCuda) -> Recorder:
    return Recorder(0, GPU)


def _op(cuda: FakeCuda, recorder: Recorder, index: int, seconds: float = 1e-3, kind: str = "F") -> None:
    start = recorder.mark()
    cuda.run(seconds)
    recorder.note(kind, 0, index, start)


def test_reading_spans_waits_for_the_last_op_and_never_for_the_device(cuda: FakeCuda, recorder: Recorder) -> None:
    for index in range(8):
        _op(cuda, recorder, index)
    assert cuda.now_s < 1000.001, "the host ran ahead"
    spans = recorder.spans(0)
    assert cuda.now_s == pytest.approx(1000.008)
    assert [span.index for span in spans] == list(range(8))
    starts_s = [1000 + index * 1e-3 for index in range(9)]
    assert [span.start_s for span in spans] == pytest.approx(starts_s[:8], abs=1e-6)
    assert [span.end_s for span in spans] == pytest.approx(starts_s[1:], abs=1e-6)


def test_busy_share_does_not_wait(cuda: FakeCuda, recorder: Recorder) -> None:
    assert recorder.busy_share() == 0.0, "nothing has run"
    _op(cuda, recorder, 0)
    cuda.now_s += 0.003
    assert recorder.busy_share() == pytest.approx(1.0, rel=0.01)
    _op(cuda, recorder, 1, 1e-3)
    _op(cuda, recorder, 2, 1.0)
    cuda.now_s += 0.002
    before = cuda.now_s
    assert recorder.busy_share() == pytest.approx(1 / 3, rel=0.01), "2 ms of pause, and op 1; op 2 is not over"
    assert recorder.busy_share() == pytest.approx(1 / 3, rel=0.01), "nothing is known since"
    assert cuda.now_s == before


def test_times_are_precise_hours_after_the_first_and_after_a_drain(cuda: FakeCuda, recorder: Recorder) -> None:
    for index in range(20_000):
        _op(cuda, recorder, index, 123e-6)
        cuda.now_s += 1.0
    end_s = cuda.stream_s
    recorder.end_stream(0, 0, 1)
    cuda.now_s = cuda.stream_s = 50_000.0
    _op(cuda, recorder, 20_000, 123e-6)
    *_, last, after_drain = recorder.spans(0)
    assert last.end_s - last.start_s == pytest.approx(123e-6, abs=2e-6), "against the first event: steps of 2 ms"
    assert last.end_s == pytest.approx(end_s, abs=1e-3)
    assert (after_drain.start_s, after_drain.end_s) == pytest.approx((50_000.0, 50_000.000123), abs=2e-6)


def test_a_backward_has_what_was_recomputed_before_its_gradient_arrived(cuda: FakeCuda, recorder: Recorder) -> None:
    for index in range(2):
        for kind, seconds in (("F", 1e-3), ("recompute", 2e-3), ("wait", 5e-3), ("B", 3e-3)):
            _op(cuda, recorder, index, seconds, kind)
    assert recorder.busy_share() == 0.0
    spans = recorder.spans(0)
    assert recorder.busy_share() == pytest.approx(6 / 11)
    assert [span.kind for span in spans] == ["F", "wait", "B"] * 2
    assert [span.end_s - span.start_s for span in spans] == pytest.approx([1e-3, 5e-3, 5e-3] * 2, abs=2e-6)
    assert [second.start_s - first.end_s for first, second in pairwise(spans)] == pytest.approx([0.0] * 5, abs=2e-6)


def test_ops_share_events_which_are_used_again(cuda: FakeCuda, recorder: Recorder) -> None:
    for index in range(100):
        _op(cuda, recorder, index)
    assert cuda.events == 2 + 100, "the origin, the first begin, and an end each"
    cuda.now_s = cuda.stream_s + 5.0
    for index in range(5_000):
        _op(cuda, recorder, index, 50e-6)
        cuda.now_s += 60e-6
    assert cuda.events < 400
    spans = recorder.spans(0)
    assert len(spans) == 5_100
    assert spans[100].start_s == pytest.approx(spans[99].end_s + 5.0), "a pause is not part of the next op"


def test_the_current_stream_is_looked_for_only_where_it_is_another(cuda: FakeCuda, recorder: Recorder) -> None:
    for cuda.stream_number in (0, 0, 7, 7, 0):
        for index in range(100):
            _op(cuda, recorder, index)
    assert cuda.stream_lookups == 3


def test_the_oldest_mark_is_what_the_gpu_has_not_reached(cuda: FakeCuda, recorder: Recorder) -> None:
    assert recorder.oldest_mark() is None
    _op(cuda, recorder, 0, 5.0)
    cuda.now_s += 6.0
    assert recorder.oldest_mark() is None, "all is done"
    _op(cuda, recorder, 1, 100.0)
    _op(cuda, recorder, 2, 100.0)
    cuda.now_s += 50.0
    first = recorder.oldest_mark()
    assert first is not None
    cuda.now_s += 20.0
    assert recorder.oldest_mark() is first
    cuda.now_s += 50.0
    assert recorder.oldest_mark() not in (None, first)
    assert Recorder(0, torch.device("cpu")).oldest_mark() is None


@pytest.mark.parametrize("most", [1, 6])
def test_the_host_is_ahead_by_a_bounded_number_of_forwards(cuda: FakeCuda, most: int) -> None:
    """Each has messages, whose memory no plan counts."""
    recorder = Recorder(0, GPU)
    recorder.max_queued = most
    for index in range(20):
        _op(cuda, recorder, 2 * index, 1.0)
        assert min(index, most - 2) < (cuda.stream_s - cuda.now_s) / 2.0 <= most, "the GPU has work, and not more"
        _op(cuda, recorder, index, 1.0, "B")
    assert [span.index for span in recorder.spans(0) if span.kind == "F"] == list(range(0, 40, 2))
