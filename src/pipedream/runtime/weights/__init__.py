"""The weights of a model: their names and slots, and those that stages share."""
