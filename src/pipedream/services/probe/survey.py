"""A Survey: measurements of a cluster's links and workers, and the Cluster that follows from them.

A message is limited by the slower of its two ports. Which one that is shows only when a port talks to several at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import ClassVar

from pipedream.core.artifact import Artifact
from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster, Level, Workers
from pipedream.core.tabular import align
from pipedream.core.units import format_bytes, format_rate, format_seconds

_SPEED_TOLERANCE = 0.15
_MEMORY_TOLERANCE = 0.1
_MIN_PORT_GAIN = 1.25
"""Smaller differences are noise."""

_HALF_DUPLEX_SHARE = 0.7
"""A link is half duplex if a direction keeps a smaller share of its bandwidth while the other is in use."""


@dataclass(frozen=True)
class MeasuredWorker:
    """One worker; `work_s` is for the same work everywhere. The rate is None without a GPU."""

    DROPPED: ClassVar[frozenset[str]] = frozenset({"disk_bytes_per_s", "disk_s_per_byte"})

    machine: str
    device: str
    work_s: float
    memory_bytes: int
    host_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Link:
    """Messages from one rank to another.

    Attributes:
        latency_s: half of a short round trip.
        alone_bytes_per_s, both_bytes_per_s: rates in one direction, and in each while both are used.
    """

    level: int
    sender: int
    receiver: int
    latency_s: float
    alone_bytes_per_s: float
    both_bytes_per_s: float


@dataclass(frozen=True)
class Fan:
    """One rank, the first of `ranks`, that sends to the others at once, or receives from them."""

    level: int
    sends: bool
    ranks: tuple[int, ...]
    bytes_per_s: float


@dataclass(frozen=True)
class Sum:
    """All-reduces over a group.

    Attributes:
        latency_s: seconds of one of the 2 (n - 1) steps of a ring.
        bytes_per_s: 2 (n - 1) / n of the bytes per second.
    """

    level: int
    ranks: tuple[int, ...]
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Survey(Artifact):
    """The measurements of a cluster."""

    FORMAT = 1

    workers: tuple[MeasuredWorker, ...]
    links: tuple[Link, ...] = ()
    fans: tuple[Fan, ...] = ()
    sums: tuple[Sum, ...] = ()
    seconds: float = 0.0

    @property
    def machines(self) -> tuple[tuple[int, ...], ...]:
        return machines_of([worker.machine for worker in self.workers])

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
            uneven_counts = counts if len(set(counts)) > 1 else ()
            levels = (self._derive_level(0, max(counts), uneven_counts), self._derive_level(1, len(machines)))
        kinds = self._derive_kinds()
        first = kinds[0]
        are_identical = len(kinds) == 1

        rates = [worker.host_bytes_per_s for worker in self.workers if worker.host_bytes_per_s is not None]
        return Cluster(
            levels,
            first.memory_bytes if are_identical else None,
            first.device,
            () if are_identical else kinds,
            host_bytes_per_s=min(rates) if len(rates) == len(self.workers) else None,
        )

    def _derive_level(self, number: int, width: int, sizes: tuple[int, ...] = ()) -> Level:
        links = [link for link in self.links if link.level == number]
        if not links:
            if width == 1:
                return Level(1, 1e30)
            raise PlanError(f"no link of level {number} was measured; probe again with more time")
        # The planner's ports are full duplex; on others each direction gets what it has left. Both directions of a pair
        # must lose bandwidth: in one alone, acknowledgements may have queued among the messages of the other.
        kept_shares: dict[frozenset[int], float] = {}
        for link in links:
            pair = frozenset((link.sender, link.receiver))
            kept_shares[pair] = max(kept_shares.get(pair, 0.0), link.both_bytes_per_s / link.alone_bytes_per_s)
        is_half_duplex = median(kept_shares.values()) < _HALF_DUPLEX_SHARE
        rate = median(link.both_bytes_per_s if is_half_duplex else link.alone_bytes_per_s for link in links)
        send_fan, receive_fan = (
            max((fan.bytes_per_s for fan in self.fans if fan.level == number and fan.sends is sends), default=0.0)
            for sends in (True, False)
        )
        send_bytes_per_s, receive_bytes_per_s = rate, rate
        # If both are faster, neither port limits a message.
        if send_fan > _MIN_PORT_GAIN * rate >= receive_fan:
            send_bytes_per_s = send_fan
        elif receive_fan > _MIN_PORT_GAIN * rate >= send_fan:
            receive_bytes_per_s = receive_fan
        sums = [measured for measured in self.sums if measured.level == number]
        widest = max(sums, key=lambda measured: len(measured.ranks), default=None)
        return Level(
            width,
            send_bytes_per_s,
            lower_quartile([link.latency_s for link in links]),
            receive_bytes_per_s if receive_bytes_per_s != send_bytes_per_s else None,
            widest.bytes_per_s if widest else None,
            sizes,
        )

    def _derive_kinds(self) -> tuple[Workers, ...]:
        speeds = _group_similar([(worker.device, worker.work_s) for worker in self.workers], _SPEED_TOLERANCE)
        memories = _group_similar([("", float(worker.memory_bytes)) for worker in self.workers], _MEMORY_TOLERANCE)

        def members(groups: Sequence[int], rank: int) -> list[MeasuredWorker]:
            return [worker for worker, group in zip(self.workers, groups, strict=True) if group == groups[rank]]

        def work_s(rank: int) -> float:
            return median(worker.work_s for worker in members(speeds, rank))

        runs = [list(run) for _, run in groupby(range(len(speeds)), lambda rank: (speeds[rank], memories[rank]))]
        return tuple(
            Workers(
                len(run),
                self.workers[run[0]].device,
                work_s(0) / work_s(run[0]),
                min(worker.memory_bytes for worker in members(memories, run[0])),
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
                worker, speed = self.workers[rank], self.workers[0].work_s / self.workers[rank].work_s
                rows.append(
                    f"rank {rank}, machine {machine}: {worker.device}, {speed:.2f} times rank 0's speed, "
                    f"{format_bytes(worker.memory_bytes)}"
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
    """Returns the lower quartile, because noise only adds time."""
    return sorted(seconds)[len(seconds) // 4]


def slope(sizes_bytes: Sequence[float], seconds: Sequence[Sequence[float]]) -> float:
    """Returns bytes per second from repeated times at two message sizes, the smaller one first.

    Costs that do not depend on the size cancel out, unless noise hides the difference.
    """
    small_s, large_s = map(lower_quartile, seconds)
    added_bytes, added_s = sizes_bytes[1] - sizes_bytes[0], large_s - small_s
    large_rate = sizes_bytes[1] / large_s
    rate = added_bytes / added_s if added_s > 0 else large_rate
    return rate if rate < 2 * large_rate else large_rate


def _group_similar(values: Sequence[tuple[str, float]], tolerance: float) -> list[int]:
    """Returns the group of each value: same word, similar number."""
    groups: list[tuple[str, float]] = []
    indices = []
    for word, number in values:
        for group, (group_word, group_number) in enumerate(groups):
            if word == group_word and abs(number / group_number - 1) < tolerance:
                indices.append(group)
                break
        else:
            indices.append(len(groups))
            groups.append((word, number))
    return indices
