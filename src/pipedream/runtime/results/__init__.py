"""Losses, metrics, timings, and where they are logged."""
