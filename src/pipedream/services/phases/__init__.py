"""Phases of a run, each with its method: as text, and in which order they may follow each other."""
