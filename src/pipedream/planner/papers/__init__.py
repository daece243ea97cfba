"""The planners of the papers, with their own arithmetic."""

from pipedream.planner.papers.classic import Classic, classic
from pipedream.planner.papers.two_bw import two_bw, two_bw_s

__all__ = [
    "Classic",
    "classic",
    "two_bw",
    "two_bw_s",
]
