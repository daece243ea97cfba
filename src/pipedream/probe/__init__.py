"""Measurements of the links and the workers of a cluster."""
