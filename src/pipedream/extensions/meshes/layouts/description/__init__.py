"""A training step as text: its operators, and the tensors that they read and compute."""
