"""Peaks of a run of layers at work: temporaries and gradients on top of what it keeps.

While layer i of a stage works, the layers up to i keep their activations. After i, in a backward, there are gradients
of the parameters instead. So the peak is a maximum over the layers of a sum that begins at the model's first layer,
minus what is before the stage: one table of maxima over runs answers for every stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipedream.core.model.profile import Profile
from pipedream.planner.arrays import BoolArray, Bytes, IntArray, Place, RunExtremes


class PlaceBytes(NamedTuple):
    """Bytes of all layers before each place, and bytes that cross a cut there."""

    activations: IntArray
    parameters: IntArray
    crossing: IntArray


@dataclass(frozen=True, eq=False)
class StagePeaks:
    """The peaks of every stage of a profile, for a whole minibatch.

    Between two places of the graph's own order, a stage is a run of layers and its peaks are exact. Between others it
    is part of a run, and the peaks are upper bounds.

    Attributes:
        count: number of layers; the places up to it are those of the graph's order.
        lowest, highest: for each place, the first layer that is not before it, and one more than the last that is.
        kept, parameters: bytes of all layers before each place; the loss is part of the last layer.
        arriving, leaving: bytes that a stage which begins, or ends, at a place keeps in addition to `kept`.
        working, growing, largest: over runs: activations and temporaries; these and gradients; parameters.
        alone: over runs: temporaries of a single layer.
        update_working: bytes of an optimizer step per byte of the largest parameter, and per byte of all.
    """

    count: int
    lowest: IntArray
    highest: IntArray
    kept: IntArray
    parameters: IntArray
    arriving: IntArray
    leaving: IntArray
    working: RunExtremes
    growing: RunExtremes
    largest: RunExtremes
    alone: RunExtremes
    gathered: RunExtremes
    update_working: tuple[float, float]

    @classmethod
    def of(cls, profile: Profile, downsets: Sequence[int], places: PlaceBytes) -> StagePeaks:
        """Returns the peaks; the `downsets` of the graph's order come first."""
        layers, count = profile.layers, len(profile.layers)
        kept = places.activations.copy()
        working = np.array([layer.working_bytes for layer in layers])
        backward = np.array([layer.backward_bytes for layer in layers])
        leaving = np.array([layer.leaving_bytes for layer in layers])
        # The loss runs after the last layer, whose backward begins when the loss is done.
        last = np.array([downset >> (count - 1) & 1 for downset in downsets])
        kept += last * profile.loss_bytes
        leaving[-1] = 0
        working[-1] = max(working[-1] - profile.loss_bytes, profile.loss_working_bytes)
        ahead, parameters = kept[1 : count + 1], places.parameters[1 : count + 1]
        # What a stage of a graph keeps twice is at most what crosses its cuts; an old profile does not record it.
        others = np.array(places.crossing[count + 1 :]) * any(layer.arriving_bytes for layer in layers)
        arriving = np.array([layer.arriving_bytes for layer in layers])
        return cls(
            count,
            np.array([(~downset & (downset + 1)).bit_length() - 1 for downset in downsets]),
            np.array([downset.bit_length() for downset in downsets]),
            kept,
            places.parameters,
            np.concatenate([arriving, arriving[-1:], others]),
            np.concatenate([leaving[:1], leaving, others]),
            RunExtremes.of(ahead + working, np.maximum),
            RunExtremes.of(np.maximum(ahead + backward - parameters, ahead + working - parameters), np.maximum),
            RunExtremes.of([layer.largest_parameter_bytes for layer in layers], np.maximum),
            RunExtremes.of(working, np.maximum),
            RunExtremes.of([layer.gathered_bytes for layer in layers], np.maximum),
            _rate_update_working(profile),
        )

    def activation_bytes(self, first: Place, last: Place) -> Bytes:
        return self.kept[last] - self.kept[first] + self.arriving[first] + self.leaving[last]

    def working_bytes(self, first: Place, last: Place) -> Bytes:
        """Returns what a pass needs in addition to what is kept."""
        run = np.maximum(self.working.between(*self._run(first, last)) - self.kept[last], 0)
        part = self.alone.between(self.lowest[first], self.highest[last])
        working: Bytes = np.where(self._is_run(first, last), run, part)
        return working

    def gathered_bytes(self, first: Place, last: Place) -> Bytes:
        """Returns how much of it is for sharded weights, whatever the number of samples."""
        gathered = self.gathered.between(self.lowest[first], self.highest[last])
        least: Bytes = np.minimum(gathered, self.working_bytes(first, last))
        return least

    def relief_bytes(self, first: Place, last: Place) -> Bytes:
        """Returns how much less a backward needs, see `StageSizes`."""
        peak = self.kept[last] + self.working_bytes(first, last)
        run = peak - self.growing.between(*self._run(first, last)) - self.parameters[first]
        return np.where(self._is_run(first, last), np.maximum(run, 0), 0)

    def largest_parameter_bytes(self, first: Place, last: Place) -> Bytes:
        largest: Bytes = self.largest.between(self.lowest[first], self.highest[last])
        return largest

    def update_working_bytes(self, first: Place, last: Place, all_bytes: Bytes) -> Bytes:
        by_largest, by_all = self.update_working
        need = by_largest * self.largest_parameter_bytes(first, last) + by_all * all_bytes
        rounded: IntArray = np.ceil(need).astype(np.int64)
        return rounded

    def _is_run(self, first: Place, last: Place) -> bool | BoolArray:
        is_run: bool | BoolArray = np.maximum(first, last) <= self.count
        return is_run

    def _run(self, first: Place, last: Place) -> tuple[Place, Place]:
        return np.minimum(first, self.count), np.minimum(last, self.count)


def _rate_update_working(profile: Profile) -> tuple[float, float]:
    """The bytes of a step per byte of the largest parameter, and of all: one is 0.

    An optimizer updates its parameters one by one, or all at once, which needs the temporaries of several.
    """
    largest = max(layer.largest_parameter_bytes for layer in profile.layers)
    if profile.update_working_bytes <= 4 * largest:
        return (profile.update_working_bytes / largest if largest else 0.0), 0.0
    return 0.0, profile.update_working_bytes / max(profile.parameter_bytes, 1)
