"""Stages that keep what a backward needs in the memory of a GPU's host."""
