"""Tensors that are cut over the ranks of one worker, on DTensor (docs/meshes.md)."""
