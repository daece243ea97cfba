"""Runs a plan with workers that sleep in place of computing."""
