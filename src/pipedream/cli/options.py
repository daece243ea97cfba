"""Options that several commands share, and how they are read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand

from pipedream.core import units
from pipedream.core.errors import PlanError
from pipedream.core.hardware import presets
from pipedream.core.hardware.cluster import Cluster, Level
from pipedream.core.model.graph_txt import GraphText
from pipedream.core.model.profile import Profile

__all__ = [
    "AllowAsynchronous",
    "Chunks",
    "ClusterName",
    "Config",
    "DataParallel",
    "Depth",
    "Device",
    "Json",
    "Microbatches",
    "PlanSchedule",
    "PlansSchedule",
    "RecipeFile",
    "RunMicrobatches",
    "RunMinibatches",
    "ScheduleName",
    "SeveralValues",
    "Straight",
    "UpdateDelay",
    "cluster_of",
    "depth_of",
    "measured",
    "print_json",
    "shape_of",
]

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
Depth = Annotated[
    str,
    typer.Option(
        "--in-flight",
        help="Depth: noam (the paper's), full (hides messages), auto (as near to full as fits), or counts: 3,2,1.",
    ),
]
Straight = Annotated[bool, typer.Option("--straight", help="One stage for each worker.")]
DataParallel = Annotated[bool, typer.Option("--data-parallel", help="One stage on all workers.")]
Config = Annotated[str | None, typer.Option("--config", metavar="R0-R1-...", help="Workers of each stage: 2-1.")]
UpdateDelay = Annotated[
    int, typer.Option("--update-delay", min=0, max=1, help="1: replicated stages update behind their next forward.")
]
ClusterName = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="FILE|NAME[:MACHINES]",
        help=f"A cluster's file, or one of the papers': {', '.join(presets.PRESETS)}; as in pipedream-a:4.",
    ),
]
Chunks = Annotated[
    int | None,
    typer.Option("--chunks", min=1, help="Stages of each worker, for methods that interleave; 2."),
]
ScheduleName = Annotated[str, typer.Option("--schedule", help="A method: see 'pipedream schedules'.")]
PlanSchedule = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        help="A method: see 'pipedream schedules', with options as in pb_lwp[by=difference]; FILE.csv, FILE.py; "
        "auto: the fastest by simulation; pipedream.",
    ),
]
PlansSchedule = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        help="A method: see 'pipedream schedules', with options as in pb_lwp[by=difference]; FILE.csv, FILE.py; the "
        "plan's, or pipedream.",
    ),
]
AllowAsynchronous = Annotated[
    bool, typer.Option("--allow-asynchronous", help="With auto: also methods whose gradients are late.")
]
Microbatches = Annotated[
    int | None, typer.Option("--microbatches", min=1, help="Parts of a minibatch, for methods that split it.")
]
RunMicrobatches = Annotated[
    int | None,
    typer.Option(
        "--microbatches",
        min=1,
        help="Parts of a minibatch; for methods that do not split it, minibatches of the run.",
    ),
]
RunMinibatches = Annotated[
    int | None,
    typer.Option(
        "--minibatches",
        min=1,
        help="Of the run, from an empty pipeline to an empty one; 1 with a flush, else enough for a steady state.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
RecipeFile = Annotated[str, typer.Argument(metavar="RECIPE", help="A Python file with a function recipe().")]


def print_json(value: Any) -> None:
    """Prints one JSON object."""
    print(json.dumps(value, indent=1))


def measured(path: Path) -> Profile | GraphText:
    """Reads a profile, or a graph.txt, told apart by how they begin. Raises ArtifactError."""
    try:
        begins = path.read_text(encoding="utf-8").lstrip()[:1]
    except (OSError, UnicodeDecodeError):
        return Profile.load(path)  # which says what is wrong with it
    return Profile.load(path) if begins in ("{", "[") or path.suffix == ".json" else GraphText.load(path)


def depth_of(text: str) -> str | tuple[int, ...]:
    """Reads --in-flight. Raises PlanError."""
    if text in ("noam", "full", "auto"):
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise PlanError(f"--in-flight {text!r} is not known; write noam, full, auto or counts as in 3,2,1") from None


def shape_of(*, straight: bool, data_parallel: bool, config: str | None, usual: str) -> str:
    """Reads --straight, --data-parallel and --config, of which one may be given. Raises PlanError."""
    given = [
        (name, shape)
        for name, shape, said in (
            ("--straight", "straight", straight),
            ("--data-parallel", "data-parallel", data_parallel),
            ("--config", config or "", config is not None),
        )
        if said
    ]
    if len(given) > 1:
        raise PlanError(f"{' and '.join(name for name, _ in given)} exclude each other; give one or none")
    return given[0][1] if given else usual


_RATE = r"[0-9.]+([eE][-+]?\d+)?([kKmMgGtT]?(bit|[bB])(/s|ps)?)?"


class SeveralValues(TyperCommand):
    """A command whose --workers and --bandwidth take several values: ``--workers 4 4``, ``4,4``, or the option again.

    What follows such an option belongs to it as long as it reads like another value; so a file whose name is a
    number stands before it.
    """

    _LISTS: ClassVar = {
        "--workers": r"[\d+]+(,[\d+]+)*",
        "--bandwidth": rf"{_RATE}(,{_RATE})*",
    }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Writes the option's name before each of its values, and leaves the rest to typer."""
        given: list[str] = []
        option = ""
        for word in args:
            if option and given[-1] != option and re.fullmatch(self._LISTS[option], word):
                given.append(option)
            elif not option or given[-1] != option:
                name = word.partition("=")[0]
                option = name if name in self._LISTS else ""
                if option and word != name:
                    given += [option, word.partition("=")[2]]
                    continue
            given.append(word)
        return list(super().parse_args(ctx, given))


