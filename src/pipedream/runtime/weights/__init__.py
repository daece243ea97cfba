"""The weights of a model: their names and slots, first values, and files."""
