"""Predicted bytes of a worker against its allocator's and the kernel's; the largest models; bubbles. See README.md."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import bubble
import largest
import scaffold
from scatter import Pair, scatter_svg

from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.units import format_bytes, format_rate
from pipedream.planner import manual_plan
from pipedream.planner.tables.search_space import SearchSpace, apply_depth
from pipedream.runtime.stage.offload import measure_core_time
from pipedream.runtime.stage.offload_place import measure_disk
from pipedream.workflows.methods import versions_of

_SLOTS = 8
"""Microbatches of a minibatch whose time is measured."""


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        offload: share of the activations that wait on disk.
        malloc: False leaves glibc's allocator as it is.
    """

    replicas: tuple[int, ...]
    schedule: str = "pipedream"
    optimizer: str = "sgd"
    microbatches: int | None = None
    recompute: bool = False
    offload: float = 0.0
    malloc: bool = True

    def __str__(self) -> str:
        split = f", m = {self.microbatches}" if self.microbatches else ""
        more = (", recompute" if self.recompute else "") + ("" if self.malloc else ", malloc as it is")
        more += f", {self.offload:.0%} of the activations on disk" if self.offload else ""
        return f"{'-'.join(map(str, self.replicas))} {self.schedule}{split}, {self.optimizer}{more}"


@dataclass(frozen=True)
class Row:
    """One worker: predicted at most, live at most, predicted beyond the weights, resident beyond the start.

    Live bytes are None if a thread of the runtime allocates some, which are not seen.
    """

    variant: str
    malloc: bool
    stage: int
    predicted_bytes: int
    live_bytes: int | None
    rise_bytes: int
    resident_bytes: int

    @property
    def live_off(self) -> float | None:
        """Share by which the prediction is above the live bytes."""
        return None if self.live_bytes is None else self.predicted_bytes / self.live_bytes - 1

    @property
    def rise_off(self) -> float:
        """Share by which the predicted rise is above the resident one."""
        return self.rise_bytes / self.resident_bytes - 1

    def __str__(self) -> str:
        sizes = (self.predicted_bytes, self.live_bytes, self.rise_bytes, self.resident_bytes)
        predicted, live, rise, resident = ("-" if size is None else f"{size / 1e6:.0f} MB" for size in sizes)
        offs = ["-" if off is None else f"{off:+.1%}" for off in (self.live_off, self.rise_off)]
        return scaffold.format_row((self.variant, self.stage, predicted, live, offs[0], rise, resident, offs[1]))


VARIANTS = (
    Variant((1, 1, 1)),
    Variant((1, 1, 1), recompute=True),
    Variant((1, 1, 1), optimizer="adamw"),
    Variant((1, 1, 1), "1f1b", "adamw", 4),
    Variant((1, 1, 1), "1f1b", "sgd", 4),
    Variant((1, 1, 1), "1f1b", "sgd", 4, offload=0.5),
    Variant((1, 1, 1), "pipedream_2bw", "sgd", 4),
    Variant((1, 1, 1), "pipedream_2bw", "adamw", 4, recompute=True),
    Variant((2, 1)),
    Variant((2, 1), optimizer="adamw", recompute=True),
    Variant((2,), optimizer="adamw"),
    Variant((1, 1, 1), malloc=False),
)


def main() -> None:
    parser = scaffold.make_parser(__doc__)
    parser.add_argument("--only", choices=("bytes", "slots", "largest", "bubble"))
    parser.add_argument("--size", choices=("test", "full"), default="full", help="test: that it runs")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--plot", type=Path, help="file for a picture")
    parser.add_argument("--workers", type=int, nargs="+", help="of the largest models; by default 1, 2 and 4")
    sections = {"bytes": _compare_bytes, "slots": _compare_slots, "largest": _find_largest, "bubble": _compare_bubbles}
    scaffold.print_sections(sections, parser.parse_args())


def _find_largest(options: argparse.Namespace) -> Iterator[str]:
    environment = scaffold.Environment()
    with tempfile.TemporaryDirectory() as folder:
        log = partial(print, file=sys.stderr, flush=True)
        rows = largest.measure(options.size, Path(folder), log, options.workers)
    shape = ", ".join(f"{name} {count}" for name, count in largest.SHAPE.items())
    yield environment.describe(f"{shape} a microbatch, {largest.MICROBATCHES} of them a minibatch") + "\n"
    yield from largest.tables(rows)


