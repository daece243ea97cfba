"""Bisection over the period, for pipelines too long for the dynamic program."""

from pipedream.planner.bisection.bisection import Bisection

__all__ = [
    "Bisection",
]
