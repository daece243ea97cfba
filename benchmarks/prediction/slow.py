"""What `pipedream train` predicts of itself over slow links, and measures: a GPT in two stages. See README.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pipedream as pd
from pipedream import Plan, Recipe, metrics
from pipedream.core.units import format_seconds, parse_link
from pipedream.slow_links import Network, slow_network, why_not

FOLDER = Path(__file__).parent
sys.path += [str(FOLDER.parent), str(FOLDER.parents[1] / "examples")]
MESSAGES = ("full", "int8")
BEFORE_MS = {"25mbit/s": 148.0, "100mbit/s": 26.0, "1gbit/s": 3.1}
"""Link -> what a megabyte cost each end when seconds that no wait explained were counted."""


def recipe(seed: int = 0) -> Recipe:
    """Returns the example's GPT with 3.3 million weights; a message has 1 MB."""
    import char_gpt

    char_gpt.WIDTH = 256
    return replace(char_gpt.recipe(seed), test=None, metrics={}, target=None)


def _train(network: Network, port: int, before_s_per_byte: float, *options: str) -> list[str]:
    """Trains on both hosts; returns cells of its row."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        fixed = ("--config", "1-1", "--checkpoint-every", "0", "--out", folder)
        command = (sys.executable, "-m", "pipedream", "train", str(FOLDER / "slow.py"), *fixed, *options)
        workers = []
        for rank, host in enumerate(network.hosts):
            variables = os.environ | network.variables(rank, port=port)
            worker = subprocess.Popen(host.inside(*command), env=variables, stdout=subprocess.DEVNULL)
            workers.append(running.enter_context(worker))
        if any([worker.wait() for worker in workers]):
            raise SystemExit("a worker failed")
        plan, summary = Plan.load(Path(folder, "plan.json")), json.loads(Path(folder, "summary.json").read_text())
    seconds = [
        _predict_s(plan, summary["slowness"] or 1.0, s_per_byte)
        for s_per_byte in (before_s_per_byte, plan.runtime.message_s_per_byte)
    ]
    seconds.append(plan.batch / summary["throughput"]["measured_per_s"])
    costs = [f"{1e9 * s_per_byte:.1f} ms" for s_per_byte in (before_s_per_byte, plan.runtime.message_s_per_byte)]
    return [*costs, *map(format_seconds, seconds), f"{1 - 1 / (summary['slowness'] or 1.0):.0%}"]


def _predict_s(plan: Plan, slowness: float, message_s_per_byte: float) -> float:
    """Returns the seconds of a minibatch on cores that are so many times as slow, given the cost of a byte."""
    plan = replace(plan, runtime=replace(plan.runtime, message_s_per_byte=message_s_per_byte))
    timeline = pd.simulate(plan, minibatches=60, slow=dict.fromkeys(range(plan.workers), slowness))
    return 1 / metrics.steady_metrics(timeline, skip=8).throughput_per_s


def main() -> None:
    """Prints a table. Its options: the links, what a byte cost before, and the minibatches of a run."""
    from scaffold import Environment, format_table, make_parser, stop_if

    parser = make_parser(__doc__)
    parser.add_argument("--links", nargs="+", type=parse_link, default=[*map(parse_link, BEFORE_MS)])
    parser.add_argument(
        "--before", nargs="+", type=float, default=[*BEFORE_MS.values()], help="ms per MB, of each link"
    )
    parser.add_argument("--minibatches", default="40")
    options = parser.parse_args()
    stop_if(why_not(), "prediction")
    place, rows = Environment(), []
    with slow_network((2,), (None,)) as network:
        for link, before_ms in zip(options.links, options.before, strict=True):
            network.limit(link.bytes_per_s, latency_s=link.latency_s)
            for messages in MESSAGES:
                chosen = ("--messages", messages, "--minibatches", options.minibatches)
                row = _train(network, 29500 + len(rows), before_ms * 1e-9, *chosen)
                rows.append((str(link), messages, *row))
                print(*rows[-1], file=sys.stderr, flush=True)
    titles = "link | messages | per MB before | now | predicted before | predicted now | measured | others"
    print(format_table(titles, "llr", rows))
    print(place.describe())


if __name__ == "__main__":
    main()
