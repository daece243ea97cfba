"""Clips gradients by their norm, and skips updates whose gradients are not finite."""
