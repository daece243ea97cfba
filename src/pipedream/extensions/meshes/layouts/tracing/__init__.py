"""Traces a training step into operators as text, and knows how each of torch's operators is described."""
