"""Seconds of each instruction: from a plan, from bytes on the links of its cluster, and from stragglers.

Sums over replicas begin inside the backward, bucket by bucket (`core.plan.cost.SumLink`, docs/cost_models.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import repeat
from math import exp, isfinite, log1p, sqrt
from operator import add
from random import Random

from pipedream.core.errors import ProfileError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.hardware.devices import device_named
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.core.plan.cost import Site, all_reduce_bytes
from pipedream.core.plan.placement import Carries
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.op import Kind
from pipedream.core.schedule.program import Channel, Program

_CORE_S_PER_FLOP = 8e-12
"""In float32 products of matrices of 512 to 1024 rows: torch 2.13, an x86 server."""


@dataclass(frozen=True)
class Costs:
    """Seconds of ops and sums, for each stage; seconds of messages, for each channel.

    Attributes:
        forward_s, backward_s: seconds of one microbatch.
        weight_s: the weight gradient's part of a split backward.
        recompute_s: the repeated forward's part of a backward, which needs no gradient; () if nothing is recomputed.
        update_s, sync_s: seconds of one optimizer step, and of one sum over the replicas.
        output_bytes: bytes that each stage sends on, for one microbatch; its gradient is as large.
        workers: the cluster's worker of each rank; () for the first ones.
        input_bytes: bytes that go directly from the input stage to the output stage.
        buckets: buckets of each stage's sum: the share of the last backward after which a bucket is ready, and the
            seconds of it and all later ones. (): nothing hides sums, which take `sync_s`.
        sum_bytes: bytes that each stage's sum moves through a port, one way.
        tied: seconds, and bytes through a port, of each sum over the holders of tied weights (`Plan.tied_weights`).
        runtime: seconds of the runtime; on a worker of speed 1, like the seconds of ops.
        launch_s: seconds of the host to launch each pass of a microbatch at each stage, while a GPU computes; () if
            unknown.
        message_shares: see `Terms`.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    update_s: tuple[float, ...]
    sync_s: tuple[float, ...]
    output_bytes: tuple[float, ...]
    cluster: Cluster
    workers: tuple[int, ...] = ()
    input_bytes: float = 0.0
    buckets: tuple[tuple[tuple[float, float], ...], ...] = ()
    sum_bytes: tuple[float, ...] = ()
    weight_bytes: tuple[float, ...] = ()
    tied: tuple[tuple[float, float], ...] = ()
    runtime: RuntimeCosts = field(default_factory=RuntimeCosts)
    launch_s: tuple[tuple[float, float], ...] = ()
    recompute_s: tuple[float, ...] = ()
    message_shares: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:  # the rest is a plan's, which is checked
        if min(self.weight_s, default=0.0) < 0:
            raise ValueError(f"weight_s cannot be negative, found {self.weight_s}")
        parts_s = map(add, self.weight_s, self.recompute_s or repeat(0.0))
        if any(parts > backward for parts, backward in zip(parts_s, self.backward_s, strict=True)):
            raise ValueError(
                f"the weight gradient is part of the backward, beside what is recomputed ({self.recompute_s}), found "
                f"{self.weight_s} of {self.backward_s} seconds"
            )

    def worker(self, rank: int) -> int:
        return self.workers[rank] if self.workers else rank

    def speed(self, rank: int) -> float:
        """Returns a rank's speed, relative to the profile's device."""
        return self.cluster.speeds[self.worker(rank)]

    def op_s(self, kind: Kind, stage: int) -> float:
        """Returns the seconds on a worker of speed 1."""
        seconds = self._compute_device_s(kind, stage)
        return seconds + float(
            self.runtime.added_s(seconds, self._compute_host_s(kind, stage), self._compute_launch_s(kind, stage))
        )

    def _compute_host_s(self, kind: Kind, stage: int) -> float:
        """Returns the seconds that an op keeps the host busy, with messages if the device computes meanwhile."""
        if kind is Kind.UPDATE:
            return self.runtime.update_s
        if not self.runtime.overlap_device or kind is Kind.WEIGHT_GRADIENT:
            return self.runtime.op_s
        neighbours = (stage > 0) + (stage < len(self.forward_s) - 1)
        return self.runtime.op_s + neighbours * self.runtime.message_s

    def summing_s(self, stage: int) -> float:
        """Returns the seconds that a sum over replicas keeps a worker busy after its backward."""
        if self.runtime.overlap_device or not self.sum_bytes or stage >= len(self.forward_s):
            return 0.0
        return (self.runtime.sum_s_per_byte or 2 * self.runtime.message_s_per_byte) * self.sum_bytes[stage]

    def end_s(self, channel: Channel) -> float:
        """Returns the seconds that a message keeps its sender, and again its receiver, from computing."""
        return 0.0 if self.runtime.overlap_device else float(self.runtime.end_s(self._count_bytes_in_memory(channel)))

    @property
    def load_s(self) -> float:
        """Seconds in which the input stage reads a minibatch, before its first forward."""
        return 0.0 if self.runtime.overlap_device else self.runtime.load_s

    def _compute_launch_s(self, kind: Kind, stage: int) -> float:
        if not self.launch_s or kind is Kind.UPDATE:
            return 0.0
        forward_s, backward_s = self.launch_s[stage]
        is_half = kind in (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
        return forward_s if kind is Kind.FORWARD else backward_s / 2 if is_half else backward_s

    def _compute_device_s(self, kind: Kind, stage: int) -> float:
        if kind is Kind.INPUT_GRADIENT:
            return self.backward_s[stage] - self.weight_s[stage]
        by_kind = {
            Kind.FORWARD: self.forward_s,
            Kind.BACKWARD: self.backward_s,
            Kind.WEIGHT_GRADIENT: self.weight_s,
            Kind.UPDATE: self.update_s,
        }
        return by_kind[kind][stage]

    def with_compensation(self, program: Program) -> Costs:
        """Returns the costs with the program's compensation in the updates."""
        weights, stages = program.weights, range(len(self.update_s))
        if not program.updates.compensation:
            return self
        delays, added_s = [weights.staleness(stage) for stage in stages], []
        for stage in stages:
            rules = program.updates.at_stage(stage, delays).compensation
            flops = sum(rule.update_flops(program.plan.stages[stage].matrices) for rule in rules)
            added_s.append(flops * _find_flop_s(self.cluster.devices[self.worker(program.placement.ranks[stage][0])]))
        return replace(self, update_s=tuple(map(add, self.update_s, added_s)))

    def sum_s(self, stage: int) -> float:
        """Returns the seconds of a sum on idle ports, with the hidden part.

        Here and elsewhere, numbers after the last stage are those of the sums of `tied`.
        """
        if stage >= len(self.forward_s):
            return self.tied[stage - len(self.forward_s)][0]
        return self.buckets[stage][0][1] if self.buckets and self.buckets[stage] else self.sync_s[stage]

    def sum_parts(self, stage: int, arrivals: Sequence[tuple[float, float]]) -> list[tuple[float, float, float]]:
        """Returns the parts of a sum: when each may begin, its bytes through a port, its seconds.

        `arrivals` has, for each replica, the end of its last backward and its seconds.
        """
        if stage >= len(self.forward_s):
            seconds, size = self.tied[stage - len(self.forward_s)]
            return [(max(at_s for at_s, _ in arrivals), size, seconds)]
        size = self.port_bytes(stage)
        buckets = self.buckets[stage] if self.buckets else ((1.0, self.sync_s[stage]),)
        tails_s = [tail_s for _, tail_s in buckets]
        parts = []
        for (ready, tail_s), later_s in zip(buckets, [*tails_s[1:], 0.0], strict=True):
            at_s = max(end_s - (1 - ready) * backward_s for end_s, backward_s in arrivals)
            seconds = tail_s - later_s
            parts.append((at_s, size * seconds / tails_s[0] if tails_s[0] else 0.0, seconds))
        return parts

    def port_bytes(self, stage: int) -> float:
        """Returns the bytes of a sum through a port, one way; 0 if only its seconds count."""
        if stage >= len(self.forward_s):
            return self.tied[stage - len(self.forward_s)][1]
        return self.sum_bytes[stage] if self.sum_bytes else 0.0

    def channel_bytes(self, channel: Channel) -> float:
        """Returns the bytes of a message on the wire."""
        activation_share, gradient_share = self.message_shares
        shares = {Carries.ACTIVATION: activation_share, Carries.GRADIENT: gradient_share}
        return self._count_bytes_in_memory(channel) * shares.get(channel.carries, 1.0)

    def _count_bytes_in_memory(self, channel: Channel) -> float:
        if channel.carries == Carries.INPUT:
            return self.input_bytes
        if channel.carries == Carries.STAGE_INPUT:
            return self.output_bytes[channel.source - 1] if channel.source else self.input_bytes
        # A gradient has as many bytes as its activation.
        return self.output_bytes[channel.source if channel.carries == Carries.ACTIVATION else channel.target]

    def early_s(self, stage: int) -> float:
        """Returns how long before its gradient's arrival the op of a stage may begin that repeats its forward."""
        return self.recompute_s[stage] if self.recompute_s else 0.0

    def copy_s(self, stage: int, source: int, target: int) -> float:
        """Returns the seconds of copying a stage's weights to another rank: from the memory of the machine."""
        if not self.weight_bytes:
            return 0.0
        bandwidth, latency_s = self.cluster.link(self.cluster.reach(self.worker(source), self.worker(target)))
        return self.weight_bytes[stage] / (self.cluster.host_bytes_per_s or bandwidth) + latency_s

    def link(self, channel: Channel) -> tuple[float, float]:
        """Returns bandwidth (bytes/s) and latency (s) of a channel."""
        workers = self.worker(channel.sender), self.worker(channel.receiver)
        return self.cluster.link(self.cluster.reach(*workers))

    def latency_s(self, channel: Channel) -> float:
        """Returns the seconds from a message's last byte to its arrival; 0 for inputs that cost nothing."""
        if channel.carries not in (Carries.ACTIVATION, Carries.GRADIENT) and not self.channel_bytes(channel):
            return 0.0
        return self.link(channel)[1]


def _find_flop_s(device: str) -> float:
    """Returns the seconds of one floating-point operation in a product of matrices."""
    with suppress(ProfileError):
        return device_named(device).op_s(1.0, 0.0, launches=0)
    return _CORE_S_PER_FLOP


def bucket_costs(size_bytes: float, site: Site) -> tuple[tuple[float, float], ...]:
    """Returns `Costs.buckets` of a sum over the replicas of a site, given the bytes of its weights."""
    buckets: dict[float, float] = {}
    for ready, tail_s in site.sum_link.buckets(size_bytes, site.replicas, site.sum_costs):
        buckets[float(ready)] = max(float(tail_s), buckets.get(float(ready), 0.0))
    return tuple(buckets.items())


def costs(plan: Plan, *, split: int = 1, weight_s: float | None = None, overlap: bool = True) -> Costs:
    """Returns the costs of a plan's stages on its cluster.

    Args:
        split: m, microbatches of a minibatch. Divides a plan in minibatches, except for updates, sums and the fixed
            part of passes (`Stage.split_s`).
        weight_s: seconds of a stage's weight gradient, in the plan's unit; by default half of the backward.
        overlap: sums begin inside the backward, as in the runtime; otherwise directly before their update.

    Raises:
        ValueError: a split below 1, or a weight gradient longer than its backward.
    """
    if split < 1:
        raise ValueError(f"a minibatch is split into at least 1 microbatch, found {split}")
    parts = split if plan.unit == "minibatch" else 1
    stages, cluster = plan.stages, plan.costs.cluster
    splits = [stage.split_s(parts) for stage in stages]
    sites = plan.costs.sites
    return Costs(
        forward_s=tuple(forward_s for forward_s, _ in splits),
        backward_s=tuple(b + f if stage.recompute else b for stage, (f, b) in zip(stages, splits, strict=True)),
        recompute_s=tuple(f if stage.recompute else 0.0 for stage, (f, _) in zip(stages, splits, strict=True)),
        weight_s=tuple(backward_s / 2 if weight_s is None else weight_s / parts for _, backward_s in splits),
        update_s=tuple(
            stage.update_s + stage.trained_bytes * site.sum_costs.work_s_per_byte * (stage.replicas > 1)
            for stage, site in zip(stages, sites, strict=True)
        ),
        sync_s=plan.costs.sync_s,
        output_bytes=tuple(stage.output_bytes / parts for stage in stages),
        cluster=cluster,
        message_shares=plan.costs.terms[0].message_shares,
        workers=tuple(sorted(set(plan.worker_order))),
        buckets=tuple(bucket_costs(stage.trained_bytes, site) for stage, site in zip(stages, sites, strict=True))
        if overlap
        else (),
        sum_bytes=tuple(
            site.sum_costs.share * float(all_reduce_bytes(stage.trained_bytes, stage.replicas, how=cluster.all_reduce))
            for stage, site in zip(stages, sites, strict=True)
        ),
        weight_bytes=tuple(float(stage.parameter_bytes) for stage in stages),
        tied=tuple(
            (
                seconds,
                float(all_reduce_bytes(tied.parameter_bytes, len(tied.ranks(plan.placement)), how=cluster.all_reduce)),
            )
            for tied, seconds in zip(plan.tied_weights, plan.costs.tied_sums_s, strict=True)
        ),
        runtime=plan.costs.runtime,
        launch_s=tuple(
            (stage.forward_launch_s, stage.backward_launch_s + stage.forward_launch_s * stage.recompute)
            for stage in stages
        ),
    )


@dataclass(frozen=True)
class Stragglers:
    """Factors on the seconds of ops. Messages and sums are not affected.

    Each op takes its seconds times a factor from a lognormal distribution of mean 1, and times the factor of its rank.
    Each rank has its own generator, so that a seed determines the run.

    Attributes:
        jitter: coefficient of variation (standard deviation / mean) of an op's seconds, or one for each letter of an
            op, such as {"F": 0.1, "B": 0.2}; others then have none.
        slow: rank -> factor on the seconds of its ops; by default 1.

    Raises:
        ValueError: a negative or infinite jitter, a factor that is not positive, or an unknown letter.
    """

    jitter: float | Mapping[str, float] = 0.0
    slow: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        jitters = self.jitter if isinstance(self.jitter, Mapping) else {"F": self.jitter}
        letters = {kind.value for kind in Kind}
        if unknown := sorted(set(jitters) - letters):
            raise ValueError(f"jitter was given for {unknown}; the letters of ops are {sorted(letters)}")
        for variation in jitters.values():
            if not (isfinite(variation) and variation >= 0):
                raise ValueError(f"jitter is a coefficient of variation, 0 or more, found {variation}")
        for rank, factor in self.slow.items():
            if not (isfinite(factor) and factor > 0):
                raise ValueError(f"a slow rank takes its factor times the seconds, found {factor} for rank {rank}")

    def check_ranks(self, ranks: int) -> None:
        if unknown := sorted(rank for rank in self.slow if not 0 <= rank < ranks):
            raise ValueError(f"a slow rank {unknown[0]} was asked for, the ranks are 0 to {ranks - 1}")

    def slowness(self, rank: int) -> float:
        return self.slow.get(rank, 1.0)

    def draws(self, rank: int) -> Callable[[str], float] | None:
        """Returns the function from an op's letter to its next factor; None if all are 1."""
        by_letter = self.jitter if isinstance(self.jitter, Mapping) else {kind.value: self.jitter for kind in Kind}
        # ln X is normal with variance ln(1 + CV^2) and mean minus half of that.
        sigma = {letter: sqrt(log1p(variation**2)) for letter, variation in by_letter.items() if variation}
        if not sigma:
            return None
        gauss = Random(f"{self.seed}/{rank}").gauss

        def draw(letter: str) -> float:
            deviation = sigma.get(letter)
            return 1.0 if deviation is None else exp(gauss(-deviation * deviation / 2, deviation))

        return draw
