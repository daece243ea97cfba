"""Options that several commands share, and what their text means."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from pipedream.core import units
from pipedream.core.artifact import writing
from pipedream.core.errors import PlanError
from pipedream.core.hardware import presets
from pipedream.core.hardware.cluster import Cluster, Level
from pipedream.core.model.graph_txt import GraphText
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.report.files import check_picture
from pipedream.workflows.exclusions import as_flag, check_options

_SHAPE, _CLUSTER, _METHOD, _MESH = "Shape of the plan", "Cluster", "Method", "Mesh"
_METHOD_NAME = "NAME[OPTION=VALUE,...]|FILE"
_METHOD_HELP = "The method: a name from 'pipedream schedules', a schedule in PyTorch's notation (FILE.csv), or FILE.py"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else.")]
Seed = Annotated[int, typer.Option(metavar="N", help="Random seed.")]
LayoutRules = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="TENSOR:MESH[,...]",
        rich_help_panel=_MESH,
        show_default="the recipe's",
        help="Which dimension of the mesh cuts which dimension of tensors, e.g. d_ff:model.",
    ),
]
AtRest = Annotated[
    str | None,
    typer.Option(
        "--at-rest",
        metavar="MESH",
        rich_help_panel=_MESH,
        show_default="the recipe's",
        help="Dimension of the mesh over which weights, gradients and optimizer state are sharded (ZeRO-3).",
    ),
]
Finest = Annotated[
    bool, typer.Option("--finest", help="Also split the modules of a chain into those inside them, to cut there.")
]
Device = Annotated[str, typer.Option(metavar="cpu|cuda", help="Device of the workers.")]
RecipeFile = Annotated[str, typer.Argument(metavar="RECIPE", help="Python file that defines recipe().")]
ProfileFile = Annotated[
    Path, typer.Argument(metavar="PROFILE", help="Profile of the model, or a graph.txt of the original PipeDream.")
]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Also write the result to a file.")]

PlanSchedule = Annotated[
    str,
    typer.Option(
        "--schedule",
        metavar=_METHOD_NAME,
        rich_help_panel=_METHOD,
        help=f"{_METHOD_HELP}; 'auto' chooses the fastest by simulation.",
    ),
]
ScheduleOrPlans = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar=_METHOD_NAME,
        rich_help_panel=_METHOD,
        show_default="the plan's own, or pipedream",
        help=f"{_METHOD_HELP}.",
    ),
]
AllowAsynchronous = Annotated[
    bool,
    typer.Option(
        "--allow-asynchronous",
        rich_help_panel=_METHOD,
        help="Let --schedule auto also choose methods with late gradients.",
    ),
]
Microbatches = Annotated[
    int | None,
    typer.Option(
        "--microbatches",
        min=1,
        metavar="M",
        rich_help_panel=_METHOD,
        show_default="the plan's or the method's own number",
        help="Microbatches per minibatch.",
    ),
]
RunMinibatches = Annotated[
    int | None,
    typer.Option(
        "--minibatches",
        min=1,
        metavar="N",
        rich_help_panel=_METHOD,
        show_default="1 if the method flushes, otherwise enough for a steady state",
        help="Minibatches to run, from an empty pipeline to an empty one.",
    ),
]
Chunks = Annotated[
    int | None,
    typer.Option(
        "--chunks",
        min=1,
        metavar="V",
        rich_help_panel=_METHOD,
        show_default="the method's own number",
        help="Stages per worker, for methods that interleave.",
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option("--svg", metavar="FILE", help="Also write the picture: an SVG, or a PDF or PNG by the file's suffix."),
]
Depth = Annotated[
    str,
    typer.Option(
        "--in-flight",
        metavar="noam|full|auto|N,N,...",
        rich_help_panel=_METHOD,
        help="Depth, the microbatches in flight at each stage: as in the paper (noam), enough to hide messages (full), "
        "the deepest that fits the memory (auto), or a count for each stage, e.g. 3,2,1.",
    ),
]

Straight = Annotated[bool, typer.Option("--straight", rich_help_panel=_SHAPE, help="One stage for each worker.")]
DataParallel = Annotated[
    bool, typer.Option("--data-parallel", rich_help_panel=_SHAPE, help="One stage, replicated on all workers.")
]
Config = Annotated[
    str | None,
    typer.Option("--config", metavar="R0-R1-...", rich_help_panel=_SHAPE, help="Workers of each stage, e.g. 2-1."),
]
UpdateDelay = Annotated[
    int,
    typer.Option(
        "--update-delay",
        min=0,
        max=1,
        metavar="0|1",
        rich_help_panel=_SHAPE,
        help="1 lets replicated stages run their next forward before they update.",
    ),
]

Workers = Annotated[
    list[str] | None,
    typer.Option(
        metavar="N [N ...]",
        rich_help_panel=_CLUSTER,
        help="Number of workers. With several network levels, one number per level, innermost first, e.g. 4 4; for "
        "machines of unequal size, e.g. 4+4+2 3.",
    ),
]
Bandwidth = Annotated[
    list[str] | None,
    typer.Option(
        metavar="B [B ...]",
        rich_help_panel=_CLUSTER,
        show_default="10Gbit/s",
        help="Bandwidth of a link in one direction, one value per level, e.g. 1e9 (bytes/s) or 10Gbit/s.",
    ),
]
Latency = Annotated[
    float, typer.Option(min=0.0, metavar="SECONDS", rich_help_panel=_CLUSTER, help="One-way latency of a message.")
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES", rich_help_panel=_CLUSTER, show_default="no limit", help="Memory per worker, e.g. 16GB."
    ),
]
ClusterName = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="FILE|NAME[:MACHINES]",
        rich_help_panel=_CLUSTER,
        help=f"A cluster's file, or a cluster of a paper ({', '.join(presets.PRESETS)}), e.g. pipedream-a:4.",
    ),
]


def print_json(value: Any) -> None:
    """Prints one JSON object."""
    print(json.dumps(value, indent=1))


def check_flags(**options: Any) -> None:
    """Checks that no given option rules out another; see `workflows.exclusions`."""
    check_options(options, as_flag)


def check_outputs(**paths: Path | None) -> None:
    """Checks that each option's file can be written; a folder that is missing is not made."""
    for name, path in paths.items():
        if path is None:
            continue
        with writing(path):
            if path.is_dir():
                raise PlanError(f"--{name} {path} was asked for, which is a folder; name a file in it")
            if not path.parent.is_dir():
                raise PlanError(f"--{name} {path} was asked for, but there is no folder {path.parent}; make it first")
        if name == "svg":
            check_picture(path)


