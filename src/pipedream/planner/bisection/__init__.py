"""Bisection over the period, for pipelines too long for the dynamic program."""
