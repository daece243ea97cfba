"""The report of a run as one self-contained HTML page, light or dark like the reader's screen."""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from pipedream.apps.report import html_tables as tables
from pipedream.apps.report.charts import curve_svg
from pipedream.apps.report.lanes import Window, match_waits, middle_window, start_window
from pipedream.apps.report.svg import LEFT, RIGHT, SPAN_NAMES, timeline_svg
from pipedream.apps.training.summary_text import describe_losses, slowness_text
from pipedream.core.artifact import write_text
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.timeline import Timeline
from pipedream.core.units import format_number, format_seconds

_WIDTH_PX = 1180
_MAX_PX = 4000
_OP_PX = 22
"""A box this wide has room for its number."""

Runs = Sequence[tuple[str, Timeline]]


def page(
    summary: Mapping[str, Any],
    *,
    plan: Plan | None = None,
    profile: Profile | None = None,
    predicted: Timeline | None = None,
    measured: Timeline | None = None,
    start: Timeline | None = None,
    losses: Iterable[tuple[int, float]] = (),
    title: str = "",
) -> str:
    """Returns the report as HTML text. Unknown values are shown as ``-``; parts that are not given are left out.

    Args:
        summary: the content of the run's ``summary.json``; values may be missing or null.
        measured: the part of the run that is compared with the prediction, without a drain.
        start: the begin of the run, if it is not in `measured`.
        losses: (minibatch number, loss).
        title: '': the recipe and the schedule.
    """
    heading = title or f"{summary.get('recipe') or 'Run'}: {summary.get('schedule') or 'pipeline'}"
    runs = [(word, run) for word, run in (("predicted", predicted), ("measured", measured)) if run is not None]
    command = summary.get("command")
    sections = [
        f"<p><code>{escape(str(command))}</code></p>" if command else "",
        f'<dl class="cards">{tables.cards(_list_figures(summary))}</dl>',
        *(f"<p>{escape(text)}</p>" for text in _explain(summary, predicted, measured) if text),
        _draw_timelines(runs, start),
        tables.section("Loss", _draw_losses(summary, losses)),
        tables.section("Evaluations", _draw_evaluations(summary)),
        *_draw_results(summary, plan, profile),
        '<div class="columns">'
        + tables.section("Configuration", tables.pairs("Configuration", summary.get("configuration") or {}))
        + tables.section("Versions", tables.pairs("Versions", summary.get("versions") or {}))
        + "</div>",
    ]
    body = "\n".join(part for part in sections if part)
    facts = {name: summary.get(name) for name in ("workers", "epochs", "seed")}
    facts["recipe sha256"] = summary.get("recipe_sha256")
    words = [] if plan is None else [f"plan {plan.config}, depth {plan.depth_mode}"]
    words += [f"{name} {value}" for name, value in facts.items() if value is not None]
    return tables.document(heading, " \u00b7 ".join(words), f"{body}\n")


def _draw_results(summary: Mapping[str, Any], plan: Plan | None, profile: Profile | None) -> Iterator[str]:
    """Yields the tables of phases, stages, collectives, the plan and the profile."""
    draw, stages = tables.result_table, summary.get("stages") or []
    if phases := _list_phases(summary):
        yield tables.section("Phases", draw("Phases", phases, tables.PHASES, words=1, show_caption=False))
    if stages:
        caption = "Stages: shares of the time and memory of tensors, measured and predicted"
        yield tables.section("Stages", draw(caption, stages, tables.STAGES))
    yield tables.section("Collectives", tables.collectives_table(stages))
    if plan is not None:
        caption = f"Plan {plan.config}: stages, seconds and bytes of one {plan.unit}"
        note = f"<p>{escape(plan.note)}</p>" if plan.note else ""
        yield tables.section("Plan", draw(caption, plan.rows(), tables.PLANS) + note)
    if profile is not None:
        caption = f"Profile of {profile.model}: batch {profile.batch}, {profile.device}"
        yield f"<details><summary>Profile</summary>{draw(caption, profile.rows(), tables.PROFILES)}</details>"