def read_profile(path: Path) -> Profile | GraphText:
    """Reads a profile or a graph.txt; the first character decides which."""
    if path.suffix == ".py":
        raise PlanError(
            f"{path} is not a profile; measure one first: pipedream profile {path} -o {path.stem}.profile.json"
        )
    try:
        begins = path.read_text(encoding="utf-8").lstrip()[:1]
    except (OSError, UnicodeDecodeError):
        return Profile.load(path)  # which reports what is wrong with it
    return Profile.load(path) if begins in ("{", "[") or path.suffix == ".json" else GraphText.load(path)


def profile_of(path: Path) -> Profile:
    """Reads a profile; a graph.txt is named after its file."""
    found = read_profile(path)
    return found.profile(path.stem) if isinstance(found, GraphText) else found


def depth_of(text: str) -> str | tuple[int, ...]:
    """Reads --in-flight."""
    if text in ("noam", "full", "auto"):
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise PlanError(f"--in-flight {text!r} is not known; write noam, full, auto or counts as in 3,2,1") from None


def depth_of_plan(plan: Plan, text: str) -> Plan:
    """Returns a plan with the depth of --in-flight; a chosen depth is kept under the option's default."""
    return plan if text == "noam" and plan.depth_mode != "noam" else plan.with_depth(depth_of(text))


def shape_of(*, straight: bool, data_parallel: bool, config: str | None) -> str | None:
    """Reads --straight, --data-parallel and --config, of which one may be given."""
    check_flags(straight=straight, data_parallel=data_parallel, config=config)
    return "straight" if straight else "data-parallel" if data_parallel else config


def cluster_of(
    path: Path | None, workers: list[str], bandwidths: list[str], latency_s: float, memory: str | None
) -> Cluster:
    """Reads --cluster; or --workers and --bandwidth, one value per level, --latency and --memory."""
    check_flags(cluster=path, workers=workers, bandwidth=bandwidths, latency=latency_s, memory=memory)
    if path is not None:
        return _named_cluster(path)
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
            levels.append(Level(max(sizes), units.parse_rate(rate), latency_s, sizes=uneven))
        return Cluster(tuple(levels), memory_of(memory))
    except ValueError as error:
        raise PlanError(str(error)) from None


def memory_of(text: str | None) -> int | None:
    """Reads --memory."""
    try:
        return None if text is None else units.parse_bytes(text)
    except ValueError as error:
        raise PlanError(str(error)) from None


def _named_cluster(path: Path) -> Cluster:
    """Reads a cluster's file, or takes a paper's by name: pipedream-a:4."""
    name, _, count = path.name.partition(":")
    if path.exists() or path.name != str(path) or "." in name:
        return Cluster.load(path)  # which reports what is wrong with it
    if count and not count.isdecimal():
        raise PlanError(f"--cluster {path} was asked for; write NAME:MACHINES with a whole number of machines")
    return presets.cluster(name, int(count) if count else None)
