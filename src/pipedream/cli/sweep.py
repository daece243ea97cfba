"""`pipedream plan --sweep`: a table, rows as JSON, and a picture, over workers, bandwidths and methods."""

from __future__ import annotations

from pathlib import Path

from pipedream.cli.options import print_json
from pipedream.core import units
from pipedream.core.artifact import encode, write_text
from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster, Level
from pipedream.core.model.profile import Profile
from pipedream.core.schedule.method_text import listed
from pipedream.report.sweep import sweep_page, sweep_svg
from pipedream.workflows import sweep as sweeping

__all__ = ["sweep"]


def sweep(
    profile: Profile,
    *,
    workers: list[str],
    bandwidths: list[str],
    latency_s: float,
    memory: str | None,
    schedules: str,
    microbatches: int | None,
    in_flight: str | tuple[int, ...],
    shape: str,
    allow_asynchronous: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Sweeps over the values of these lists, prints what comes out, and draws it."""
    counts = _values(workers)
    if not counts or not all(count.isdecimal() and int(count) > 0 for count in counts):
        raise PlanError(f"a sweep over --workers {','.join(counts) or '(none)'} was asked for; write --workers 2,4,8")
    if plot is not None and plot.suffix not in (".svg", ".html"):
        raise PlanError(f"--plot {plot} was asked for; a picture is written to name.svg or name.html")
    try:
        rates = [units.parse_rate(rate) for rate in _values(bandwidths) or ["1.25e9"]]
        size = None if memory is None else units.parse_bytes(memory)
        cluster = Cluster((Level(int(counts[0]), rates[0], latency_s),), size)
    except ValueError as error:
        raise PlanError(str(error)) from None
    found = sweeping.sweep(
        profile,
        cluster,
        workers=sorted({int(count) for count in counts}),
        bandwidths=sorted(set(rates)),
        schedules=_values([schedules]),
        microbatches=microbatches,
        in_flight=in_flight,
        shape=shape,
        allow_asynchronous=allow_asynchronous,
    )
    if plot is not None:
        write_text(plot, sweep_svg(found) if plot.suffix == ".svg" else sweep_page(found))
    if as_json:
        print_json({"rows": encode(found.points), "crossovers": encode(found.crossovers)})
    else:
        print(found)


def _values(texts: list[str]) -> list[str]:
    return [word for text in texts for word in listed(text) if word]
