"""Weight rules: the weights that a forward and its backward read.

A rule gives static version numbers, counted from the last drain; update n makes version n. So a program's staleness and
memory are known before it runs, and the runtime checks the versions that it reads.

If a backward reads a newer version than its forward, one of these holds:

- *recompute*: the forward is repeated on the old input at the backward's weights: their true gradient;
- *graph*: the activations stay those of the forward, but autograd multiplies with the backward's weights: the gradient
  of no function. Pipelined backpropagation, PipeMare and similar methods train this way, with one set of weights.

A prediction (`WeightPrediction`) has the number of the version that it is computed from.

Legend: s stage, k microbatch (from 0, since the drain), r_s replicas, W_s warm-up forwards, m microbatches
per minibatch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, takewhile
from math import exp, isfinite, lcm
from typing import Any, ClassVar, Self

from pipedream.core.artifact import NamedKind
from pipedream.core.extensions import import_methods
from pipedream.core.schedule.op import Kind

VELOCITY, DIFFERENCE, AVERAGE = "velocity", "difference", "average"


@dataclass(frozen=True)
class WeightPrediction:
    """Weights that are not stored but computed, some updates before or after a version.

    A prediction from version t is w_t + T d_t: T its horizon in updates, d_t what one update is assumed to add.

    - *velocity*: d_t = -lr v_t, where v_t is the direction in which the optimizer steps: SGD's momentum buffer (Kosson
      et al., MLSys 2021, LWP^v; SpecTrain, 2018), Adam's and AdamW's m / (sqrt(v) + eps), both with bias correction
      (PipeOptim, 2023; XPipe, 2019), without decoupled decay. lr is the rate of the next update.
    - *difference*: d_t = w_t - w_{t-1}, the last update itself, of any optimizer (Kosson et al., LWP^w).
    - *average*: d_t = gamma d_{t-1} + (1 - gamma)(w_t - w_{t-1}), gamma = decay^(1/|T|) (PipeMare, MLSys 2021, T2).

    T < 0 reconstructs earlier weights. Before the first update d = 0.

    Attributes:
        decay: the share of an average that remains after |T| updates; exp(-2), PipeMare's, makes its correction exact
            to first order.
    """

    by: str
    horizons: tuple[float, ...]
    decay: float = exp(-2)

    def __post_init__(self) -> None:
        if self.by not in (VELOCITY, DIFFERENCE, AVERAGE):
            raise ValueError(f"a prediction is by {VELOCITY}, {DIFFERENCE} or {AVERAGE}, found {self.by!r}")
        if not self.horizons or not all(isfinite(horizon) for horizon in self.horizons):
            raise ValueError(f"a prediction needs a finite horizon for each stage, found {self.horizons}")
        if not 0 < self.decay < 1:
            raise ValueError(f"an average's decay lies between 0 and 1, found {self.decay}")
        # So that 1 and 1.0 are equal in a file.
        object.__setattr__(self, "horizons", tuple(map(float, self.horizons)))

    def gamma(self, stage: int) -> float:
        return float(self.decay ** (1 / abs(self.horizons[stage])))


BACKWARD_RULES = ("stash", "recompute", "graph")


@dataclass(frozen=True)
class WeightRule(NamedKind, ABC):
    """The version that each forward and each backward of a stage reads.

    Attributes:
        backward_rule: 'stash': the true gradient at the weights that the forward read; 'recompute' or 'graph' if the
            backward reads others.
    """

    KEY = "rule"
    backward_rule: ClassVar[str] = "stash"
    forward_prediction: ClassVar[WeightPrediction | None] = None
    backward_prediction: ClassVar[WeightPrediction | None] = None

    @classmethod
    def decoded(cls, value: dict[str, Any], where: str) -> Self:
        if value.get(cls.KEY) not in cls.kinds:  # perhaps that of a method's file
            import_methods()
        return super().decoded(value, where)

    @abstractmethod
    def forward_version(self, stage: int, microbatch: int) -> int:
        """Returns the version that a forward reads; it never decreases over the microbatches of a replica."""

    def backward_version(self, stage: int, microbatch: int) -> int:
        return self.forward_version(stage, microbatch)

    def readable(
        self, stage: int, microbatch: int, newest: int, *, step: int = 1, total: int | None = None
    ) -> frozenset[int]:
        """Returns the versions up to `newest` that the coming forwards of a replica read.

        Args:
            microbatch: of the next forward.
            step: the stage's number of replicas.
            total: microbatches in the run; None while unknown.
        """
        coming = count(microbatch, step) if total is None else range(microbatch, total, step)  # ends: versions grow
        versions = (self.forward_version(stage, k) for k in coming)
        return frozenset(takewhile(lambda version: version <= newest, versions))

    @abstractmethod
    def versions(self, stage: int) -> int:
        """Returns the most versions that exist at once, including the newest and kept predictions."""

    @abstractmethod
    def staleness(self, stage: int) -> int:
        """Returns the most updates between the version a gradient is taken at and the one it updates."""

    def mean_staleness(self, stage: int) -> float:
        """Returns the mean staleness over an update's microbatches."""
        return float(self.staleness(stage))

    def predictions(self, stage: int) -> tuple[WeightPrediction, ...]:
        """Returns a stage's predictions that differ from the version itself."""
        predictions = (
            prediction for prediction in (self.forward_prediction, self.backward_prediction) if prediction is not None
        )
        return tuple(prediction for prediction in predictions if prediction.horizons[stage])

    def predicts_by_velocity(self, stage: int) -> bool:
        """Returns whether a stage's predictions read the state of its optimizer."""
        return any(prediction.by == VELOCITY for prediction in self.predictions(stage))

    def kept_until(self, stage: int) -> Kind | None:
        """Returns the last pass that reads a forward's kept prediction."""
        return None

    @property
    def held_until(self) -> Kind | None:
        """The last pass that keeps a version other than the newest; None with one set of weights."""
        return Kind.BACKWARD if self.backward_rule == "stash" else None

    def backward_reader(self, versions: Any) -> Callable[[Any], Any] | None:
        """Returns the function from the set of weights that a forward read to the set that its backward reads.

        None: the newest version. `versions` is a `runtime.stage.versions.Versions`.
        """
        return None

    def buffers(self, stage: int) -> int:
        """Returns how many further sets of tensors, as large as the weights, predictions need."""
        return 0


