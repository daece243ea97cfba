"""Searches how the ranks of one worker divide the tensors and operators of a step: partitions, and layouts by name."""
