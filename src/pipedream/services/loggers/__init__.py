"""Loggers of losses, rates and metrics."""
