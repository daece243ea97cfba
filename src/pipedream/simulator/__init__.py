"""Runs a program in simulated time on a cluster: when each op runs, what waits for what, and the bytes held."""

from pipedream.simulator.clock import simulate, time_updates
from pipedream.simulator.costs import Costs, Stragglers, costs

__all__ = ["Costs", "Stragglers", "costs", "simulate", "time_updates"]
