"""What each worker does in which order, with which weights: from a Schedule to a Program to a Timeline."""
