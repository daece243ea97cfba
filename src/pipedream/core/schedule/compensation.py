"""Compensations for stale gradients: their algebra, without tensors (docs/exact_rules.md, Compensation of delay).

An update may change the *rate* (`LearningRateRescheduling`), the *gradient* (`GapAware`), or the *step*: every
published way to predict the weights at a constant horizon, in which the backward reads the prediction of its forward,
is one in other coordinates. With w the weights, p_t the predicted displacement and u_t the optimizer's own update, the
predicted weights y = w - p obey

    y(t+1) = y(t) - (u_t + p_{t+1} - p_t)

so that y alone is stored. If u is momentum SGD's and p lies along its velocity, all are one family (`OfVelocity`); for
other optimizers there is `ErrorFeedback`.

Legend: m momentum, v velocity, g gradient, lr learning rate, D staleness of the stage (`WeightRule.staleness`), T
horizon in updates, t an update, k an update since the start of training.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from pipedream.core.artifact import NamedKind
from pipedream.core.errors import ArtifactError, ScheduleError
from pipedream.core.model.weight_shapes import Matrices
from pipedream.core.schedule.weights import WeightRule

_QR_COST = 4.0
"""A QR decomposition takes as long as so many products of square matrices (one core, 512 to 1024 rows)."""
_TEMPORARY_MATRICES = 4
"""Matrices that torch needs to compute eigenvectors or a QR decomposition."""


@dataclass(frozen=True)
class Compensation(NamedKind, ABC):
    """One way to compensate for stale gradients.

    Attributes:
        moves_weights: it moves weights itself; an update has at most one such compensation.
        needs_read_weights: an update reads the weights with which its gradients were computed.
    """

    KEY = "compensation"
    kinds: ClassVar[dict[str, type[Compensation]]]
    moves_weights: ClassVar[bool] = False
    needs_read_weights: ClassVar[bool] = False

    def kept_tensors(self, staleness: int) -> int:
        return 0

    def matrix_bytes(self, matrices: Iterable[Matrices]) -> tuple[int, int]:
        """Returns bytes that weights of these shapes need besides `kept_tensors`: always, and during an update."""
        return 0, 0

    def update_flops(self, matrices: Iterable[Matrices]) -> float:
        """Returns the mean operations per update for weights of these shapes; a multiply-add counts as two."""
        return 0.0

    def at_stage(self, stage: int, delays: Sequence[int]) -> Self:
        """Returns the compensation of one stage, given the staleness of all stages."""
        return self

    def __str__(self) -> str:
        values = [getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default]
        return ":".join([self.name, *(value if isinstance(value, str) else repr(value) for value in values)])

    @staticmethod
    def of_text(text: str) -> Compensation:
        """Reads ``spike``, ``spike:3`` or, in any order, ``basis_rotation:one_sided:5``.

        Raises:
            ScheduleError: an unknown name, or a wrong number.
        """
        name, colon, values_text = text.partition(":")
        kind = Compensation.kinds.get(name.strip().lower().replace("-", "_"))
        if kind is None:
            raise ScheduleError(
                f"compensation {text!r} is not known; choose one of {', '.join(sorted(Compensation.kinds))}"
            )
        hints = get_type_hints(kind)
        numbers = [f.name for f in fields(kind) if get_origin(hints[f.name]) is not Literal]
        words = {word: f.name for f in fields(kind) if f.name not in numbers for word in get_args(hints[f.name])}
        arguments: dict[str, Any] = {}
        try:
            for value in values_text.split(":") if colon else ():
                if value in words:
                    arguments[words[value]] = value
                    continue
                number = next(number for number in (*numbers, "") if number not in arguments)
                arguments[number] = int(value) if hints.get(number) in (int, int | None) else float(value)
            return kind(**arguments)
        except (TypeError, ValueError) as error:
            names = ", ".join([*numbers, *words]) or "no number"
            reason = error if isinstance(error, ValueError) else f"found {values_text or 'none'}"
            raise ScheduleError(f"compensation {text!r} takes {names}, as in NAME:NUMBER: {reason}") from None

    @classmethod
    def decoded(cls, value: dict[str, Any], where: str) -> Self:
        """Reads JSON values; raises an ArtifactError if a field is missing."""
        compensation = super().decoded(value, where)
        names = compensation.encoded().keys()
        if value.keys() != names:
            raise ArtifactError(f"{where} should have the fields {sorted(names)}, found {sorted(value)}")
        return compensation


class OfVelocity(Compensation):
    """Momentum SGD that steps along the velocity and the newest gradient.

        v(t+1) = m v(t) + g_t,   y(t+1) = y(t) - lr (a v(t+1) + b g_t),   a = 1 - b (1 - m)

    A gradient moves the weights by lr / (1 - m) in total, of which b at once. In the coordinates
    w = y + lr T v this is momentum SGD on w, with gradients taken at the prediction w - lr T v, T = m b. A coupled
    weight decay is part of g, and is taken at y.
    """

    moves_weights = True

    @abstractmethod
    def at_once(self, momentum: float, staleness: int) -> float:
        """Returns b."""

    def coefficients(self, momentum: float, staleness: int) -> tuple[float, float]:
        """Returns (a, b)."""
        b = self.at_once(momentum, staleness)
        return 1.0 - b * (1.0 - momentum), b

    def horizon_at(self, momentum: float, staleness: int) -> float:
        """Returns T: the stored weights are T velocities ahead of w."""
        return momentum * self.at_once(momentum, staleness)


@dataclass(frozen=True)
class Generalised(OfVelocity):
    """Any member of the family.

    Attributes:
        b: share of the newest gradient; 0 is plain momentum, 1 Nesterov's.
    """

    name: ClassVar[str] = "generalised"
    b: float

    def __post_init__(self) -> None:
        _expect(math.isfinite(self.b) and self.b >= 0, f"b must be at least 0, found {self.b}")

    def at_once(self, momentum: float, staleness: int) -> float:
        return self.b


@dataclass(frozen=True)
class Nesterov(OfVelocity):
    """Asynchronous Nesterov momentum: b = 1, one update ahead regardless of the delay.

    Ajanthan et al., ICML 2025, with a constant momentum: d = m (w(t) - w(t-1)), w(t+1) = w(t) + d - eta (1 - m) grad at
    the delayed w + d. The learning rate here is eta (1 - m).
    """

    name: ClassVar[str] = "nesterov"

    def at_once(self, momentum: float, staleness: int) -> float:
        return 1.0


@dataclass(frozen=True)
class SpikeCompensation(OfVelocity):
    """Spike compensation SC_D: a gradient immediately makes the steps of the D updates that it missed.

    Kosson et al., Pipelined Backpropagation at Scale, MLSys 2021: a = m^D, b = (1 - m^D) / (1 - m). The same as the
    multi-step Nesterov prediction of FTPipe (Eliad et al., ATC 2021) and DANA at horizon D, kept for the backward.
    D = 0 is plain momentum, D = 1 Nesterov's.

    Attributes:
        delay: D; None: the stage's staleness.
    """

    name: ClassVar[str] = "spike"
    delay: int | None = None

    def __post_init__(self) -> None:
        _expect(self.delay is None or self.delay >= 0, f"a delay must be at least 0 updates, found {self.delay}")

    def at_once(self, momentum: float, staleness: int) -> float:
        delay = staleness if self.delay is None else self.delay
        return sum((momentum**i for i in range(delay)), 0.0)


@dataclass(frozen=True)
class VelocityPrediction(OfVelocity):
    """Linear weight prediction in the velocity form, w - lr T v, kept for the backward: b = T / m.

    SpecTrain (Chen et al., 2018), and LWPv of Kosson et al., MLSys 2021.

    Attributes:
        horizon: T; None: the stage's staleness.
    """

    name: ClassVar[str] = "velocity_prediction"
    horizon: float | None = None

    def __post_init__(self) -> None:
        _expect_horizon(self.horizon)

    def at_once(self, momentum: float, staleness: int) -> float:
        return (staleness if self.horizon is None else self.horizon) / momentum


@dataclass(frozen=True)
class ErrorFeedback(Compensation):
    """Error feedback, for the update u of any optimizer: y(t+1) = y(t) - (u_t + lambda (u_t - u_{t-1})), u_{-1} = 0.

    One-Step Gradient Delay, arXiv 2606.30634, ICML 2026, with lambda = 1 for a delay of 1. The same as linear weight
    prediction in the difference form, w + T (w(t) - w(t-1)) (LWPw of Kosson et al.), at horizon T = lambda, kept for
    the backward. A decoupled weight decay is part of u.

    Attributes:
        strength: lambda; None: the stage's staleness.
    """

    name: ClassVar[str] = "error_feedback"
    moves_weights: ClassVar[bool] = True
    strength: float | None = None

    def __post_init__(self) -> None:
        _expect_horizon(self.strength)

    def kept_tensors(self, staleness: int) -> int:
        return 1 if self.strength_at(staleness) else 0

    def strength_at(self, staleness: int) -> float:
        return float(staleness) if self.strength is None else self.strength


@dataclass(frozen=True)
class LearningRateRescheduling(Compensation):
    """PipeMare's T1: the rate of update k is divided by D^p, p = 1 - min(k / K, 1), D the stage's mean staleness.

    Yang et al., MLSys 2021; D is the mean over the microbatches of an update, as for its T2
    (`schedules.asynchronous.pipemare`). Stale gradients are only stable at rates of the order of 1 / D
    (docs/lessons.md, Facts). The paper's K is the length of its first phase. PipeMare's delays below 1 would raise the
    rate, and are ignored. k counts rounds of the input stage, as learning-rate schedules do.

    Attributes:
        updates: K.
    """

    name: ClassVar[str] = "t1"
    updates: int

    def __post_init__(self) -> None:
        _expect(self.updates >= 1, f"T1 ends after at least 1 update, found {self.updates}")

    def factor(self, staleness: float, k: int) -> float:
        return math.pow(max(staleness, 1.0), min(k / self.updates, 1.0) - 1.0)


@dataclass(frozen=True)
class GapAware(Compensation):
    """The gradient is divided, element by element, by 1 + gap / usual step.

    Barkai et al., Gap-Aware Mitigation of Gradient Staleness, ICLR 2020; FTPipe, ATC 2021:
    1 + |w_t - w_read| / (lr_max (sqrt(E[v^2]) + eps)), with w_read the weights that the gradient was taken at, E the
    moving average over the updates made so far, corrected for its start, v = u / lr the step at a rate of 1 (for
    momentum SGD its velocity), lr_max the greatest rate so far. A coupled weight decay is divided likewise.
    """

    name: ClassVar[str] = "gap_aware"
    needs_read_weights: ClassVar[bool] = True
    eps: ClassVar[float] = 1e-8
    decay: float = 0.999

    def kept_tensors(self, staleness: int) -> int:
        return 1

    def __post_init__(self) -> None:
        _expect(0.0 <= self.decay < 1.0, f"the decay of an average lies between 0 and 1, found {self.decay}")


@dataclass(frozen=True)
class BasisRotation(Compensation):
    """Adam in the basis of the gradients' covariance, in which stale gradients still make useful steps.

    Jung, Shin and Lee, Mitigating Staleness in Asynchronous Pipeline Parallelism via Basis Rotation, ICML 2026,
    algorithms 1 and 2. For a matrix with gradient G, moments M and V in the rotated basis, and any optimizer of the
    Adam family:

        L = E[G G^T],  R = E[G^T G],  U <- qr(L U),  V <- qr(R V),  W <- W - lr U adam(U^T G V) V^T

    E are averages with the optimizer's second decay; `first_moment` takes M M^T and M^T M for them. The first basis has
    the eigenvectors; before each later one its columns are sorted by eigenvalue. All weights of two or more dimensions
    are rotated, as matrices of their first dimension and all others, except sides longer than `longest` (SOAP's limit).

    Attributes:
        every: updates from one basis to the next.
        frequency: `by_delay` gives a stage new bases in proportion to its D + 1, and all stages the same total.
        geometry: `one_sided` rotates only the shorter side.
    """

    name: ClassVar[str] = "basis_rotation"
    longest: ClassVar[int] = 10_000
    every: int = 10
    frequency: Literal["uniform", "by_delay"] = "uniform"
    geometry: Literal["two_sided", "one_sided"] = "two_sided"
    estimate: Literal["second_moment", "first_moment"] = "second_moment"

    def __post_init__(self) -> None:
        _expect(self.every >= 1, f"a basis is renewed after at least 1 update, found {self.every}")
        for name in ("frequency", "geometry", "estimate"):
            value, choices = getattr(self, name), get_args(get_type_hints(BasisRotation)[name])
            _expect(value in choices, f"{name} is one of {', '.join(choices)}, found {value!r}")

    @property
    def keeps_covariance(self) -> bool:
        return self.estimate == "second_moment"

    def at_stage(self, stage: int, delays: Sequence[int]) -> Self:
        if self.frequency == "uniform":
            return self
        # A single division: a second one could change how a half is rounded.
        every = self.every * sum(delay + 1 for delay in delays) / (len(delays) * (delays[stage] + 1))
        return replace(self, every=max(1, round(every)), frequency="uniform")

    def kept_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, int, int]]:
        """Returns what is kept for a weight's rows ('left') and columns: (1 or 2, n, n), the basis and the average."""
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0)
        lengths = {"left": rows, "right": columns}
        if self.geometry == "one_sided":
            lengths = {"left": rows} if rows < columns else {"right": columns}
        count = 1 + self.keeps_covariance
        return {side: (count, length, length) for side, length in lengths.items() if 0 < length <= self.longest}

    def matrix_bytes(self, matrices: Iterable[Matrices]) -> tuple[int, int]:
        kept_bytes = largest_bytes = 0
        for rows, columns, tensors, size_bytes in matrices:
            value_bytes = max(size_bytes // max(tensors * rows * columns, 1), 4)  # float32 or more
            for count, n, _ in self.kept_shapes((rows, columns)).values():
                kept_bytes += tensors * count * n * n * value_bytes
                largest_bytes = max(largest_bytes, n * n * value_bytes)
        return kept_bytes, _TEMPORARY_MATRICES * largest_bytes

    def update_flops(self, matrices: Iterable[Matrices]) -> float:
        """Each update rotates the gradient and the step, each new basis also the first moment, back and forth."""
        flops = 0.0
        for rows, columns, tensors, _ in matrices:
            for _, n, _ in self.kept_shapes((rows, columns)).values():
                product = 2.0 * rows * columns * n
                new_basis = 2 * product + (2.0 * n**3 if self.keeps_covariance else 2 * product) + _QR_COST * 2.0 * n**3
                flops += tensors * ((2 + self.keeps_covariance) * product + new_basis / self.every)
        return flops


def compensations(chosen: Any) -> tuple[Compensation, ...]:
    """Returns compensations from one or several of them, or of their texts."""
    items = [chosen] if isinstance(chosen, (str, Compensation)) or not isinstance(chosen, Iterable) else list(chosen)
    unknown = [item for item in items if not isinstance(item, (str, Compensation))]
    if unknown:
        raise ScheduleError(f"compensation {unknown[0]!r} is neither a Compensation nor the name of one")
    return tuple(Compensation.of_text(item) if isinstance(item, str) else item for item in items)


def rate_factor(chosen: Iterable[Compensation], staleness: float, k: int) -> float:
    """Returns the factor on the rate of update k (from 0) at a mean staleness."""
    factor = 1.0
    for compensation in chosen:
        if isinstance(compensation, LearningRateRescheduling):
            factor *= compensation.factor(staleness, k)
    return factor


def check_compensations(
    chosen: tuple[Compensation, ...], weights: WeightRule, *, flushes: bool, reads_one_version: bool
) -> None:
    """Checks that compensations fit together and fit the method.

    Args:
        reads_one_version: all microbatches of an update read the same version.
    """
    if not chosen:
        return
    names = " and ".join(map(str, chosen))
    if flushes:
        raise ScheduleError(
            f"compensation {names} was asked for with a method that flushes: none of its gradients is stale; leave it "
            "out, or use an asynchronous method"
        )
    if len({type(compensation) for compensation in chosen}) < len(chosen):
        raise ScheduleError(f"compensation {names}: one kind is asked for twice; leave one out")
    movers = [str(compensation) for compensation in chosen if compensation.moves_weights]
    if len(movers) > 1:
        raise ScheduleError(
            f"compensations {' and '.join(movers)} make up for the same staleness twice, because each of them predicts "
            "the weights; choose one"
        )
    predicts_forward = weights.forward_prediction is not None
    only_spikes = all(isinstance(c, SpikeCompensation) for c in chosen if c.moves_weights)
    predicts_only_forward = weights.backward_rule != "stash" and weights.backward_prediction is None
    if movers and predicts_forward and not (predicts_only_forward and only_spikes):
        raise ScheduleError(
            f"compensation {movers[0]} was asked for with a method whose forwards read predicted weights: both make up "
            "for the same staleness; leave it out, or use a method that reads stored weights. (Spike compensation can "
            "be combined with a prediction for the forward alone, as in pb_lwp_sc.)"
        )
    if any(isinstance(compensation, GapAware) for compensation in chosen):
        if weights.backward_rule == "graph":
            raise ScheduleError(
                "compensation gap_aware needs the weights that a gradient was taken at; under the backward rule "
                "'graph' there are none; use a method that stashes weights"
            )
        if weights.backward_rule == "recompute":
            raise ScheduleError(
                "compensation gap_aware divides by how far the weights have moved from those that a gradient was taken "
                "at, but the backward rule 'recompute' takes it at the newest; leave it out, or use a method that "
                "stashes weights"
            )
        if weights.forward_prediction is not None:
            raise ScheduleError(
                "compensation gap_aware needs the weights that a gradient was taken at, but the method's forwards read "
                "predictions, which are gone when the update comes; use a method that stashes weights"
            )
        if not reads_one_version:
            raise ScheduleError(
                "compensation gap_aware needs the weights that a gradient was taken at, but microbatches of one update "
                "read different versions; use a method whose updates do not accumulate over versions"
            )


def _expect(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)


def _expect_horizon(value: float | None) -> None:
    _expect(value is None or (math.isfinite(value) and value >= 0), f"a horizon must be at least 0, found {value}")
