"""What lives on one seat of a rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from .optimize import Gradients, Optimizer
from .stage import StageModule
from .versions import Versions

__all__ = ["Seated"]


@dataclass
class Seated:
    """What lives on one seat of a rank: a stage replica with its weights and its optimizer.

    Attributes:
        next_forward: microbatch of its next forward.
        tags: (microbatch, forward version, backward version) of the gradients of the coming update.
    """

    module: StageModule
    versions: Versions
    gradients: Gradients
    optimizer: Optimizer
    next_forward: int = 0
    tags: list[tuple[int, int, int]] = field(default_factory=list)

    def update(self, next_read: int, present_share: float) -> list[tuple[int, int, int, int]]:
        """Makes an update from the gradients in the handles; returns the tags of those gradients.

        Args:
            next_read: version that the next forward will read.
            present_share: of the round's replicas, on the learning rate.

        A tag is (microbatch, forward version, backward version, version that the update started from).
        """
        newest = self.versions.newest
        self.versions.begin_update(next_read)
        self.optimizer.step(present_share)
        self.versions.end_update()
        tags = [(*tag, newest) for tag in self.tags]
        self.tags.clear()
        return tags
