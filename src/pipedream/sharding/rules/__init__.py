"""Operators on DTensors, computed with the ranks' own parts."""
