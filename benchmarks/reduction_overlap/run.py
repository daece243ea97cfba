"""What starting the all-reduce during the backward saves: data parallelism on two workers over a slow link."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from pipedream.slow_links import slow_network, why_not

sys.path.append(str(Path(__file__).parents[1]))
import scaffold
from scaffold import compare_rounds, format_range
from worker_processes import worker_processes

RATES = {"no limit": None, "1 gbit/s": 125e6, "400 mbit/s": 50e6}
"""Name -> bytes per second."""

BASE = "pipedream, sums at the update"


def main() -> int:
    """Runs the benchmark; returns the exit status."""
    parser = scaffold.make_parser(__doc__, "a small network, one round")
    parser.add_argument("--rounds", type=int, default=5, help="segments of each variant, by turns")
    parser.add_argument("--segment", type=int, default=12, help="minibatches a worker that a segment times")
    parser.add_argument("--rates", nargs="+", choices=list(RATES), help="of the link; all unless given")
    options = parser.parse_args()
    scaffold.stop_if(why_not(), "reduction_overlap")
    request = {"rounds": options.rounds, "segment": options.segment, "batch": 12, "width": 1.0, "dense": 1024}
    if options.quick:
        request |= {"rounds": 1, "segment": 3, "batch": 2, "width": 0.25, "dense": 64}
    environment = scaffold.Environment()
    tables = [_format_table(name, _measure(RATES[name], request)) for name in options.rates or RATES]
    print(environment.describe(f"{request['rounds']} rounds of {request['segment']} minibatches a worker") + "\n")
    print("\n\n".join(tables))
    return 0


def _measure(bytes_per_s: float | None, request: dict[str, object]) -> dict[str, list[float]]:
    """Runs the two workers, one core each; returns variant -> seconds per minibatch of a worker, round by round."""
    worker = str(Path(__file__).with_name("worker.py"))
    with slow_network((2,), (bytes_per_s,)) as network, worker_processes(network, 2, worker) as workers:
        return dict(workers.ask(request))


def _format_table(name: str, seconds_by_variant: dict[str, list[float]]) -> str:
    rows = []
    for variant, seconds in seconds_by_variant.items():
        share = statistics.median(compare_rounds(seconds, seconds_by_variant[BASE]))
        rows.append((variant, format_range(seconds, "{:.3f}".format), f"{share:.0%}"))
    titles = "variant | seconds a minibatch (least to most) | of sums at the update"
    return f"### {name}\n\n{scaffold.format_table(titles, 'lr', rows)}"


if __name__ == "__main__":
    sys.exit(main())
