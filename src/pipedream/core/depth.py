"""Depth: how many warm-up forwards W_s each stage makes; W_s + 1 are then in flight.

``noam`` is PipeDream's (SOSP 2019, section 3.2): NOAM = ceil(workers / replicas of the input stage)
minibatches are admitted, which gives W_s = (sum of replicas from s on, minus 1) // r_s. It hides no message
time: with one-way message time c and slot T the period of a straight pipeline of p stages is
T + 2c(p - 1)/p, however asynchronous the sends are.

``full`` is the smallest depth at which messages and replica barriers are hidden (docs/design.md, Depth):
W_{p-1} = 0; W_s = ceil((W_u r_u + r_s + 2 r_u - 2 gcd(r_s, r_u) + ceil((c_fwd + c_bwd)/T)) / r_s), u = s + 1.
"""

from __future__ import annotations

from math import ceil, gcd

from .errors import PlanError

__all__ = ["check_in_flight", "full", "noam"]

_MOST_IN_FLIGHT = 10_000  # no memory holds more, and a proof of it would take all of this machine's


def noam(replicas: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the in-flight count of each stage at the paper's depth.

    >>> noam((1, 1, 1, 1))
    (4, 3, 2, 1)
    >>> noam((2, 1))
    (2, 1)
    """
    return tuple((sum(replicas[s:]) - 1) // replicas[s] + 1 for s in range(len(replicas)))


def full(replicas: tuple[int, ...], round_trip_slots: tuple[float, ...]) -> tuple[int, ...]:
    """Returns the in-flight count of each stage at the depth that hides messages and barriers.

    Args:
        replicas: workers of each stage.
        round_trip_slots: for each boundary, (c_fwd + c_bwd) / T: seconds of an activation message and of
            a gradient message over the period per minibatch.

    >>> full((1, 1, 1), (0.0, 0.0))
    (3, 2, 1)
    >>> full((1, 1), (0.5,))
    (3, 1)
    """
    warmup = [0]
    for s in range(len(replicas) - 2, -1, -1):
        here, after = replicas[s], replicas[s + 1]
        ahead = warmup[0] * after + here + 2 * after - 2 * gcd(here, after) + ceil(round_trip_slots[s] - 1e-9)
        warmup.insert(0, ceil(ahead / here))
    return tuple(w + 1 for w in warmup)


def check_in_flight(in_flight: tuple[int, ...], replicas: tuple[int, ...]) -> None:
    """Checks a depth written by hand: W_s r_s <= W_u r_u for every stage u upstream of s.

    Raises:
        PlanError: wrong length, a count under 1, or a stage that waits for more than is admitted.
    """
    if len(in_flight) != len(replicas):
        raise PlanError(
            f"in-flight counts {in_flight} name {len(in_flight)} stages, the plan has {len(replicas)}; give one "
            "count a stage, or noam, or full"
        )
    if not 1 <= min(in_flight) <= max(in_flight) <= _MOST_IN_FLIGHT:
        raise PlanError(f"in-flight counts must be between 1 and {_MOST_IN_FLIGHT}, found {in_flight}")
    for u in range(len(replicas)):
        for s in range(u + 1, len(replicas)):
            if (in_flight[s] - 1) * replicas[s] > (in_flight[u] - 1) * replicas[u]:
                raise PlanError(
                    f"in-flight counts {in_flight}: stage {s} would wait for {(in_flight[s] - 1) * replicas[s]} "
                    f"warm-up minibatches, but stage {u} sends only {(in_flight[u] - 1) * replicas[u]}; counts must "
                    "not grow towards the output"
                )
