"""Computes loss, weight and metrics from output and targets."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import log2
from typing import Any

import torch

from pipedream.core.schedule.program import Program
from pipedream.runtime.comm.message import Message
from pipedream.runtime.comm.values import map_tensors, tensors_in
from pipedream.runtime.results import ReadSums, Results
from pipedream.runtime.scorer import Scorer, Targets
from pipedream.services.losses.losses import Loss, Metric, metric_scores
from pipedream.services.losses.totals import Score, Totals


class LossScorer(Scorer):
    """Computes a loss and metrics.

    Args:
        raises_on_nan: whether a loss that is nan raises an error in training.
    """

    def __init__(
        self,
        loss: Loss,
        metrics: Mapping[str, Metric],
        results: Results,
        program: Program,
        *,
        raises_on_nan: bool = False,
    ) -> None:
        self._loss = loss
        self._metrics = metrics
        self._raises_on_nan = raises_on_nan
        self._results = results
        self._mean_of_rounds = program.updates.mean_of_rounds
        self._has_units = has_units(program)
        self._needs_weights = needs_weights(program)
        self.begin(trains=True)

    def begin(self, *, trains: bool) -> None:
        self._trains = trains
        self._totals: dict[int, Totals] = {}

    def watching(self, inputs: Any, samples: int) -> AbstractContextManager[Any]:
        return self._loss.watching(inputs, samples) if self._needs_weights or not self._trains else nullcontext()

    def score(
        self, minibatch: int, message: Message, output: Any, targets: Targets, recomputes: bool = False
    ) -> tuple[torch.Tensor, float, float]:
        number = message.minibatch if self._needs_weights and self._trains else None
        value, weight, is_sum = self._loss(
            output, targets.value, message.samples, message.share, number, received=targets.received
        )
        loss = value
        if not weight:
            # Nothing counts here (e.g. all tokens are padding): the loss is 0/0.
            value = _make_zero(output, value)
        if not recomputes:
            scored = output, targets.value
            if self._metrics and self._trains:  # they may write into what the backward needs
                scored = map_tensors(scored, lambda tensor: tensor.detach().clone())
            self._record(minibatch, message, *scored, loss, weight, is_sum)
        if not self._trains or self._mean_of_rounds or not self._needs_weights:  # the gradient of each minibatch's mean
            return value, float(weight > 0), 1.0 / weight if is_sum and weight else 1.0
        unit = choose_unit(self._loss, message, output, targets.received) if self._has_units else 1.0
        return value, weight / unit, (1.0 if is_sum else weight) / unit

    def _record(
        self, key: int, message: Message, output: Any, targets: Any, loss: torch.Tensor, weight: float, is_sum: bool
    ) -> None:
        scores: list[Score] = [(loss.detach(), 1.0 if is_sum else weight) if weight else (0.0, 1.0), (weight, 1.0)]
        if self._metrics:
            scores += metric_scores(self._metrics, output, targets, message.samples)
        if self._results.reads_late and not self._trains:  # a metric may write into its tensor until it is read
            scores = [(v.clone() if isinstance(v, torch.Tensor) else v, factor) for v, factor in scores]
        self._add(key, message, scores)

    def _add(self, key: int, message: Message, scores: Sequence[Score]) -> None:
        totals = self._totals.get(key)
        if totals is None:
            totals = self._totals[key] = Totals(message, self._check)
        totals.add(message, scores, reads_late=self._results.reads_late)

    def _check(self, minibatch: int, numbers: Sequence[float]) -> None:
        """Raises a WorkerError if a loss in training is nan."""
        if numbers[0] != numbers[0] and self._raises_on_nan and self._trains:
            raise self._results.make_error(f"the loss of minibatch {minibatch} is nan")

    def skip(self, minibatch: int, message: Message) -> None:
        self._add(minibatch, message, [(0.0, 1.0)] * (2 + 2 * len(self._metrics)))

    def close(self, minibatch: int) -> ReadSums:
        if minibatch not in self._totals:
            self.skip(minibatch, Message(0))
        totals = self._totals.pop(minibatch)
        if self._results.reads_late:
            totals.begin_reading()
        return totals.read


def choose_unit(loss: Loss, message: Message, output: Any, targets: Any) -> float:
    """Returns a power of two near the weight of the minibatch, the same for each microbatch on each replica."""
    weight = loss.weight_from_shapes(output, targets, message.samples, message.share)
    return 2.0 ** round(log2(max(round(weight / message.share), 1)))


def has_units(program: Program) -> bool:
    """Returns whether all gradients of an update can have the minibatch's unit."""
    return all(program.microbatches % count == 0 for count in program.updates.per_update)


def needs_weights(program: Program) -> bool:
    """Returns whether an update sums gradients of several parts, whose weights then matter."""
    updates = program.updates
    return program.microbatches > 1 or (max(updates.per_update) > 1 and not updates.mean_of_rounds)


def _make_zero(output: Any, loss: torch.Tensor) -> torch.Tensor:
    """Returns a 0 whose gradients are 0, although the loss may be nan."""
    sums = [t.sum() for t in tensors_in(output) if t.requires_grad and t.numel() > 1]
    return (torch.stack(sums).sum() if sums else loss.nan_to_num()) * 0.0
