"""Predicted bytes of a worker against its allocator's and the kernel's; the largest models; bubbles. See README.md."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import bubble
import largest
import scaffold
from scatter import Pair, scatter_svg

import pipedream as pd
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.units import format_bytes


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        malloc: False leaves glibc's allocator as it is.
    """

    replicas: tuple[int, ...]
    schedule: str = "pipedream"
    optimizer: str = "sgd"
    microbatches: int | None = None
    recompute: bool = False
    malloc: bool = True

    def __str__(self) -> str:
        split = f", m = {self.microbatches}" if self.microbatches else ""
        more = (", recompute" if self.recompute else "") + ("" if self.malloc else ", malloc as it is")
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
    live_bytes: int
    rise_bytes: int
    resident_bytes: int

    @property
    def live_off(self) -> float:
        """Share by which the prediction is above the live bytes."""
        return self.predicted_bytes / self.live_bytes - 1

    @property
    def rise_off(self) -> float:
        """Share by which the predicted rise is above the resident one."""
        return self.rise_bytes / self.resident_bytes - 1

    def __str__(self) -> str:
        sizes = (self.predicted_bytes, self.live_bytes, self.rise_bytes, self.resident_bytes)
        predicted, live, rise, resident = (f"{size / 1e6:.0f} MB" for size in sizes)
        offs = [f"{off:+.1%}" for off in (self.live_off, self.rise_off)]
        return scaffold.format_row((self.variant, self.stage, predicted, live, offs[0], rise, resident, offs[1]))


VARIANTS = (
    Variant((1, 1, 1)),
    Variant((1, 1, 1), recompute=True),
    Variant((1, 1, 1), optimizer="adamw"),
    Variant((1, 1, 1), "1f1b", "adamw", 4),
    Variant((1, 1, 1), "1f1b", "sgd", 4),
    Variant((1, 1, 1), "pipedream_2bw", "sgd", 4),
    Variant((1, 1, 1), "pipedream_2bw", "adamw", 4, recompute=True),
    Variant((2, 1)),
    Variant((2, 1), optimizer="adamw", recompute=True),
    Variant((2,), optimizer="adamw"),
    Variant((1, 1, 1), malloc=False),
)


def main() -> None:
    parser = scaffold.make_parser(__doc__)
    parser.add_argument("--only", choices=("bytes", "largest", "bubble"))
    parser.add_argument("--size", choices=("test", "full"), default="full", help="test: that it runs")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--plot", type=Path, help="file for a picture")
    parser.add_argument("--workers", type=int, nargs="+", help="of the largest models; by default 1, 2 and 4")
    sections = {"bytes": _compare_bytes, "largest": _find_largest, "bubble": _compare_bubbles}
    scaffold.print_sections(sections, parser.parse_args())


def _find_largest(options: argparse.Namespace) -> Iterator[str]:
    environment = scaffold.Environment()
    with tempfile.TemporaryDirectory() as folder:
        log = partial(print, file=sys.stderr, flush=True)
        rows = largest.measure(options.size, Path(folder), log, options.workers)
    shape = ", ".join(f"{name} {count}" for name, count in largest.SHAPE.items())
    yield environment.describe(f"{shape} a microbatch, {largest.MICROBATCHES} of them a minibatch") + "\n"
    yield from largest.tables(rows)


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
        ("live", [abs(row.live_off) for row in rows if row.malloc]),
        ("resident rise", [abs(row.rise_off) for row in rows if row.malloc]),
    ):
        yield scaffold.format_row((name, len(offs), f"{statistics.median(offs):.1%}", f"{max(offs):.1%}"))
    if options.plot:
        pairs = [Pair(row.predicted_bytes, row.live_bytes, f"{row.variant}, live", "live", row.malloc) for row in rows]
        pairs += [Pair(row.rise_bytes, row.resident_bytes, row.variant, "resident rise", row.malloc) for row in rows]
        title = "Bytes of a worker, predicted and measured"
        options.plot.write_text(scatter_svg(pairs, title=title, unit="bytes", tolerance=0.1, write=format_bytes))


def _plan(variant: Variant, profile: Profile, blocks: int) -> Plan:
    stages = len(variant.replicas)
    cuts = tuple(1 + s * blocks // stages for s in range(1, stages))
    return pd.plan(
        profile,
        pd.Cluster.flat(sum(variant.replicas)),
        schedule=variant.schedule,
        microbatches=variant.microbatches,
        shape=variant.replicas,
        cuts=cuts,
        recompute="always" if variant.recompute else "never",
    )


def _measure_rows(variant: Variant, profile: Profile, request: dict[str, int], folder: Path) -> Iterator[Row]:
    plan = _plan(variant, profile, request["blocks"])
    plan.save(folder / "plan.json")
    how = {name: getattr(variant, name) for name in ("schedule", "microbatches", "optimizer")}
    job = request | how | {"do": "train", "plan": str(folder / "plan.json")}
    malloc = scaffold.TIGHT_MALLOC if variant.malloc else {}
    for answer in scaffold.run_processes(largest.WORKER, job, plan.workers, malloc):
        peak, stage = plan.stages[answer["stage"]].peak_bytes, answer["stage"]
        sizes = peak, answer["live_bytes"], peak - answer["start_bytes"], answer["resident_rise_bytes"]
        yield Row(str(variant), variant.malloc, stage, *sizes)


if __name__ == "__main__":
    main()
