"""Weights in the memory of the machine, of which passes on any rank take copies (RoundPipe)."""
