"""Runs programs with real tensors: workers, versions, channels, updates."""
