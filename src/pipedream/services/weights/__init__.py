"""The values of weights: those that a session begins with, and the memory for them; the state dict of all stages."""
