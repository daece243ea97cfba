"""`pipedream schedules`."""

from __future__ import annotations

from pipedream.cli.options import JSON, print_json
from pipedream.report.text import schedule_table
from pipedream.schedules import ALIASES, COMPENSATED, SCHEDULES, Run, build, claims_at, run_of, uniform

_STAGES = 4
_MICROBATCHES = 8  # per minibatch, for the methods that split it


def schedules(as_json: bool = JSON) -> None:
    """List the methods, with the claims of their papers.

    The figures are those of four stages; 'pipedream show NAME' draws a method.
    """
    runs = sorted(map(_run, [*SCHEDULES, *COMPENSATED]), key=lambda run: not run.schedule.flushes)
    claimed = {run.schedule.name: claims_at(run.schedule, _STAGES, run.microbatches) for run in runs}
    if as_json:
        aliases = {name: [alias for alias, meant in ALIASES.items() if meant == name] for name in claimed}
        print_json({name: {"aliases": aliases[name], **claims} for name, claims in claimed.items()})
    else:
        print(schedule_table(claimed, stages=_STAGES))


def _run(name: str) -> Run:
    """Returns a run of eight microbatches a minibatch, or of eight minibatches where they are not split."""
    plan = uniform(name, _STAGES)
    splits = not build(name, plan).updates.mean_of_rounds
    return run_of(name, plan, _MICROBATCHES) if splits else run_of(name, plan, minibatches=_MICROBATCHES)
