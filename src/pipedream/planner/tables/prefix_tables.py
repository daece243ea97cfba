"""Sums over the layers before each place where a graph may be cut: what any stage costs, in two look-ups.

A place is a downset of the graph (`planner.cuts`). Places 0 to n are the layers before each index, in the
graph's order; the other searched downsets come after them.

Seconds are added exactly (as integers over a common power of two) and rounded once, so stages that cost the same
compare equal, and ties are broken by rule.

While layer i of a stage works, the layers up to i keep their activations. In a backward, the layers after i have
gradients of their parameters instead. So the peak is a maximum over the layers of a sum that begins at the model's
first layer, minus the part before the stage: one table of maxima over runs answers for every stage (`StagePeaks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice, pairwise
from math import prod

import numpy as np

from pipedream.core.model.profile import Profile
from pipedream.core.model.weight_shapes import join_matrices
from pipedream.core.plan.stage import Stage
from pipedream.core.schedule.delay_compensation import Compensation
from pipedream.core.schedule.rules import UpdateRule
from pipedream.planner.arrays import BoolArray, Bytes, Cut, ExactSums, IntArray, RunExtremes, Seconds
from pipedream.planner.cuts import Lattice, bit_indices


@dataclass(frozen=True, eq=False)
class StagePeaks:
    """The peaks of every stage of a profile, for a whole minibatch.

    Between two places of the graph's own order, a stage is a run of layers and its peaks are exact. Between other
    places it is part of a run, and its peaks are upper bounds.

    Attributes:
        count: number of layers; the places up to it are those of the graph's order.
        lowest, highest: for each place, the first layer that is not before it, and one more than the last that is.
        kept, trained: bytes of all layers before each place; the loss is part of the last layer.
        arriving, leaving: bytes that a stage which begins, or ends, at a place keeps in addition to `kept`.
        working, growing, largest: over runs: activations and temporaries; these and gradients; parameters.
        alone: over runs: temporaries of a single layer.
        update_working: bytes of an optimizer step per byte of the largest parameter, and per byte of all.
    """

    count: int
    lowest: IntArray
    highest: IntArray
    kept: IntArray
    trained: IntArray
    arriving: IntArray
    leaving: IntArray
    working: RunExtremes
    growing: RunExtremes
    largest: RunExtremes
    alone: RunExtremes
    gathered: RunExtremes
    update_working: tuple[float, float]

    @classmethod
    def of(
        cls, profile: Profile, downsets: Sequence[int], saved: IntArray, trained: IntArray, crossing: IntArray
    ) -> StagePeaks:
        """Returns the peaks; the `downsets` of the graph's order come first.

        Args:
            saved, trained: bytes of the activations and trained weights of all layers before each place.
            crossing: those that cross a cut.
        """
        layers, count = profile.layers, len(profile.layers)
        working = np.array([layer.temporary_bytes for layer in layers])
        backward = np.array([layer.backward_bytes for layer in layers])
        leaving = np.array([layer.leaving_bytes for layer in layers])
        # The loss runs after the last layer, whose backward begins when the loss is done.
        has_last = np.array([downset >> (count - 1) & 1 for downset in downsets])
        saved = saved + has_last * profile.loss_bytes
        leaving[-1] = 0
        working[-1] = max(working[-1] - profile.loss_bytes, profile.loss_temporary_bytes)
        saved_up_to, trained_up_to = saved[1 : count + 1], trained[1 : count + 1]
        # At most what crosses the cuts is kept twice in a stage of a graph; an old profile does not record it.
        crossing_elsewhere = crossing[count + 1 :] * any(layer.arriving_bytes for layer in layers)
        arriving = np.array([layer.arriving_bytes for layer in layers])
        return cls(
            count,
            np.array([(~downset & (downset + 1)).bit_length() - 1 for downset in downsets]),
            np.array([downset.bit_length() for downset in downsets]),
            saved,
            trained,
            np.concatenate([arriving, arriving[-1:], crossing_elsewhere]),
            np.concatenate([leaving[:1], leaving, crossing_elsewhere]),
            RunExtremes.of(saved_up_to + working, np.maximum),
            RunExtremes.of(saved_up_to + np.maximum(backward, working) - trained_up_to, np.maximum),
            RunExtremes.of([layer.largest_parameter_bytes for layer in layers], np.maximum),
            RunExtremes.of(working, np.maximum),
            RunExtremes.of([layer.gathered_bytes for layer in layers], np.maximum),
            _rate_update_working(profile),
        )

    def activation_bytes(self, first: Cut, last: Cut) -> Bytes:
        return self.kept[last] - self.kept[first] + self.arriving[first] + self.leaving[last]

    def temporary_bytes(self, first: Cut, last: Cut) -> Bytes:
        """Returns what a pass needs in addition to what is kept."""
        run = np.maximum(self.working.between(*self._run(first, last)) - self.kept[last], 0)
        part = self.alone.between(self.lowest[first], self.highest[last])
        working: Bytes = np.where(self._is_run(first, last), run, part)
        return working

    def gathered_bytes(self, first: Cut, last: Cut) -> Bytes:
        """Returns how much of `temporary_bytes` is for sharded weights, whatever the number of samples."""
        gathered = self.gathered.between(self.lowest[first], self.highest[last])
        bounded: Bytes = np.minimum(gathered, self.temporary_bytes(first, last))
        return bounded

    def freed_before_peak_bytes(self, first: Cut, last: Cut) -> Bytes:
        """Returns how much less a backward needs than all its bytes together, see `StageSizes`."""
        peak = self.kept[last] + self.temporary_bytes(first, last)
        run = peak - self.growing.between(*self._run(first, last)) - self.trained[first]
        return np.where(self._is_run(first, last), np.maximum(run, 0), 0)

    def largest_parameter_bytes(self, first: Cut, last: Cut) -> Bytes:
        largest: Bytes = self.largest.between(self.lowest[first], self.highest[last])
        return largest

    def update_temporary_bytes(self, first: Cut, last: Cut, all_bytes: Bytes) -> Bytes:
        by_largest, by_all = self.update_working
        needed = by_largest * self.largest_parameter_bytes(first, last) + by_all * all_bytes
        rounded: IntArray = np.ceil(needed).astype(np.int64)
        return rounded

    def _is_run(self, first: Cut, last: Cut) -> bool | BoolArray:
        is_run: bool | BoolArray = np.maximum(first, last) <= self.count
        return is_run

    def _run(self, first: Cut, last: Cut) -> tuple[Cut, Cut]:
        return np.minimum(first, self.count), np.minimum(last, self.count)


def _rate_update_working(profile: Profile) -> tuple[float, float]:
    """Returns the bytes of a step per byte of the largest parameter, and per byte of all; one of them is 0.

    An optimizer updates its parameters one by one, or all at once, which needs the temporaries of several.
    """
    largest = max(layer.largest_parameter_bytes for layer in profile.layers)
    if profile.update_temporary_bytes <= 4 * largest:
        return (profile.update_temporary_bytes / largest if largest else 0.0), 0.0
    return 0.0, profile.update_temporary_bytes / max(profile.trained_bytes, 1)


@dataclass(frozen=True, eq=False)
class PrefixTables:
    """The layers of a profile, summed up to each place.

    Attributes:
        forward, backward: seconds; the loss is part of the last layer's backward.
        launch: seconds of the host's launches for both passes.
        parameters, trained, optimizer: bytes of all layers before each place; `trained` without frozen weights.
        crossing: bytes that cross a cut at each place; at 0 the model's input, at n its output.
        downsets: the layers before each place, as bit sets.
    """

    profile: Profile
    forward: ExactSums
    backward: ExactSums
    launch: ExactSums
    parameters: IntArray
    trained: IntArray
    optimizer: IntArray
    peaks: StagePeaks
    crossing: IntArray
    downsets: tuple[int, ...]

    @classmethod
    def sum_up(cls, profile: Profile, lattice: Lattice, others: Sequence[int]) -> PrefixTables:
        """Returns the sums up to each layer of the graph's order, then those of the other downsets."""
        layers, count = profile.layers, len(profile.layers)
        downsets = (*((1 << i) - 1 for i in range(count + 1)), *others)
        steps = [
            (list(bit_indices(after & ~before)), list(bit_indices(before & ~after)))
            for before, after in pairwise([0, *others])
        ]
        forward = [layer.forward_s.as_integer_ratio() for layer in layers]
        backward = [layer.backward_s.as_integer_ratio() for layer in layers]
        launch = [(layer.forward_launch_s + layer.backward_launch_s).as_integer_ratio() for layer in layers]
        loss = profile.loss_s.as_integer_ratio()
        scale = max(denominator for _, denominator in (*forward, *backward, *launch, loss))
        backward_parts = _scale(backward, scale)
        backward_parts[-1] += loss[0] * (scale // loss[1])
        parameters = _sum_prefixes([layer.parameter_bytes for layer in layers], steps)
        trained = _sum_prefixes([layer.trained_bytes for layer in layers], steps)
        crossing = lattice.crossing_bytes(downsets, [layer.output_bytes for layer in layers])
        # The profile has only one dtype; inputs of another count as if they had it.
        crossing[0] = sum(prod(shape) for shape in profile.input_shapes) * profile.value_bytes
        crossing[count] = sum(layers[i].output_bytes for i in range(count) if not lattice.consumers[i])
        activations = np.array(_sum_prefixes([layer.activation_bytes for layer in layers], steps))
        # Rounding the running share, and not each layer's, makes the stages of any cut add up to the total.
        optimizer = [profile.optimizer_bytes * before // max(trained[count], 1) for before in trained]
        return cls(
            profile=profile,
            forward=ExactSums(np.array(_sum_prefixes(_scale(forward, scale), steps), dtype=object), scale),
            backward=ExactSums(np.array(_sum_prefixes(backward_parts, steps), dtype=object), scale),
            launch=ExactSums(np.array(_sum_prefixes(_scale(launch, scale), steps), dtype=object), scale),
            parameters=np.array(parameters),
            trained=np.array(trained),
            optimizer=np.array(optimizer),
            peaks=StagePeaks.of(profile, downsets, activations, np.array(trained), crossing),
            crossing=crossing,
            downsets=downsets,
        )

    def matrix_bytes(self, updates: UpdateRule | None, first: Cut, last: Cut) -> tuple[Bytes, Bytes]:
        """Returns the bytes that an update's compensations keep for a stage's matrices, and need during an update."""
        if updates is None:
            return 0, 0
        if updates.compensation not in self._matrix_sums:
            sizes, working = zip(*(updates.matrix_bytes(layer.matrices) for layer in self.profile.layers), strict=True)
            sums = np.array([sum(sizes[i] for i in bit_indices(downset)) for downset in self.downsets])
            self._matrix_sums[updates.compensation] = sums, RunExtremes.of(list(working), np.maximum)
        sums, largest = self._matrix_sums[updates.compensation]
        return sums[last] - sums[first], largest.between(self.peaks.lowest[first], self.peaks.highest[last])

    @cached_property
    def _matrix_sums(self) -> dict[tuple[Compensation, ...], tuple[IntArray, RunExtremes]]:
        """Compensations -> bytes that they keep for all layers before each place, and need for each layer."""
        return {}

    def passes_s(self, first: Cut, last: Cut) -> tuple[Seconds, Seconds]:
        return self.forward.between(first, last), self.backward.between(first, last)

    def bytes_of(self, first: Cut, last: Cut) -> tuple[Bytes, Bytes, Bytes]:
        """Returns the bytes of trained parameters, received and sent on."""
        end = len(self.profile.layers)
        return (
            self.trained_bytes(first, last),
            np.where(np.asarray(first) == 0, 0, self.crossing[first]),
            np.where(np.asarray(last) == end, 0, self.crossing[last]),
        )

    def parameter_bytes(self, first: Cut, last: Cut) -> Bytes:
        """Returns the bytes of a stage's parameters: with its copies of tied ones that an earlier stage also uses."""
        return self._add_copies(self.parameters[last] - self.parameters[first], first, last, trained_only=False)

    def trained_bytes(self, first: Cut, last: Cut) -> Bytes:
        """Returns `parameter_bytes` without frozen parameters."""
        return self._add_copies(self.trained[last] - self.trained[first], first, last, trained_only=True)

    def _add_copies(self, total: Bytes, first: Cut, last: Cut, *, trained_only: bool) -> Bytes:
        for (count, is_first), tied in zip(self._tied, self.profile.tied, strict=True):
            copies = (count[last] > count[first]) & (is_first[last] == is_first[first])
            total = total + copies * tied.parameter_bytes * (tied.trained or not trained_only)
        return total

    def optimizer_bytes(self, first: Cut, last: Cut) -> Bytes:
        total: Bytes = self.optimizer[last] - self.optimizer[first]
        copies = self.trained_bytes(first, last) - (self.trained[last] - self.trained[first])
        return total + self.profile.optimizer_bytes * copies // self._all_bytes if self._tied else total

    @cached_property
    def _tied(self) -> list[tuple[IntArray, IntArray]]:
        """For each of the profile's tied parameters, how many of its layers, and whether the first, are before each
        place."""
        rows = []
        for tied in self.profile.tied:
            members = sum(1 << layer for layer in tied.layers)
            count = np.array([(downset & members).bit_count() for downset in self.downsets])
            rows.append((count, np.array([downset >> min(tied.layers) & 1 for downset in self.downsets])))
        return rows

    @property
    def _all_bytes(self) -> int:
        return max(int(self.trained[len(self.profile.layers)]), 1)

    @property
    def _launches(self) -> bool:
        return bool(self.launch.whole[len(self.profile.layers)])

    @property
    def _on_gpus(self) -> bool:
        return self.profile.runtime.overlap_device or self._launches

    def _step_s(self, first: Cut, last: Cut) -> Seconds:
        fixed_s = self.profile.update_fixed_s
        return fixed_s + self._share(self.profile.update_s - fixed_s, first, last)

    def _share(self, seconds: float, first: Cut, last: Cut) -> Seconds:
        share: Seconds = seconds * self.trained_bytes(first, last) / self._all_bytes
        return share

    def _build_stage(self, first: int, last: int) -> Stage:
        before, after = self.downsets[first], self.downsets[last]
        inside = [self.profile.layers[i] for i in bit_indices(after & ~before)]
        return Stage(
            before.bit_count(),
            after.bit_count(),
            forward_s=float(self.forward.between(first, last)),
            backward_s=float(self.backward.between(first, last)),
            forward_fixed_s=sum(layer.forward_fixed_s for layer in inside),
            backward_fixed_s=sum(layer.backward_fixed_s for layer in inside),
            forward_launch_s=sum(layer.forward_launch_s for layer in inside),
            backward_launch_s=sum(layer.backward_launch_s for layer in inside),
            output_bytes=int(self.crossing[last]),
            activation_bytes=int(self.peaks.activation_bytes(first, last)),
            parameter_bytes=int(self.parameter_bytes(first, last)),
            frozen_bytes=int(self.parameter_bytes(first, last) - self.trained_bytes(first, last)),
            optimizer_bytes=int(self.optimizer_bytes(first, last)),
            matrices=join_matrices(matrix for layer in inside for matrix in layer.matrices),
            names=tuple(self.profile.graph.layers[i].name for i in bit_indices(after & ~before)),
            temporary_bytes=int(self.peaks.temporary_bytes(first, last)),
            gathered_bytes=int(self.peaks.gathered_bytes(first, last)),
            freed_before_peak_bytes=int(self.peaks.freed_before_peak_bytes(first, last)),
            largest_parameter_bytes=int(self.peaks.largest_parameter_bytes(first, last)),
            update_temporary_bytes=int(self.peaks.update_temporary_bytes(first, last, self.trained_bytes(first, last))),
        )


def _scale(ratios: Iterable[tuple[int, int]], scale: int) -> list[int]:
    """Returns fractions, whose denominators divide `scale`, as numerators over it."""
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def _sum_prefixes(values: list[int], steps: Sequence[tuple[list[int], list[int]]]) -> list[int]:
    """Returns the sums over the layers before each index, then over those of each further downset.

    Args:
        steps: the layers that each further downset adds to the one before it, and those that it lacks.
    """
    changes = (sum(values[i] for i in added) - sum(values[i] for i in removed) for added, removed in steps)
    return [0, *accumulate(values), *islice(accumulate(changes, initial=0), 1, None)]
