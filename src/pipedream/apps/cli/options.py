"""Options that several commands share, and what their text means."""

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipedream.apps.cli import presets
from pipedream.apps.cli.retired import refuse_retired
from pipedream.core import units
from pipedream.core.artifact import read_text, writing
from pipedream.core.errors import PlanError
from pipedream.core.flags import Panel, argument, option, option_of
from pipedream.core.hardware.cluster import Cluster, Level
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.plan_request import METHOD_HELP, METHOD_NAME, PlanRequest
from pipedream.workflows.exclusions import as_flag, check_options

JSON = option(False, "Print one JSON object on standard output, and nothing else.", "--json")
SEED = option(0, "Random seed.")
FINEST = option(False, "Also split the modules of a chain into those inside them, as more cut points.")
RECIPE = argument("RECIPE", "Python file that defines recipe().")
PROFILE = argument("PROFILE", "Profile of the model.")
OUTPUT = option(None, "Also write the result to a file.", "-o", "--output")
SVG = option(None, "Also write the picture: an SVG, or a PDF or PNG by the file's suffix.", "--svg")
CLUSTER = Panel.CLUSTER.option(
    None,
    f"A cluster's file, or a cluster of a paper ({', '.join(presets.PRESETS)}), e.g. pipedream-a:4.",
    metavar="FILE|NAME[:MACHINES]",
)
SCHEDULE = Panel.METHOD.option(None, f"{METHOD_HELP}.", metavar=METHOD_NAME, unset="the plan's own, or pipedream")
MINIBATCHES = Panel.METHOD.number(
    None,
    "Minibatches to run, from an empty pipeline to an empty one.",
    unset="1 if the method flushes, otherwise enough for a steady state",
)


@dataclass(frozen=True, kw_only=True)
class ShapeFlags:
    """The shape of a plan, of which one flag may be given."""

    straight: bool = Panel.SHAPE.option(False, "One stage for each worker.")
    data_parallel: bool = Panel.SHAPE.option(False, "One stage, replicated on all workers.")
    config: str | None = Panel.SHAPE.option(None, "Workers of each stage, e.g. 2-1.", metavar="R0-R1-...")

    def read(self) -> str | None:
        """Returns the shape, if a flag is given."""
        check_flags(**vars(self))
        return "straight" if self.straight else "data-parallel" if self.data_parallel else self.config


@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """Workers and links, by a file or by figures."""

    workers: list[str] | None = Panel.CLUSTER.option(
        None,
        "Number of workers. With several network levels, one number per level, innermost first, e.g. 4 4; for "
        "machines of unequal size, e.g. 4+4+2 3.",
        metavar="N [N ...]",
    )
    bandwidth: list[str] | None = Panel.CLUSTER.option(
        None,
        "Bandwidth of a link in one direction, one value per level, e.g. 1e9 (bytes/s) or 10Gbit/s; with its latency "
        "25Mbit/s+50ms.",
        metavar="B [B ...]",
        unset="10Gbit/s",
    )
    latency: float = Panel.CLUSTER.option(0.0, "One-way latency of a message.")
    memory: str | None = Panel.CLUSTER.option(
        None, "Memory per worker, e.g. 16GB.", metavar="BYTES", unset="the cluster's, or no limit"
    )
    cluster: Path | None = CLUSTER

    def read(self, workers: int | None = None) -> Cluster:
        """Returns the cluster; `workers` counts them if no flag does."""
        check_flags(**vars(self))
        if self.cluster is not None:
            cluster, limit = read_cluster(self.cluster), read_memory(self.memory)
            return cluster if limit is None else cluster.with_memory(lambda _: limit)
        widths = self.workers or ([] if workers is None else [str(workers)])
        return make_cluster(widths, self.bandwidth or [], self.latency, self.memory)


LATENCY, MEMORY = (option_of(ClusterFlags, name) for name in ("latency", "memory"))
MICROBATCHES, CHUNKS, IN_FLIGHT, ALLOW_ASYNCHRONOUS = (
    option_of(PlanRequest, name) for name in ("microbatches", "chunks", "in_flight", "allow_asynchronous")
)


def print_json(value: Any) -> None:
    """Prints one JSON object."""
    print(json.dumps(value, indent=1))


def check_flags(**options: Any) -> None:
    """Checks that no given option rules out another; see `workflows.exclusions`."""
    check_options(options, as_flag)


