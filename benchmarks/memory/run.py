"""Predicted bytes of a worker against what its allocator and the kernel saw.

    python benchmarks/memory/run.py            # some minutes, 4 GB
    python benchmarks/memory/run.py --quick    # that it runs, not how true

Prints the table of README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pipedream.api import versions_of
from pipedream.core.cluster import Cluster
from pipedream.core.plan import Plan
from pipedream.core.profile import Profile
from pipedream.planner import by_hand
from pipedream.planner.space import Space

__all__ = ["main"]

TRUE = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Variant:
    """A way to train; `malloc` False leaves glibc's allocator as it is."""

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


VARIANTS = (
    Variant((1, 1, 1)),
    Variant((1, 1, 1), recompute=True),
    Variant((1, 1, 1), optimizer="adamw"),
    Variant((1, 1, 1), "1f1b", "adamw", 4),
    Variant((1, 1, 1), "pipedream_2bw", "sgd", 4),
    Variant((1, 1, 1), "pipedream_2bw", "adamw", 4, recompute=True),
    Variant((2, 1)),
    Variant((2, 1), optimizer="adamw", recompute=True),
    Variant((2,), optimizer="adamw"),
    Variant((1, 1, 1), malloc=False),
)


def main() -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a small model, two variants")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--minibatches", type=int, default=6)
    options = parser.parse_args()
    asked = {name: getattr(options, name) for name in ("width", "blocks", "batch", "minibatches")}
    chosen = VARIANTS
    if options.quick:
        asked |= {"width": 192, "blocks": 3, "batch": 240}
        chosen = VARIANTS[:2]
    before, start = os.getloadavg()[0], time.monotonic()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        profiles = {name: _profile(asked, name, Path(folder)) for name in sorted({v.optimizer for v in chosen})}
        for variant in chosen:
            rows += _row(variant, profiles[variant.optimizer], asked, Path(folder))
            print(rows[-1], file=sys.stderr)
    weights = next(iter(profiles.values())).parameter_bytes
    minutes = (time.monotonic() - start) / 60
    print(
        f"- {time.strftime('%Y-%m-%d')}, {minutes:.0f} minutes, {asked['minibatches']} minibatches of "
        f"{asked['batch']} a variant\n"
        f"- {asked['blocks']} blocks of width {asked['width']}, {weights / 1e6:.0f} MB of weights\n"
        f"- Linux {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"load average {before:.2f} before the run\n"
        f"- command: python benchmarks/memory/run.py {' '.join(sys.argv[1:])}\n\n"
        "| variant | stage | predicted | live | off | predicted rise | resident rise | off |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    print("\n".join(rows))
    return 0


def _profile(asked: dict[str, int], optimizer: str, folder: Path) -> Profile:
    file = folder / f"{optimizer}.json"
    _wait([_start("profile", asked | {"optimizer": optimizer, "file": str(file)}, TRUE)])
    return Profile.load(file)


def _plan(variant: Variant, profile: Profile, blocks: int) -> Plan:
    stages = len(variant.replicas)
    cuts = tuple(1 + s * blocks // stages for s in range(1, stages))
    how = {"versions": versions_of(variant.schedule), "microbatches": variant.microbatches or 1}
    cluster = Cluster.flat(sum(variant.replicas))
    plan = by_hand(profile, cluster, cuts, variant.replicas, **how)
    again = tuple(replace(stage, recompute=variant.recompute) for stage in plan.stages)
    return Space.of(profile, cluster, **how).at_depth(replace(plan, stages=again), plan.in_flight)


def _row(variant: Variant, profile: Profile, asked: dict[str, int], folder: Path) -> list[str]:
    plan = _plan(variant, profile, asked["blocks"])
    plan.save(folder / "plan.json")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(plan.workers)}
    job = asked | {
        "plan": str(folder / "plan.json"),
        "out": str(folder),
        "schedule": variant.schedule,
        "microbatches": variant.microbatches,
        "optimizer": variant.optimizer,
    }
    malloc = TRUE if variant.malloc else {}
    _wait([_start("train", job, malloc | world | {"RANK": str(rank)}) for rank in range(plan.workers)])
    rows = []
    for rank in range(plan.workers):
        found = json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
        stage = plan.stages[found["stage"]]
        rise = stage.peak_bytes - found["start_bytes"]
        rows.append(
            f"| {variant} | {found['stage']} | {stage.peak_bytes / 1e6:.0f} MB | {found['live_bytes'] / 1e6:.0f} MB | "
            f"{stage.peak_bytes / found['live_bytes'] - 1:+.1%} | {rise / 1e6:.0f} MB | "
            f"{found['resident_rise_bytes'] / 1e6:.0f} MB | {rise / found['resident_rise_bytes'] - 1:+.1%} |"
        )
    return rows


def _start(command: str, asked: dict[str, object], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    worker = Path(__file__).with_name("worker.py")
    return subprocess.Popen([sys.executable, str(worker), command, json.dumps(asked)], env=os.environ | environment)


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    if any([process.wait() for process in processes]):
        raise SystemExit("a process of the benchmark failed; its error stands above")


if __name__ == "__main__":
    sys.exit(main())
