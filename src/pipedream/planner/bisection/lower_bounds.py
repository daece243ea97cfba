"""How few workers a stage needs to keep within a period, wherever on the line it stands: for lower bounds.

For each count of workers a *relaxed* site has the best that any run of so many on the line has: the fastest sums, the
least at each port, the largest memory. Counts are taken in spans within which the relaxed seconds of a stage only fall
as workers are added, so that the least count of a span is found by bisection, for all stages at once:

- its compute, and each byte of a ring, 2 (r - 1) / r^2, fall in r >= 2;
- what the network does to it changes where a run must leave a component, and spans end there; within a span the
  best so far is taken;
- the latency of a sum grows with r. Within a span it is taken as at its first count; spans end at powers of two.

On one level of like workers, without latency, nothing is relaxed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from pipedream.core.plan.cost import visible_sum_s
from pipedream.planner.tables.search_space import Space
from pipedream.planner.workers.worker_line import Sites, WorkerLine

__all__ = ["Pairs", "Relaxed", "period_s"]

_TOGETHER = 1 << 14  # stages at once: what stays in a cache is several times as fast


@dataclass(frozen=True, eq=False)
class Pairs:
    """What each stage costs, in flat arrays: seconds of its passes and update, and its bytes.

    Attributes:
        first, last: places, as indices of the space's.
        forward_s, backward_s, update_s, parameter_bytes, before_bytes, behind_bytes: as `Site.period_s` takes them.
    """

    first: Any
    last: Any
    forward_s: Any
    backward_s: Any
    update_s: Any
    parameter_bytes: Any
    before_bytes: Any
    behind_bytes: Any

    @classmethod
    def of(cls, space: Space, places: Any, allowed: Any, recompute: bool) -> Pairs:
        """Returns those of all stages that are allowed; with `recompute` they do their forward again."""
        first, last = np.nonzero(allowed)
        ends = places[first], places[last]
        forward, backward = (np.asarray(row, dtype=float) for row in space.passes_s(*ends))
        update = np.broadcast_to(np.asarray(space.update_s(*ends), dtype=float), first.shape)
        return cls(first, last, forward, backward + forward if recompute else backward, update, *space.bytes_of(*ends))

    def __getitem__(self, chosen: Any) -> Pairs:
        """Returns some of them."""
        return Pairs(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))

    @property
    def compute_s(self) -> Any:
        """Seconds on one worker of speed 1."""
        return self.forward_s + self.backward_s + self.update_s


def period_s(pairs: Pairs, sites: Sites, how: str) -> Any:
    """Returns the seconds per minibatch of stages on their sites, one each: `Site.period_s` for arrays."""
    summed_s = visible_sum_s(
        pairs.parameter_bytes,
        pairs.backward_s / sites.speed,
        sites.replicas,
        sites.sum_bytes_per_s,
        sites.sum_latency_s,
        how=how,
    )
    busiest = (pairs.compute_s / sites.speed + summed_s * (sites.replicas > 1)) / sites.replicas
    for before, behind, weights in zip(sites.before, sites.behind, sites.weights, strict=True):
        port_s = before * pairs.before_bytes + behind * pairs.behind_bytes + weights * pairs.parameter_bytes
        busiest = np.maximum(busiest, port_s)
    return busiest


@dataclass(frozen=True, eq=False)
class Relaxed:
    """The relaxed sites of a line, by their count of workers."""

    line: WorkerLine

    @property
    def workers(self) -> int:
        """All workers of the line."""
        return len(self.line.order)

    def at(self, replicas: Any) -> Sites:
        """Returns the sites of so many workers each."""
        return self._sites[replicas]

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """First and last count of each span; 1 is one of its own."""
        cluster = self.line.cluster
        ends = {1, self.workers, *(2**k for k in range(self.workers.bit_length()))}
        for number in range(1, len(cluster.levels)):
            starts = np.array(cluster.starts(number))
            ends.add(int(np.diff(starts).max()))
        kept = sorted(end for end in ends if end <= self.workers)
        return list(zip([1, *(end + 1 for end in kept[:-1])], kept, strict=True))

    @cached_property
    def _sites(self) -> Sites:
        rows = list(self._best())
        table = np.array([rows[0], *rows])  # index 0 is not used
        levels = len(self.line.cluster.levels)
        ports = [list(table[:, 4 + k * levels : 4 + (k + 1) * levels].T) for k in range(3)]
        for low, high in self.spans:
            span = slice(low, high + 1)
            for column in (0, 1, 2):
                table[span, column] = np.maximum.accumulate(table[span, column])
            for row in (table[:, 3], *(row for port in ports for row in port)):
                row[span] = np.minimum.accumulate(row[span])
            counts = np.arange(low, high + 1)
            steps = np.ceil(np.log2(counts)) if self.line.cluster.sums == "tree" else counts - 1
            table[span, 3] *= steps[0] / np.maximum(steps, 1)
        return Sites(np.arange(self.workers + 1), *(table[:, k].copy() for k in range(4)), *ports)

    def _best(self) -> Iterator[list[float]]:
        """Yields, for each count, the most speed, memory and bandwidth of a run, and the least of all else."""
        for count in range(1, self.workers + 1):
            first = np.arange(self.workers - count + 1)
            sites = self.line.sites(first, np.full(len(first), count))
            most = [sites.speed.max(), sites.memory_bytes.max(), sites.sum_bytes_per_s.max()]
            ports = [row.min() for port in self._one_each(sites) for row in port]
            yield [*most, sites.sum_latency_s.min(), *ports]

    @staticmethod
    def _one_each(sites: Sites) -> tuple[list[Any], list[Any], list[Any]]:
        """Before, behind and weights of one port a level: of each run the one that most of its messages cross."""
        found: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        for begin, end in pairwise((0, *range(1, len(sites.before) + 1, 3))):
            rows = [np.stack(port[begin:end]) for port in (sites.before, sites.behind, sites.weights)]
            chosen = (rows[0] + rows[1]).argmax(axis=0)[None]
            for kind, row in zip(found, rows, strict=True):
                kind.append(np.take_along_axis(row, chosen, axis=0)[0])
        return found

    def least(self, pairs: Pairs, period: float, low: Any, high: Any, useful: Any) -> Any:
        """Returns for each stage the fewest workers, 2 or more, that keep it within a period; one too many if none do.

        Args:
            pairs: the stages.
            period: in seconds.
            low, high: what is known: the answer lies between, both included.
            useful: the most workers that the stage may have; where the answer is more, it counts as none.
        """
        found = np.where(high <= useful, high, self.workers + 1)
        left = np.flatnonzero((low < found) & (low <= useful))
        for begin in range(0, len(left), _TOGETHER):
            some = left[begin : begin + _TOGETHER]
            found[some] = self._least(pairs[some], period, low[some], found[some], useful[some])
        return found

    def _least(self, pairs: Pairs, period: float, low: Any, high: Any, useful: Any) -> Any:
        found, how = high.copy(), self.line.cluster.sums
        left = np.arange(len(low))
        for begin, end in self.spans:
            if begin < 2 or not len(left):
                continue
            few, many = np.maximum(begin, low[left]), np.minimum(end, useful[left])
            tried = (few <= many) & (few < found[left])
            some, few, many = left[tried], few[tried] - 1, many[tried]
            if not len(some):
                continue
            within = period_s(pairs[some], self.at(many), how) <= period
            some, few, many = some[within], few[within], many[within]
            while len(open_ := np.flatnonzero(many - few > 1)):
                middle = (few[open_] + many[open_]) // 2
                good = period_s(pairs[some[open_]], self.at(middle), how) <= period
                many[open_[good]] = middle[good]
                few[open_[~good]] = middle[~good]
            found[some] = np.minimum(found[some], many)
            left = left[(found[left] > end) & (useful[left] > end)]
        return found
