"""What is trained: a model's layers, and what was measured of them."""
