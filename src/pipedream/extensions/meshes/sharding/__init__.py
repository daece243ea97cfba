"""Tensors that are sharded over the ranks of one worker, on DTensor (docs/meshes.md)."""

from pipedream.extensions.meshes.sharding.functions import replicate, shard, split
from pipedream.extensions.meshes.sharding.layers import attention

__all__ = ["attention", "replicate", "shard", "split"]
