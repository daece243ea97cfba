"""Seconds of each layer by the roofline of this machine, beside those that were measured. See README.md."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from statistics import median

import torch
from models import MODELS

import pipedream
from pipedream.core.model.profile import Profile
from pipedream.core.units import format_seconds
from pipedream.profiler import measure_device

sys.path.append(str(Path(__file__).parents[1]))
from scaffold import Environment, format_head, make_parser


def errors(predicted: Profile, measured: Profile) -> list[tuple[str, float, float, float]]:
    """Returns (what, predicted, measured seconds, share of all that was measured) of each forward and backward."""
    whole = measured.forward_s + measured.backward_s
    rows = []
    for layer, a, b in zip(measured.graph.layers, predicted.layers, measured.layers, strict=True):
        for way, guess, seconds in (
            ("forward", a.forward_s, b.forward_s),
            ("backward", a.backward_s, b.backward_s),
        ):
            rows.append((f"{layer.name} {layer.kind} {way}", guess, seconds, seconds / whole))
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=15, help="behind each median")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", action="store_true", help="print each layer too")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of the processor, where others work on it too")
    options = parser.parse_args()
    if options.cpu_time:
        time.perf_counter = time.process_time
    torch.set_num_threads(options.threads)
    environment = Environment()
    device = measure_device()
    print(f"{device}\n")
    titles = "model | predicted | measured | predicted / measured | layers of more than 2%: median factor, worst"
    print(format_head(titles, "lr"))
    details = []
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model, sample = make()
        measured = pipedream.profile(model, sample, runs=options.runs)
        predicted = pipedream.profile(model, sample, device="meta", as_device=device)
        rows = errors(predicted, measured)
        guess, seconds = (p.forward_s + p.backward_s for p in (predicted, measured))
        factors = [math.exp(abs(math.log(a / b))) for _, a, b, share in rows if share > 0.02 and a > 0]
        print(
            f"| {name} | {format_seconds(guess)} | {format_seconds(seconds)} | {guess / seconds:.2f} | "
            f"{median(factors):.2f}, {max(factors):.2f} |"
        )
        details.append((name, rows))
    for name, rows in details if options.layers else ():
        print(f"\n{name}\n")
        for what, guess, seconds, share in rows:
            if share > 0.005:
                factor = f"{guess / seconds:.2f}" if guess else "-"
                print(f"    {what:32} {format_seconds(guess):>9} {format_seconds(seconds):>9} {share:6.1%} {factor:>6}")
    print("\n" + environment.describe(f"{options.threads} thread(s)"))


if __name__ == "__main__":
    main()
