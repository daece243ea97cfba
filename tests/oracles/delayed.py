"""Methods whose forward and backward read different weights, as their papers write them: s counts stages from 0, k
microbatches since the last drain."""

from collections.abc import Callable
from dataclasses import replace
from math import exp, floor
from typing import Any

from compensated import Spike

import pipedream as pd
from pipedream.testing import MethodRules, Reads


def pipelined_backprop(p: int, m: int) -> Reads:
    """Kosson et al., section 3: forward at w(t - D), D = 2(S - s) for s = 1..S, backward at w(t)."""
    return Reads(lambda s, k: max(0, k - 2 * (p - 1 - s)), lambda s, k: k)


def pb_lwp(p: int, m: int, scale: float = 1.0) -> Reads:
    """The same, section 3.2: the forward at w - lr T v, T = D."""
    return replace(pipelined_backprop(p, m), ahead=lambda s: scale * 2 * (p - 1 - s))


def pipemare(p: int, m: int) -> Reads:
    """Yang et al., section 3.2: u = w - D delta, forward 2(p-1-s) microbatches before the backward, m in an update."""
    return Reads(
        lambda s, k: max(0, floor((k - 2 * (p - 1 - s)) / m)), lambda s, k: k // m,
        back=lambda s: -2 * (p - 1 - s) / m, by="average",
    )  # fmt: skip


