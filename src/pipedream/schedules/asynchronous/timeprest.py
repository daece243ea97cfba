"""TiMePReSt: nF1B, all forwards of one minibatch alternate with another's backward, which reads the newest weights.

2024 (arXiv 2410.14312; Future Generation Computer Systems, 2026), sections 3.1 and 3.2; `v_timeprest`: 2025 (arXiv
2509.23241). A stage runs the backward of a whole minibatch of m microbatches as soon as it can, and admits at most
p - s minibatches: min(2, m)(p-1-s) warm-up forwards besides the minibatch's own m.

    rank 0 | F0  F1  F2  F3  B0  B1' F4  F5  B2  B3'
    rank 1 | .   F0  F1  B0  B1' F2  F3  B2  B3' F4

Differences from the paper: the backwards of the microbatches replace one backward of the mean loss, with the same
gradient; replicas, which the paper does not have, share the warm-up.

The paper says that v = floor((p+m-2)/m) minibatches lie between a backward and the one whose weights it reads, at
every stage. Its own order gives floor((p-1)/(m+1)) + 1, up to the newest minibatch that every stage has updated for.
Both are 1 for p <= m + 1, as in its experiments; up to eight workers they differ at (p, m) = (6, 2), (8, 2), (8, 3).
Here a backward reads what is newest at its own stage, the same where v = 1.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import ClassVar

from pipedream.schedules import kit


@dataclass(frozen=True)
class NewerBackward(kit.WeightRule):
    """Several versions, and backwards that read the newest; for the order nF1B.

    A forward is W_s r_s microbatches ahead of the next backward, at most as many as in earlier stages.

    Attributes:
        per_update: m, over all replicas, at every stage.
    """

    warmup: tuple[int, ...]
    replicas: tuple[int, ...]
    per_update: int
    backward_rule: str = field(default="graph", kw_only=True)  # type: ignore[misc]

    def __post_init__(self) -> None:
        if len(self.warmup) != len(self.replicas):
            raise ValueError(
                f"each argument needs one number per stage, found {len(self.warmup)} and {len(self.replicas)}"
            )
        if self.per_update < max(self.replicas):
            raise ValueError(
                f"an update holds a microbatch of each replica, found {self.per_update} of {self.replicas}"
            )
        late = [self._count_late_microbatches(stage) for stage in range(len(self.warmup))]
        if sorted(late, reverse=True) != late:
            raise ValueError(f"no stage may have more warm-up microbatches than an earlier one, found {late}")
        if self.backward_rule not in kit.BACKWARD_RULES[1:]:
            raise ValueError(f"a backward rule is {', '.join(kit.BACKWARD_RULES[1:])}, found {self.backward_rule!r}")

    def backward_version(self, stage: int, microbatch: int) -> int:
        return microbatch // self.per_update

    def _count_late_microbatches(self, stage: int) -> int:
        return self.warmup[stage] * self.replicas[stage]


@dataclass(frozen=True)
class Stamped(NewerBackward):
    """Vertical sync without a horizontal stash: forwards read a stamped version, backwards the newest.

    A microbatch's stamp is the version that it reads at the input stage.

    TiMePReSt, 2024 (arXiv 2410.14312), section 3.1. A later stage makes its updates sooner than the input stage, so it
    keeps ceil((W_0 r_0 - W_s r_s) / m) versions besides the newest for forwards still to come: the input stage none,
    the last stage the most, the reverse of PipeDream. All stages are equally stale.
    """

    name: ClassVar[str] = "stamped"

    def forward_version(self, stage: int, microbatch: int) -> int:
        return max(0, (microbatch - self._count_late_microbatches(0)) // self.per_update)

    def versions(self, stage: int) -> int:
        return -(-(self._count_late_microbatches(0) - self._count_late_microbatches(stage)) // self.per_update) + 1

    def staleness(self, stage: int) -> int:
        return -(-self._count_late_microbatches(0) // self.per_update)

    def mean_staleness(self, stage: int) -> float:
        return self._count_late_microbatches(0) / self.per_update

    @property
    def held_until(self) -> kit.Kind:
        return kit.Kind.FORWARD


def timeprest(plan: kit.Plan, microbatches: int | None = None, *, backward_rule: str = "graph") -> kit.Schedule:
    """Returns TiMePReSt, with vertical sync but no horizontal stash: a microbatch's forwards read the version of its
    input stage, a backward the newest of its stage, with staleness ceil(2(p-1)/m) everywhere. By default m = 3.

    The plan's in-flight counts are replaced: this order has a depth of its own.
    """
    return nf1b(
        "timeprest",
        plan,
        microbatches,
        backward_rule,
        lambda warmups, replicas, m: Stamped(warmups, replicas, m, backward_rule=backward_rule),
        staleness=lambda p, s, m: -(-min(2, m) * (p - 1) // m),
        versions=lambda p, s, m: -(-min(2, m) * s // m) + 1,
    )


def v_timeprest(plan: kit.Plan, microbatches: int | None = None, *, backward_rule: str = "graph") -> kit.Schedule:
    """Returns V-TiMePReSt, without a stash or version per microbatch: staleness ceil(2(p-1-s)/m), by default m = 3."""

    def rule(warmups: tuple[int, ...], replicas: tuple[int, ...], m: int) -> kit.Latest:
        return kit.Latest(warmups, replicas, (0,) * len(warmups), (m,) * len(warmups), backward_rule=backward_rule)

    return nf1b("v_timeprest", plan, microbatches, backward_rule, rule)


def nf1b(
    name: str,
    plan: kit.Plan,
    microbatches: int | None,
    backward_rule: str,
    rule: Callable[[tuple[int, ...], tuple[int, ...], int], kit.WeightRule],
    *,
    staleness: Callable[[int, int, int], int] = lambda p, s, m: -(-min(2, m) * (p - 1 - s) // m),
    versions: Callable[[int, int, int], int] = lambda p, s, m: 1,
) -> kit.Schedule:
    """Returns a method of the order nF1B.

    Args:
        rule: (warm-up forwards of each stage's replicas, replicas, m) -> weight rule.
        staleness, versions: (p, s, m) -> the claims for a straight pipeline.
    """
    m = kit.choose_microbatches(name, plan, microbatches, 3)
    warmups = _count_warmup(plan, m)
    in_flight = tuple(wait - (-m // count) for wait, count in zip(warmups, plan.replicas, strict=True))
    update_delay = (0,) * len(plan.stages)
    if (plan.in_flight, plan.update_delay) != (in_flight, update_delay):
        plan = replace(plan, in_flight=in_flight, update_delay=update_delay, depth_mode="hand")
    plan = kit.with_backward_rule(plan, backward_rule)

    def ops(stage_replica: kit.StageReplica) -> Iterator[kit.Op]:
        stage, replicas = stage_replica.stage, plan.replicas[stage_replica.stage]
        ahead = warmups[stage] * replicas
        forwards = iter(kit.all_microbatches(stage_replica, replicas))
        backwards = iter(kit.all_microbatches(stage_replica, replicas))
        k, back = next(forwards), next(backwards)
        for number in count():
            while k < ahead + (number + 1) * m:
                yield kit.forward(stage_replica, k)
                k = next(forwards)
            while back < (number + 1) * m:
                yield kit.backward(stage_replica, back)
                back = next(backwards)
            yield kit.update(stage_replica, number + 1)

    return kit.Schedule(
        name=name,
        plan=plan,
        placement=plan.placement,
        order=kit.one_stage_per_rank(plan.placement, ops),
        weights=rule(warmups, plan.replicas, m),
        updates=kit.UpdateRule((m,) * len(plan.stages)),
        microbatches=m,
        claims=kit.Claims(
            in_flight=lambda p, total, s: min(min(2, m) * (p - 1 - s) + m, total),
            staleness=lambda p, total, s: staleness(p, s, m),
            versions=lambda p, total, s: versions(p, s, m),
        ),
    )


def _count_warmup(plan: kit.Plan, m: int) -> tuple[int, ...]:
    """Returns the warm-up forwards of a replica of each stage: its part of min(2, m) (p - 1 - s), rounded up.

    No stage has fewer than the next one, which would wait for a forward that waits for its backward; nor does it hold
    fewer in flight, as in any plan. At the input stage replica 0 reads minibatches for all replicas: if a backward
    falls between the forwards of a minibatch, each replica has one of them before it, or they would deadlock.
    """
    warmups: list[int] = []
    later = later_in_flight = 0
    for s, replicas in reversed([*enumerate(plan.replicas)]):
        share = -(-m // replicas)
        warmup = max(
            -(-max(min(2, m) * (len(plan.stages) - 1 - s), later) // replicas),
            1 - share - (-later_in_flight // replicas),
        )
        while s == 0 and 0 < warmup * replicas % m < replicas:
            warmup += 1
        warmups.insert(0, warmup)
        later, later_in_flight = warmup * replicas, (warmup + share - 1) * replicas
    return tuple(warmups)


METHODS = (
    kit.Method(
        timeprest,
        since=2024,
        properties=kit.MethodProperties(
            flushes=False, same_updates=False, reads_stored_weights=False, versions_grow_with_stages=True
        ),
        picture=kit.Picture(
            "TiMePReSt: forwards read the version (v) of their stamp, backwards the newest; m = 3", 3, 15
        ),
        choose="To study backwards at the newest weights with forwards at one version of the whole model. The last "
        "stage keeps the most versions, and all stages are as stale as the first. Use "
        "`timeprest[backward_rule=recompute]` at high learning rates: in tests, old activations with newer weights "
        "diverged first.",
    ),
    kit.Method(
        v_timeprest,
        since=2025,
        properties=kit.MethodProperties(flushes=False, same_updates=False, reads_stored_weights=False),
        picture=kit.Picture(
            "V-TiMePReSt: m forwards, then m backwards; each op reads the newest version (v); m = 3", 3, 15
        ),
        choose="To study the order nF1B: paci's weights and updates, with a minibatch's backwards together. It keeps "
        "more microbatches in flight than paci and is no less stale.",
    ),
)