@dataclass(frozen=True)
class Flush(WeightRule):
    """The newest weights; an update waits until nothing is in flight. GPipe, 1F1B, DDP."""

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

    PipeDream, SOSP 2019, section 3.3: w(t+1) = w(t) - lr grad f(w_0(t-p+1), ..., w_{p-1}(t)). Stage s has staleness
    W_s + update delay.
    """

    name: ClassVar[str] = "stash"
    warmup: tuple[int, ...]
    replicas: tuple[int, ...]
    update_delay: tuple[int, ...]

    def forward_version(self, stage: int, microbatch: int) -> int:
        return max(0, microbatch // self.replicas[stage] - self.staleness(stage))

    def versions(self, stage: int) -> int:
        return self.staleness(stage) + 1

    def staleness(self, stage: int) -> int:
        return self.warmup[stage] + self.update_delay[stage]


@dataclass(frozen=True)
class VerticalSync(WeightRule):
    """Vertical sync: one version for all stages, chosen at the input stage, travels with the minibatch.

    PipeDream, SOSP 2019, section 3.3: w(t+1) = w(t) - lr grad f(w_0(t-p+1), ..., w_{p-1}(t-p+1)). The stamp that
    travels is a count of minibatches, a multiple of L = lcm(r), so that every stage has a version for it. Its staleness
    is W_0 + update_delay_0 rounds of the input stage, or more if a later stage with an update delay needs that.
    """

    name: ClassVar[str] = "vertical_sync"
    warmup: tuple[int, ...]
    replicas: tuple[int, ...]
    update_delay: tuple[int, ...]

    def forward_version(self, stage: int, microbatch: int) -> int:
        first = self.replicas[0]
        newest = max(0, microbatch // first - self._rounds_late)
        cycle = lcm(*self.replicas)
        return cycle * (first * newest // cycle) // self.replicas[stage]

    def versions(self, stage: int) -> int:
        # Only multiples of L / r_s are read: those since the stamp of the oldest round in flight, and the newest
        # version if it is no multiple.
        replicas = self.replicas[stage]
        step = lcm(*self.replicas) // replicas
        return max(
            len(range(self.forward_version(stage, newest * replicas), newest + 1, step)) + (newest % step > 0)
            for newest in self._find_steady(stage)
        )

    def staleness(self, stage: int) -> int:
        # The stamp does not change for a cycle while the stage keeps updating.
        return max(
            newest - self.forward_version(stage, newest * self.replicas[stage]) for newest in self._find_steady(stage)
        )

    def mean_staleness(self, stage: int) -> float:
        updates, replicas = self._find_steady(stage), self.replicas[stage]
        members = range(updates.start * replicas, updates.stop * replicas)
        return sum(k // replicas - self.forward_version(stage, k) for k in members) / len(members)

    @property
    def _rounds_late(self) -> int:
        """Rounds of the input stage that cover (W_s + update_delay_s) r_s of every stage."""
        rows = zip(self.warmup, self.update_delay, self.replicas, strict=True)
        return max(-(-(wait + update_delay) * count // self.replicas[0]) for wait, update_delay, count in rows)

    def _find_steady(self, stage: int) -> range:
        """Returns one cycle of a stage's updates after the warm-up."""
        cycle = lcm(*self.replicas)
        first = -(-self._rounds_late * self.replicas[0] // cycle) * cycle  # from here on no stamp is raised to 0
        return range(first // self.replicas[stage], (first + cycle) // self.replicas[stage])


@dataclass(frozen=True)
class DoubleBuffer(WeightRule):
    """Two buffers, one step of delay everywhere: w(t+1) = w(t) - lr grad f(w(t-1)).

    PipeDream-2BW, ICML 2021, section 3.1: microbatch k (from 0) reads version max(floor(k/m) - 1, 0) in
    both passes and at all stages.
    """

    name: ClassVar[str] = "double_buffer"
    per_update: int

    def forward_version(self, stage: int, microbatch: int) -> int:
        return max(microbatch // self.per_update - 1, 0)

    def versions(self, stage: int) -> int:
        return 2

    def staleness(self, stage: int) -> int:
        return 1


@dataclass(frozen=True)
class Latest(WeightRule):
    """The newest weights: at the forward, and again at the backward.

    The optimizer writes the only set while microbatches are in flight: update n of a stage follows the last backward of
    its microbatches (or, with an update delay, the next forward), so which version is newest at an op is arithmetic.
    Under the rule 'stash' the backward reads what its forward read.

    Attributes:
        per_update: over all replicas; at least their number.
        shares_prediction: microbatches that share the forward prediction computed for the first of them (XPipe's
            bellwether): 1, or all those of an update.
    """

    name: ClassVar[str] = "latest"
    warmup: tuple[int, ...]
    replicas: tuple[int, ...]
    update_delay: tuple[int, ...]
    per_update: tuple[int, ...]
    # Fields here; class variables in the other rules.
    backward_rule: str = field(default="graph", kw_only=True)  # type: ignore[misc]
    forward_prediction: WeightPrediction | None = field(default=None, kw_only=True)  # type: ignore[misc]
    backward_prediction: WeightPrediction | None = field(default=None, kw_only=True)  # type: ignore[misc]
    shares_prediction: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        forward, backward = self.forward_prediction, self.backward_prediction
        lengths = {len(row) for row in (self.warmup, self.replicas, self.update_delay, self.per_update)}
        lengths |= {len(prediction.horizons) for prediction in (forward, backward) if prediction is not None}
        if len(lengths) != 1:
            raise ValueError(f"each argument needs one number per stage, found {sorted(lengths)} numbers")
        if any(count < replicas for count, replicas in zip(self.per_update, self.replicas, strict=True)):
            raise ValueError(
                f"an update holds a microbatch of each replica, found {self.per_update} of {self.replicas}"
            )
        if self.backward_rule not in BACKWARD_RULES:
            raise ValueError(f"a backward rule is {', '.join(BACKWARD_RULES)}, found {self.backward_rule!r}")
        if self.backward_rule == "stash" and (backward is not None or self.shares_prediction > 1):
            raise ValueError(
                "with the rule 'stash' each backward reads what its own forward has read, and has no prediction of its "
                "own"
            )
        if self.shares_prediction != 1 and {self.shares_prediction} != set(self.per_update):
            raise ValueError(
                f"a prediction is shared by the {self.per_update} microbatches of an update, "
                f"not {self.shares_prediction}"
            )
        if forward is not None and backward is not None and forward.by == backward.by == AVERAGE:
            raise ValueError("only one of the two predictions can use an average: each would need its own")

    def forward_version(self, stage: int, microbatch: int) -> int:
        replicas = self.replicas[stage]
        # The first microbatch of a replica in the group makes the prediction that its others read.
        group_start = microbatch - microbatch % self.shares_prediction
        reader = microbatch if self.shares_prediction == 1 else group_start + (microbatch - group_start) % replicas
        return max(0, (reader - self._count_late_microbatches(stage)) // self.per_update[stage])

    def backward_version(self, stage: int, microbatch: int) -> int:
        if self.backward_rule == "stash":
            return self.forward_version(stage, microbatch)
        return microbatch // self.per_update[stage]

    def versions(self, stage: int) -> int:
        if self.backward_rule != "stash":  # a prediction that forwards share is a set of its own
            return 1 if self.kept_until(stage) is None else 2
        if self.kept_until(stage) is None:
            return self.staleness(stage) + 1
        # A prediction for each version read in flight, and the weights themselves.
        return -(-self.warmup[stage] * self.replicas[stage] // self.per_update[stage]) + 2

    def staleness(self, stage: int) -> int:
        return -(-self._count_late_microbatches(stage) // self.per_update[stage])

    def mean_staleness(self, stage: int) -> float:
        late, per_update = self._count_late_microbatches(stage), self.per_update[stage]
        if self.shares_prediction == 1:  # after the warm-up, each reads its own weights
            return late / per_update
        return sum(-((i % self.replicas[stage] - late) // per_update) for i in range(per_update)) / per_update

    def kept_until(self, stage: int) -> Kind | None:
        if self.forward_prediction is None or not self.forward_prediction.horizons[stage]:
            return None
        if self.backward_rule == "stash":
            return Kind.BACKWARD
        # With as many replicas, each has one microbatch of a group, and no other one to keep the prediction for.
        return Kind.FORWARD if self.shares_prediction > self.replicas[stage] else None

    def buffers(self, stage: int) -> int:
        # The optimizer itself keeps the velocity.
        computed_from = {prediction.by for prediction in self.predictions(stage)} - {VELOCITY}
        # The weights are copied while a prediction occupies their storage, and before a step that enters an average.
        has_copy = AVERAGE in computed_from or (self.backward_rule != "stash" and bool(self.predictions(stage)))
        return has_copy + len(computed_from)

    def _count_late_microbatches(self, stage: int) -> int:
        return (self.warmup[stage] + self.update_delay[stage]) * self.replicas[stage]
