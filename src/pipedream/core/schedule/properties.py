"""What all schedules of one method have in common, on whatever plan."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MethodProperties"]


@dataclass(frozen=True)
class MethodProperties:
    """The properties of a method that planning needs to know before there is a plan.

    The defaults are those of a simple method with a flush, such as GPipe.

    Attributes:
        flushes: an update waits until nothing is in flight; otherwise gradients are late.
        splits_minibatch: a minibatch can be split into several microbatches.
        splits_backward: input gradient and weight gradient are separate ops.
        reads_stored_weights: forward and backward of a microbatch read the same version, one that the stage has had.
            False if the backward reads newer weights than the forward, or if weights are predicted: not every model
            and optimizer tolerates that.
        uses_depth: the plan's in-flight counts make a difference; otherwise the method has a depth of its own.
        delays_updates: the plan's update delay makes a difference.
        replicates_stages: any stage of a plan can have replicas.
        recomputes: stages recompute, whether or not the plan says so.
        versions_grow_with_stages: the versions that a stage keeps depend on the number of stages in the whole plan, not
            only on the stage's own depth.
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
