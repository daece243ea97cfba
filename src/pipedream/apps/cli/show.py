"""`pipedream show`."""

import json
from pathlib import Path

import typer

from pipedream import schedules
from pipedream.apps.cli import options as common
from pipedream.apps.report.claims import check_claims
from pipedream.apps.report.svg import save_picture, timeline_svg
from pipedream.apps.report.text import grid, print_grid, schedule_table
from pipedream.core.artifact import encode, write_text
from pipedream.core.errors import PlanError
from pipedream.core.flags import argument, number, option
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.moves import Move
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.timeline import WORK
from pipedream.verifier import verify
from pipedream.workflows.methods import resolve_method
from pipedream.workflows.simulate import simulate

_USUAL_MICROBATCHES = 8  # of a picture
_LISTED_STAGES, _LISTED_MICROBATCHES = 4, 8  # of the list; microbatches of a minibatch where it is split
_MAX_STAGES = 256  # drawn in seconds


def show(
    name: str | None = argument(
        "NAME|PLAN",
        "Method to draw, with options as in paci[backward_rule=stash]; a schedule in PyTorch's notation (FILE.csv); or "
        "a Python file that declares a method (FILE.py). Or a plan (FILE.json), which is drawn with its own stages and "
        "seconds.",
        default=None,
        unset="list all methods",
    ),
    stages: int | None = number(
        None,
        "Number of stages; of workers, for methods with several stages per worker.",
        "--stages",
        "--workers",
        metavar="P",
        most=_MAX_STAGES,
        unset="4, or the file's",
    ),
    schedule: str | None = common.SCHEDULE,
    chunks: int | None = common.CHUNKS,
    microbatches: int | None = common.MICROBATCHES,
    minibatches: int | None = common.MINIBATCHES,
    in_flight: str | tuple[int, ...] = common.IN_FLIGHT,
    forward_s: float | None = option(None, "Time of a forward.", unset="1.0"),
    backward_s: float | None = option(None, "Time of a backward.", unset="2.0"),
    verify_it: bool = option(
        False,
        "Print the proof too: in flight, weight versions, staleness; and compare the method's claims with the "
        "simulation. Exit status 1 if one does not hold.",
        "--verify",
    ),
    program: bool = option(
        False, "Print the program too: each rank's warm-up and period, with messages and all that it waits for."
    ),
    svg: Path | None = common.SVG,
    csv: Path | None = option(None, "Also write the schedule in PyTorch's notation, if the method flushes."),
    as_json: bool = common.JSON,
) -> None:
    """List the methods, or draw one's schedule and its proof.

    The list has the claims of their papers, for four stages.

    \b
    Examples:
      pipedream show
      pipedream show 1f1b --stages 4 --microbatches 8
      pipedream show pipedream --stages 3 --minibatches 6 --verify
      pipedream show roundpipe --stages 4 --program
      pipedream show digits.plan.json --schedule 1f1b --microbatches 4 --svg digits.pdf
    """
    if name is None:
        _list_methods(as_json)
        return
    common.check_outputs(csv=csv, svg=svg)
    if name.endswith(".json"):
        common.check_flags(PLAN=name, stages=stages, chunks=chunks, forward_s=forward_s, backward_s=backward_s)
        chosen = common.with_depth(Plan.load(name), in_flight)
        method, split = resolve_method(chosen, schedule)
        run = schedules.run_of(method, chosen, microbatches, minibatches, split=split, usual=_USUAL_MICROBATCHES)
    elif schedule is not None:
        raise PlanError(f"--schedule {schedule} was given with the method {name}; give one of them, or a plan's file")
    else:
        chosen_s = (1.0 if forward_s is None else forward_s, 2.0 if backward_s is None else backward_s)
        equal = schedules.uniform(name, stages, *chosen_s, chunks=chunks).with_depth(in_flight)
        run = schedules.run_of(name, equal, microbatches, minibatches, usual=_USUAL_MICROBATCHES)
    built = run.schedule
    lowered = lower(built)
    proof = verify(lowered)
    timeline = simulate(built.plan, schedule=built, minibatches=run.minibatches)
    checked = check_claims(built.name, built.plan.workers, built.microbatches, chunks) if verify_it else None
    if svg is not None:
        save_picture(timeline_svg(timeline, title=f"{built.name}, {len(built.plan.stages)} stages", versions=True), svg)
    if csv is not None:
        write_text(csv, schedules.format_schedule(built, ".csv"))
    if as_json:
        # As in the CSV of `pipedream simulate`, and each op's microbatch; updates have none.
        rows = [row for row in timeline.rows() if row["kind"] in WORK]
        ops = [row | {"microbatch": None if row["kind"] == "U" else row["index"]} for row in rows]
        report = {"grid": grid(timeline).splitlines(), "ops": ops, "proof": encode(proof)}
        report |= {"program": json.loads(lowered.to_json())} if program else {}
        common.print_json(report if checked is None else report | {"claims": encode(checked)})
    else:
        print_grid(timeline)
        if run.microbatches != (microbatches or 1) * (minibatches or 1):
            print(run)
        if program:
            print(f"\n{lowered}\n")
            _explain_instructions(lowered)
        if checked is not None:
            print(f"\n{proof}\n\n{checked}")
    if checked is not None and checked.differences:
        raise typer.Exit(1)


def _list_methods(as_json: bool) -> None:
    names = [*schedules.SCHEDULES, *schedules.COMPENSATED]
    runs = sorted(map(_build_listed_run, names), key=lambda run: not run.schedule.flushes)
    claims = {run.schedule.name: schedules.claims_at(run.schedule, _LISTED_STAGES, run.microbatches) for run in runs}
    if not as_json:
        print(schedule_table(claims, stages=_LISTED_STAGES))
        return
    aliases: dict[str, list[str]] = {name: [] for name in claims}
    for alias, name in schedules.ALIASES.items():
        aliases[name].append(alias)
    common.print_json({name: {"aliases": aliases[name], **row} for name, row in claims.items()})


def _build_listed_run(name: str) -> schedules.Run:
    """Returns a run of eight microbatches a minibatch, or of eight minibatches where they are not split."""
    plan = schedules.uniform(name, _LISTED_STAGES)
    if schedules.build(name, plan).updates.mean_of_rounds:
        return schedules.run_of(name, plan, minibatches=_LISTED_MICROBATCHES)
    return schedules.run_of(name, plan, _LISTED_MICROBATCHES)


def _explain_instructions(program: Program) -> None:
    """Prints the first instruction of each kind beside ops, in words."""
    instructions = [item for rank in program.ranks for item in (*rank.warmup, *rank.period)]
    for move in Move.by_signs.values():
        first = next((item for item in instructions if item.kind is move), None)
        if first is not None:
            print(f"{first!s:6} {program.describe(first)}")
