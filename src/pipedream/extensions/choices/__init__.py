"""Choices of plans, one file or folder each (`core.plan.choice`)."""
