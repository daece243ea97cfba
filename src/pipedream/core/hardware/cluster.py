"""The Cluster: number, speed and memory of workers, and how fast they communicate (docs/cost_models.md).

The network is a tree. ``levels`` are innermost first: for example, level 0 joins workers to machines, level 1 machines
to racks. Each *component* that a level joins has one full-duplex port into it: at level 0 every worker has its own, at
level 1 all workers of a machine share one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import ClassVar

from pipedream.core.artifact import Artifact
from pipedream.core.units import format_bytes, format_rate, format_seconds

MAX_WORKERS = 100_000
"""More than any cluster has. A file with more is damaged, and planning for it would take all memory."""


LOOPBACK = (2e9, 50e-6)
"""Bandwidth (bytes/s) and latency (s) assumed within a machine (gloo: 1 MiB in 0.5 ms, 64 bytes in 40 to 56 us)."""


@dataclass(frozen=True)
class Level:
    """One level of the network.

    Attributes:
        width: components in a group (in the largest, if unequal).
        bandwidth_bytes_per_s: rate at which a component sends.
        latency_s: seconds of one message, one way; a round trip takes twice as long.
        receive_bytes_per_s: rate at which it receives; None if the same.
        sum_bytes_per_s: measured bandwidth of an all-reduce, 2 (n - 1) / n of its bytes over its seconds; None uses
            that of the links.
        sizes: sizes of unequal groups, e.g. machines of 4, 4 and 2 workers; () if all have `width`.
    """

    width: int
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    receive_bytes_per_s: float | None = None
    sum_bytes_per_s: float | None = None
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for width in (self.width, *self.sizes):
            if not 1 <= width <= MAX_WORKERS:
                raise ValueError(f"width must be between 1 and {MAX_WORKERS}, found {width}")
        if self.sizes and max(self.sizes) != self.width:
            raise ValueError(f"width is the greatest of the sizes {self.sizes}, found {self.width}")
        rates = (self.bandwidth_bytes_per_s, self.receive_bytes_per_s, self.sum_bytes_per_s)
        if min(rate for rate in rates if rate is not None) <= 0 or self.latency_s < 0:
            raise ValueError(
                f"bandwidth must be positive and latency not negative, found "
                f"{', '.join(str(rate) for rate in rates if rate is not None)} and {self.latency_s}"
            )

    @property
    def link_bytes_per_s(self) -> float:
        """Bandwidth of a message, limited by the slower of its two ports."""
        return min(self.bandwidth_bytes_per_s, self.receive_bytes_per_s or self.bandwidth_bytes_per_s)

    def with_sizes(self, sizes: tuple[int, ...]) -> Level:
        """Returns the level with groups of these sizes."""
        return replace(self, width=max(sizes), sizes=() if len(set(sizes)) == 1 else sizes)


@dataclass(frozen=True)
class Workers:
    """Consecutive identical workers.

    Attributes:
        device: in words.
        speed: relative to the profile's device.
        memory_bytes: of each; None if unlimited.
    """

    count: int
    device: str = "cpu"
    speed: float = 1.0
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_WORKERS:
            raise ValueError(f"there must be between 1 and {MAX_WORKERS} workers of a kind, found {self.count}")
        if self.speed <= 0:
            raise ValueError(f"speed must be positive, found {self.speed}")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ValueError(f"memory must be positive, found {self.memory_bytes}")


@dataclass(frozen=True)
class Cluster(Artifact):
    """Workers, their memory and the links between them.

    Attributes:
        levels: innermost first.
        memory_bytes: memory of one worker; None if unlimited.
        device: in words.
        kinds: the workers in order, each kind with its memory and device; () if all are identical.
        all_reduce: the all-reduce algorithm, 'ring' or 'tree' (`cost.SumLink`).
        host_bytes: memory of each machine beside its GPUs; None if unknown.
        host_bytes_per_s: rate of copies between a GPU and the memory of its machine while all workers of the machine
            copy; None if unknown.

    Raises:
        ValueError: no level, groups or kinds that do not match the workers, or an unknown all-reduce.
    """

    DROPPED: ClassVar[frozenset[str]] = frozenset({"disk_bytes_per_s", "disk_s_per_byte", "snapshots"})

    levels: tuple[Level, ...]
    memory_bytes: int | None = None
    device: str = "cpu"
    kinds: tuple[Workers, ...] = ()
    all_reduce: str = field(default="ring", metadata={"json": "sums"})
    host_bytes: int | None = None
    host_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if not self.levels:
            raise ValueError("a cluster has at least one level, found none")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ValueError(f"memory must be positive, found {self.memory_bytes}")
        if self.host_bytes_per_s is not None and not self.host_bytes_per_s > 0:
            raise ValueError(f"the rate of copies to the host must be positive, found {self.host_bytes_per_s}")
        if self.all_reduce not in ("ring", "tree"):
            raise ValueError(f"all_reduce is ring or tree, found {self.all_reduce!r}")
        groups = 1
        for number, level in reversed(list(enumerate(self.levels))):
            if level.sizes and len(level.sizes) != groups:
                raise ValueError(f"level {number} has {groups} groups, but sizes of {len(level.sizes)}")
            groups = sum(level.sizes) if level.sizes else groups * level.width
            if groups > MAX_WORKERS:
                raise ValueError(f"a cluster has at most {MAX_WORKERS} workers, found {groups}")
        if self.kinds and sum(kind.count for kind in self.kinds) != groups:
            raise ValueError(f"the cluster has {groups} workers, its kinds {sum(kind.count for kind in self.kinds)}")

    @classmethod
    def flat(
        cls,
        workers: int,
        bandwidth_bytes_per_s: float = 1.25e9,
        latency_s: float = 0.0,
        memory_bytes: int | None = None,
        device: str = "cpu",
    ) -> Cluster:
        """Returns workers with equal links, by default 10 Gbit/s Ethernet."""
        return cls((Level(workers, bandwidth_bytes_per_s, latency_s),), memory_bytes, device)

    @classmethod
    def local(cls, workers: int | None = None, memory_bytes: int | None = None) -> Cluster:
        """Returns this machine, with workers on its CPU; `pipedream.probe.probe_gpus` returns its GPUs.

        Links have the assumed bandwidth and latency of `LOOPBACK`.

        Args:
            workers: by default one for each core.
            memory_bytes: memory of each worker; by default an equal share of the machine's.
        """
        count = workers or os.cpu_count() or 1
        if memory_bytes is None:
            memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // count
        return cls.flat(count, *LOOPBACK, memory_bytes)

    @property
    def workers(self) -> int:
        return self.starts(0)[-1]

    def starts(self, level: int) -> tuple[int, ...]:
        """Returns the first worker of each component of a level, then the number of workers."""
        return self._starts[level]

    @cached_property
    def _starts(self) -> tuple[tuple[int, ...], ...]:
        sizes: list[tuple[int, ...]] = []
        groups = 1
        for level in reversed(self.levels):
            sizes.insert(0, level.sizes or (level.width,) * groups)
            groups = sum(sizes[0])
        starts = [tuple(range(groups + 1))]
        for level_sizes in sizes[:-1]:
            ends = (0, *accumulate(level_sizes))
            starts.append(tuple(starts[-1][end] for end in ends))
        return tuple(starts)

    def component(self, level: int, worker: int) -> int:
        return self._components[level][worker]

    @cached_property
    def _components(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(c for c, (first, last) in enumerate(pairwise(starts)) for _ in range(first, last))
            for starts in self._starts
        )

    def reach(self, *workers: int) -> int:
        """Returns the outermost level that messages between these workers cross."""
        rows = self._components
        return max(level for level, row in enumerate(rows) if not level or len({row[w] for w in workers}) > 1)

    def link(self, level: int) -> tuple[float, float]:
        """Returns bandwidth (bytes/s) and latency (s) of messages that cross this level."""
        crossed = self.levels[: level + 1]
        return min(inner.link_bytes_per_s for inner in crossed), max(inner.latency_s for inner in crossed)

    def sum_link(self, level: int) -> tuple[float, float]:
        """Returns bandwidth (bytes/s) of sums that cross this level, and latency (s) of each of their steps.

        A step between CPUs takes two latencies of a message: gloo sends once the other end has said that it receives.
        """
        crossed = self.levels[: level + 1]
        rates = (inner.sum_bytes_per_s or inner.link_bytes_per_s for inner in crossed)
        return min(rates), (2 if self.on_cpus else 1) * max(inner.latency_s for inner in crossed)

    @cached_property
    def on_cpus(self) -> bool:
        """Whether all workers are CPUs."""
        return all(kind.device.startswith("cpu") for kind in self._all_kinds)

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """Each worker's speed, relative to the profile's device."""
        return tuple(kind.speed for kind in self._all_kinds for _ in range(kind.count))

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Each worker's device, in words."""
        return tuple(kind.device for kind in self._all_kinds for _ in range(kind.count))

    @cached_property
    def memories(self) -> tuple[int | None, ...]:
        """Each worker's bytes of memory; None if unlimited."""
        return tuple(kind.memory_bytes for kind in self._all_kinds for _ in range(kind.count))

    @property
    def _all_kinds(self) -> tuple[Workers, ...]:
        return self.kinds or (Workers(self.workers, self.device, memory_bytes=self.memory_bytes),)

    @cached_property
    def is_limited(self) -> bool:
        return any(memory is not None for memory in self.memories)

    def without_memory_limits(self) -> Cluster:
        return self.with_memory(lambda memory: None)

    def with_memory(self, change: Callable[[int | None], int | None]) -> Cluster:
        kinds = tuple(replace(kind, memory_bytes=change(kind.memory_bytes)) for kind in self.kinds)
        return replace(self, memory_bytes=change(self.memory_bytes), kinds=kinds)

    def with_slower_links(self, factor: float) -> Cluster:
        """Returns the cluster with slower links: longer latencies, and bandwidths divided by the factor."""
        return self.with_links(lambda rate: rate / factor, factor)

    def with_links(self, change: Callable[[float], float], latency_factor: float) -> Cluster:
        """Returns the cluster with changed bandwidths, and with latencies multiplied by a factor."""
        levels = tuple(
            replace(
                level,
                bandwidth_bytes_per_s=change(level.bandwidth_bytes_per_s),
                latency_s=level.latency_s * latency_factor,
                receive_bytes_per_s=level.receive_bytes_per_s and change(level.receive_bytes_per_s),
                sum_bytes_per_s=level.sum_bytes_per_s and change(level.sum_bytes_per_s),
            )
            for level in self.levels
        )
        return replace(self, levels=levels)

    @property
    def is_flat(self) -> bool:
        """Whether all workers are identical and on a single level."""
        return len(self.levels) == 1 and not self.kinds

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """The bandwidth across all levels."""
        return self.link(len(self.levels) - 1)[0]

    @property
    def latency_s(self) -> float:
        """The latency across all levels."""
        return self.link(len(self.levels) - 1)[1]

    def __str__(self) -> str:
        def describe_memory(size: int | None) -> str:
            return "memory not limited" if size is None else f"{format_bytes(size)} each"

        workers = " + ".join(
            f"{kind.count} x {kind.device}{f' ({kind.speed:.3g}x)' if kind.speed != 1 else ''}, "
            f"{describe_memory(kind.memory_bytes)}"
            for kind in self._all_kinds
        )
        links = "; ".join(
            f"{'+'.join(map(str, level.sizes)) or level.width} x {format_rate(level.bandwidth_bytes_per_s)}, "
            f"{format_seconds(level.latency_s)}"
            for level in self.levels
        )
        host = f"; memory of the host {format_rate(self.host_bytes_per_s)}" if self.host_bytes_per_s else ""
        return f"Cluster of {workers}; levels: {links}{host}"
