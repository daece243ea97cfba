"""Metrics of a timeline, simulated or measured, under a short name."""

from pipedream.services.results.metrics import (
    Metrics as Metrics,
    RankMetrics as RankMetrics,
    in_flight as in_flight,
    run_metrics as run_metrics,
    staleness as staleness,
    steady_metrics as steady_metrics,
    steady_window as steady_window,
)
