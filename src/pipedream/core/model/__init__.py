"""The model that is trained: its layers, and their measurements."""
