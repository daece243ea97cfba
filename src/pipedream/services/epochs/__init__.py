"""Follows the epochs that the user's own loop sets."""
