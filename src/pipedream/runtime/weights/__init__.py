"""The weights of a model: their names and slots."""
