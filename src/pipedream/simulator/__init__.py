"""What a program would do on a cluster: when each op runs, who waits for whom, how much must be held."""

from .clock import simulate
from .costs import Costs, costs
from .stragglers import Stragglers

__all__ = ["Costs", "Stragglers", "costs", "simulate"]
