"""Training jobs: from a recipe to a run folder."""