def cluster_of(
    path: Path | None, workers: list[str], bandwidths: list[str], latency_s: float, memory: str | None
) -> Cluster:
    """Reads --cluster, or --workers, --bandwidth, --latency and --memory, a level a value. Raises PlanError."""
    if path is not None:
        told = {
            "--workers": bool(workers),
            "--bandwidth": bool(bandwidths),
            "--latency": bool(latency_s),
            "--memory": memory is not None,
        }
        if also := [name for name, is_given in told.items() if is_given]:
            raise PlanError(f"--cluster {path} was given, and {', '.join(also)}, which it says itself; leave one out")
        return _named_cluster(path)
    widths = [word for text in workers for word in text.split(",")]
    rates = [word for text in bandwidths for word in text.split(",")] or ["1.25e9"]
    if not widths:
        raise PlanError("say how many workers: --workers N, or give --cluster FILE or NAME")
    if len(widths) != len(rates):
        raise PlanError(
            f"--workers gives {len(widths)} levels of the network and --bandwidth {len(rates)}; give one of each a "
            "level, innermost first"
        )
    if not all(re.fullmatch(r"0*[1-9]\d*(\+0*[1-9]\d*)*", width) for width in widths):
        raise PlanError(
            f"--workers {' '.join(widths)} was asked for; give a whole number from 1 on for each level, or of unequal "
            "machines one for each, as in 4+4+2 3"
        )
    try:
        size = None if memory is None else units.parse_bytes(memory)
        levels = []
        for width, rate in zip(widths, rates, strict=True):
            sizes = tuple(map(int, width.split("+")))
            uneven = sizes if len(sizes) > 1 else ()
            levels.append(Level(max(sizes), units.parse_rate(rate), latency_s, sizes=uneven))
        return Cluster(tuple(levels), size)
    except ValueError as error:
        raise PlanError(str(error)) from None


def _named_cluster(path: Path) -> Cluster:
    """A cluster's file, or one of the papers' by name: pipedream-a:4."""
    name, _, count = path.name.partition(":")
    if path.exists() or path.name != str(path) or "." in name:
        return Cluster.load(path)  # which says what is wrong with it
    if count and not count.isdecimal():
        raise PlanError(f"--cluster {path} was asked for; write NAME:MACHINES with a whole number of machines")
    return presets.cluster(name, int(count) if count else None)
