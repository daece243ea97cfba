"""Tensors that are sharded over the ranks of one worker, on DTensor (docs/meshes.md)."""

from pipedream.sharding.attend import attention
from pipedream.sharding.functions import replicate, shard, split

__all__ = ["attention", "replicate", "shard", "split"]
