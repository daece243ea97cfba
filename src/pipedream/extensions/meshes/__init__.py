"""Meshes: workers of several ranks, which hold parts of tensors (docs/meshes.md)."""
