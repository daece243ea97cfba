"""Compensations for stale gradients: their algebra, without tensors (docs/exact_rules.md, Compensation of delay).

An update may change the *rate* (T1), the *gradient* (the gap-aware penalty), or the *step*: every
published way to predict the weights at a constant horizon, in which the backward reads the prediction of its forward,
is one in other coordinates. With w the weights, p_t the predicted displacement and u_t the optimizer's own update, the
predicted weights y = w - p obey

    y(t+1) = y(t) - (u_t + p_{t+1} - p_t)

so that y alone is stored. If u is momentum SGD's and p lies along its velocity, all are one family; for other
optimizers there is error feedback. `extensions/compensations/` has a file for each.

Legend: m momentum, v velocity, g gradient, lr learning rate, D staleness of the stage (`WeightRule.staleness`), T
horizon in updates, t an update, k an update since the start of training.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self, cast, get_args, get_origin, get_type_hints

from pipedream.core.artifact import NamedKind, decode_fields
from pipedream.core.door import Door, is_file
from pipedream.core.errors import ArtifactError, ScheduleError
from pipedream.core.model.weight_shapes import Matrices
from pipedream.core.schedule.weights import WeightRule


@dataclass(frozen=True)
class Compensation(NamedKind, ABC):
    """One way to compensate for stale gradients.

    Attributes:
        moves_weights: it moves weights itself; an update has at most one such compensation.
        joins_forward_prediction: it may move weights although the method predicts them, for its forwards alone.
        needs_read_weights: an update reads the weights with which its gradients were computed.
        notes_steps: it learns from the optimizer's steps (`note_steps`).
        steps_whole_matrices: on a mesh the optimizer steps whole weights.
    """

    KEY = "compensation"
    moves_weights: ClassVar[bool] = False
    joins_forward_prediction: ClassVar[bool] = False
    needs_read_weights: ClassVar[bool] = False
    notes_steps: ClassVar[bool] = False
    steps_whole_matrices: ClassVar[bool] = False

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

    def rate_factor(self, staleness: float, k: int) -> float:
        """Returns the factor on the learning rate of update k (from 0) at a mean staleness."""
        return 1.0

    def list_smaller_forms(self) -> list[Compensation]:
        """Returns forms that keep less, the best first."""
        return []

    def check_method(self, weights: WeightRule, *, reads_one_version: bool) -> None:
        """Raises a `ScheduleError` if a method's rule for the weights does not allow it; see `check_compensations`."""

    # -- in a run: `stage` is an `extensions.delays.compensator.CompensatedStage` -------------------------------------

    def check_optimizer(self, optimizer: Any) -> None:
        """Raises a `ScheduleError` if it is not defined for an optimizer of torch's."""

    def begin(self, stage: Any) -> None:
        """Makes the state of the stage's weights."""

    def change_gradients(self, stage: Any) -> None:
        """Changes the gradients of the handles before the step."""

    def penalise(self, stage: Any, newest: Mapping[str, Any], read: Mapping[str, Any]) -> None:
        """Does so by the weights that were read; for those with `needs_read_weights`.

        Args:
            newest: weights from which the update starts.
            read: weights at which the gradients were computed.
        """

    def moves_at(self, staleness: int) -> bool:
        """Returns whether it moves the weights of a stage of this staleness."""
        return self.moves_weights

    def move(self, stage: Any, step: Callable[[], None]) -> None:
        """Makes a step of the optimizer, and moves the weights; for those with `moves_at`."""

    def step(self, stage: Any, step: Callable[[], None]) -> None:
        """Makes a step of the optimizer, without anything else that moves weights."""
        step()

    def note_steps(self, stage: Any, handles: Sequence[Any], steps: Sequence[Any], rate: float) -> None:
        """Gets the optimizer's steps of some handles, divided by their learning rate, after they were made."""

    def unpredict(self, stage: Any, weights: dict[str, Any], factor: float) -> None:
        """Replaces weights y by those that they are predicted from, w = y + p.

        Args:
            factor: on the learning rate.
        """

    def load(self, stage: Any, name: str, saved: Mapping[str, Any]) -> None:
        """Loads a weight's state from a checkpoint or another method; missing entries keep their initial values."""
        for key, tensor in stage.state[name].items():
            if key in saved:
                tensor.copy_(saved[key])

    @classmethod
    def leave(cls, stage: Any, name: str, saved: Mapping[str, Any]) -> None:
        """Takes back what it has done to the optimizer's state of a weight, given what it had saved."""

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
        name = name if is_file(name) else name.strip().lower().replace("-", "_")
        if not is_file(name) and not COMPENSATIONS.has(name):
            raise ScheduleError(
                f"compensation {text!r} is not known; choose one of {', '.join(sorted(COMPENSATIONS.named))}, or give "
                "FILE.py with yours"
            )
        kind = COMPENSATIONS.find(name)
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
        """Reads JSON values; raises an ArtifactError for an unknown kind, or if a field is missing."""
        name = str(value.get(cls.KEY))
        if not is_file(name) and not COMPENSATIONS.has(name):
            raise ArtifactError(f"{where}.{cls.KEY} should be one of {sorted(COMPENSATIONS.named)}")
        kind = cast(type[Self], COMPENSATIONS.find(name))
        compensation: Self = decode_fields(kind, {k: v for k, v in value.items() if k != cls.KEY}, where)
        names = compensation.encoded().keys()
        if value.keys() != names:
            raise ArtifactError(f"{where} should have the fields {sorted(names)}, found {sorted(value)}")
        return compensation


COMPENSATIONS: Door[type[Compensation]] = Door(
    "pipedream.extensions.compensations", "COMPENSATIONS", "compensation", "compensation", ScheduleError
)


def compensations(chosen: Any) -> tuple[Compensation, ...]:
    """Returns compensations from one or several that a user gives, or from their texts; opens the files they name."""
    items = [chosen] if isinstance(chosen, (str, Compensation)) or not isinstance(chosen, Iterable) else list(chosen)
    unknown = [item for item in items if not isinstance(item, (str, Compensation))]
    if unknown:
        raise ScheduleError(f"compensation {unknown[0]!r} is neither a Compensation nor the name of one")
    for name in (item.partition(":")[0] for item in items if isinstance(item, str)):
        if is_file(name):
            COMPENSATIONS.open_file(name)
    return tuple(Compensation.of_text(item) if isinstance(item, str) else item for item in items)


def rate_factor(chosen: Iterable[Compensation], staleness: float, k: int) -> float:
    """Returns the factor on the rate of update k (from 0) at a mean staleness."""
    factor = 1.0
    for compensation in chosen:
        factor *= compensation.rate_factor(staleness, k)
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
    may_join = all(c.joins_forward_prediction for c in chosen if c.moves_weights)
    predicts_only_forward = weights.backward_rule != "stash" and weights.backward_prediction is None
    if movers and predicts_forward and not (predicts_only_forward and may_join):
        raise ScheduleError(
            f"compensation {movers[0]} was asked for with a method whose forwards read predicted weights: both make up "
            "for the same staleness; leave it out, or use a method that reads stored weights. (Spike compensation can "
            "be combined with a prediction for the forward alone, as in pb_lwp_sc.)"
        )
    for compensation in chosen:
        compensation.check_method(weights, reads_one_version=reads_one_version)


def expect(condition: bool, text: str) -> None:
    """Raises a ValueError with a text unless a condition holds."""
    if not condition:
        raise ValueError(text)


def expect_horizon(value: float | None) -> None:
    """Raises a ValueError for what is no horizon."""
    expect(value is None or (math.isfinite(value) and value >= 0), f"a horizon must be at least 0, found {value}")
