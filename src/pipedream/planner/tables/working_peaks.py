"""What a run of layers needs while it works: temporaries and gradients on top of what is kept.

While layer i of a stage works, the layers of the stage up to i keep their activations; behind i, in a backward, there
are gradients of the parameters instead. So the most that a pass needs is a maximum over the layers of a sum that begins
at the model's first layer, minus what is before the stage: one table of maxima over runs answers for every stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pipedream.core.model.profile import Profile

__all__ = ["Maxima", "Peaks", "PlaceTables"]


class PlaceTables(NamedTuple):
    """Bytes of all layers before each place, and of what crosses a cut there."""

    activations: Any
    parameters: Any
    crossing: Any


@dataclass(frozen=True, eq=False)
class Maxima:
    """Maxima of a row of numbers over any run of it, in two look-ups (a sparse table).

    Attributes:
        levels: levels[k][i] is the maximum of the 2**k numbers from i on, or of those that there are.
    """

    levels: Any

    @classmethod
    def of(cls, numbers: Any) -> Maxima:
        """Returns the table of a row that is not empty."""
        level = np.asarray(numbers)
        levels, width = [level], 1
        while 2 * width <= len(level):
            ahead = np.concatenate([levels[-1][width:], levels[-1][-width:]])
            levels.append(np.maximum(levels[-1], ahead))
            width *= 2
        return cls(np.stack(levels))

    def over(self, first: Any, last: Any) -> Any:
        """Returns the maxima of the numbers first <= i < last; of number `first` alone where there are none."""
        count = self.levels.shape[1]
        first = np.minimum(first, count - 1)
        length = np.maximum(np.asarray(last) - first, 1)
        level = np.frexp(length)[1] - 1
        return np.maximum(self.levels[level, first], self.levels[level, first + length - (1 << level)])


@dataclass(frozen=True, eq=False)
class Peaks:
    """The peaks of every stage of a profile, for a whole minibatch.

    Between two places of the graph's own order a stage is a run of layers, and its peaks are exact. Between others it
    is part of a run, whose layers are taken not to share what they need: bounds from above.

    Attributes:
        count: layers; the places up to it are those of the graph's order.
        lowest, highest: of a place, the first layer that is not before it, and one behind the last that is.
        kept: bytes kept by all layers before a place, for a whole minibatch; the loss is part of the last layer.
        parameters: bytes of all layers before a place.
        arriving, leaving: of a stage that begins, or ends, at a place: bytes that it keeps beside `kept`.
        working, growing, largest: over runs: activations and temporaries, the same and gradients, parameters.
        alone: over runs: temporaries of one layer.
        update_working: bytes of an optimizer step, by a byte of the largest parameter and of all.
    """

    count: int
    lowest: Any
    highest: Any
    kept: Any
    parameters: Any
    arriving: Any
    leaving: Any
    working: Maxima
    growing: Maxima
    largest: Maxima
    alone: Maxima
    update_working: tuple[float, float]

    @classmethod
    def of(cls, profile: Profile, downsets: Sequence[int], held: PlaceTables) -> Peaks:
        """Returns the peaks of a profile.

        Args:
            profile: of the model.
            downsets: the layers before each place, as sets of bits; those of the graph's order first.
            held: what is before each place.
        """
        layers, count = profile.layers, len(profile.layers)
        kept = held.activations.copy()
        working = np.array([layer.working_bytes for layer in layers])
        backward = np.array([layer.backward_bytes for layer in layers])
        leaving = np.array([layer.leaving_bytes for layer in layers])
        # The loss works behind the last layer, whose backward begins when it is done.
        last = np.array([found >> (count - 1) & 1 for found in downsets])
        kept += last * profile.loss_bytes
        leaving[-1] = 0
        working[-1] = max(working[-1] - profile.loss_bytes, profile.loss_working_bytes)
        ahead, parameters = kept[1 : count + 1], held.parameters[1 : count + 1]
        # What a stage of a graph keeps twice is at most what crosses its cuts; an old profile does not tell.
        others = np.array(held.crossing[count + 1 :]) * any(layer.arriving_bytes for layer in layers)
        arriving = np.array([layer.arriving_bytes for layer in layers])
        return cls(
            count,
            np.array([(~found & (found + 1)).bit_length() - 1 for found in downsets]),
            np.array([found.bit_length() for found in downsets]),
            kept,
            held.parameters,
            np.concatenate([arriving, arriving[-1:], others]),
            np.concatenate([leaving[:1], leaving, others]),
            Maxima.of(ahead + working),
            Maxima.of(np.maximum(ahead + backward - parameters, ahead + working - parameters)),
            Maxima.of([layer.largest_parameter_bytes for layer in layers]),
            Maxima.of(working),
            _update_working(profile),
        )

    def activation_bytes(self, first: Any, last: Any) -> Any:
        """Returns what a stage keeps of a minibatch until its backward."""
        return self.kept[last] - self.kept[first] + self.arriving[first] + self.leaving[last]

    def working_bytes(self, first: Any, last: Any) -> Any:
        """Returns what a pass of a minibatch needs at most beside what the stage keeps of it."""
        run = np.maximum(self.working.over(*self._run(first, last)) - self.kept[last], 0)
        part = self.alone.over(self.lowest[first], self.highest[last])
        return np.where(self._is_run(first, last), run, part)

    def relief_bytes(self, first: Any, last: Any) -> Any:
        """Returns by how much less a backward of a whole minibatch needs, see `StageSizes`."""
        held = self.kept[last] + self.working_bytes(first, last)
        run = held - self.growing.over(*self._run(first, last)) - self.parameters[first]
        return np.where(self._is_run(first, last), np.maximum(run, 0), 0)

    def largest_parameter_bytes(self, first: Any, last: Any) -> Any:
        """Returns the bytes of the stage's largest parameter."""
        return self.largest.over(self.lowest[first], self.highest[last])

    def update_working_bytes(self, first: Any, last: Any) -> Any:
        """Returns what an optimizer step of the stage needs at most."""
        by_largest, by_all = self.update_working
        all_bytes = self.parameters[last] - self.parameters[first]
        need = by_largest * self.largest_parameter_bytes(first, last) + by_all * all_bytes
        return np.ceil(need).astype(np.int64)

    def _is_run(self, first: Any, last: Any) -> Any:
        return np.maximum(first, last) <= self.count

    def _run(self, first: Any, last: Any) -> tuple[Any, Any]:
        return np.minimum(first, self.count), np.minimum(last, self.count)


def _update_working(profile: Profile) -> tuple[float, float]:
    """An optimizer steps one parameter after the other, or all at once: then it needs more than one's temporaries."""
    largest = max(layer.largest_parameter_bytes for layer in profile.layers)
    if profile.update_working_bytes <= 4 * largest:
        return (profile.update_working_bytes / largest if largest else 0.0), 0.0
    return 0.0, profile.update_working_bytes / max(profile.parameter_bytes, 1)
