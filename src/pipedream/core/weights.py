"""Which weights a forward reads, and which its backward: the weight rules.

A rule answers with static version numbers, counted from the last drain: version 0 is what the stage held
there, version n is made by update n. Nobody reads "whatever has arrived", so a program's staleness and its
memory are known before it runs, and the runtime's own tags are compared with them.

Legend: s stage, k microbatch (from 0, since the drain), r_s replicas, W_s warm-up forwards, m microbatches
per minibatch, all from the plan and the schedule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import count, takewhile
from math import lcm
from typing import Any, ClassVar

from .artifact import decode, encode
from .errors import ArtifactError

__all__ = ["DoubleBuffer", "Flush", "Stash", "VerticalSync", "WeightRule"]


@dataclass(frozen=True)
class WeightRule(ABC):
    """Abstract: a forward view and a backward view on the versions of a stage.

    Attributes:
        name: how files and tables call it.
        backward_rule: 'stash': the true gradient at the weights that the forward read. ('recompute' and
            'graph', for rules whose views differ, come with the methods that need them.)
    """

    name: ClassVar[str]
    backward_rule: ClassVar[str] = "stash"
    rules: ClassVar[dict[str, type[WeightRule]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        WeightRule.rules[cls.name] = cls

    @abstractmethod
    def forward_version(self, stage: int, microbatch: int) -> int:
        """Returns the version that a forward reads; never falls as the microbatch grows."""

    def backward_version(self, stage: int, microbatch: int) -> int:
        """Returns the version that the backward reads."""
        return self.forward_version(stage, microbatch)

    def readable(
        self, stage: int, microbatch: int, newest: int, *, step: int = 1, total: int | None = None
    ) -> frozenset[int]:
        """Returns the versions up to the newest that the forwards to come at one seat read.

        Args:
            stage: whose.
            microbatch: of the next forward.
            newest: of the versions made so far.
            step: from one microbatch of the seat to its next, the stage's replicas.
            total: microbatches in the run; None while nobody knows.
        """
        coming = count(microbatch, step) if total is None else range(microbatch, total, step)
        versions = (self.forward_version(stage, k) for k in coming)
        return frozenset(takewhile(lambda version: version <= newest, versions))

    @abstractmethod
    def versions(self, stage: int) -> int:
        """Returns the most versions alive at once, the newest included."""

    @abstractmethod
    def staleness(self, stage: int) -> int:
        """Returns the most updates between the version a gradient is taken at and the one it updates."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the rule as JSON values."""
        fields: dict[str, Any] = encode(self)
        return {"rule": self.name} | fields

    @staticmethod
    def from_dict(data: Any, place: str = "weights") -> WeightRule:
        """Reads a rule from JSON values.

        Raises:
            ArtifactError: an unknown rule or wrong fields.
        """
        if not isinstance(data, dict) or data.get("rule") not in WeightRule.rules:
            raise ArtifactError(f"{place}.rule should be one of {sorted(WeightRule.rules)}")
        kind = WeightRule.rules[data["rule"]]
        rule = decode(kind, {k: v for k, v in data.items() if k != "rule"}, place)
        assert isinstance(rule, WeightRule)
        return rule


@dataclass(frozen=True)
class Flush(WeightRule):
    """The newest weights: an update waits until nothing is in flight. GPipe, 1F1B, Flush, DDP.

    Attributes:
        per_update: microbatches in one update, over all replicas.
    """

    name: ClassVar[str] = "flush"
    per_update: int

    def forward_version(self, stage: int, microbatch: int) -> int:
        return microbatch // self.per_update

    def versions(self, stage: int) -> int:
        return 1

    def staleness(self, stage: int) -> int:
        return 0


@dataclass(frozen=True)
class Stash(WeightRule):
    """Weight stashing: the newest weights at the forward, the same at the backward.

    PipeDream, SOSP 2019, section 3.3: w(t+1) = w(t) - lr grad f(w_0(t-p+1), ..., w_{p-1}(t)). Stage s is
    W_s + lag updates late.
    """

    name: ClassVar[str] = "stash"
    warmup: tuple[int, ...]
    replicas: tuple[int, ...]
    lag: tuple[int, ...]

    def forward_version(self, stage: int, microbatch: int) -> int:
        return max(0, microbatch // self.replicas[stage] - self.staleness(stage))

    def versions(self, stage: int) -> int:
        return self.staleness(stage) + 1

    def staleness(self, stage: int) -> int:
        return self.warmup[stage] + self.lag[stage]


@dataclass(frozen=True)
class VerticalSync(WeightRule):
    """Vertical sync: one version for all stages, chosen at the input stage, travels with the minibatch.

    PipeDream, SOSP 2019, section 3.3: w(t+1) = w(t) - lr grad f(w_0(t-p+1), ..., w_{p-1}(t-p+1)). The tag
    is a count of minibatches, a multiple of L = lcm(r), so that every stage has a version for it. It is
    W_0 + lag_0 rounds of the input stage late, or more where a stage behind lags so much that it has not yet
    made that version.
    """

    name: ClassVar[str] = "vertical_sync"
    warmup: tuple[int, ...]
    replicas: tuple[int, ...]
    lag: tuple[int, ...]

    def forward_version(self, stage: int, microbatch: int) -> int:
        first = self.replicas[0]
        newest = max(0, microbatch // first - self._rounds_late)
        cycle = lcm(*self.replicas)
        return cycle * (first * newest // cycle) // self.replicas[stage]

    def versions(self, stage: int) -> int:
        # Only multiples of L / r_s are ever read: those from the tag of the oldest round in flight on, and
        # the newest where it is none of them.
        count = self.replicas[stage]
        step = lcm(*self.replicas) // count
        return max(
            len(range(self.forward_version(stage, newest * count), newest + 1, step)) + (newest % step > 0)
            for newest in self._settled(stage)
        )

    def staleness(self, stage: int) -> int:
        # The most over one cycle: the tag stands still for a cycle while the stage's updates go on.
        return max(
            newest - self.forward_version(stage, newest * self.replicas[stage]) for newest in self._settled(stage)
        )

    @property
    def _rounds_late(self) -> int:
        """Rounds of the input stage: r_0 times as many microbatches must cover (W_s + lag_s) r_s of each."""
        each = zip(self.warmup, self.lag, self.replicas, strict=True)
        return max(-(-(wait + lag) * count // self.replicas[0]) for wait, lag, count in each)

    def _settled(self, stage: int) -> range:
        """Returns one cycle of updates of a stage, behind the warm-up."""
        cycle = lcm(*self.replicas)
        first = ((self._rounds_late + 1) * self.replicas[0] // cycle + 2) * cycle
        return range(first // self.replicas[stage], (first + cycle) // self.replicas[stage])


@dataclass(frozen=True)
class DoubleBuffer(WeightRule):
    """Two buffers, one step of delay everywhere: w(t+1) = w(t) - lr grad f(w(t-1)).

    PipeDream-2BW, ICML 2021, section 3.1: microbatch k (from 0) reads version max(floor(k/m) - 1, 0) in
    both passes and at all stages.

    Attributes:
        per_update: m, microbatches in one update, over all replicas.
    """

    name: ClassVar[str] = "double_buffer"
    per_update: int

    def forward_version(self, stage: int, microbatch: int) -> int:
        return max(microbatch // self.per_update - 1, 0)

    def versions(self, stage: int) -> int:
        return 2

    def staleness(self, stage: int) -> int:
        return 1
