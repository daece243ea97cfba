"""`pipedream sweep`."""

from pathlib import Path

from pipedream.apps.cli import options as common
from pipedream.apps.sweep import sweep as sweeping
from pipedream.core.artifact import encode, write_text
from pipedream.core.errors import PlanError
from pipedream.core.flags import option
from pipedream.core.hardware.cluster import Cluster, Level
from pipedream.core.schedule.method_text import split_list
from pipedream.plan_request import PlanRequest


def sweep(
    *,
    profile: Path = common.PROFILE,
    workers: list[str] = option(..., "Numbers of workers, e.g. 2,4,8.", metavar="N,N,..."),
    bandwidth: list[str] | None = option(
        None,
        "Bandwidths of a link in one direction, e.g. 1e8,1e9 (bytes/s) or 1Gbit/s,10Gbit/s; with their latency "
        "25Mbit/s+50ms,1Gbit/s+50ms.",
        metavar="B,B,...",
        unset="10Gbit/s",
    ),
    schedule: str = option(
        "pipedream", "Methods to compare with data parallelism, e.g. pipedream,1f1b,auto.", metavar="NAME,NAME,..."
    ),
    latency: float = common.LATENCY,
    memory: str | None = common.MEMORY,
    microbatches: int | None = common.MICROBATCHES,
    in_flight: str | tuple[int, ...] = common.IN_FLIGHT,
    shape: common.ShapeFlags,
    allow_asynchronous: bool = common.ALLOW_ASYNCHRONOUS,
    csv: Path | None = option(None, "Also write the table."),
    as_json: bool = common.JSON,
) -> None:
    """Compare methods over workers and bandwidths.

    Plans and simulates each method for each number of workers at each bandwidth, and finds the bandwidth at which it
    becomes faster or slower than data parallelism.

    \b
    Example:
      pipedream sweep digits.profile.json --workers 2,4 --bandwidth 1e8,1e9
    """
    counts = _split_values(workers)
    if not counts or not all(count.isdecimal() and int(count) > 0 for count in counts):
        raise PlanError(f"a sweep over --workers {','.join(counts) or '(none)'} was asked for; write --workers 2,4,8")
    common.check_outputs(csv=csv)
    try:
        links = [common.read_link(text, latency) for text in _split_values(bandwidth or []) or ["1.25e9"]]
        cluster = Cluster((Level(int(counts[0]), *links[0]),), common.read_memory(memory))
    except ValueError as error:
        raise PlanError(str(error)) from None
    if len({link.latency_s for link in links}) > 1:
        raise PlanError(f"links of {', '.join(map(str, links))} were asked for; sweep links of one latency at a time")
    result = sweeping.sweep(
        common.read_profile(profile),
        PlanRequest(
            cluster,
            microbatches=microbatches,
            in_flight=in_flight,
            shape=shape.read() or "pipeline",
            allow_asynchronous=allow_asynchronous,
        ),
        workers=sorted({int(count) for count in counts}),
        bandwidths=sorted({link.bytes_per_s for link in links}),
        schedules=_split_values([schedule]),
    )
    if csv is not None:
        write_text(csv, result.to_csv())
    table = {"rows": encode(result.points), "crossovers": encode(result.crossovers)}
    common.print_json(table) if as_json else print(result)


def _split_values(texts: list[str]) -> list[str]:
    return [word for text in texts for word in split_list(text) if word]
