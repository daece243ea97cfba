"""What is searched: any run of layers as a stage, with its seconds and its bytes, from prefix sums.

The cost of a stage is a function of (first, last, replicas) and its memory one of (first, last, in_flight);
a search needs nothing else, so replicated stages inside a pipeline can be searched over the same noun.

Seconds are added exactly (as integers over a common power of two) and rounded once. So stages that cost
the same compare equal, wherever they stand in the model, and ties are broken by rule, not by rounding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from ..core import depth as depths
from ..core.cluster import Cluster
from ..core.cost import all_reduce_s
from ..core.errors import PlanError
from ..core.memory import stage_bytes
from ..core.plan import Plan, Stage
from ..core.profile import Profile
from ..core.units import format_bytes

__all__ = ["Index", "Space", "Versions", "stash"]

Versions = Callable[[int], int]
"""From the minibatches in flight at a stage to the versions of its weights alive at once."""

Index = Any
"""A layer index, or a numpy array of them: each cost is one formula, for one stage or for all at once."""


def stash(in_flight: int) -> int:
    """Returns the versions that weight stashing holds: one for each minibatch in flight."""
    return in_flight


@dataclass(frozen=True, eq=False)
class Space:
    """A profile, a cluster and a way to train: what every run of layers would cost as a stage.

    Attributes:
        profile, cluster: as given.
        versions: versions of the weights alive at once, from the count in flight.
        microbatches: parts of a minibatch; activations in flight and inputs are those of one part.
        scale: seconds are integers over this power of two.
        forward, backward: seconds of all layers before index i, times `scale`; the loss is part of the last
            layer's backward.
        parameters, optimizer, activations: bytes of all layers before index i; the optimizer's state is
            shared out by parameter bytes.
        crossing: bytes that cross a cut at index i; at 0 the model's input, at the end its output.
    """

    profile: Profile
    cluster: Cluster
    versions: Versions
    microbatches: int
    scale: int
    forward: Any
    backward: Any
    parameters: Any
    optimizer: Any
    activations: Any
    crossing: Any

    @classmethod
    def of(cls, profile: Profile, cluster: Cluster, *, versions: Versions = stash, microbatches: int = 1) -> Space:
        """Returns the space of a profile on a cluster.

        Raises:
            PlanError: fewer than one microbatch.
        """
        if microbatches < 1:
            raise PlanError(f"a minibatch is split into at least 1 microbatch, found {microbatches}; give 1 or more")
        layers = profile.layers
        forward = [layer.forward_s.as_integer_ratio() for layer in layers]
        backward = [layer.backward_s.as_integer_ratio() for layer in layers]
        loss = profile.loss_s.as_integer_ratio()
        scale = max(below for _, below in (*forward, *backward, loss))
        backward_sums = _exact(backward, scale)
        backward_sums[-1] += loss[0] * (scale // loss[1])
        parameters = [0, *accumulate(layer.parameter_bytes for layer in layers)]
        # Rounding the running share, and not each layer's, makes any cut's stages add up to the whole.
        optimizer = [profile.optimizer_bytes * held // max(parameters[-1], 1) for held in parameters]
        return cls(
            profile,
            cluster,
            versions,
            microbatches,
            scale,
            _exact(forward, scale),
            backward_sums,
            np.array(parameters),
            np.array(optimizer),
            np.array([0, *accumulate(layer.activation_bytes for layer in layers)]),
            np.array([_input_bytes(profile), *(layer.output_bytes for layer in layers)]),
        )

    @property
    def positions(self) -> tuple[int, ...]:
        """The indices where a stage may begin or end."""
        return (0, *self.profile.graph.cuts(), len(self.profile.layers))

    def update_s(self, first: Index, last: Index) -> Any:
        """Returns the seconds of one optimizer step of a stage: its share, by parameter bytes."""
        held = self.parameters[last] - self.parameters[first]
        return self.profile.update_s * held / max(int(self.parameters[-1]), 1)

    def seconds(self, first: Index, last: Index, replicas: int = 1) -> Any:
        """Returns the seconds per minibatch of a stage on so many workers, its all-reduce included."""
        forward = (self.forward[last] - self.forward[first]) / self.scale
        backward = (self.backward[last] - self.backward[first]) / self.scale
        compute = forward + backward + self.update_s(first, last)
        cluster = self.cluster
        held = self.parameters[last] - self.parameters[first]
        sync = all_reduce_s(held, replicas, cluster.bandwidth_bytes_per_s, cluster.latency_s)
        return (compute + sync) / replicas

    def need_bytes(self, first: Index, last: Index, in_flight: int) -> Any:
        """Returns the peak bytes of one worker of a stage that holds so many microbatches in flight."""
        return stage_bytes(
            parameter_bytes=self.parameters[last] - self.parameters[first],
            optimizer_bytes=self.optimizer[last] - self.optimizer[first],
            activation_bytes=-(-(self.activations[last] - self.activations[first]) // self.microbatches),
            input_bytes=-(-self.crossing[first] // self.microbatches),
            versions=self.versions(in_flight),
            in_flight=in_flight,
        )

    def stage(self, first: int, last: int, replicas: int = 1, in_flight: int = 1) -> Stage:
        """Returns the stage of the layers first <= i < last, all its fields filled in."""
        return Stage(
            first,
            last,
            replicas,
            forward_s=(self.forward[last] - self.forward[first]) / self.scale,
            backward_s=(self.backward[last] - self.backward[first]) / self.scale,
            update_s=float(self.update_s(first, last)),
            output_bytes=int(self.crossing[last]),
            activation_bytes=int(self.activations[last] - self.activations[first]),
            parameter_bytes=int(self.parameters[last] - self.parameters[first]),
            optimizer_bytes=int(self.optimizer[last] - self.optimizer[first]),
            peak_bytes=int(self.need_bytes(first, last, in_flight)),
            names=tuple(layer.name for layer in self.profile.graph.layers[first:last]),
        )

    def plan(self, cuts: tuple[int, ...], replicas: tuple[int, ...] | None = None, note: str = "") -> Plan:
        """Returns the plan of these cuts at the paper's depth; neither cuts nor memory are checked."""
        counts = replicas or (1,) * (len(cuts) + 1)
        in_flight = depths.noam(counts)
        spans = pairwise((0, *cuts, len(self.profile.layers)))
        stages = tuple(
            self.stage(first, last, count, held)
            for (first, last), count, held in zip(spans, counts, in_flight, strict=True)
        )
        profile = self.profile
        return Plan(stages, in_flight, self.cluster, model=profile.model, batch=profile.batch, note=note)

    def at_depth(self, plan: Plan, depth: str | tuple[int, ...]) -> Plan:
        """Returns the plan at a depth, its peak bytes renewed and within the memory of a worker.

        Raises:
            PlanError: an unknown or ill-formed depth (`Plan.with_depth`), or a stage that does not fit.
        """
        deep = plan.with_depth(depth)
        stages = tuple(
            replace(stage, peak_bytes=int(self.need_bytes(stage.first, stage.last, held)))
            for stage, held in zip(deep.stages, deep.in_flight, strict=True)
        )
        limit = self.cluster.memory_bytes
        for s, (stage, held) in enumerate(zip(stages, deep.in_flight, strict=True)):
            if limit is not None and stage.peak_bytes > limit:
                raise PlanError(
                    f"depth {deep.depth} was asked: stage {s} (layers {stage.first} to {stage.last - 1}) then holds "
                    f"{held} in flight and needs {format_bytes(stage.peak_bytes)}, a worker has "
                    f"{format_bytes(limit)}; ask for a smaller depth, cut it further, split minibatches into "
                    "more microbatches or choose a schedule that holds fewer versions"
                )
        return replace(deep, stages=stages)


def _exact(ratios: Iterable[tuple[int, int]], scale: int) -> Any:
    return np.array([0, *accumulate(above * (scale // below) for above, below in ratios)], dtype=object)


def _input_bytes(profile: Profile) -> int:
    """The profile tells shapes and the compute dtype; inputs of another dtype are counted as of this one."""
    bits = re.search(r"\d+", profile.dtype)
    return sum(prod(shape) for shape in profile.input_shapes) * (int(bits[0]) // 8 if bits else 4)
