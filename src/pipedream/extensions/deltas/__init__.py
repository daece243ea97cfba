"""Activations travel as the differences to those of the samples' last visits (AQ-SGD, arXiv 2206.01299)."""
