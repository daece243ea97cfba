"""Which versions of its weights a seat holds while a program runs, and what its gradients carry."""

from __future__ import annotations

from ..core.op import Kind, Op
from ..core.program import Program
from ..core.timeline import Tag

__all__ = ["SeatVersions"]

_FORWARD, _UPDATE = Kind.FORWARD, Kind.UPDATE  # looking up a member of an enum is slow


class SeatVersions:
    """Follows one seat op by op.

    A version is alive while it is the newest, while a microbatch in flight was forwarded with it, and while a
    forward that is still to come will read it.

    Attributes:
        peak: most distinct versions alive at once.
        peak_in_flight: most microbatches forwarded and not yet backwarded.
        tags: of the gradients taken so far.
    """

    def __init__(self, program: Program, stage: int, replica: int, total: int) -> None:
        self.peak = 1
        self.peak_in_flight = 0
        self.tags: list[Tag] = []
        self._stage = stage
        self._stride = program.placement.replicas[stage]
        self._total = total
        self._rule = program.weights
        self._per_update = program.updates.per_update[stage]
        self._trains = len(program.kinds) > 1
        self._last = Kind.WEIGHT_GRADIENT if Kind.WEIGHT_GRADIENT in program.kinds else Kind.BACKWARD
        self._in_flight = 0
        # Microbatches before the horizon that are not yet backwarded, and how many of them read each version.
        self._read: dict[int, int] = {}
        self._readers: dict[int, int] = {}
        self._horizon = replica
        self._horizon_version = self._rule.forward_version(stage, replica)

    def follow(self, op: Op) -> None:
        """Takes note of an op that was done."""
        kind, stage, index, _ = op
        if kind is _FORWARD:
            if self._trains:
                while index >= self._horizon:
                    self._look_ahead()
                self._in_flight += 1
                if self._in_flight > self.peak_in_flight:
                    self.peak_in_flight = self._in_flight
        elif kind is self._last:
            version = self._read.pop(index)
            if self._readers[version] == 1:
                del self._readers[version]
            else:
                self._readers[version] -= 1
            self._in_flight -= 1
            backward = self._rule.backward_version(stage, index)
            self.tags.append(Tag(stage, index, version, backward, index // self._per_update))
        elif kind is _UPDATE:
            # Only here can the count grow: a forward keeps alive what was waiting for it.
            while self._horizon_version < index and self._horizon < self._total:
                self._look_ahead()
            alive = len(self._readers) + (index not in self._readers)
            if alive > self.peak:
                self.peak = alive

    def _look_ahead(self) -> None:
        version = self._horizon_version
        self._read[self._horizon] = version
        self._readers[version] = self._readers.get(version, 0) + 1
        self._horizon += self._stride
        self._horizon_version = self._rule.forward_version(self._stage, self._horizon)
