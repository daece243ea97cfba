"""A program in simulated time on a cluster: when each op runs, who waits for whom, how much must be held."""

from pipedream.simulator.clock import simulate, time_updates
from pipedream.simulator.costs import Costs, Stragglers, costs

__all__ = ["Costs", "Stragglers", "costs", "simulate", "time_updates"]
