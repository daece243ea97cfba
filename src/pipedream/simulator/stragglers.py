"""Uneven workers: ops whose seconds vary, and ranks that are slower than planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import exp, isfinite, log1p, sqrt
from random import Random

from pipedream.core.schedule.op import Kind


@dataclass(frozen=True)
class Stragglers:
    """Factors on the seconds of ops. Messages and sums are not affected.

    Each op takes its seconds times a factor from a lognormal distribution of mean 1, and times the factor of its rank.
    Each rank draws from a generator of its own, so that a seed gives the same run.

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
        if beyond := sorted(rank for rank in self.slow if not 0 <= rank < ranks):
            raise ValueError(f"a slow rank {beyond[0]} was asked for, the ranks are 0 to {ranks - 1}")

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
