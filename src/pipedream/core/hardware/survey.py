"""A Survey: measurements of a cluster's links and workers, and the Cluster that follows from them.

A message is as fast as the slower of the two ports that it passes; which one that is only shows when one port exchanges
messages with several at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from pipedream.core.artifact import Artifact
from pipedream.core.display import align
from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster, Level, Workers
from pipedream.core.units import format_bytes, format_rate, format_seconds

_SAME_SPEED = 0.15
_SAME_MEMORY = 0.1
_FASTER = 1.25
"""Smaller differences are noise."""

_HALF_DUPLEX = 0.7
"""Share of its bandwidth that a direction keeps while the other is used; 0.5 on a shared link."""


@dataclass(frozen=True)
class Seen:
    """One worker; `work_s` is for work that is the same for all. Rates are None if no folder was given, or no GPU."""

    machine: str
    device: str
    work_s: float
    memory_bytes: int
    disk_bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Link:
    """Messages from one rank to another.

    Attributes:
        latency_s: half of a short round trip.
        alone_bytes_per_s, both_bytes_per_s: while nothing, or as much, is sent the other way.
    """

    level: int
    sender: int
    receiver: int
    latency_s: float
    alone_bytes_per_s: float
    both_bytes_per_s: float


@dataclass(frozen=True)
class Fan:
    """One rank that sends to several at once, or receives from several; `ranks` has it first."""

    level: int
    sends: bool
    ranks: tuple[int, ...]
    bytes_per_s: float


@dataclass(frozen=True)
class Sum:
    """All-reduces over a group.

    Attributes:
        latency_s: seconds of one of the 2 (n - 1) steps of a ring.
        bytes_per_s: 2 (n - 1) / n of the bytes over their seconds.
    """

    level: int
    ranks: tuple[int, ...]
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Survey(Artifact):
    """The measurements of a cluster."""

    FORMAT = 1

    workers: tuple[Seen, ...]
    links: tuple[Link, ...] = ()
    fans: tuple[Fan, ...] = ()
    sums: tuple[Sum, ...] = ()
    seconds: float = 0.0

    @property
    def machines(self) -> tuple[tuple[int, ...], ...]:
        return machines_of([seen.machine for seen in self.workers])

    def cluster(self) -> Cluster:
        """Returns the cluster that these measurements describe; its worker n is rank n.

        Raises:
            PlanError: a machine's ranks are not consecutive, or a level was not measured.
        """
        machines = self.machines
        counts = tuple(map(len, machines))
        if len(machines) == 1 or max(counts) == 1:
            levels: tuple[Level, ...] = (self._derive_level(0, len(self.workers)),)
        else:
            uneven = counts if len(set(counts)) > 1 else ()
            levels = (self._derive_level(0, max(counts), uneven), self._derive_level(1, len(machines)))
        kinds = self._derive_kinds()
        first = kinds[0]
        alike = len(kinds) == 1

        def find_least(rates: Sequence[float | None]) -> float | None:
            measured = [rate for rate in rates if rate is not None]
            return min(measured) if len(measured) == len(rates) else None

        return Cluster(
            levels,
            first.memory_bytes if alike else None,
            first.device,
            () if alike else kinds,
            disk_bytes_per_s=find_least([worker.disk_bytes_per_s for worker in self.workers]),
            host_bytes_per_s=find_least([worker.host_bytes_per_s for worker in self.workers]),
        )

    def _derive_level(self, number: int, width: int, sizes: tuple[int, ...] = ()) -> Level:
        links = [link for link in self.links if link.level == number]
        if not links:
            if width == 1:
                return Level(1, 1e30)
            raise PlanError(f"no link of level {number} was measured; probe again with more time")
        # The planner's ports are full duplex; otherwise each direction gets the bandwidth that is left. Both directions
        # of a pair must have lost some: in one, acknowledgements may only have queued with what the other sends.
        kept: dict[frozenset[int], float] = {}
        for link in links:
            pair = frozenset((link.sender, link.receiver))
            kept[pair] = max(kept.get(pair, 0.0), link.both_bytes_per_s / link.alone_bytes_per_s)
        half = median(kept.values()) < _HALF_DUPLEX
        rate = median(link.both_bytes_per_s if half else link.alone_bytes_per_s for link in links)
        out, into = (
            max((fan.bytes_per_s for fan in self.fans if fan.level == number and fan.sends is sends), default=0.0)
            for sends in (True, False)
        )
        send, receive = rate, rate
        # If both do, neither port limits a message.
        if out > _FASTER * rate >= into:
            send = out
        elif into > _FASTER * rate >= out:
            receive = into
        sums = [measured for measured in self.sums if measured.level == number]
        widest = max(sums, key=lambda measured: len(measured.ranks), default=None)
        return Level(
            width,
            send,
            lower_quartile([link.latency_s for link in links]),
            receive if receive != send else None,
            widest.bytes_per_s if widest else None,
            sizes,
        )

    def _derive_kinds(self) -> tuple[Workers, ...]:
        work = _group_alike([(seen.device, seen.work_s) for seen in self.workers], _SAME_SPEED)
        memory = _group_alike([("", float(seen.memory_bytes)) for seen in self.workers], _SAME_MEMORY)

        def members(groups: Sequence[int], rank: int) -> list[Seen]:
            return [seen for seen, group in zip(self.workers, groups, strict=True) if group == groups[rank]]

        def work_s(rank: int) -> float:
            return median(seen.work_s for seen in members(work, rank))

        runs = [list(run) for _, run in groupby(range(len(work)), lambda rank: (work[rank], memory[rank]))]
        return tuple(
            Workers(
                len(run),
                self.workers[run[0]].device,
                work_s(0) / work_s(run[0]),
                min(seen.memory_bytes for seen in members(memory, run[0])),
            )
            for run in runs
        )

    def __str__(self) -> str:
        table = [("", "level", "latency", "alone", "both ways")]
        for link in self.links:
            rates = format_rate(link.alone_bytes_per_s), format_rate(link.both_bytes_per_s)
            what = f"rank {link.sender} to rank {link.receiver}"
            table.append((what, str(link.level), format_seconds(link.latency_s), *rates))
        for fan in self.fans:
            others = ", ".join(map(str, fan.ranks[1:]))
            what = f"rank {fan.ranks[0]} {'to' if fan.sends else 'from'} {others}"
            table.append((what, str(fan.level), "", format_rate(fan.bytes_per_s), ""))
        for measured in self.sums:
            what, latency = f"sum over {len(measured.ranks)} ranks", format_seconds(measured.latency_s)
            table.append((what, str(measured.level), latency, format_rate(measured.bytes_per_s), ""))
        rows = [align(table), ""]
        for machine, ranks in enumerate(self.machines):
            for rank in ranks:
                seen = self.workers[rank]
                rows.append(
                    f"rank {rank}, machine {machine}: {seen.device}, {self.workers[0].work_s / seen.work_s:.2f} times "
                    f"rank 0's speed, {format_bytes(seen.memory_bytes)}"
                )
        return "\n".join([*rows, f"measured in {self.seconds:.1f} s"])


def machines_of(names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each machine, which must be consecutive."""
    machines: list[list[int]] = []
    for rank, name in enumerate(names):
        if rank and name == names[rank - 1]:
            machines[-1].append(rank)
        elif name in names[:rank]:
            raise PlanError(
                f"rank {rank} is on the machine of rank {names.index(name)}, with ranks of other machines between "
                "them; start the ranks of a machine one after the other, as torchrun does"
            )
        else:
            machines.append([rank])
    return tuple(map(tuple, machines))


def lower_quartile(seconds: Sequence[float]) -> float:
    """Returns the lower quartile: noise, as of other processes, only ever adds seconds."""
    return sorted(seconds)[len(seconds) // 4]


def slope(sizes_bytes: Sequence[float], seconds: Sequence[Sequence[float]]) -> float:
    """Returns bytes per second from repeated times at two message sizes, the smaller one first.

    The cost that is independent of the size cancels out; if noise hides the difference, it is counted.
    """
    small_s, large_s = map(lower_quartile, seconds)
    more_bytes, more_s = sizes_bytes[1] - sizes_bytes[0], large_s - small_s
    whole = sizes_bytes[1] / large_s
    rate = more_bytes / more_s if more_s > 0 else whole
    return rate if rate < 2 * whole else whole


def _group_alike(values: Sequence[tuple[str, float]], tolerance: float) -> list[int]:
    """The group of each value: the same word, and about the same number."""
    groups: list[tuple[str, float]] = []
    numbers = []
    for word, number in values:
        for group, (other, first) in enumerate(groups):
            if word == other and abs(number / first - 1) < tolerance:
                numbers.append(group)
                break
        else:
            numbers.append(len(groups))
            groups.append((word, number))
    return numbers
