"""`pipedream show`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from pipedream import schedules
from pipedream.cli.options import Chunks, Depth, Json, Microbatches, RunMinibatches, depth_of, print_json
from pipedream.cli.printing import print_grid, print_length
from pipedream.core.artifact import encode, write_text
from pipedream.core.errors import PlanError
from pipedream.core.schedule.lowering import lower
from pipedream.report.svg import timeline_svg
from pipedream.report.text import grid
from pipedream.verifier import verify
from pipedream.workflows.simulate import simulate

__all__ = ["show"]

_USUAL_MICROBATCHES = 8  # of a picture


def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Method to draw: a name from 'pipedream schedules', with options as in roundpipe[forwards=3]; a "
            "schedule in PyTorch's notation (FILE.csv); or a Python file that declares a method (FILE.py).",
        ),
    ],
    stages: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="P",
            show_default="4, or the file's",
            help="Number of stages; of workers, for methods with several stages per worker.",
        ),
    ] = None,
    chunks: Chunks = None,
    microbatches: Microbatches = None,
    minibatches: RunMinibatches = None,
    in_flight: Depth = "noam",
    forward_s: Annotated[float, typer.Option(min=0.0, metavar="SECONDS", help="Time of a forward.")] = 1.0,
    backward_s: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            show_default="1.0; 2.0 where the backward is split",
            help="Time of a backward.",
        ),
    ] = None,
    verify_it: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Print the proof too: in flight, weight versions, staleness. It does not check the paper's claims.",
        ),
    ] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the picture as SVG.")] = None,
    csv: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the schedule in PyTorch's notation, if the method flushes."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw a method's schedule, with its proof on request.

    \b
    Examples:
      pipedream show 1f1b --stages 4 --microbatches 8
      pipedream show pipedream --stages 3 --minibatches 6 --verify
    """
    for option, path in (("--csv", csv), ("--svg", svg)):
        if path is not None and path.is_dir():
            raise PlanError(f"{option} {path} was asked for, which is a folder; name a file in it")
        if path is not None and not path.parent.is_dir():
            raise PlanError(f"{option} {path} was asked for, but there is no folder {path.parent}; make it first")
    chosen = schedules.uniform(name, stages, forward_s, chunks=chunks).with_depth(depth_of(in_flight))
    run = schedules.run_of(name, chosen, microbatches, minibatches, usual=_USUAL_MICROBATCHES)
    seconds = (2.0 if run.schedule.splits_backward else 1.0) if backward_s is None else backward_s
    chosen = replace(chosen, stages=tuple(replace(stage, backward_s=seconds) for stage in chosen.stages))
    built = schedules.build(name, chosen, run.schedule.microbatches)
    proof = verify(lower(built))
    timeline = simulate(chosen, schedule=built, minibatches=run.minibatches)
    if csv is not None:
        write_text(csv, schedules.to_torch_csv(built))
    if svg is not None:
        svg.write_text(timeline_svg(timeline, title=f"{built.name}, {len(chosen.stages)} stages"), encoding="utf-8")
    if as_json:
        print_json({"grid": grid(timeline).splitlines(), "proof": encode(proof)})
        return
    print_grid(timeline)
    print_length(run, microbatches, minibatches)
    if verify_it:
        print(f"\n{proof}")
