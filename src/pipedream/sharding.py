"""Tensors that are sharded over the ranks of one worker, under their short name."""

from pipedream.extensions.meshes.sharding import attention, replicate, shard, split

__all__ = ["attention", "replicate", "shard", "split"]
