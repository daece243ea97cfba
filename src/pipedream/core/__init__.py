"""The data types, and the arithmetic that several packages share; without torch."""
