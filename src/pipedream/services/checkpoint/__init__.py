"""Checkpoint files, and the state that goes into them."""
