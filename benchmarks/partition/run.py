"""Tofu's partition beside its baselines: predicted and real seconds of a step, seconds of search."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from models import PUBLISHED, TIMED, Model

from pipedream import partition
from pipedream.slow_links import slow_network, why_not

sys.path.append(str(Path(__file__).parents[1]))
import scaffold
from worker_processes import Disturbance, Workers, worker_processes

SEARCH_S = {"WResNet-152, widened 10 times": 8.3, "RNN, 10 layers, 20 time steps, 4096 units": 66.6}
"""Published, on 8 ranks (EuroSys 2019, section 7)."""

SLOW_METHODS = ("recursive", "data", "all-row", "model")
"""Whose steps are timed."""

RATE_BYTES_PER_S = 25e6
LINK_BYTES = (400_000, 2_400_000)
"""Sizes of the exchanges by which a link is measured; both are far larger than what a link sends at once."""


def main() -> None:
    sections = {"search": _ask_search, "seconds": _ask_seconds}
    parser = scaffold.make_parser(__doc__, "few steps, few models")
    parser.add_argument("--only", choices=sections)
    parser.add_argument("--rounds", type=int, default=7, help="steps that are timed")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to wait for other processes to end")
    options = scaffold.parse_quick(parser, rounds=2, patience=0.0)
    torch.set_num_threads(1)
    environment = scaffold.Environment()
    scaffold.print_sections(sections, options)
    print("\n" + environment.describe())


def _choose_models(models: dict[str, Model], options: argparse.Namespace) -> Iterator[tuple[str, Model]]:
    yield from list(models.items())[: 1 if options.quick else None]


def _ask_search(options: argparse.Namespace) -> Iterator[str]:
    yield scaffold.format_head("search on 8 ranks | operators | published | measured, recursive | data | tracing", "lr")
    for name, model in _choose_models(PUBLISHED, options):
        began = time.perf_counter()
        operators = model.traced("meta", updates=True)[2].operators
        traced_s = time.perf_counter() - began

        def time_search(method: str, operators: Any = operators) -> float:
            began = time.perf_counter()
            partition(operators, 8, method, batch="x0")
            return time.perf_counter() - began

        seconds_by_method = scaffold.collect_rounds(time_search, ("recursive", "data"), 1 if options.quick else 3)
        cells = (scaffold.format_range(seconds, "{:.1f} s".format) for seconds in seconds_by_method.values())
        yield scaffold.format_row(
            (name, f"{len(operators.steps):,}", f"{SEARCH_S[name]} s", *cells, f"{traced_s:.0f} s")
        )
    yield ""


def _ask_seconds(options: argparse.Namespace) -> Iterator[str]:
    if (reason := why_not()) is not None:
        yield f"The seconds of a step cannot be measured here: {reason}"
        return
    cores, errors = len(os.sched_getaffinity(0)), []
    titles = "model | ranks | method | exchanges | bytes sent | alone | exchanging | predicted | measured | error"
    yield scaffold.format_head(f"{titles} | of recursive | others", "lrlr")
    for count in (2, 4):
        with (
            slow_network((count,), (RATE_BYTES_PER_S,)) as network,
            worker_processes(network, count, str(Path(__file__).with_name("worker.py"))) as workers,
        ):
            link = _link(workers)
            print(f"{count} ranks: {link[0] * 1e-6:.2f} MB/s, latency {link[1] * 1e3:.2f} ms", file=sys.stderr)
            for name, _ in _choose_models(TIMED, options):
                least = 0.0
                for method in SLOW_METHODS:
                    answer, others = _ask_least_disturbed(
                        workers, options, {"model": name, "method": method, "link": link}
                    )
                    alone_s = statistics.median(answer["alone_s"]) * max(1.0, count / cores)
                    measured_s = statistics.median(answer["together_s"])
                    predicted_s = alone_s + answer["exchange_s"]
                    errors.append(predicted_s / measured_s - 1)
                    least = least or measured_s
                    sent = f"{answer['sent_bytes']:,}"
                    if answer["sent_bytes"] != answer["predicted_bytes"]:
                        sent += f" (predicted {answer['predicted_bytes']:,})"
                    expected = (f"{s * 1e3:.0f} ms" for s in (alone_s, answer["exchange_s"], predicted_s))
                    low, high = (f"{pick(answer['together_s']) * 1e3:.0f}" for pick in (min, max))
                    shares = f"{errors[-1]:+.1%}", f"{measured_s / least:.2f}", f"{others:.0%}"
                    measured = f"{measured_s * 1e3:.0f} ms ({low} to {high})"
                    cells = (name, count, method, answer["exchanges"], sent, *expected, measured, *shares)
                    yield scaffold.format_row(cells)
    sizes = sorted(map(abs, errors))
    yield f"\nMedian error {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}, of {len(sizes)} steps."


def _link(workers: Workers) -> tuple[float, float]:
    """Returns bytes per second and latency of an exchange between all ranks."""
    small_s, large_s = workers.ask({"do": "link", "sizes": LINK_BYTES, "times": 20})
    bytes_per_s = (LINK_BYTES[1] - LINK_BYTES[0]) / (large_s - small_s)
    return bytes_per_s, max(0.0, small_s - LINK_BYTES[0] / bytes_per_s)


def _ask_least_disturbed(
    workers: Workers, options: argparse.Namespace, case: dict[str, Any]
) -> tuple[dict[str, Any], float]:
    """Returns the least disturbed of several answers, and the share of the cores that others took meanwhile."""
    until = time.monotonic() + options.patience
    attempts: list[tuple[float, dict[str, Any]]] = []
    while not attempts or (min(share for share, _ in attempts) > 0.05 and time.monotonic() < until):
        disturbance = Disturbance(workers.cpu_s)
        answer = workers.ask({"do": "step", "rounds": options.rounds, **case})
        attempts.append((disturbance.share(), answer))
    share, answer = min(attempts, key=lambda attempt: attempt[0])
    return answer, share


if __name__ == "__main__":
    main()
