"""Finds how the ranks of one worker divide a step's tensors and operators: Tofu, and layouts by name."""
