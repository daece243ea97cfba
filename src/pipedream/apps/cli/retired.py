"""What the command no longer does: one table of commands, options, their values, and kinds of files."""

from fnmatch import fnmatchcase

from pipedream.core.errors import PlanError

RETIRED = {
    "* --snapshot-every": "--checkpoint-every auto saves as often as costs 2% of the time",
    "check": "pipedream plan --check PLAN does it, with the profile as the argument",
    "partition": "pipedream layout --ranks N does it",
    "probe --disk": "leave it out; activations are no longer kept on disks",
    "report": "each run folder has its report.html",
    "schedules": "pipedream show lists the methods",
    "sweep --plot": "leave it out, or write the table (--csv FILE)",
    "plan --batch": "profiles have a minibatch size; for a graph.txt, benchmarks/paper_tables/graph_txt.py takes it",
    "plan --cost-model": "leave it out; the original PipeDream's planner is in the sources, in benchmarks/paper_tables",
    "plan --output=*.txt": "name a JSON file; it lists the layers of each stage",
    "reading a graph.txt *": "in the sources, python benchmarks/paper_tables/graph_txt.py FILE -o PROFILE converts it",
}
"""Pattern of a name -> what to do instead.

A name is a COMMAND, 'COMMAND --OPTION', 'COMMAND --OPTION=VALUE', or 'reading a KIND (FILE)'.
"""


def refuse_retired(name: str) -> None:
    """Raises a PlanError if the table has the name."""
    for pattern, instead in RETIRED.items():
        if fnmatchcase(name, pattern):
            raise PlanError(f"{name} is retired; {instead}")
