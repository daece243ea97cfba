"""PipeDream's Table 1 as predictions: what the paper chose and measured, what both cost models choose and predict."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from pipedream.apps.cli import presets
from pipedream.core.errors import PipelineError
from pipedream.workflows import plan as planning

sys.path.append(str(Path(__file__).parents[1]))
from paper_tables.classic import classic
from paper_tables.graph_txt import GraphText
from scaffold import Environment, format_table, make_parser, parse_with_profiles
from table_1 import TABLE_1, Row


def main() -> None:
    """Prints the table."""
    parser, environment = make_parser(__doc__), Environment()
    parser.add_argument("--model", choices=dict.fromkeys(row.profile for row in TABLE_1), help="only its rows")
    options = parse_with_profiles(parser)
    rows = [row for row in TABLE_1 if options.model in (None, row.profile)]
    answers = [answer(row, GraphText.load(options.profiles / f"{row.profile}.txt")) for row in rows]
    titles = "model | cluster | paper | measured | classic | predicted | pipedream | predicted | "
    titles += "the paper's configuration, predicted by pipedream"
    print(environment.describe() + "\n\n" + format_table(titles, "lllrlrlrr", answers))


def answer(row: Row, text: GraphText) -> tuple[str, ...]:
    """Returns the cells of a row; each figure is a speedup over data parallelism under the same cost model."""
    # The profiles tell no batch, so their activations are no measure of memory: it is not limited here.
    cluster = replace(presets.cluster(row.cluster, machines=row.machines), memory_bytes=None)
    original = classic(text, cluster)
    profile = text.profile(row.model)
    ours = planning.plan(profile, cluster, strategy="search")
    parallel_s = planning.plan(profile, cluster, shape="data-parallel").slowest_stage_s
    try:
        shape = "data-parallel" if row.config == "16" else row.config
        theirs = f"{parallel_s / planning.plan(profile, cluster, shape=shape).slowest_stage_s:.2f}x"
    except PipelineError:
        theirs = "no such plan"
    return (
        row.model,
        f"{'x'.join(str(level.width) for level in reversed(cluster.levels))} ({row.cluster[-1].upper()})",
        row.config,
        f"{row.speedup:.2f}x",
        original.plan.config,
        f"{original.data_parallel_s / original.slowest_stage_s:.2f}x",
        ours.config,
        f"{parallel_s / ours.slowest_stage_s:.2f}x",
        theirs,
    )


if __name__ == "__main__":
    main()
