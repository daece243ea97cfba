"""The page of a run: balanced, self-contained, complete, and calm when something is not known."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.apps.report.html import page
from pipedream.core.schedule.timeline import Span
from tests.apps.report.conftest import Simulated
from tests.apps.report.html_page import HtmlPage

SUMMARY: dict[str, Any] = {
    "recipe": "examples/digits.py",
    "recipe_sha256": "0123456789ab",
    "command": "pipedream train 'a b.py'",
    "schedule": "pipedream",
    "seed": 3,
    "workers": 3,
    "epochs": 2,
    "metrics": {"accuracy": 0.9722, "validation loss": 0.1124},
    "seconds": 754.2,
    "seconds_to_target": 9.25,
    "target": {"metric": "accuracy", "value": 0.95},
    "slowness": 1.25,
    "throughput": {"predicted_per_s": 8000.0, "predicted_slowed_per_s": 7000.0, "measured_per_s": 7200.0},
    "stages": [
        {"layers": ["conv1", "pool"], "rank": [0, 1], "learning_rate": 0.1, "busy_share": 0.913, "wait_share": 0.07,
         "send_share": 0.017, "predicted_busy_share": 0.98, "bytes_sent": 123_456_789, "peak_bytes": 81_000_000,
         "predicted_peak_bytes": 79_000_000, "reserved_bytes": 455_000_000, "versions": 2, "staleness": 1,
         "mesh": "model:2", "collectives": {"predicted": None, "measured": {"forward": [
             {"kind": "all-reduce", "over": "model", "count": 2, "size_bytes": 2_050_000, "of_weights": False}]}}},
        {"layers": ["fc1", "fc<2>"], "rank": 2, "learning_rate": 0.05, "busy_share": 0.871},
    ],
    "bubble": {"predicted": 0.031, "measured": 0.104},
    "memory": {"of": "the fullest worker", "measured_bytes": 81_000_000, "predicted_bytes": 79_000_000,
               "reserved_bytes": 455_000_000},
    "drains": [40, 80],
    "configuration": {"clip": None, "quiet": False, "loggers": [], "seed": 0,
                      "optimizer": "SGD", "momentum": 0.9, "paths": ["https://example.invalid/<data>"], "in": {"a": 1}},
    "versions": {"torch": "2.13.0"},
}  # fmt: skip


@pytest.fixture(scope="module")
def full(simulated: Simulated, digits_plan: pd.Plan, measured: pd.Timeline) -> str:
    run = {"plan": digits_plan, "profile": pd.Profile.of_chain((pd.LayerProfile(0.1, 0.2, 10, 10, 10),) * 2)}
    predicted, losses = simulated("pipedream", total=120, plan=digits_plan), [(k, 2.0 / (1 + k)) for k in range(120)]
    rows = [{"epoch": k, "minibatches": 30 * k, "seconds": 1.0, "accuracy": k / 9} for k in (1, 2, 3)]
    return page(SUMMARY | {"evaluations": rows}, predicted=predicted, measured=measured, losses=losses, **run)


def test_it_is_balanced_and_loads_nothing(full: str) -> None:
    reader = HtmlPage(full)
    assert reader.loads == ["data:,"]
    assert "script" not in reader.tags
    assert not re.search(r"url\(|@import|(src|href)=.?https?:", full)


def test_it_tells_all(full: str) -> None:
    words = " ".join(HtmlPage(full).words)
    for word in (
        "97.2%", "target 95.0%", "0.1124", "7200", "predicted 8000 (-10%), 7000 for the cores that were there",
        "10.4%", "predicted 3.1%", "12 min 34 s",
        "9.25 s", "plan 2-1", "seed 3", "conv1 .. pool", "91.3%", "98.0%", "123 MB", "81.0 MB", "fc1 .. fc<2>",
        "best of all cuts", "recipe sha256 0123456789ab",
        "in.a", "momentum", "2.13.0", "Loss of each minibatch", "In the middle of the run", "At the start", "layer0",
        "model:2 forward all-reduce model - 2 - 2.05 MB", "Evaluations", "Test accuracy",
    ):  # fmt: skip
        assert word in words, word
    assert full.count("<svg") == 6
    assert "Test seconds" not in words
    assert words.index("pipedream train 'a b.py'") < words.index("97.2%"), "on top"
    assert "123 MB 81.0 MB 79.0 MB 455 MB" in words, "memory beside what was predicted of the same tensors"


def test_it_says_what_other_work_took() -> None:
    """Of emulated ops, which need no cores, without a prediction."""
    busy = "(other work took 20% of the most disturbed worker's cores)"
    rates = {"predicted_per_s": 8000.0, "measured_per_s": 7200.0, "predicted_slowed_per_s": 7000.0}
    both = f", 7000 for the cores that were there {busy}"
    for slowed, slowness, words in ((7000.0, 1.25, both), (None, 1.25, f" {busy}"), (None, 1.05, ""), (None, None, "")):
        summary = {"slowness": slowness, "throughput": rates | {"predicted_slowed_per_s": slowed}}
        assert f"predicted 8000 (-10%){words}" in HtmlPage(page(summary)).words


def test_it_says_which_ops_were_slower(simulated: Simulated) -> None:
    predicted = simulated("1f1b")
    slower = tuple(span._replace(end_s=span.end_s + 1.0) if span.kind == "B" else span for span in predicted.spans)
    words = " ".join(HtmlPage(page(SUMMARY, predicted=predicted, measured=replace(predicted, spans=slower))).words)
    assert re.search(r"Means that differ from the prediction: backward \S+ s, predicted \S+ s\.", words)
    assert "Means" not in " ".join(HtmlPage(page(SUMMARY, predicted=predicted, measured=predicted)).words)


def test_it_says_what_ranks_waited_for() -> None:
    """Rank 1 waits 3 s for its input, then 1 s for a gradient; the first forward begins after 2 s."""
    spans = (
        Span(0, "F", 0, 0, 2.0, 3.0), Span(0, "wait", 0, 0, 3.0, 4.0), Span(0, "B", 0, 0, 4.0, 5.0),
        Span(1, "wait", 1, 0, 0.0, 3.0), Span(1, "F", 1, 0, 3.0, 3.5), Span(1, "wait", 1, 7, 5.0, 6.0),
    )  # fmt: skip
    run = pd.Timeline("gpipe", "measured", 2, spans, 1)
    text = page({}, measured=run, start=run)
    for words in (
        "of all their waiting: inputs 75.0%, gradients 25.0%.",
        "waiting for inputs, before 1F0, 3.00 s",
        "waiting for gradients, before 0B0, 1.00 s",
        "waiting, 1.00 s",  # no op follows
        "Until the first forward, 2.00 s, stage 0 opened the loader and made a batch.",
    ):
        assert words in text
    weights = replace(run, spans=(Span(0, "wait", 0, 5, 0.0, 1.0), Span(0, "F", 0, 0, 1.0, 2.0)))
    assert "waiting, before 0F0, 1.00 s" in page({}, measured=weights)


def test_the_configuration_lists_what_is_set(full: str) -> None:
    words = HtmlPage(full).words
    assert words[words.index("seed", words.index("Configuration")) + 1] == "0"
    assert not {"clip", "quiet", "loggers"} & set(words)


def test_the_start_is_the_start(simulated: Simulated, measured: pd.Timeline) -> None:
    """The compared part may begin later in the run, after a drain."""
    late = replace(measured, spans=tuple(span._replace(index=span.index + 364) for span in measured.spans))
    words = " ".join(HtmlPage(page(SUMMARY, measured=late, start=measured)).words)
    assert "Measured, from microbatch 0 on" in words.partition("At the start")[2]
    assert "from microbatch 0 on" not in words.partition("At the start")[0]


def test_the_losses_show_failures() -> None:
    rows = [{"minibatches": 40, "resumed_from": 32}, {"minibatches": 95, "resumed_from": 90}]
    losses = [(k, 1.0) for k in range(100)]
    text = page({"failures": {"restarts": 2, "each": rows}}, losses=losses)
    stories = re.findall(r'<line class="failure" x1="([^"]+)"[^>]*><title>([^<]*)</title>', text)
    assert list(dict.fromkeys(story for _, story in stories)) == [
        "failure after minibatch 40, resumed from 32",
        "failure after minibatch 95, resumed from 90",
    ]
    places = [float(x) for x, _ in stories[::3]]
    assert (places[1] - places[0]) / (95 - 40) == pytest.approx((1180 - 56 - 16) / 99, abs=0.1)
    assert "failures, after which minibatches were trained again" in text
    assert "failure" not in page({"failures": {"restarts": 0, "each": []}}, losses=losses).partition("</style>")[2]


def test_timelines_are_on_one_scale(full: str) -> None:
    box = re.findall(r'<div class="scroll timelines[^"]*".*?</div>', full, re.S)
    assert len(box) == 2
    for inside in box:
        widths = re.findall(r'<svg[^>]*? width="([\d.]+)"', inside)
        assert len(widths) == 2
        assert len(set(widths)) == 1
        assert float(widths[0]) >= 1180 - 1
        slower = inside.split("<svg")[2]
        first = re.search(r"from microbatch (\d+) on", slower)
        assert first
        assert f"0F{int(first[1]) + 11}: " in slower, "the slower of the two is cut off"


def test_all_is_escaped() -> None:
    text = page({"recipe": "<script>alert(1)</script>", "configuration": {"<b>": "<i>"}, "metrics": {"<u>": 1}})
    assert not {"script", "b", "i", "u"} & set(HtmlPage(text).tags)


def _draw_part(value: Any, draw: Callable[..., bool]) -> Any:
    """Returns a value without some of its keys, at any depth."""
    if isinstance(value, dict):
        return {key: _draw_part(item, draw) for key, item in value.items() if draw(st.booleans())}
    return [_draw_part(item, draw) for item in value] if isinstance(value, list) else value


@given(data=st.data())
def test_any_key_may_be_missing(data: st.DataObject, digits_plan: pd.Plan) -> None:
    HtmlPage(page(_draw_part(SUMMARY, data.draw)))
    nothing = dict.fromkeys(SUMMARY) | {"throughput": {"measured_per_s": None}, "stages": [{"rank": None}]}
    words = " ".join(HtmlPage(page(nothing, plan=digits_plan)).words)
    assert "No loss was recorded" in words
    assert "nan" not in words.lower()
    assert "None" not in words
