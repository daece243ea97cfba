"""Stages that keep only their input between forward and backward."""
