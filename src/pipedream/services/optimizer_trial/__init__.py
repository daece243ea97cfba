"""Tries before training whether the user's optimizer can step each stage by itself."""
