"""A first look at speed: two workers behind a link of three rates; all methods by turns in one run.

    python benchmarks/first_look/run.py            # about fifteen minutes
    python benchmarks/first_look/run.py --quick    # a minute, tiny sizes: that it runs, not how fast

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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from model import Sizes

import pipedream as pd
from pipedream import Plan, Profile, metrics, planner, schedules
from pipedream.slow_links import slow_network, why_not

__all__ = ["main"]

RATES = {"no limit": None, "400 mbit/s": 50e6, "100 mbit/s": 12.5e6}
"""Name -> bytes per second."""

PIPEDREAM = {
    "pipedream, depth noam": ("pipedream", "noam"),
    "pipedream, depth full": ("pipedream", "full"),
    "pipedream, 2BW, depth full": ("pipedream_2bw", "full"),
    "pipedream, 1F1B flush": ("1f1b", "noam"),
    "pipedream, 1F1B flush, depth full": ("1f1b", "full"),
    "torch, Schedule1F1B": ("1f1b", "noam"),
}
"""Variants that the simulator can predict -> schedule and depth."""


def main() -> int:
    """Runs the benchmark; returns the exit status."""
    options = _options()
    if (reason := why_not()) is not None:
        print(f"benchmarks/first_look cannot run here: {reason}")
        return 0
    sizes = Sizes(batch=4, microbatches=4, width=0.25, dense=64) if options.quick else Sizes()
    rounds, segment = (1, 8) if options.quick else (options.rounds, options.segment)
    before = os.getloadavg()[0]
    start = time.monotonic()
    tables = []
    for name in options.rates or RATES:
        print(name, file=sys.stderr, flush=True)
        asked = {"sizes": asdict(sizes), "bytes_per_s": RATES[name], "rounds": rounds, "segment": segment,
                 "only": options.only, "patience_s": 0 if options.quick else options.patience}  # fmt: skip
        tables.append(_table(name, _measured(asked), sizes))
    print(_environment(before, rounds, segment, sizes, time.monotonic() - start))
    print("\n\n".join(tables))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round")
    parser.add_argument("--rounds", type=int, default=7, help="segments of each variant, by turns")
    parser.add_argument("--segment", type=int, default=24, help="microbatches that a segment times")
    parser.add_argument("--patience", type=float, default=60, help="seconds for which a segment disturbed by other "
                        "processes is repeated")  # fmt: skip
    parser.add_argument("--rates", nargs="+", choices=list(RATES), help="rates of the link; all unless given")
    parser.add_argument("--only", nargs="+", help="names of variants; all unless given")
    return parser.parse_args()


def _measured(asked: dict[str, Any]) -> dict[str, Any]:
    """Runs the two workers, one core each, and returns what rank 0 printed."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    with slow_network((2,), (asked["bytes_per_s"],)) as network:
        workers = []
        try:
            for rank, (host, core) in enumerate(zip(network.hosts, cores, strict=True)):
                command = host.inside("taskset", "-c", str(core), sys.executable,
                                      str(Path(__file__).with_name("worker.py")), json.dumps(asked))  # fmt: skip
                torch_variables = network.variables(rank) | {"OMP_NUM_THREADS": "1"}
                output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                workers.append(subprocess.Popen(command, env=os.environ | torch_variables, stdout=output, text=True))
            text = workers[0].communicate()[0]
            statuses = [worker.wait(timeout=60) for worker in workers]
            if any(statuses):
                raise SystemExit(f"the workers ended with {statuses}")
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                    worker.wait()
    return dict(json.loads(text.splitlines()[-1]))