def spectrain(p: int, m: int) -> Reads:
    """Chen et al., section 4: s_fwd = floor(k/2) + N - k - 1, s_bwd = floor(k/2) at GPU k of N."""
    how = {"ahead": lambda s: s // 2 + p - s - 1, "back": lambda s: s // 2}
    return Reads(lambda s, k: max(0, k - (p - 1 - s)), lambda s, k: k, **how)


def spectrain_v2(p: int, m: int) -> Reads:
    """The second version: predicted for the forward by N - k, kept for the backward."""
    return Reads(lambda s, k: max(0, k - (p - 1 - s)), ahead=lambda s: p - s)


def pipeoptim(p: int, m: int) -> Reads:
    """Guan et al. 2023, section 3: the forward at w - lr s dw, s = D - rank - 1; the backward at w."""
    return Reads(lambda s, k: max(0, k - (p - 1 - s)), lambda s, k: k, ahead=lambda s: p - s - 1)


def xpipe(p: int, m: int) -> Reads:
    """Guan et al. 2019: all microbatches of a minibatch read what its first one predicted."""
    return Reads(
        lambda s, k: max(0, floor((k - k % m - (p - 1 - s)) / m)), lambda s, k: k // m,
        ahead=lambda s: -((s + 1 - p) // m),
    )  # fmt: skip


def stash(late: Callable[[int, int], int]) -> Callable[[int, int], Reads]:
    """Returns methods of staleness (p, s) -> updates, whose backwards read the weights of the forward."""

    def make(p: int, m: int) -> Reads:
        def read(s: int, k: int) -> int:
            return max(0, k // m - late(p, s))

        return Reads(read)

    return make


def paci(p: int, m: int) -> Reads:
    """1F1B with p - s in flight, an update every m microbatches, live weights."""
    return Reads(lambda s, k: max(0, floor((k - (p - 1 - s)) / m)), lambda s, k: k // m)


def nf1b(p: int, n: int, minibatches: int) -> list[list[str]]:
    """Returns what each worker does in each slot, F or B, by the rule of TiMePReSt's section 3.

    A forward of a microbatch takes a slot, the backward of a minibatch too; backwards come first; a worker s of p has
    at most p - s minibatches that it has begun and not gone back through.
    """
    forwards, backwards = [0] * p, [0] * p
    done: list[list[str]] = [[] for _ in range(p)]
    while backwards[0] < minibatches:
        now = []
        for s in range(p):
            ready = forwards[s] // n if s == p - 1 else backwards[s + 1]
            arrived = s == 0 or forwards[s - 1] > forwards[s]
            goes_on = arrived and forwards[s] // n - backwards[s] < p - s
            now.append("B" if ready > backwards[s] else "F" if goes_on else ".")
        for s, what in enumerate(now):
            forwards[s] += what == "F"
            backwards[s] += what == "B"
            done[s].append(what)
    return done


def v_timeprest(p: int, m: int) -> Reads:
    """Order nF1B; each pass at the weights that there are, which are those of the backwards before it."""
    rows = ["".join(row) for row in nf1b(p, m, 60)]
    before = [[part.count("B") for part in _prefixes(row)] for row in rows]
    return Reads(lambda s, k: before[s][k], lambda s, k: k // m)


def timeprest(p: int, m: int) -> Reads:
    """The same order; each forward at the version that its microbatch met at the input stage, as vertical sync has it;
    each backward at the newest weights of its stage, which has made its updates of all minibatches before."""
    before = _prefixes("".join(nf1b(p, m, 60)[0]))
    return Reads(lambda s, k: before[k].count("B"), lambda s, k: k // m)


def timeprest_interpolated(p: int, m: int, share: float = exp(-1)) -> Reads:
    """The same order; forwards at the newest weights, backwards towards the newest from those that are stashed."""
    return replace(v_timeprest(p, m), share=share)


def _prefixes(row: str) -> list[str]:
    """Returns what lies before each forward."""
    return [row[:i] for i, what in enumerate(row) if what == "F"]


_METHODS = (
    pipelined_backprop, pb_lwp, pipemare, spectrain, spectrain_v2, pipeoptim, xpipe, paci, v_timeprest, timeprest,
    timeprest_interpolated,
)  # fmt: skip
PAPERS: dict[str, Callable[..., Reads]] = {method.__name__: method for method in _METHODS}


def reads_of(name: str, plan: pd.Plan, m: int, replicas: tuple[int, ...] | None, options: dict[str, Any]) -> Reads:
    """Returns the weights that a method reads, with its options; the papers have a worker a stage, without replicas."""
    options, p = dict(options), len(plan.stages)
    changes = {"rule": options.pop("backward_rule", None), "by": options.pop("by", None)}
    reads = PAPERS[name](p, m, **options)
    reads = replace(reads, **{name: value for name, value in changes.items() if value is not None})
    if replicas is None:
        return reads
    if "timeprest" in name:
        # The warm-up is the schedule's own; the rest is the papers' arithmetic.
        in_flight = pd.schedules.build(name, plan, m).plan.in_flight
        waits = [(n - -(-m // count)) * count for n, count in zip(in_flight, replicas, strict=True)]
        return replace(reads, forward=lambda s, k: max(0, (k - waits[0 if name == "timeprest" else s]) // m))
    # Of r replicas each has W warm-up forwards, its own microbatches alone, and a bellwether of its own.
    late = [(n - 1) * count for n, count in zip(plan.in_flight, replicas, strict=True)]
    per_update = [m if m > 1 else count for count in replicas]
    shared = m if name == "xpipe" else 1
    first = lambda s, k: k - k % shared + k % shared % replicas[s]  # noqa: E731
    predicts = bool(reads.ahead(0))
    return replace(
        reads,
        forward=lambda s, k: max(0, (first(s, k) - late[s]) // per_update[s]),
        backward=lambda s, k: k // per_update[s],
        ahead=lambda s: -(-late[s] // per_update[s]) if predicts else 0,
    )


class _Rated(Spike):
    """Spike compensation at a rate of its own."""

    def __init__(self, rate: Callable[[int, int], float], *of_spike: Any) -> None:
        super().__init__(*of_spike)
        self.rate = rate  # type: ignore[method-assign]


def turn(
    reads: Reads,
    m: int,
    rate: Callable[[int, int], float] = lambda s, k: 1.0,
    spike: Callable[[int], int] = lambda s: 0,
    *,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    **settings: Any,
) -> MethodRules:
    """Returns a method with momentum SGD; `rate`: (s, updates of the input stage) -> factor, `spike`: s -> delay."""
    return MethodRules(reads, m, compensation=_Rated(rate, weight_decay, momentum, spike))
