"""What is searched: any run of layers as a stage, with its seconds and its bytes, from prefix sums.

The cost of a stage is a function of (first, last, replicas) and its memory one of (first, last, in_flight, lag);
a search needs nothing else.

Seconds are added exactly (as integers over a common power of two) and rounded once. So stages that cost
the same compare equal, wherever they stand in the model, and ties are broken by rule, not by rounding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from ..core import depth as depths
from ..core.cluster import Cluster
from ..core.errors import PlanError
from ..core.holding import Held
from ..core.memory import stage_bytes
from ..core.plan import Plan, Stage
from ..core.profile import Profile
from ..core.site import Site
from ..core.units import format_bytes

__all__ = ["Holds", "Index", "Space", "Versions", "stash"]

Versions = Callable[[int, int], int]
"""From the minibatches in flight at a stage, and its lag, to the versions of its weights alive at once."""

Holds = Callable[[Plan], tuple[Held, ...]]
"""From a plan to what each of its stages holds under a method, which is read off the method's schedule."""

Index = Any
"""A layer index, or a numpy array of them: each cost is one formula, for one stage or for all at once."""


def stash(in_flight: int, lag: int) -> int:
    """Returns the versions that weight stashing holds: one for each minibatch in flight, and one for a lag."""
    return in_flight + lag


