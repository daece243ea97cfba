"""The planners of the papers, with their own arithmetic."""
