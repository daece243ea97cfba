"""The ops of each worker, in order, and the weights they read: from a Schedule to a Program to a Timeline."""