def _compare_slots(options: argparse.Namespace) -> Iterator[str]:
    """Compares minibatches of 1F1B with half of the activations on disk and with none, on two workers."""
    request: dict[str, Any] = {"width": 512, "blocks": 4, "batch": 512, "optimizer": "sgd"}
    environment, rounds = scaffold.Environment(), 1 if options.size == "test" else 7
    with tempfile.TemporaryDirectory() as folder:
        profile, rate = largest.measure_profile(request, Path(folder, "profile.json")), measure_disk(folder)
        core_s_per_byte = measure_core_time(folder)
        plans = {}
        for name, share in (("in memory", 0.0), ("half on disk", 0.5)):
            variant = Variant((1, 1), "1f1b", microbatches=_SLOTS, offload=share)
            plan = replace(_plan(variant, profile, 4, Path(folder)), schedule="1f1b", microbatches=_SLOTS)
            plans[name] = str(Path(folder, f"{share}.json"))
            plan.save(Path(plans[name]))
        request |= {"do": "time", "plans": plans, "rounds": rounds, "minibatches": 4 if rounds == 1 else 20}
        seconds_by_plan = scaffold.run_processes(largest.WORKER, request, 2)
    stage = max(plan.stages, key=lambda stage: stage.activation_bytes)
    passes_s, moved_bytes = stage.split_s(_SLOTS), stage.offload * stage.activation_bytes / _SLOTS
    yield environment.describe(f"{rounds} rounds of {request['minibatches']} minibatches of {_SLOTS} microbatches")
    yield (
        f"- passes of {passes_s[0] * 1e3:.1f} and {passes_s[1] * 1e3:.1f} ms; {format_bytes(moved_bytes)} of each "
        f"microbatch move in {moved_bytes / rate * 1e3:.1f} ms, at {format_rate(rate)}, which takes "
        f"{moved_bytes * core_s_per_byte * 1e3:.1f} ms of each pass\n"
    )
    ratios = scaffold.compare_rounds(seconds_by_plan["half on disk"], seconds_by_plan["in memory"])
    yield scaffold.format_head("seconds of a minibatch | in memory | half on disk | ratio", "lr")
    cells = [scaffold.format_quartiles(seconds_by_plan[name]) for name in plans]
    yield scaffold.format_row(("median (quartiles)", *cells, scaffold.format_quartiles(ratios))) + "\n"


def _compare_bubbles(options: argparse.Namespace) -> Iterator[str]:
    environment, log = scaffold.Environment(), partial(print, file=sys.stderr, flush=True)
    models, dilation = (bubble.MODELS[:1], 0.05) if options.size == "test" else (bubble.MODELS, 0.5)
    yield from bubble.compare_with_paper(models)
    with tempfile.TemporaryDirectory() as folder:
        yield from bubble.measure(models[:3], dilation, Path(folder), log)
    yield environment.describe()


def _compare_bytes(options: argparse.Namespace) -> Iterator[str]:
    request = {"width": options.width, "blocks": 9, "batch": options.batch, "minibatches": 6}
    chosen = VARIANTS
    if options.size == "test":
        request |= {"width": 192, "blocks": 3, "batch": 240}
        chosen = VARIANTS[:2]
    environment = scaffold.Environment()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        profiles = {
            name: largest.measure_profile(request | {"optimizer": name}, Path(folder, f"{name}.json"))
            for name in sorted({v.optimizer for v in chosen})
        }
        for variant in chosen:
            for row in _measure_rows(variant, profiles[variant.optimizer], request, Path(folder)):
                rows.append(row)
                print(row, file=sys.stderr)
    weights = next(iter(profiles.values())).parameter_bytes
    yield environment.describe(f"{request['minibatches']} minibatches of {request['batch']} a variant")
    yield f"- {request['blocks']} blocks of width {request['width']}, {weights / 1e6:.0f} MB of weights\n"
    yield scaffold.format_head("variant | stage | predicted | live | off | predicted rise | resident rise | off", "lr")
    yield from map(str, rows)
    yield "\n" + scaffold.format_head("malloc gives back what is freed | workers | median off | worst off", "lr")
    for name, offs in (
        ("live", [abs(row.live_off) for row in rows if row.malloc and row.live_off is not None]),
        ("resident rise", [abs(row.rise_off) for row in rows if row.malloc]),
    ):
        yield scaffold.format_row((name, len(offs), f"{statistics.median(offs):.1%}", f"{max(offs):.1%}"))
    if options.plot:
        pairs = [
            Pair(row.predicted_bytes, row.live_bytes, f"{row.variant}, live", "live", row.malloc)
            for row in rows
            if row.live_bytes is not None
        ]
        pairs += [Pair(row.rise_bytes, row.resident_bytes, row.variant, "resident rise", row.malloc) for row in rows]
        title = "Bytes of a worker, predicted and measured"
        options.plot.write_text(scatter_svg(pairs, title=title, unit="bytes", tolerance=0.1, write=format_bytes))


def _plan(variant: Variant, profile: Profile, blocks: int, folder: Path) -> Plan:
    stages = len(variant.replicas)
    cuts = tuple(1 + s * blocks // stages for s in range(1, stages))
    how = {"versions": versions_of(variant.schedule), "microbatches": variant.microbatches or 1}
    cluster = Cluster.flat(sum(variant.replicas))
    plan = manual_plan(profile, cluster, cuts, variant.replicas, **how)
    ways = {"recompute": variant.recompute, "offload": variant.offload}
    plan = replace(plan, stages=tuple(replace(stage, **ways) for stage in plan.stages))
    plan = replace(plan, activations=f"disk:{folder}" if variant.offload else "")
    return apply_depth(SearchSpace.of(profile, cluster, **how), plan, plan.in_flight)


def _measure_rows(variant: Variant, profile: Profile, request: dict[str, int], folder: Path) -> Iterator[Row]:
    plan = _plan(variant, profile, request["blocks"], folder)
    plan.save(folder / "plan.json")
    how = {name: getattr(variant, name) for name in ("schedule", "microbatches", "optimizer")}
    job = request | how | {"do": "train", "plan": str(folder / "plan.json")}
    malloc = scaffold.TIGHT_MALLOC if variant.malloc else {}
    for answer in scaffold.run_processes(largest.WORKER, job, plan.workers, malloc):
        peak, stage = plan.stages[answer["stage"]].peak_bytes, answer["stage"]
        live_bytes = None if variant.offload else answer["live_bytes"]
        sizes = peak, live_bytes, peak - answer["start_bytes"], answer["resident_rise_bytes"]
        yield Row(str(variant), variant.malloc, stage, *sizes)


if __name__ == "__main__":
    main()
