"""What it saves to start the sums over replicas inside the backward: data parallelism by two workers, behind a link.

    python benchmarks/reduction_overlap/run.py            # some minutes
    python benchmarks/reduction_overlap/run.py --quick    # that it runs, not how fast

Needs two cores and network namespaces; says so where it cannot run. Prints the tables of README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from pipedream.slow_links import slow_network, why_not

RATES = {"no limit": None, "1 gbit/s": 125e6, "400 mbit/s": 50e6}
"""Name -> bytes per second."""

BASE = "pipedream, sums at the update"


def main() -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a small network, one round")
    parser.add_argument("--rounds", type=int, default=5, help="segments of each variant, by turns")
    parser.add_argument("--segment", type=int, default=12, help="minibatches a worker that a segment times")
    parser.add_argument("--rates", nargs="+", choices=list(RATES), help="of the link; all unless given")
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"benchmarks/reduction_overlap cannot run here: {reason}")
        return 0
    asked = {"rounds": options.rounds, "segment": options.segment, "batch": 12, "width": 1.0, "dense": 1024}
    if options.quick:
        asked |= {"rounds": 1, "segment": 3, "batch": 2, "width": 0.25, "dense": 64}
    before, start = os.getloadavg()[0], time.monotonic()
    tables = [_table(name, _measured(RATES[name], asked)) for name in options.rates or RATES]
    print(
        f"- {time.strftime('%Y-%m-%d')}, {(time.monotonic() - start) / 60:.0f} minutes, {asked['rounds']} rounds of "
        f"{asked['segment']} minibatches a worker\n"
        f"- 2 cores of {_processor()}, Linux {platform.release()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}\n"
        f"- load average {before:.2f} before the run, {os.getloadavg()[0]:.2f} at its end\n"
        f"- command: python benchmarks/reduction_overlap/run.py {' '.join(sys.argv[1:])}\n"
    )
    print("\n\n".join(tables))
    return 0


def _measured(bytes_per_s: float | None, asked: dict[str, object]) -> dict[str, list[float]]:
    """Runs the two workers, one core each; returns variant -> seconds per minibatch of a worker, round by round."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    with slow_network((2,), (bytes_per_s,)) as network:
        workers: list[subprocess.Popen[str]] = []
        try:
            for rank, (host, core) in enumerate(zip(network.hosts, cores, strict=True)):
                command = host.inside("taskset", "-c", str(core), sys.executable,
                                      str(Path(__file__).with_name("worker.py")), json.dumps(asked))  # fmt: skip
                variables = network.variables(rank) | {"OMP_NUM_THREADS": "1"}
                output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                workers.append(subprocess.Popen(command, env=os.environ | variables, stdout=output, text=True))
            text = workers[0].communicate()[0]
            if any(statuses := [worker.wait(timeout=60) for worker in workers]):
                raise SystemExit(f"the workers ended with {statuses}")
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                    worker.wait()
    return dict(json.loads(text.splitlines()[-1]))


def _table(name: str, found: dict[str, list[float]]) -> str:
    rows = [f"### {name}", "", "| variant | seconds a minibatch (least to most) | of sums at the update |",
            "| --- | ---: | ---: |"]  # fmt: skip
    for variant, seconds in found.items():
        # Round by round: what disturbs the machine for seconds disturbs both.
        share = statistics.median(mine / base for mine, base in zip(seconds, found[BASE], strict=True))
        rows.append(
            f"| {variant} | {statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f}) | {share:.0%} |"
        )
    return "\n".join(rows)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
