"""The ops of each worker, in order, with their weights: from a Schedule to a Program to a Timeline."""