def check_outputs(**paths: Path | None) -> None:
    """Checks that each option's file can be written, and makes its folder."""
    for name, path in paths.items():
        if path is None:
            continue
        with writing(path):
            if path.is_dir():
                raise PlanError(f"--{name} {path} was asked for, which is a folder; name a file in it")
            path.parent.mkdir(parents=True, exist_ok=True)
        if name == "svg":
            from pipedream.apps.report.svg import check_picture  # here, because few commands draw

            check_picture(path)


def read_profile(path: Path) -> Profile:
    """Reads a profile; a file that is another kind of input is refused with advice."""
    if path.suffix == ".py":
        raise PlanError(
            f"{path} is not a profile; measure one first: pipedream profile {path} -o {path.stem}.profile.json"
        )
    with suppress(OSError, UnicodeDecodeError):  # which `load` reports
        if " -- forward_compute_time=" in read_text(path):
            refuse_retired(f"reading a graph.txt ({path})")
    return Profile.load(path)


def with_depth(plan: Plan, depth: str | tuple[int, ...]) -> Plan:
    """Returns a plan with the depth of --in-flight; by default the plan's own."""
    return plan if depth == "noam" and plan.depth_mode != "noam" else plan.with_depth(depth)


def make_cluster(workers: Iterable[str], bandwidths: Sequence[str], latency_s: float, memory: str | None) -> Cluster:
    """Reads --workers and --bandwidth, one value per level, --latency and --memory."""
    widths = [word for text in workers for word in text.split(",")]
    rates = [word for text in bandwidths for word in text.split(",")] or ["1.25e9"]
    if not widths:
        raise PlanError("the number of workers is missing; give --workers N, or --cluster with a file or a name")
    if len(widths) != len(rates):
        raise PlanError(
            f"--workers gives {len(widths)} levels of the network and --bandwidth {len(rates)}; give one of each a "
            "level, innermost first"
        )
    if not all(re.fullmatch(r"0*[1-9]\d*(\+0*[1-9]\d*)*", width) for width in widths):
        raise PlanError(
            f"--workers {' '.join(widths)} was asked for; give a whole number from 1 on for each level, or for unequal "
            "machines one for each, as in 4+4+2 3"
        )
    try:
        levels = []
        for width, rate in zip(widths, rates, strict=True):
            sizes = tuple(map(int, width.split("+")))
            uneven = sizes if len(sizes) > 1 else ()
            levels.append(Level(max(sizes), *read_link(rate, latency_s), sizes=uneven))
        return Cluster(tuple(levels), read_memory(memory))
    except ValueError as error:
        raise PlanError(str(error)) from None


def read_memory(text: str | None) -> int | None:
    """Reads --memory."""
    if text is None:
        return None
    try:
        size = units.parse_bytes(text)
    except ValueError as error:
        raise PlanError(str(error)) from None
    _check_unit("--memory", text, units.format_bytes(size), "GB")
    return size


def read_link(text: str, latency_s: float = 0.0) -> units.LinkSpeed:
    """Reads --bandwidth; with --latency, if it has no latency.

    Raises:
        ValueError: no bandwidth.
        PlanError: a small number without a unit, or two latencies.
    """
    link = units.parse_link(text)
    _check_unit("--bandwidth", text.partition("+")[0].strip(), units.format_rate(link.bytes_per_s), "Mbit/s")
    if link.latency_s and latency_s:
        raise PlanError(f"--bandwidth {text} was given with --latency {latency_s:g}; leave one latency out")
    return link._replace(latency_s=link.latency_s or latency_s)


def _check_unit(flag: str, text: str, meaning: str, unit: str) -> None:
    """Raises a PlanError for a number below 1000 without a unit, which is not meant in bytes."""
    if text.replace(".", "", 1).isdecimal() and float(text) < 1000:
        raise PlanError(f"{flag} {text} is {meaning}; did you mean {text}{unit}?")


def read_cluster(path: Path) -> Cluster:
    """Reads a cluster's file, or takes a paper's by name: pipedream-a:4."""
    name, _, count = path.name.partition(":")
    if path.exists() or path.name != str(path) or "." in name:
        return Cluster.load(path)  # which reports what is wrong with it
    if count and not count.isdecimal():
        raise PlanError(f"--cluster {path} was asked for; write NAME:MACHINES with a whole number of machines")
    return presets.cluster(name, int(count) if count else None)
