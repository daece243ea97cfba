"""Weights that several stages hold and train."""
