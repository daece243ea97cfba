"""A program in simulated time on a cluster: when each op runs, who waits for whom, how much must be held."""

from pipedream.simulator.clock import simulate
from pipedream.simulator.costs import Costs, costs
from pipedream.simulator.stragglers import Stragglers

__all__ = ["Costs", "Stragglers", "costs", "simulate"]
