"""Data types, and arithmetic that several packages share; without torch."""
