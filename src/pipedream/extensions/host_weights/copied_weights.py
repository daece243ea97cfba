"""Weights that the passes of a rank copy from the host store (`host_store`), for each minibatch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property

import torch

from pipedream.core.schedule.program import Program
from pipedream.extensions.host_weights.home_versions import HostVersions
from pipedream.extensions.host_weights.host_store import SharedWeights, StoreFormat
from pipedream.runtime.comm.channel import Pending
from pipedream.runtime.stage.part import PassFacts, StagePart
from pipedream.runtime.stage.stage_module import SavedForward
from pipedream.runtime.stage.versions import WeightSet, WeightStore
from pipedream.runtime.update.gradients import Gradients


class CopiedWeights(WeightStore):
    """Copies of a stage's weights and buffers. The home of the stage makes updates.

    Args:
        per_update: microbatches of an update.
        open_stored: called at the first pass, when the store has the stage.
    """

    def __init__(self, store_format: StoreFormat, per_update: int, open_stored: Callable[[], SharedWeights]) -> None:
        self._store_format = store_format
        self._per_update = per_update
        self._open_stored = open_stored
        self._update = 0  # whose buffers the passes write; 0: none
        self._weights: WeightSet | None = None
        self._untrained: list[torch.Tensor] = []
        self._old_buffers: list[tuple[torch.Tensor, int]] = []
        self._changed: set[int] = set()

    @cached_property
    def shared_weights(self) -> SharedWeights:
        return self._open_stored()

    def begin_pass(self, index: int, version: int, *, changes_buffers: bool) -> Pending[None]:
        self._update = index // self._per_update + 1 if changes_buffers and self._store_format.rotations else 0
        return self.shared_weights.wait(version, max(0, self._update - 1))

    def acquire(self, version: int) -> WeightSet:
        """Returns the weights for a pass; copies them for the first pass of a minibatch."""
        return self._acquire(version, ema=False)

    def _acquire(self, version: int, *, ema: bool) -> WeightSet:
        if self._weights is None:
            bring = self.shared_weights.copies.copy_to_device
            leaves, buffers = self.shared_weights.copy(version)
            if ema:
                leaves = self._store_format.view_ema(bring(self.shared_weights.ema))
            self._weights = WeightSet(version, leaves)
            self._changed = set()
            if self._update > 1:
                for number, buffer in enumerate(self.shared_weights.read_rotation(self._update - 1)[1]):
                    if buffer is not None:
                        buffers[number] = bring(buffer)
                        self._changed.add(number)
            self._old_buffers = [(buffer, buffer._version) for buffer in buffers]
            self._untrained = [*self._store_format.view_frozen(bring(self.shared_weights.frozen)), *buffers]
        assert self._weights.version == version, f"version {self._weights.version} is there, not {version}"
        return self._weights

    def _list_changed(self) -> list[torch.Tensor | None]:
        """Returns the buffers that passes have changed since the stream began, None for the others."""
        buffers = self._untrained[self._store_format.frozen :]
        written = self._store_format.select_written(buffers, self._old_buffers)
        return [buffers[n] if n in self._changed else buffer for n, buffer in enumerate(written)]

    def installed(self, weights: WeightSet) -> AbstractContextManager[None]:
        """Returns a context in which the modules hold copies of what else passes with these weights read."""
        return self._store_format.installed(self._untrained)

    def reading(self, ema: bool) -> tuple[dict[str, torch.Tensor], AbstractContextManager[None]]:
        self._update = 0
        weights = self._acquire(0, ema=ema)
        return weights.leaves, self.installed(weights)

    def end_passes(self, gradients: Gradients) -> None:
        """Drops the copies; after backwards leaves their gradients in the store."""
        if self._weights is not None:
            self.shared_weights.copies.note_dropped()
        if gradients.count:
            self.shared_weights.leave_rotation(self._update, gradients, self._list_changed())
        self._weights = None
        self._untrained = []


class CopiesInModules(StagePart):
    """Lets the modules hold what passes copy besides weights."""

    def __init__(self, store: CopiedWeights | HostVersions) -> None:
        self._store = store

    @classmethod
    def make(cls, facts: PassFacts, program: Program) -> StagePart | None:
        return cls(facts.store) if isinstance(facts.store, (CopiedWeights, HostVersions)) else None

    def forward(self, saved: SavedForward) -> AbstractContextManager[None]:
        assert saved.weights is not None
        return self._store.installed(saved.weights)

    backward = forward
