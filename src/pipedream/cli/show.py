"""`pipedream show`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from pipedream import schedules
from pipedream.cli import options as common
from pipedream.cli.printing import print_grid, print_length
from pipedream.core.artifact import encode, write_text
from pipedream.core.errors import PlanError
from pipedream.core.flags import argument, option
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.timeline import WORK
from pipedream.report.svg import save_picture, timeline_svg
from pipedream.report.text import grid
from pipedream.verifier import verify
from pipedream.workflows.check import check_claims
from pipedream.workflows.methods import resolve_method
from pipedream.workflows.simulate import simulate

_USUAL_MICROBATCHES = 8  # of a picture
_MAX_STAGES = 256  # drawn in seconds


def show(
    name: str = argument(
        "NAME|PLAN",
        "Method to draw: a name from 'pipedream schedules', with options as in paci[backward_rule=stash]; a "
        "schedule in PyTorch's notation (FILE.csv); or a Python file that declares a method (FILE.py). Or a plan "
        "(FILE.json), which is drawn with its own stages and seconds.",
    ),
    stages: int | None = option(
        None,
        "Number of stages; of workers, for methods with several stages per worker.",
        "--stages",
        "--workers",
        metavar="P",
        least=1,
        most=_MAX_STAGES,
        unset="4, or the file's",
    ),
    schedule: str | None = common.SCHEDULE,
    chunks: int | None = common.CHUNKS,
    microbatches: int | None = common.MICROBATCHES,
    minibatches: int | None = common.MINIBATCHES,
    in_flight: str | tuple[int, ...] = common.IN_FLIGHT,
    forward_s: float | None = option(None, "Time of a forward.", metavar="SECONDS", least=0.0, unset="1.0"),
    backward_s: float | None = option(
        None,
        "Time of a backward.",
        metavar="SECONDS",
        least=0.0,
        unset="1.0; 2.0 where the backward is split",
    ),
    verify_it: bool = option(
        False,
        "Print the proof too: in flight, weight versions, staleness; and compare the method's claims with the "
        "simulation. Exit status 1 if one does not hold.",
        "--verify",
    ),
    svg: Path | None = common.SVG,
    csv: Path | None = option(
        None, "Also write the schedule in PyTorch's notation, if the method flushes.", metavar="FILE"
    ),
    as_json: bool = common.JSON,
) -> None:
    """Draw a method's schedule, with its proof on request.

    \b
    Examples:
      pipedream show 1f1b --stages 4 --microbatches 8
      pipedream show pipedream --stages 3 --minibatches 6 --verify
      pipedream show digits.plan.json --schedule 1f1b --microbatches 4 --svg digits.pdf
    """
    common.check_outputs(csv=csv, svg=svg)
    if name.endswith(".json"):
        common.check_flags(PLAN=name, stages=stages, chunks=chunks, forward_s=forward_s, backward_s=backward_s)
        chosen = common.with_depth(Plan.load(name), in_flight)
        method, split = resolve_method(chosen, schedule)
        run = schedules.run_of(method, chosen, microbatches, minibatches, split=split, usual=_USUAL_MICROBATCHES)
    elif schedule is not None:
        raise PlanError(f"--schedule {schedule} was given with the method {name}; give one of them, or a plan's file")
    else:
        equal = schedules.uniform(name, stages, 1.0 if forward_s is None else forward_s, chunks=chunks)
        equal = equal.with_depth(in_flight)
        run = schedules.run_of(name, equal, microbatches, minibatches, usual=_USUAL_MICROBATCHES)
        seconds = (2.0 if run.schedule.splits_backward else 1.0) if backward_s is None else backward_s
        equal = replace(equal, stages=tuple(replace(stage, backward_s=seconds) for stage in equal.stages))
        run = replace(run, schedule=schedules.build(name, equal, run.schedule.microbatches))
    built = run.schedule
    proof = verify(lower(built))
    timeline = simulate(built.plan, schedule=built, minibatches=run.minibatches)
    checked = check_claims(built.name, built.plan.workers, built.microbatches, chunks) if verify_it else None
    if csv is not None:
        write_text(csv, schedules.to_torch_csv(built))
    if svg is not None:
        save_picture(timeline_svg(timeline, title=f"{built.name}, {len(built.plan.stages)} stages"), svg)
    if as_json:
        # As in the CSV of `pipedream simulate`, and each op's microbatch; updates have none.
        rows = [row for row in timeline.rows() if row["kind"] in WORK]
        ops = [row | {"microbatch": None if row["kind"] == "U" else row["index"]} for row in rows]
        report = {"grid": grid(timeline).splitlines(), "ops": ops, "proof": encode(proof)}
        common.print_json(report if checked is None else report | {"claims": encode(checked)})
    else:
        print_grid(timeline)
        print_length(run, microbatches, minibatches)
        if checked is not None:
            print(f"\n{proof}\n\n{checked}")
    if checked is not None and checked.differences:
        raise typer.Exit(1)
