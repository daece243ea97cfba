"""Runs a step as a partition has divided it."""
