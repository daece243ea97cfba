"""What a program would do on a cluster: when each op runs, who waits for whom, how much must be held."""

from .clock import simulate
from .costs import Costs, costs

__all__ = ["Costs", "costs", "simulate"]
