"""The cuts of a graph of layers, and which of them are searched."""
