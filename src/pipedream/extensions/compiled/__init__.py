"""Layers that torch.compile has compiled."""
