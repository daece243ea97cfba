"""Records what workers report: their ops, their memory, and what follows from both."""
