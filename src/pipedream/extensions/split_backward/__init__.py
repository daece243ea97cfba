"""Backwards in two halves: gradients for the stage before first, those of the weights later."""
