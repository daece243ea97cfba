"""Samples per second of two workers against the number of weights, over slow links, and where an update's time goes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import curve
import torch
from models import SIZED
from scaffold import format_table

from pipedream.apps.compare.variants import ONE_WORKER
from pipedream.apps.report.charts import curve_svg
from pipedream.apps.report.svg import frame
from pipedream.core.plan.codec import CODECS
from pipedream.core.plan.sum_method import SumMethod
from pipedream.core.units import format_link, format_number
from pipedream.runtime.comm.channel import LocalGroup, Waiting
from pipedream.runtime.update.gradients import Gradients
from pipedream.runtime.update.replica import Replica

VARIANTS = (
    "PowerSGD 4, accumulating", "torch local SGD, every 32", "sparse sums, every 30",
    "1F1B, full, int8", "1F1B, full, int4", "2BW, full, int8", "2BW, full, int4",
    "PipeDream, full, int8", "PipeDream, full, int4",
)  # fmt: skip
LINKS = tuple(bits_per_s / 8 for bits_per_s in (10e6, 25e6, 100e6))
_SHOWN_LINK = 25e6 / 8  # whose updates are taken apart
_FAMILIES = {"gpt": "GPT of 6 blocks", "vgg": "VGG-like network"}
_SIZES = {
    "test": (("gpt_1m",), LINKS[2:], ("PowerSGD 4, accumulating", "PipeDream, full, int4"), 0.1),
    "short": (("gpt_1m", "gpt_3m"), LINKS[1:2], ("PowerSGD 4, accumulating", "2BW, full, int4"), 2.0),
    "full": (tuple(SIZED), LINKS, VARIANTS, 10.0),
}
"""Size -> models, links, variants, and the seconds for which a row is timed at least."""

_RUNS = 3  # of an encoding or a sum, after a first one

KEY = ("model", "bytes_per_s", "variant")
"""The fields that identify a row. Not rho, which changes with each profile."""


def measure(
    size: str,
    log: Callable[[str], None],
    *,
    models: Sequence[str] = (),
    links: Sequence[float] = (),
    only: Sequence[str] = (),
    rounds: int | None = None,
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Returns a row for each model, link and variant, as `curve.measure` does.

    Each row has `weights`, their number; that of a variant also `alone_per_s`, the rate of one worker in the same
    processes before and after it, and `work_s`, what its encoding or sum alone takes one core for an update.
    """
    all_models, all_links, all_variants, least_s = _SIZES[size]
    works_s: dict[tuple[str, str], float] = {}

    def complete(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        weights = {row["model"]: round(row["parameter_bytes"] / 4) for row in rows if row["variant"] == "solo"}
        done = []
        for row in rows:
            more = {"bytes_per_s": float(round(row["bytes_per_s"])), "weights": weights[row["model"]]}
            if row["variant"] != "solo":
                key = row["model"], row["variant"]
                if key not in works_s:
                    works_s[key] = measure_work_s(*key, row["message_bytes"])
                more |= {"work_s": works_s[key]}
            done.append(row | more)
        return done

    return complete(
        curve.measure(
            size,
            log,
            models=models or all_models,
            links=links or all_links,
            only=only or all_variants,
            rounds=rounds or 1,
            with_choices=False,
            least_s=least_s,
            keep=lambda rows: keep(complete(rows)),
        )
    )


def measure_work_s(model: str, name: str, message_bytes: int) -> float:
    """Returns the seconds of one core, for an update, of a variant's own work on gradients, weights or messages.

    torch's averages are those of this library. What is measured is in a process without other workers.

    Args:
        message_bytes: of a microbatch, before it is encoded.
    """
    variant, threads = curve.BY_NAME[name], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if "sums" in variant.how:
            return _time_sums(model, variant.how["sums"])
        if "messages" not in variant.how:
            return 0.0
        # A worker encodes an activation or its gradient, and decodes the other.
        codec, values = CODECS.find(variant.how["messages"]), torch.randn(message_bytes // 4)
        shape = tuple(values.shape)
        return variant.samples * _time(lambda: codec.decode(codec.encode(values), values.dtype, shape))
    finally:
        torch.set_num_threads(threads)


def _time_sums(model: str, text: str) -> float:
    """Returns the mean seconds of an update's sums, with a group of one replica, which sends nothing."""
    handles: dict[str, torch.nn.Parameter] = dict(SIZED[model].make().named_parameters())
    method: Any = SumMethod.parse(text)
    reducer = method.make_reducer(Replica(handles, {}, LocalGroup(1).member(0), replicas=2))
    updates = method.period if method.averages_weights else 1
    gradients = [torch.randn_like(weight) for weight in handles.values()]

    def run() -> None:
        for _ in range(updates):
            summed = Gradients(len(gradients))
            summed.fill(list(gradients), 1.0, 1)
            _finish(reducer.take(summed, 0.0, lambda reduced: 1.0))
            reducer.finish_step(is_made=True)
            _finish(reducer.after_step())

    return _time(run) / updates


def _finish(waiting: Waiting[Any]) -> None:
    for pending in waiting:
        assert pending is None or pending.ready(), "nobody else takes part"


def _time(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(1 + _RUNS):
        start_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds[1:])


def tables(rows: list[dict[str, Any]]) -> str:
    """Returns the rates of each family over each link, and what the updates of each model consist of over one."""
    others, changed = (max((row.get(key, 0.0) for row in rows), default=0.0) for key in ("others", "alone_changed"))
    lines = [
        f"- other processes took at most {others:.0%} of the cores during any row, and the rate of one worker changed "
        f"by at most {changed:.0%} from before to after it",
        *curve.describe_choices(rows),
    ]
    parts = ["\n".join(lines)]
    for family, mine in _group(rows, lambda row: row["model"].partition("_")[0]):
        parts.append(f"### {_FAMILIES[family]}")
        parts += [_format_rates(link, over) for link, over in _group(mine, lambda row: row["bytes_per_s"])]
        shown = min({row["bytes_per_s"] for row in mine}, key=lambda link: abs(math.log(link / _SHOWN_LINK)))
        over = [row for row in mine if row["bytes_per_s"] == shown]
        parts += [_format_updates(group) for _, group in _group(over, lambda row: row["weights"])]
    return "\n\n".join(parts)


def _group(
    rows: Sequence[dict[str, Any]], key: Callable[[dict[str, Any]], Any]
) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """Yields each value of a key, the least first, and its rows."""
    for value in sorted({key(row) for row in rows}):
        yield value, [row for row in rows if key(row) == value]


def _list_names(rows: Sequence[dict[str, Any]]) -> list[str]:
    measured = {row["variant"] for row in rows}
    return [name for name in curve.BY_NAME if name in measured]


def _format_rates(bytes_per_s: float, rows: list[dict[str, Any]]) -> str:
    models = [group for _, group in _group(rows, lambda row: row["weights"])]
    cells = {"solo": "one worker"} | {name: name for name in _list_names(rows)}
    lines = [[title, *(_format_rate(name, group) for group in models)] for name, title in cells.items()]
    heads = "|".join(["weights", *(_format_weights(group[0]["weights"]) for group in models)])
    link = format_link(bytes_per_s)
    title = f"Samples per second of both workers at {link} (over those of one worker at the same time):"
    return f"{title}\n\n{format_table(heads, 'lr', lines)}"


def _format_rate(name: str, rows: list[dict[str, Any]]) -> str:
    row = next((row for row in rows if row["variant"] == name), {"why": ""})
    if "why" in row:
        return row["why"] or "-"
    over = f" ({row['samples_per_s'] / row['alone_per_s']:.2f})" if name != "solo" else ""
    return f"{format_number(row['samples_per_s'])}{over}"


def _format_weights(weights: int) -> str:
    return f"{weights / 1e6:.3g} million"


def _format_updates(rows: list[dict[str, Any]]) -> str:
    """Returns what the parts of an update take by themselves, beside what the update takes."""
    solo, job = next(row for row in rows if row["variant"] == "solo"), SIZED[rows[0]["model"]]
    lines = [
        ["one worker", 1, *map(_ms, (solo["passes_s"], solo["step_s"], 0.0, 0.0, job.samples / solo["samples_per_s"]))]
    ]
    for name in _list_names(rows):
        row = next(row for row in rows if row["variant"] == name)
        if "why" not in row:
            samples = row["microbatches_per_update"] * job.samples
            link_s = row["bytes_per_sample"] * samples / 2 / row["bytes_per_s"]
            seconds = row["passes_s"], row["step_s"], row["work_s"], link_s, samples / row["samples_per_s"]
            lines.append([name, row["microbatches_per_update"], *map(_ms, seconds)])
    heads = "|microbatches|passes|optimizer|encoding or sums|link|an update, measured"
    title = (
        f"{job.title}, {_format_weights(solo['weights'])} weights, {format_link(solo['bytes_per_s'])}: milliseconds of "
        "an update, of the worker with the most passes, of the optimizer over its weights, of the encoding or the sums "
        "alone, and of a direction of the link:"
    )
    return f"{title}\n\n{format_table(heads, 'lr', lines)}"


def _ms(seconds: float) -> str:
    return format_number(1e3 * seconds)


_PANEL_PX = 860, 330


def pictures(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Returns a picture of each family, with a panel for each link: file name -> SVG."""
    svg_by_name, (width_px, height_px) = {}, _PANEL_PX
    for family, mine in _group(rows, lambda row: row["model"].partition("_")[0]):
        panels = [_draw(family, link, over) for link, over in _group(mine, lambda row: row["bytes_per_s"])]
        placed = [svg.replace("<svg ", f'<svg y="{number * height_px}" ', 1) for number, svg in enumerate(panels)]
        label = f"{_FAMILIES[family]}: speed-up over one worker"
        height = len(panels) * height_px
        svg_by_name[f"sizes_{family}.svg"] = frame("".join(placed), width_px, height, label, standalone=True)
    return svg_by_name


def _draw(family: str, bytes_per_s: float, rows: list[dict[str, Any]]) -> str:
    lines = {}
    for name in _list_names(rows):
        ran = [row for row in rows if row["variant"] == name and "why" not in row]
        lines[name] = sorted((math.log(row["weights"]), row["samples_per_s"] / row["alone_per_s"]) for row in ran)
    return curve_svg(
        {f"{points[-1][1]:.2g}x {name}" if points else name: points for name, points in lines.items()},
        title=f"{_FAMILIES[family]}, two workers at {format_link(bytes_per_s)}",
        width_px=_PANEL_PX[0],
        height_px=_PANEL_PX[1],
        x_label="weights, on a logarithmic axis",
        y_label=f"samples per second over those of {ONE_WORKER} alone; left of a name: of the largest model",
        x_ticks={math.log(row["weights"]): _format_weights(row["weights"]) for row in rows},
        standalone=True,
    )
