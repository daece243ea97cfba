"""What a run of layers needs while it works: temporaries and gradients on top of what is kept.

While layer i of a stage works, the layers of the stage up to i keep their activations; behind i, in a backward, there
are gradients of the parameters instead. So the most that a pass needs is a maximum over the layers of a sum that begins
at the model's first layer, minus what is before the stage: one table of maxima over runs answers for every stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.profile import Profile

__all__ = ["Maxima", "Peaks"]


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
    """The peaks of every run of layers of a profile, for one microbatch of so many.

    Attributes:
        kept: bytes kept by all layers before index i, for a whole minibatch; the loss is part of the last layer.
        parameters: bytes of all layers before index i.
        arriving, leaving: of a stage that begins at, or ends behind, a layer: bytes that it keeps beside `kept`.
        working, growing, largest: over runs: activations and temporaries, the same and gradients, parameters.
        update_working: bytes of an optimizer step, by a byte of the largest parameter and of all.
    """

    microbatches: int
    kept: Any
    parameters: Any
    arriving: Any
    leaving: Any
    working: Maxima
    growing: Maxima
    largest: Maxima
    update_working: tuple[float, float]

    @classmethod
    def of(cls, profile: Profile, microbatches: int = 1) -> Peaks:
        """Returns the peaks of a profile."""
        layers = profile.layers
        kept = np.array([0, *np.cumsum([layer.activation_bytes for layer in layers])])
        working = np.array([layer.working_bytes for layer in layers])
        backward = np.array([layer.backward_bytes for layer in layers])
        parameters = np.array([0, *np.cumsum([layer.parameter_bytes for layer in layers])])
        leaving = np.array([layer.leaving_bytes for layer in layers])
        # The loss works behind the last layer, whose backward begins when it is done.
        kept[-1] += profile.loss_bytes
        leaving[-1] = 0
        working[-1] = max(working[-1] - profile.loss_bytes, profile.loss_working_bytes)
        return cls(
            microbatches,
            kept,
            parameters,
            np.array([layer.arriving_bytes for layer in layers]),
            leaving,
            Maxima.of(kept[1:] + working),
            Maxima.of(np.maximum(kept[1:] + backward - parameters[1:], kept[1:] + working - parameters[1:])),
            Maxima.of([layer.largest_parameter_bytes for layer in layers]),
            _update_working(profile),
        )

    def activation_bytes(self, first: Any, last: Any) -> Any:
        """Returns what a stage keeps of a minibatch until its backward."""
        count = len(self.arriving)
        kept = self.kept[last] - self.kept[first]
        return kept + self.arriving[np.minimum(first, count - 1)] + self.leaving[np.maximum(last, 1) - 1]

    def working_bytes(self, first: Any, last: Any) -> Any:
        """Returns what a pass of a microbatch needs at most beside what the stage keeps of it."""
        return -(-np.maximum(self.working.over(first, last) - self.kept[last], 0) // self.microbatches)

    def relief_bytes(self, first: Any, last: Any) -> Any:
        """Returns by how much less a backward of a whole minibatch needs, see `StageSizes`."""
        held = self.kept[last] + self.parameters[last] + self.working_bytes(first, last) * self.microbatches
        return np.maximum(held - self.parameters[last] - self.growing.over(first, last) - self.parameters[first], 0)

    def update_working_bytes(self, first: Any, last: Any) -> Any:
        """Returns what an optimizer step of the stage needs at most."""
        by_largest, by_all = self.update_working
        need = by_largest * self.largest.over(first, last) + by_all * (self.parameters[last] - self.parameters[first])
        return np.ceil(need).astype(np.int64)


def _update_working(profile: Profile) -> tuple[float, float]:
    """An optimizer steps one parameter after the other, or all at once: then it needs more than one's temporaries."""
    largest = max(layer.largest_parameter_bytes for layer in profile.layers)
    if profile.update_working_bytes <= 4 * largest:
        return (profile.update_working_bytes / largest if largest else 0.0), 0.0
    return 0.0, profile.update_working_bytes / max(profile.parameter_bytes, 1)
