"""The page of a run: balanced, self-contained, complete, and calm when something is not known."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.apps.report import charts, svg
from pipedream.apps.report.html import page
from pipedream.core.schedule.timeline import Span
from tests.apps.report.conftest import SVG, Simulated
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
        "97.2%", "target 95.0%", "0.1124", "7200", "predicted 8000 (-10%)",
        "predicted 8000, 7000 for the cores that were there", "10.4%", "predicted 3.1%", "12 min 34 s",
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
        shown = HtmlPage(page(summary)).words
        assert "predicted 8000 (-10%)" in shown, "its tile stays as small as the others"
        assert [text for text in shown if "8000" in text][1:] == [f"Samples per second: predicted 8000{words}."] * bool(
            words
        )


def test_it_says_which_ops_were_slower(simulated: Simulated) -> None:
    """A tenth of them much slower: they change neither the median nor what is said of its spread."""
    predicted = simulated("1f1b", split=12, total=12)
    late = {span: 9.0 if not i else 1.0 for i, span in enumerate(s for s in predicted.spans if s.kind == "B")}
    slower = tuple(span._replace(end_s=span.end_s + late.get(span, 0.0)) for span in predicted.spans)
    words = " ".join(HtmlPage(page(SUMMARY, predicted=predicted, measured=replace(predicted, spans=slower))).words)
    assert "that differ from the prediction: backward 3.00 s (3.00 s to 3.00 s), predicted 2.00 s." in words
    assert "Medians" not in " ".join(HtmlPage(page(SUMMARY, predicted=predicted, measured=predicted)).words)


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
        assert len(set(widths)) == 1 < len(widths)
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


def _find_boxes(tree: ElementTree.Element, kind: str = "op") -> list[ElementTree.Element]:
    return [box for box in tree.iter(f"{SVG}rect") if box.get("class") == kind]


def _read_title(box: ElementTree.Element) -> str:
    return box.findtext(f"{SVG}title") or ""


@given(
    name=st.sampled_from(["naive", "gpipe", "1f1b", "pipedream", "pipedream_vertical_sync"]),
    stages=st.integers(1, 4),
    total=st.integers(1, 8),
    transfer_s=st.sampled_from([0.0, 0.25]),
)
def test_one_box_an_op_at_its_time(simulated: Simulated, name: str, stages: int, total: int, transfer_s: float) -> None:
    timeline = simulated(name, stages=stages, total=total, transfer_s=transfer_s)
    tree = ElementTree.fromstring(svg.timeline_svg(timeline, title='"a" < & b', px_per_s=50))
    drawn = {_read_title(box).split(":")[0]: box for box in _find_boxes(tree)}
    assert len(_find_boxes(tree)) == len(drawn) == len(timeline.work())
    for span in timeline.work():
        box = drawn[f"{span.stage}{span.kind}{span.index}"]
        assert float(box.get("x", "")) == pytest.approx(svg.LEFT + 50 * span.start_s, abs=0.1)
        if span.kind != "U":
            assert float(box.get("width", "")) == pytest.approx(50 * (span.end_s - span.start_s), abs=1)
    lines = [line for line in tree.iter(f"{SVG}line") if line.get("class") == "wave"]
    assert len(lines) == sum(span.kind == "send" for span in timeline.spans)
    assert bool(lines) == bool(transfer_s and stages > 1)


def test_labels_are_microbatches_and_versions(simulated: Simulated) -> None:
    timeline = simulated("pipedream", stages=3, total=8)
    tree = ElementTree.fromstring(svg.timeline_svg(timeline, versions=True, px_per_s=40))
    labels = [text.text for text in tree.iter(f"{SVG}text") if text.get("class") == "on-op"]
    assert sorted(label for label in labels if label and label[0] == "v") == sorted(
        f"v{tag.forward_version}" for tag in timeline.gradient_versions for _ in "FB"
    )
    assert sum(label == "7" for label in labels) == 6
    story = next(_read_title(box) for box in _find_boxes(tree) if _read_title(box).startswith("0B7"))
    assert story == "0B7: backward, microbatch 7, 2.00 s, reads version 5"


def test_a_window_is_cut_at_its_edges(simulated: Simulated) -> None:
    timeline = simulated("pipedream", total=40)
    tree = ElementTree.fromstring(svg.timeline_svg(timeline, start_s=60.5, end_s=70.5, px_per_s=30))
    assert tree.get("width") == str(svg.LEFT + 300 + 16)
    for box in _find_boxes(tree):
        assert float(box.get("x", "")) >= svg.LEFT
        assert float(box.get("x", "")) + float(box.get("width", "")) <= svg.LEFT + 300 + 1.5


def test_colours_follow_the_screen_and_have_a_fallback(simulated: Simulated) -> None:
    """In a file they are literal: converters that know no CSS variables draw black what has one."""
    picture = svg.timeline_svg(simulated("gpipe"))
    assert "prefers-color-scheme:dark" in picture
    for shape in re.findall(r"<(?:rect|text|line|g) [^>]*class=[^>]*>", picture):
        if 'class="op"' not in shape and 'class="idle"' not in shape:  # their group has it
            assert re.search(r'(fill|stroke)="#[0-9a-f]{6}"', shape), shape
    assert "var(" not in picture + charts.curve_svg(enumerate([3.0, 2.0]), marks=[1], named=[(1, "x")])
    assert "http" not in svg.timeline_svg(simulated("gpipe"), standalone=False), "inlined it names no address"


def test_what_is_not_known_is_not_drawn(simulated: Simulated) -> None:
    assert not _find_boxes(ElementTree.fromstring(svg.timeline_svg(pd.Timeline("x", "simulated", 2, (), 0))))
    without_versions = replace(simulated("pipedream", stages=3, total=8), gradient_versions=())
    assert 'class="on-op"' in svg.timeline_svg(without_versions, versions=True)
