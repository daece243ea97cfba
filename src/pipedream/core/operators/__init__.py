"""The operators of a training step, described by text."""
