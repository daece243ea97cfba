"""Where a graph of layers may be cut."""
