"""Meshes beside torch's own parallel modules: seconds, bytes, bytes of a stash, forms of experts. See README.md."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import scaffold

WORKER = Path(__file__).with_name("worker.py")
SHAPE = {"width": 512, "blocks": 2, "batch": 8, "length": 256}
SMALL = {"width": 128, "blocks": 2, "batch": 4, "length": 16}
EXPERTS = {"groups": 4, "tokens": 1024, "d_model": 512, "d_ff": 2048, "experts": 8}
"""Tokens are those of a group."""


@dataclass(frozen=True)
class Row:
    """One figure: what the paper says of it, what follows for this case, what was found."""

    figure: str
    paper: str
    predicted: str
    measured: str
    met: bool | None = None

    def __str__(self) -> str:
        end = "" if self.met is None else " met" if self.met else " **not met**"
        return scaffold.format_row((self.figure, self.paper, self.predicted, f"{self.measured}{end}"))


def main() -> None:
    questions = {"model": _ask_model, "data": _ask_data, "stash": _ask_stash, "experts": _ask_experts}
    parser = scaffold.make_parser(__doc__, "one round of a small model")
    parser.add_argument("--only", choices=questions)
    parser.set_defaults(rounds=5, minibatches=2)  # segments of each variant, in turns; minibatches of a segment
    options = scaffold.parse_quick(parser, rounds=1, minibatches=1)
    scaffold.stop_if(None if len(os.sched_getaffinity(0)) > 1 else "it needs two cores", "meshes")
    environment = scaffold.Environment()
    print(scaffold.format_head("figure | paper | predicted | measured"))
    scaffold.print_sections(questions, options)
    print("\n" + environment.describe(f"{options.rounds} rounds of {options.minibatches} minibatches"))


def _ask_model(options: argparse.Namespace) -> Iterator[Row]:
    predicted = f"{4 * SHAPE['blocks']} all-reduces"
    yield from _compare("model", "tensor parallelism, of `parallelize_module`", 1.05,
                        "4 all-reduces a block (Megatron-LM, 3)", predicted, options)  # fmt: skip
    yield from _compare_peaks("model", None, options)


def _ask_data(options: argparse.Namespace) -> Iterator[Row]:
    units = SHAPE["blocks"] + 1  # the root has the rest
    predicted = f"{2 * units} all-gathers, {units} reduce-scatters, if one is made for each block"
    yield from _compare("data", "`shard_weights`, of `fully_shard`", 1.10,
                        "2 gathers, 1 scatter a weight (ZeRO, 7.2.2)", predicted, options)  # fmt: skip
    yield from _compare_peaks("data", 1.05, options)


def _compare(
    question: str, what: str, bound: float, paper: str, predicted: str, options: argparse.Namespace
) -> Iterator[Row]:
    """Yields our seconds over torch's, and the collectives of both."""
    request = {"do": "times", "question": question, "rounds": options.rounds, "minibatches": options.minibatches}
    answer = scaffold.run_processes(WORKER, request | {"shape": SMALL if options.quick else SHAPE}, 2)
    for at, kind in enumerate(("CPU seconds", "wall seconds")):
        ours, others = ([seconds[at] for seconds in answer["rounds"][name]] for name in ("ours", "torch"))
        shares, middle = scaffold.compare_rounds(ours, others), statistics.median(ours)
        text = f"{scaffold.format_quartiles(shares)}; ours {middle * 1e3:.0f} ms"
        met = statistics.median(shares) <= bound if at == 0 else None
        yield Row(f"{kind} of {what}", "", f"at most {bound:.2f}" if at == 0 else "", text, met)
    counts = {name: sorted(answer["collectives"][name].items()) for name in ("ours", "torch")}
    words = {name: ", ".join(f"{count} {kind}" for kind, count in rows) or "none" for name, rows in counts.items()}
    yield Row("collectives of a minibatch", paper, predicted, f"ours: {words['ours']}; torch: {words['torch']}")


def _compare_peaks(question: str, bound: float | None, options: argparse.Namespace) -> Iterator[Row]:
    request = {"do": "memory", "question": question, "shape": SMALL if options.quick else SHAPE}
    peaks: dict[str, list[float]] = {"ours": [], "torch": []}
    for _ in range(1 if options.quick else 2):
        for name, trainer_peaks in peaks.items():
            trainer_peaks.append(scaffold.run_processes(WORKER, request | {"trainer": name}, 2, scaffold.TIGHT_MALLOC))
    ours, torchs = (statistics.median(peaks[name]) for name in ("ours", "torch"))
    spread = max(max(trainer_peaks) / min(trainer_peaks) for trainer_peaks in peaks.values()) - 1
    sizes = f"ours {scaffold.format_mib(ours)}, torch's {scaffold.format_mib(torchs)}"
    text = f"{ours / torchs:.2f}; {sizes}, spread {spread:.1%}"
    met = None if bound is None else ours <= bound * torchs
    yield Row("peak of resident bytes, of torch's", "", "" if bound is None else f"at most {bound:.2f}", text, met)


def _ask_stash(options: argparse.Namespace) -> Iterator[Row]:
    def stashed(mesh: str, ranks: int, rules: str = "", shard_weights: str = "") -> int:
        request = {"do": "stash", "mesh": mesh, "rules": rules, "shard_weights": shard_weights, "shape": SMALL}
        return int(scaffold.run_processes(WORKER, request, ranks))

    single_bytes = stashed("-/-", 2)
    for mesh, size, rules, shard_weights in (
        ("model:2/-", 2, "heads:model, d_ff:model", ""),
        ("data:2/-", 2, "batch:data", "data"),
        ("data:4/-", 4, "batch:data", "data"),
    ):
        bytes_ = stashed(mesh, size + 1, rules, shard_weights)
        how = f"cut by `{rules}`" if not shard_weights else "sharded"
        share = bytes_ / single_bytes
        yield Row(
            f"stash of a rank of {size}, {how}, of one rank's",
            "weights over n (ZeRO, 5.3)" if shard_weights else "weights over n (Mesh-TensorFlow, 4)",
            f"{1 / size:.3f}, within 10%",
            f"{share:.3f}; {bytes_:,} of {single_bytes:,} bytes",
            abs(share * size - 1) <= 0.1,
        )


def _ask_experts(options: argparse.Namespace) -> Iterator[Row]:
    request = {"do": "experts", "rounds": options.rounds, "minibatches": 1} | EXPERTS
    rounds = scaffold.run_processes(WORKER, request, 1)["rounds"]
    flops = 1 + EXPERTS["tokens"] / EXPERTS["d_ff"]
    for at, kind in enumerate(("CPU second", "second")):
        dense, ours = ([seconds[at] for seconds in rounds[form]] for form in ("dense", "sorted"))
        speedups = scaffold.compare_rounds(dense, ours)
        tokens = EXPERTS["groups"] * EXPERTS["tokens"] / statistics.median(ours)
        yield Row(
            f"tokens per {kind} of sorted experts, of the dense form's",
            "dense: GShard's einsums (2.2)",
            f"at least 1.8 ({flops:.2f} by the products if all places are filled)" if at == 0 else "",
            f"{scaffold.format_quartiles(speedups)}; {tokens:,.0f} tokens",
            statistics.median(speedups) >= 1.8 if at == 0 else None,
        )


if __name__ == "__main__":
    main()
