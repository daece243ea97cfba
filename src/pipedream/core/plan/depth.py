"""Depth: the warm-up forwards W_s of each stage, after which W_s + 1 are in flight (docs/exact_rules.md, Depth).

``noam`` is PipeDream's (SOSP 2019, section 3.2): W_s = (sum of replicas from s on, minus 1) // r_s.

``full`` is the smallest that hides messages and replica barriers:
W_{p-1} = 0; W_s = ceil((W_u r_u + r_s + 2 r_u - 2 gcd(r_s, r_u) + ceil((c_fwd + c_bwd)/T)) / r_s), u = s + 1.

A depth is legal if no stage waits for a message that is never sent: W_u r_u >= X(u, s) for each u upstream of s,

    X(u, s) = W_s r_s                                   neither has an update delay
              (W_s + 1) r_s - gcd(r_u, r_s)             s has one
              W_s r_s - r_u + 1                         u has one
              (W_s + 1) r_s - r_u                       both have one

Why: minibatch k's backward at s follows the forward of k + W_s r_s or, with an update delay, all forwards of its
round's W_s-th successor, because the update before it waits for those of all replicas. At u a forward follows all
backwards up to W_u rounds (with an update delay, only the one W_u + 1 rounds) before its own. Together they must not
require the backward of k or of a later minibatch.
"""

from math import ceil, gcd

from pipedream.core.errors import PlanError

Counts = tuple[int, ...]

DEPTH_MODES = {
    "noam": "as in the paper",
    "full": "enough to hide messages",
    "auto": "the deepest that fits",
    "hand": "as given",
}
"""Ways to choose in-flight counts, in words."""

_MAX_IN_FLIGHT = 10_000  # more fit neither any memory nor the proof


def noam(replicas: Counts, update_delay: Counts = ()) -> Counts:
    """Returns the in-flight counts of the paper's depth, raised where an update delay needs more.

    >>> noam((1, 1, 1, 1))
    (4, 3, 2, 1)
    >>> noam((2, 1))
    (2, 1)
    """
    counts = tuple((sum(replicas[s:]) - 1) // replicas[s] + 1 for s in range(len(replicas)))
    return raise_to_legal(counts, replicas, update_delay)


def full(replicas: Counts, round_trip_slots: tuple[float, ...], update_delay: Counts = ()) -> Counts:
    """Returns the in-flight counts that hide messages and barriers.

    Args:
        round_trip_slots: (c_fwd + c_bwd) / T of each boundary.

    >>> full((1, 1, 1), (0.0, 0.0))
    (3, 2, 1)
    >>> full((1, 1), (0.5,))
    (3, 1)
    """
    delays_updates = update_delay or (0,) * len(replicas)
    warmup = [0]
    for s in range(len(replicas) - 2, -1, -1):
        r_s, r_u = replicas[s], replicas[s + 1]
        needed = warmup[0] * r_u + r_s + 2 * r_u - 2 * gcd(r_s, r_u) + ceil(round_trip_slots[s] - 1e-9)
        warmup.insert(0, ceil(needed / r_s))
        warmup[0] = max(warmup[0], _find_least_warmup(s, warmup, replicas, delays_updates))
    return tuple(w + 1 for w in warmup)


def raise_to_legal(in_flight: Counts, replicas: Counts, update_delay: Counts = ()) -> Counts:
    """Returns the smallest legal counts that are at least the given ones.

    >>> raise_to_legal((1, 1, 3), (2, 1, 1))
    (2, 3, 3)
    """
    delays_updates = update_delay or (0,) * len(replicas)
    warmup: list[int] = []
    for s in range(len(replicas) - 1, -1, -1):
        warmup.insert(0, in_flight[s] - 1)
        warmup[0] = max(warmup[0], _find_least_warmup(s, warmup, replicas, delays_updates))
    return tuple(w + 1 for w in warmup)


def fit_counts(low: Counts, high: Counts, limits: Counts, replicas: Counts) -> Counts:
    """Returns the deepest counts from `low` to `high` within `limits`; legal if `low` is.

    A stage adds no more minibatches than the previous stage, which has to send them.

    >>> fit_counts((3, 2, 1), (7, 4, 1), (5, 9, 9), (1, 1, 1))
    (5, 4, 1)
    >>> fit_counts((3, 2, 1), (7, 4, 1), (4, 9, 9), (1, 1, 1))
    (4, 3, 1)
    """
    counts: list[int] = []
    added = high[0] * replicas[0]
    for lowest, highest, limit, count in zip(low, high, limits, replicas, strict=True):
        counts.append(max(lowest, min(highest, limit, lowest + added // count)))
        added = (counts[-1] - lowest) * count
    return tuple(counts)


def check_in_flight(in_flight: Counts, replicas: Counts, update_delay: Counts = ()) -> None:
    """Checks in-flight counts that a user gave.

    Raises:
        PlanError: wrong length, out of range, or not legal.
    """
    if len(in_flight) != len(replicas):
        raise PlanError(
            f"in-flight counts {in_flight} are for {len(in_flight)} stages, the plan has {len(replicas)}; give one "
            "count per stage, or noam, or full"
        )
    if not 1 <= min(in_flight) <= max(in_flight) <= _MAX_IN_FLIGHT:
        raise PlanError(f"in-flight counts must be between 1 and {_MAX_IN_FLIGHT}, found {in_flight}")
    delays_updates = update_delay or (0,) * len(replicas)
    warmup = [count - 1 for count in in_flight]
    for u in range(len(replicas)):
        for s in range(u + 1, len(replicas)):
            needed, sent = _count_needed(u, s, warmup[s], replicas, delays_updates), warmup[u] * replicas[u]
            if needed > sent:
                delaying = [t for t in (u, s) if delays_updates[t]]
                delays = f", with update delay 1 at stage {' and '.join(map(str, delaying))}" if delaying else ""
                raise PlanError(
                    f"in-flight counts {in_flight}{delays}: stage {s} would wait for {needed} warm-up minibatches, "
                    f"but stage {u} sends only {sent}; counts must not grow towards the output, and an update delay "
                    f"needs more upstream; {raise_to_legal(in_flight, replicas, update_delay)} would do"
                )


def _count_needed(u: int, s: int, warmup: int, replicas: Counts, update_delay: Counts) -> int:
    """Returns X(u, s), given W_s."""
    r_s, r_u = replicas[s], replicas[u]
    if update_delay[s]:
        return (warmup + 1) * r_s - (r_u if update_delay[u] else gcd(r_s, r_u))
    return warmup * r_s - (r_u - 1 if update_delay[u] else 0)


def _find_least_warmup(u: int, warmup: list[int], replicas: Counts, update_delay: Counts) -> int:
    """Returns the least W_u that all later stages allow; `warmup` begins at stage u."""
    later = range(u + 1, len(replicas))
    return max(
        (-(-_count_needed(u, s, warmup[s - u], replicas, update_delay) // replicas[u]) for s in later), default=0
    )


def read_depth(text: str) -> str | Counts:
    """Reads a depth from the command line."""
    if text in ("noam", "full", "auto"):
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise PlanError(f"--in-flight {text!r} is not known; write noam, full, auto or counts as in 3,2,1") from None
