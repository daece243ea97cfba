"""The Cluster: how many workers, how much memory each, how fast they talk.

``levels`` are innermost first. The classic planner reckons with each (docs/cost_models.md); everything else with the
slowest, which a ring over all workers crosses.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from .artifact import Artifact
from .units import format_bytes, format_rate, format_seconds

__all__ = ["MOST_WORKERS", "Cluster", "Level"]

MOST_WORKERS = 100_000
"""More than any cluster has; a file that says more is damaged, and would take all memory to plan for."""


@dataclass(frozen=True)
class Level:
    """One level of the network.

    Attributes:
        width: components joined at this level (workers at the innermost).
        bandwidth_bytes_per_s: of one link, one direction.
        latency_s: of one message.
    """

    width: int
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MOST_WORKERS:
            raise ValueError(f"width must be between 1 and {MOST_WORKERS}, found {self.width}")
        if self.bandwidth_bytes_per_s <= 0 or self.latency_s < 0:
            raise ValueError(
                f"bandwidth must be positive and latency not negative, found "
                f"{self.bandwidth_bytes_per_s} and {self.latency_s}"
            )


@dataclass(frozen=True)
class Cluster(Artifact):
    """Workers, their memory and the links between them.

    Attributes:
        levels: network levels, innermost first.
        memory_bytes: memory of one worker; None means that it is not limited.
        device: what a worker is, in words.
    """

    levels: tuple[Level, ...]
    memory_bytes: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not self.levels:
            raise ValueError("a cluster has at least one level, found none")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ValueError(f"memory must be positive, found {self.memory_bytes}")

    @classmethod
    def flat(
        cls,
        workers: int,
        bandwidth_bytes_per_s: float = 1.25e9,
        latency_s: float = 0.0,
        memory_bytes: int | None = None,
        device: str = "cpu",
    ) -> Cluster:
        """Returns workers that all talk over one kind of link (default: 10 Gbit/s Ethernet)."""
        return cls((Level(workers, bandwidth_bytes_per_s, latency_s),), memory_bytes, device)

    @classmethod
    def here(cls, workers: int | None = None, memory_bytes: int | None = None) -> Cluster:
        """Returns this machine: a worker a core unless said, its memory shared out evenly.

        Loopback is taken at 2 GB/s and 50 us a message (gloo: 1 MiB in 0.5 ms, 64 bytes in 40 to 56 us);
        for real links give their own figures.
        """
        count = workers or os.cpu_count() or 1
        if memory_bytes is None:
            memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // count
        return cls.flat(count, 2e9, 50e-6, memory_bytes)

    @property
    def workers(self) -> int:
        """All workers: the product of the widths."""
        count = 1
        for level in self.levels:
            count *= level.width
        return count

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Bandwidth of the slowest level, which a ring over all workers crosses."""
        return min(level.bandwidth_bytes_per_s for level in self.levels)

    @property
    def latency_s(self) -> float:
        """Latency of the slowest level."""
        return max(level.latency_s for level in self.levels)

    def __str__(self) -> str:
        memory = "memory not limited" if self.memory_bytes is None else f"{format_bytes(self.memory_bytes)} each"
        links = "; ".join(
            f"{level.width} x {format_rate(level.bandwidth_bytes_per_s)}, {format_seconds(level.latency_s)}"
            for level in self.levels
        )
        return f"Cluster of {self.workers} x {self.device}, {memory}; levels: {links}"
