"""Losses and metrics with their exact weights."""
