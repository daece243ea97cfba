"""Properties that all schedules of one method share, on any plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MethodProperties:
    """The facts about a method that planning needs before there is a plan; the defaults are GPipe's.

    Attributes:
        flushes: an update waits until nothing is in flight.
        reads_stored_weights: forward and backward of a microbatch read the same version, one that the stage has had.
            Not every model and optimizer tolerates anything else.
        uses_depth, delays_updates: the plan's in-flight counts and update delay make a difference.
        replicates_stages: any stage can have replicas.
        recomputes: whether or not the plan says so.
        versions_grow_with_stages: not only with a stage's own depth.
        same_updates: all stages make the same updates on any plan (`core.schedule.coupling.makes_same_updates`), so
            that several may hold a weight.
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
    same_updates: bool = True
