"""Joins processes: what their launcher says, their group and their devices."""