def save_page(path: str | os.PathLike[str], summary: Mapping[str, Any], **parts: Any) -> Path:
    """Writes a `page` to a file, atomically. Returns the path."""
    return write_text(path, page(summary, **parts))


def _list_figures(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    rows = []
    target = summary.get("target") or {}
    metrics = dict(summary.get("metrics") or {})
    for name, value in metrics.items():
        goal = target.get("value") if target.get("metric") == name else None
        note = "" if goal is None else f"target {_format_metric(name, goal)}"
        rows.append((name, _format_metric(name, value), note))
    rate = summary.get("throughput") or {}
    predicted, measured = rate.get("predicted_per_s"), rate.get("measured_per_s")
    note = "" if predicted is None else f"predicted {format_number(predicted)}"
    if predicted and measured is not None:
        note += f" ({100 * (measured / predicted - 1):+.0f}%)"
    rows.append(("samples per second", format_number(measured), note))
    bubble = summary.get("bubble") or {}
    note = f"predicted {tables.percent(bubble['predicted'])}" if "predicted" in bubble else ""
    rows.append(("bubble", tables.percent(bubble.get("measured")), note))
    if memory := summary.get("memory"):
        note = f"{memory.get('of')}, predicted {tables.size(memory.get('predicted_bytes'))}"
        rows.append(("peak memory", tables.size(memory.get("measured_bytes")), note))
    rows.append(("wall time", _format_seconds(summary.get("seconds")), ""))
    failures = summary.get("failures") or {}
    if failures.get("restarts"):
        rows.append(("restarts after failures", str(failures["restarts"]), describe_losses(failures)))
    if target or "seconds_to_target" in summary:
        name = target.get("metric", "")
        note = f"{name} {_format_metric(name, target.get('value'))}" if name else ""
        rows.append(("time to target", _format_seconds(summary.get("seconds_to_target")), note))
    return rows


def _explain(summary: Mapping[str, Any], predicted: Timeline | None, measured: Timeline | None) -> Iterator[str]:
    """Yields sentences that may be empty."""
    rate = (summary.get("throughput") or {}).get("predicted_per_s")
    if (slowness := slowness_text(summary)) and rate:
        yield f"Samples per second: predicted {format_number(rate)}{slowness}."
    yield _explain_rate(predicted, measured)
    yield _explain_waits(measured)


def _explain_rate(predicted: Timeline | None, measured: Timeline | None) -> str:
    """Says which kind of op took how much longer or shorter than predicted, where it is a tenth or more."""
    if predicted is None or measured is None:
        return ""
    parts = []
    for kind, name in SPAN_NAMES.items():
        before, after = (
            [span.end_s - span.start_s for span in timeline.spans if span.kind == kind]
            for timeline in (predicted, measured)
        )
        if before and after and median(before) > 0 and abs(median(after) / median(before) - 1) >= 0.1:
            ranked, tenth = sorted(after), len(after) // 10
            low, middle, high = map(format_seconds, (ranked[tenth], median(after), ranked[-1 - tenth]))
            parts.append(f"{name} {middle} ({low} to {high}), predicted {format_seconds(median(before))}")
    return f"Medians (and the middle 80%) that differ from the prediction: {'; '.join(parts)}." if parts else ""


def _explain_waits(measured: Timeline | None) -> str:
    """Says what the ranks waited for."""
    seconds: dict[str, float] = defaultdict(float)
    for span, (awaited, _) in ({} if measured is None else match_waits(measured)).items():
        seconds[awaited or "others"] += span.end_s - span.start_s
    total = sum(seconds.values())
    shares = (
        f"{awaited} {tables.percent(part / total)}"
        for awaited, part in sorted(seconds.items(), key=lambda pair: -pair[1])
    )
    return f"What the ranks waited for, of all their waiting: {', '.join(shares)}." if total else ""


def _format_metric(name: str, value: Any) -> str:
    if value is None:
        return tables.NOTHING
    is_share = 0 <= value <= 1 and any(word in name.lower() for word in ("accuracy", "share", "precision", "recall"))
    return tables.percent(value) if is_share else format_number(value)


def _draw_timelines(runs: Runs, begin: Timeline | None) -> str:
    """Draws middle and start of the run; predicted above measured, on one scale of time."""
    first = [(word, begin if begin is not None and word == "measured" else run) for word, run in runs]
    parts = {
        "In the middle of the run": [(word, run, middle_window(run, _count_shown(run))) for word, run in runs],
        "At the start": [(word, run, start_window(run, _count_shown(run))) for word, run in first],
    }
    boxes = ""
    for name, windows in parts.items():
        if shown := [(word, run, window) for word, run, window in windows if window is not None]:
            boxes += _draw_box(name, shown)
    return tables.section("Timelines", boxes)


def _count_shown(timeline: Timeline) -> int:
    """The microbatches to show: a few dozen ops."""
    m = timeline.minibatch_microbatches
    return min(max(12, 2 * m if m > 1 else 12), 40)


def _draw_box(name: str, shown: Sequence[tuple[str, Timeline, Window]]) -> str:
    seconds = max(window.end_s - window.start_s for _, _, window in shown) or 1.0
    ops = [
        span.end_s - span.start_s
        for _, timeline, window in shown
        for span in timeline.between(window.start_s, window.end_s).work()
        if span.kind != "U"
    ]
    readable = _OP_PX / median(ops) if ops and median(ops) > 0 else 0.0
    fits = (_WIDTH_PX - LEFT - RIGHT) / seconds
    scale = max(fits, min(readable, _MAX_PX / seconds))
    pictures = "".join(
        timeline_svg(
            timeline,
            title=f"{word.capitalize()}, from microbatch {window.first} on",
            px_per_s=scale,
            start_s=window.start_s,
            end_s=window.start_s + seconds,
            standalone=False,
        )
        for word, timeline, window in shown
    )
    classes = "timelines" + " fits" * (scale == fits)
    return f"<h3>{escape(name)}</h3>{tables.scroll(name, pictures, classes)}"


def _draw_losses(summary: Mapping[str, Any], losses: Iterable[tuple[int, float]]) -> str:
    drains = summary.get("drains") or []
    tooltip = "failure after minibatch {minibatches}, resumed from {resumed_from}"
    restarts = (summary.get("failures") or {}).get("each") or []
    failures = [(restart["minibatches"], tooltip.format(**restart)) for restart in restarts]
    note = "<p>Dashed lines: drains (evaluation, checkpoint).</p>" if drains else ""
    note += "<p>Lines with a cross: failures, after which minibatches were trained again.</p>" if failures else ""
    points = [(float(number), float(loss)) for number, loss in losses]
    if not points:
        return "<p>No loss was recorded.</p>"
    picture = curve_svg(
        points,
        title="Loss of each minibatch",
        width_px=_WIDTH_PX,
        height_px=260,
        marks=drains,
        failures=failures,
        named=[(phase["begin"], str(phase.get("schedule", ""))) for phase in _list_phases(summary) if "begin" in phase],
        standalone=False,
    )
    return tables.scroll("Loss", picture, "fits") + note


def _draw_evaluations(summary: Mapping[str, Any]) -> str:
    rows = summary.get("evaluations") or []
    names = dict.fromkeys(name for row in rows for name in row if name not in ("epoch", "minibatches", "seconds"))
    pictures = []
    for name in names:
        points = [(row["minibatches"], row[name]) for row in rows if name in row]
        pictures.append(
            curve_svg(points, title=f"Test {name}", width_px=560, height_px=200, y_label=name, standalone=False)
        )
    return tables.scroll("Evaluations", "".join(pictures), "fits row") if pictures else ""


def _list_phases(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    phases = summary.get("phases") or []
    return phases if len(phases) > 1 else []


def _format_seconds(value: Any) -> str:
    if value is None:
        return tables.NOTHING
    if value >= 120:
        minutes, seconds = divmod(round(value), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
    return format_seconds(value)
