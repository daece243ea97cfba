"""Measures what a cluster is, and what the runtime itself takes."""
