"""What lives on one seat of a rank."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from .channel import Pending
from .optimize import Gradients, Optimizer
from .recompute import Recomputation
from .reduction import add_up_all
from .saved import Saved
from .stage import StageModule
from .versions import Versions, WeightSet
from .views import Views

__all__ = ["Seated", "evaluating"]


@dataclass
class Seated:
    """What lives on one seat of a rank: a stage replica with its weights and its optimizer.

    Attributes:
        recomputation: of the forward in the backward; None where its graph is kept.
        views: weights that are computed; None where passes read versions.
        saved: what the first forward saves, under the rule 'graph'; None where that does not matter.
        next_forward: microbatch of its next forward.
        tags: (microbatch, forward version, backward version) of the gradients of the coming update.
    """

    module: StageModule
    versions: Versions
    gradients: Gradients
    optimizer: Optimizer
    recomputation: Recomputation | None = None
    views: Views | None = None
    saved: Saved | None = None
    next_forward: int = 0
    tags: list[tuple[int, int, int]] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """Gets ready for a stream."""
        self.next_forward = 0
        if self.views is not None:
            self.views.begin()
        self._counts = [int(norm.num_batches_tracked) for norm in self._norms() if norm.num_batches_tracked is not None]

    def average_statistics(self) -> Generator[Pending[Any], None, None]:
        """Averages BatchNorm's running statistics over the replicas at a drain, and adds up their counts."""
        group = self.optimizer.replica_group
        norms = self._norms()
        if group is None or not norms:
            return
        floats = [b for n in norms for b in (n.running_mean, n.running_var) if b is not None]
        counts = [n.num_batches_tracked for n in norms if n.num_batches_tracked is not None]
        news = [count - before for count, before in zip(counts, self._counts, strict=True)]
        sums = yield from add_up_all(group, [*floats, *news])
        with torch.no_grad():
            for buffer, total in zip(floats, sums, strict=False):
                buffer.copy_(total / self.optimizer.replicas)
            for count, before, total in zip(counts, self._counts, sums[len(floats) :], strict=True):
                count.copy_(before + total)

    def _norms(self) -> list[Any]:
        layers = [layer for _, layer in self.module.layers]
        found = {id(m): m for layer in layers for m in layer.modules() if isinstance(m, _NormBase)}
        return [m for m in found.values() if m.track_running_stats]

    def read(self, version: int) -> WeightSet:
        """Returns the weights that a forward reads; its backward releases them."""
        return self.versions.read(version) if self.views is None else self.views.read(version)

    def at_forward(self, version: int) -> AbstractContextManager[None]:
        """Returns the context of a forward that reads a version, or a view of it."""
        return nullcontext() if self.views is None else self.views.forward(version)

    def at_backward(self) -> AbstractContextManager[None]:
        """Returns the context of a backward."""
        return nullcontext() if self.views is None else self.views.backward()

    def watching(self, value: Any) -> AbstractContextManager[None]:
        """Returns the context in which the layers run on a value in training."""
        return nullcontext() if self.saved is None else self.saved.watching(value)

    def give(self, index: int, gradient: torch.Tensor) -> None:
        """Takes a handle's gradient from the last backward before an update, while that still runs."""
        assert self.optimizer.reduction is not None
        self.optimizer.reduction.put(index, self.gradients.complete(index, gradient))

    def update(self, coming: Collection[int], present_share: float, read: int) -> list[tuple[int, int, int, int]]:
        """Makes an update from the gradients in the handles; returns the tags of those gradients.

        Args:
            coming: versions, of those there are, that forwards to come will read.
            present_share: of the round's replicas, on the learning rate.
            read: version that the gradients were taken at; that of the first where there are several.

        A tag is (microbatch, forward version, backward version, version that the update started from).
        """
        newest = self.versions.newest
        if self.optimizer.compensator.needs_read_weights:
            self.optimizer.compensator.penalise(self.versions.peek().leaves, self.versions.peek(read).leaves)
        self.versions.begin_update(coming)
        if self.views is not None:
            self.views.begin_update()
        self.optimizer.step(present_share)
        self.versions.end_update()
        if self.views is not None:
            self.views.end_update()
        tags = [(*tag, newest) for tag in self.tags]
        self.tags.clear()
        return tags


@contextmanager
def evaluating(seats: Iterable[Seated]) -> Iterator[None]:
    """Sets the modules to evaluation, and back to the mode that each had."""
    flags = [flag for seat in seats for flag in seat.module.train(False)]
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