@dataclass(frozen=True, eq=False)
class Space:
    """A profile, a cluster and a way to train: what every run of layers would cost as a stage.

    Attributes:
        profile, cluster: as given.
        versions: versions of the weights alive at once, from the count in flight and the lag.
        lag: of the replicated stages of a pipeline; others have none (`Plan.lag`).
        microbatches: parts of a minibatch; activations in flight and inputs are those of one part.
        scale: seconds are integers over this power of two.
        forward, backward: seconds of all layers before index i, times `scale`; the loss is part of the last
            layer's backward.
        parameters, optimizer, activations: bytes of all layers before index i; the optimizer's state is
            shared out by parameter bytes.
        crossing: bytes that cross a cut at index i; at 0 the model's input, at the end its output.
        holds: what the method holds of what is admitted; None: all of it, in so many `versions`.
    """

    profile: Profile
    cluster: Cluster
    versions: Versions
    lag: int
    microbatches: int
    scale: int
    forward: Any
    backward: Any
    parameters: Any
    optimizer: Any
    activations: Any
    crossing: Any
    holds: Holds | None = None

    @classmethod
    def of(
        cls,
        profile: Profile,
        cluster: Cluster,
        *,
        versions: Versions = stash,
        lag: int = 0,
        microbatches: int = 1,
        holds: Holds | None = None,
    ) -> Space:
        """Returns the space of a profile on a cluster.

        Raises:
            PlanError: fewer than one microbatch, or a lag that is neither 0 nor 1.
        """
        if lag not in (0, 1):
            raise PlanError(f"lag {lag} was asked for; give 0 (the paper's) or 1 (updates behind the next forward)")
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
            lag,
            microbatches,
            scale,
            _exact(forward, scale),
            backward_sums,
            np.array(parameters),
            np.array(optimizer),
            np.array([0, *accumulate(layer.activation_bytes for layer in layers)]),
            np.array([_input_bytes(profile), *(layer.output_bytes for layer in layers)]),
            holds,
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
        """Returns the seconds per minibatch of a stage on so many workers, of a pipeline's stage (`core.site`)."""
        return self.period_s(self.passes_s(first, last), first, last, replicas)

    def passes_s(self, first: Index, last: Index) -> tuple[Any, Any]:
        """Returns the seconds of forward and backward of a stage on one worker."""
        forward = (self.forward[last] - self.forward[first]) / self.scale
        backward = (self.backward[last] - self.backward[first]) / self.scale
        return forward, backward

    def period_s(self, passes_s: tuple[Any, Any], first: Index, last: Index, replicas: int) -> Any:
        """Returns `seconds` of a stage whose `passes_s` are known: exact sums of a whole table take long."""
        end = len(self.profile.layers)
        return self.site(replicas).period_s(
            *passes_s,
            self.update_s(first, last),
            self.parameters[last] - self.parameters[first],
            np.where(np.asarray(first) == 0, 0, self.crossing[first]),
            np.where(np.asarray(last) == end, 0, self.crossing[last]),
        )

    def site(self, replicas: int) -> Site:
        """Returns the site of a stage that has neighbours, all links being like the slowest."""
        cluster = self.cluster
        flat = Cluster.flat(replicas + 2, cluster.bandwidth_bytes_per_s, cluster.latency_s, cluster.memory_bytes)
        return Site.of(flat, range(1, replicas + 1), 0, replicas + 1)

    def need_bytes(
        self, first: Index, last: Index, in_flight: int, lag: int = 0, recompute: bool = False, replicas: int = 1
    ) -> Any:
        """Returns the peak bytes of one worker of a stage that admits so many microbatches before its first backward.

        What of a minibatch's parts one of several replicas holds depends on how many they are; one holds the most.
        """
        return self._bytes(first, last, self.held(in_flight, lag, replicas), recompute)

    def _bytes(self, first: Index, last: Index, held: Held, recompute: bool) -> Any:
        return stage_bytes(
            parameter_bytes=self.parameters[last] - self.parameters[first],
            optimizer_bytes=self.optimizer[last] - self.optimizer[first],
            activation_bytes=-(-(self.activations[last] - self.activations[first]) // self.microbatches),
            input_bytes=-(-self.crossing[first] // self.microbatches),
            versions=held.versions,
            in_flight=held.in_flight,
            recompute=recompute,
        )

    def held(self, in_flight: int, lag: int = 0, replicas: int = 1) -> Held:
        """Returns what a stage holds of which its neighbours are not known: that of the input stage of a small plan."""
        if self.holds is None:
            return Held(in_flight, self.versions(in_flight, lag))
        share = -(-self.microbatches // replicas)  # replicas matter by their share of a minibatch alone
        key = in_flight, lag, max(-(-self.microbatches // share), 1 + lag)
        if key not in self._known:
            small = replace(Plan.uniform(2, replicas=(key[2], 1)), in_flight=(in_flight, 1), lag=(lag, 0))
            self._known[key] = self.holds(small)[0]
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[int, int, int], Held]:
        return {}

    def _held_by(self, plan: Plan) -> tuple[Held, ...]:
        """Returns what the stages of a whole plan hold."""
        if self.holds is not None:
            return self.holds(plan)
        return tuple(self.held(*row, 1) for row in zip(plan.in_flight, plan.lag, strict=True))

    def stage(self, first: int, last: int, replicas: int = 1, in_flight: int = 1, lag: int = 0) -> Stage:
        """Returns the stage of the layers first <= i < last, all its fields filled in."""
        return Stage(
            first,
            last,
            replicas,
            forward_s=(self.forward[last] - self.forward[first]) / self.scale,
            backward_s=(self.backward[last] - self.backward[first]) / self.scale,
            update_s=float(self.update_s(first, last)),
            forward_fixed_s=sum(layer.forward_fixed_s for layer in self.profile.layers[first:last]),
            backward_fixed_s=sum(layer.backward_fixed_s for layer in self.profile.layers[first:last]),
            output_bytes=int(self.crossing[last]),
            activation_bytes=int(self.activations[last] - self.activations[first]),
            parameter_bytes=int(self.parameters[last] - self.parameters[first]),
            optimizer_bytes=int(self.optimizer[last] - self.optimizer[first]),
            peak_bytes=int(self.need_bytes(first, last, in_flight, lag, replicas=replicas)),
            names=tuple(layer.name for layer in self.profile.graph.layers[first:last]),
        )

    def plan(self, cuts: tuple[int, ...], replicas: tuple[int, ...] | None = None, note: str = "") -> Plan:
        """Returns the plan of these cuts at the paper's depth; neither cuts nor memory are checked."""
        counts = replicas or (1,) * (len(cuts) + 1)
        lags = tuple(self.lag if count > 1 and cuts else 0 for count in counts)
        in_flight = depths.noam(counts, lags)
        spans = pairwise((0, *cuts, len(self.profile.layers)))
        stages = tuple(
            self.stage(first, last, *how) for (first, last), *how in zip(spans, counts, in_flight, lags, strict=True)
        )
        profile = self.profile
        return Plan(stages, in_flight, self.cluster, lags, profile.model, profile.batch, note=note)

    def at_depth(self, plan: Plan, depth: str | tuple[int, ...]) -> Plan:
        """Returns the plan at a depth, its peak bytes renewed and within the memory of a worker.

        Depth 'auto' is the deepest between 'noam' and 'full' that fits (`core.depth.fitting`).

        Raises:
            PlanError: an unknown or ill-formed depth (`Plan.with_depth`), or a stage that does not fit.
        """
        if depth == "auto":
            low, high = self.at_depth(plan, "noam"), plan.with_depth("full")
            most = tuple(self._most_in_flight(high, s) for s in range(len(high.stages)))
            found = depths.fitting(low.in_flight, high.in_flight, most, plan.replicas)
            return replace(self.at_depth(plan, found), depth="auto")
        deep = self.with_bytes(plan.with_depth(depth))
        limit = self.cluster.memory_bytes
        for s, (stage, held) in enumerate(zip(deep.stages, deep.in_flight, strict=True)):
            if limit is not None and stage.peak_bytes > limit:
                less = "--in-flight auto for the deepest that fits" if deep.depth == "full" else "a smaller depth"
                raise PlanError(
                    f"depth {deep.depth} was asked: stage {s} (layers {stage.first} to {stage.last - 1}) then holds "
                    f"{held} in flight and needs {format_bytes(stage.peak_bytes)}, a worker has "
                    f"{format_bytes(limit)}; ask for {less}, cut it further, split minibatches into "
                    "more microbatches or choose a schedule that holds fewer versions"
                )
        return deep

    def with_bytes(self, plan: Plan) -> Plan:
        """Returns the plan with the peak bytes of what its stages hold."""
        stages = tuple(
            replace(stage, peak_bytes=int(self._bytes(stage.first, stage.last, held, stage.recompute)))
            for stage, held in zip(plan.stages, self._held_by(plan), strict=True)
        )
        return replace(plan, stages=stages)

    def _most_in_flight(self, plan: Plan, s: int) -> int:
        """Returns what a stage's memory has room for, up to what the plan has in flight."""
        stage, limit = plan.stages[s], self.cluster.memory_bytes
        held = plan.in_flight[s]
        ends = stage.first, stage.last
        while limit is not None and held > 1:
            if self.need_bytes(*ends, held, plan.lag[s], stage.recompute, stage.replicas) <= limit:
                break
            held -= 1
        return held


def _exact(ratios: Iterable[tuple[int, int]], scale: int) -> Any:
    return np.array([0, *accumulate(above * (scale // below) for above, below in ratios)], dtype=object)


def _input_bytes(profile: Profile) -> int:
    """The profile tells shapes and the compute dtype; inputs of another dtype are counted as of this one."""
    bits = re.search(r"\d+", profile.dtype)
    return sum(prod(shape) for shape in profile.input_shapes) * (int(bits[0]) // 8 if bits else 4)