def _predicted(found: dict[str, Any], sizes: Sizes) -> dict[str, float]:
    """Returns variant -> samples per second by simulation of the measured profile over the set rate."""
    # The profile is of one microbatch.
    plan = replace(Plan.from_json(found["plan"], "the worker's plan"), unit="microbatch")
    m = sizes.microbatches
    rates = {
        "solo": sizes.batch / max(stage.compute_s for stage in plan.stages),
        "solo, an update a minibatch": sizes.batch
        / max(stage.forward_s + stage.backward_s + stage.update_s / m for stage in plan.stages),
    }
    for name, (method, depth) in PIPEDREAM.items():
        splits = method != "pipedream"
        schedule = schedules.build(method, plan.with_depth(depth), m if splits else None)
        timeline = pd.simulate(schedule.plan, schedule=schedule, minibatches=12 * max(1, 4 // schedule.microbatches))
        rates[name] = metrics.steady_metrics(timeline, skip=schedule.microbatches * 2).throughput_per_s * sizes.batch
        if schedule.flushes:  # whole minibatches: the flush is part of the steady state
            rates[name] = timeline.microbatches / timeline.makespan_s * sizes.batch
    whole = planner.single_stage_plan(Profile.from_json(found["profile"], "the profile"), plan.cluster, replicas=2)
    compute, update, sync = (
        whole.stages[0].forward_s + whole.stages[0].backward_s, whole.stages[0].update_s, whole.sync_s[0]
    )  # fmt: skip
    for name, each in (("torch, DDP", 1), ("torch, DDP, accumulating", max(1, m // 2))):
        rates[name] = 2 * each * sizes.batch / (each * compute + sync + update)
    return rates


def _paper(sizes: Sizes) -> dict[str, float]:
    """Returns variant -> share of its solo rate that the method's paper claims, where it claims one."""
    flush = sizes.microbatches / (sizes.microbatches + 1)
    return {
        "pipedream, depth noam": 1.0,
        "pipedream, depth full": 1.0,
        "pipedream, 2BW, depth full": 1.0,
        "pipedream, 1F1B flush": flush,
        "pipedream, 1F1B flush, depth full": flush,
        "torch, Schedule1F1B": flush,
    }


def _solo_of(variant: str) -> str:
    """Returns the solo variant that makes as many updates."""
    each = variant in ("solo", "pipedream, depth noam", "pipedream, depth full", "torch, DDP")
    return "solo" if each else "solo, an update a minibatch"


def _table(name: str, found: dict[str, Any], sizes: Sizes) -> str:
    predicted, paper, rates = _predicted(found, sizes), _paper(sizes), found["rates"]
    plan = Plan.from_json(found["plan"], "the worker's plan")
    slot_s = sizes.batch / statistics.median(rates["solo"]) if "solo" in rates else plan.slowest_stage_s
    depths = {depth: tuple(counts) for depth, counts in found["depths"].items()}
    rows = [
        f"### {name}",
        "",
        f"Message {plan.stages[0].output_bytes / 1e6:.2f} MB, measured {found['message_s'] * 1e3:.1f} ms one way (the "
        f"rate predicts {plan.transfers_s[0] * 1e3:.1f} ms); slot of the slowest stage alone {slot_s * 1e3:.1f} ms; a "
        f"message takes {found['message_s'] / slot_s:.2f} slots. In flight: noam {depths['noam']}, full "
        f"{depths['full']}.",
        "",
        "| variant | paper | predicted | measured (quartiles) | samples/s (quartiles; best) | others' share |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for variant, values in rates.items():
        base = rates.get(_solo_of(variant), values)
        # Round by round: what disturbs the machine for seconds disturbs both.
        shares = _quartiles([rate / solo for rate, solo in zip(values, base, strict=True)])
        claim = f"{paper[variant]:.0%}" if variant in paper else "-"
        low, middle, high = _quartiles(values)
        rows.append(
            f"| {variant} | {claim} | {predicted[variant] / predicted[_solo_of(variant)]:.0%} | {shares[1]:.0%} "
            f"({shares[0]:.0%} to {shares[2]:.0%}) | {middle:.0f} ({low:.0f} to {high:.0f}; {max(values):.0f}) | "
            f"{statistics.median(found['others'][variant]):.0%} |"
        )
    rows += ["", *_answers(rates, found["message_s"] / slot_s)]
    return "\n".join(rows)


def _answers(rates: dict[str, list[float]], message_slots: float) -> list[str]:
    """Returns what the two promises of this benchmark came to at one rate of the link."""
    full, solo = rates.get("pipedream, depth full"), rates.get("solo")
    lines = []
    if full and solo:
        share = statistics.median(rate / alone for rate, alone in zip(full, solo, strict=True))
        asked = "at least 97% is asked" if message_slots < 0.5 else "nothing is asked where a message takes so long"
        lines.append(f"PipeDream at depth full: {share:.0%} of the slowest stage's solo rate ({asked}).")
    for name in ("pipedream, 1F1B flush", "pipedream, 1F1B flush, depth full"):
        ours, theirs = rates.get(name), rates.get("torch, Schedule1F1B")
        if ours and theirs:
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            lines.append(f"{name}: {ratio:.2f} times the rate of torch's.")
    return lines


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _environment(load: float, rounds: int, segment: int, sizes: Sizes, seconds: float) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor()
    return "\n".join(
        (
            f"- {time.strftime('%Y-%m-%d')}, {seconds / 60:.0f} minutes, {rounds} rounds of {segment} microbatches",
            f"- {os.cpu_count()} cores of {cpu}, Linux {platform.release()}, Python {platform.python_version()}, torch "
            f"{torch.__version__}",
            f"- load average {load:.2f} before the run, {os.getloadavg()[0]:.2f} at its end",
            f"- {sizes}",
            f"- command: python {' '.join(sys.argv)}",
            "",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
