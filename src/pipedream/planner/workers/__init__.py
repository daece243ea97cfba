"""The order of the workers, and the runs of workers that a stage may take."""

from pipedream.planner.workers.line_orders import LineOrders
from pipedream.planner.workers.worker_line import SiteArrays, WorkerLine

__all__ = [
    "LineOrders",
    "SiteArrays",
    "WorkerLine",
]
