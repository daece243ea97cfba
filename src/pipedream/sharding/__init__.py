"""Tensors that are sharded over the ranks of one worker, on DTensor (docs/meshes.md)."""

from pipedream.sharding.functions import replicate, shard, split
from pipedream.sharding.layers import attention

__all__ = ["attention", "replicate", "shard", "split"]
