"""What all schedules of one method have in common, on any plan."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MethodProperties"]


@dataclass(frozen=True)
class MethodProperties:
    """What planning needs to know before there is a plan; the defaults are GPipe's.

    Attributes:
        flushes: an update waits until nothing is in flight.
        splits_minibatch: into several microbatches.
        splits_backward: input gradient and weight gradient are separate ops.
        reads_stored_weights: forward and backward of a microbatch read the same version, one that the stage has had.
            Not every model and optimizer tolerates anything else.
        uses_depth: the plan's in-flight counts make a difference.
        delays_updates: the plan's update delay makes a difference.
        replicates_stages: any stage of a plan can have replicas.
        recomputes: stages recompute, whether or not the plan says so.
        versions_grow_with_stages: a stage's versions depend on the number of stages, not only on its own depth.
    """

    flushes: bool = True
    splits_minibatch: bool = True
    splits_backward: bool = False
    reads_stored_weights: bool = True
    uses_depth: bool = False
    delays_updates: bool = False
    replicates_stages: bool = True
    recomputes: bool = False
    versions_grow_with_stages: bool = False
