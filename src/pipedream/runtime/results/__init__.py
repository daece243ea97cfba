"""Losses, metrics, timings."""
