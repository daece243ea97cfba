"""The passes of a stage on a rank without its state: with weights copied from the host store (`stage.host_store`)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch

from pipedream.runtime.comm.channel import Pending
from pipedream.runtime.comm.message import Message
from pipedream.runtime.results.recorder import Recorder
from pipedream.runtime.stage.host_store import SharedWeights, StoreFormat
from pipedream.runtime.stage.part import PassParts, StagePart
from pipedream.runtime.stage.stage_module import SavedForward, StageModule, evaluating
from pipedream.runtime.stage.versions import WeightSet
from pipedream.runtime.stage_state import StageObserver
from pipedream.runtime.update.gradients import Gradients


class StatelessStage:
    """What a `StageState` is for passes, without versions and optimizer.

    Life: `begin_pass`, then a pass; `finish_minibatch` after the forwards, or the backwards, of a minibatch, and after
    each forward without a backward.

    Args:
        scale: factor on the loss.
        per_update: microbatches of an update.
        open_stored: called at the first pass, when the store has the stage.
    """

    observer = StageObserver()

    def __init__(
        self,
        module: StageModule,
        store_format: StoreFormat,
        gradients: Gradients,
        scale: float,
        per_update: int,
        open_stored: Callable[[], SharedWeights],
        parts: Sequence[StagePart] = (),
    ) -> None:
        self.pass_parts = PassParts([*parts, _CopiesInModules(self)])
        self.module = module
        self.store_format = store_format
        self.gradients = gradients
        self.scale = scale
        self.next_forward = 0
        self.gradient_versions: list[tuple[int, int, int]] = []  # as of a `StageState`
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
        """Returns the wait for what the pass of microbatch `index` reads: weights and, if it changes them, buffers."""
        self._update = index // self._per_update + 1 if changes_buffers and self.store_format.rotations else 0
        return self.shared_weights.wait(version, max(0, self._update - 1))

    def finish_minibatch(self) -> None:
        """Drops the copies; after backwards leaves their gradients in the store."""
        if self._weights is not None:
            self.shared_weights.copies.note_dropped()
        if self.gradients.count:
            self.shared_weights.leave_rotation(self._update, self.gradients, self._list_changed())
        self._weights = None
        self._untrained = []

    def join_update(self, recorder: Recorder) -> None:
        """Does nothing: the home makes updates."""

    def acquire(self, version: int, ema: bool = False) -> tuple[WeightSet, int]:
        """Returns the weights for a pass, and their version; copies them for the first pass of a minibatch."""
        if self._weights is None:
            bring = self.shared_weights.copies.copy_to_device
            leaves, buffers = self.shared_weights.copy(version)
            if ema:
                leaves = self.store_format.view_ema(bring(self.shared_weights.ema))
            self._weights = WeightSet(version, leaves)
            self._changed = set()
            if self._update > 1:
                for number, buffer in enumerate(self.shared_weights.read_rotation(self._update - 1)[1]):
                    if buffer is not None:
                        buffers[number] = bring(buffer)
                        self._changed.add(number)
            self._old_buffers = [(buffer, buffer._version) for buffer in buffers]
            self._untrained = [*self.store_format.view_frozen(bring(self.shared_weights.frozen)), *buffers]
        assert self._weights.version == version, f"version {self._weights.version} is there, not {version}"
        return self._weights, version

    def _list_changed(self) -> list[torch.Tensor | None]:
        """Returns the buffers that passes have changed since the stream began, None for the others."""
        changed: list[torch.Tensor | None] = []
        pairs = zip(self._untrained[self.store_format.frozen :], self._old_buffers, strict=True)
        for number, (buffer, (old, version)) in enumerate(pairs):
            is_written = number in self.store_format.statistics or buffer is not old or buffer._version != version
            changed.append(buffer if is_written or number in self._changed else None)
        return changed

    def read_for_recomputation(self, saved: SavedForward) -> WeightSet:
        assert self._weights is not None
        saved.recomputed_weights = self._weights
        return self._weights

    def reading(self, ema: bool) -> tuple[dict[str, torch.Tensor], AbstractContextManager[None]]:
        """Returns the newest weights, or averaged ones, for a forward without a backward, and its context."""
        self._update = 0
        return self.acquire(0, ema)[0].leaves, self._evaluating()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        with evaluating([self.module]), self.store_format.installed(self._untrained):
            yield

    def keep_sample(self, message: Message) -> None:
        """Does nothing: only the ranks of a mesh keep the first message."""

    def forward(self, value: Any, weights: WeightSet, microbatch: int, first: bool) -> Any:
        return self.module.forward(value, weights.leaves, microbatch, first)

    def add_gradients(self, saved: SavedForward, gradients: list[torch.Tensor | None]) -> None:
        self.gradients.add(gradients, saved.loss_weight)
        if saved.weights is not None:
            self.gradient_versions.append((saved.microbatch, saved.version, saved.version))


class _CopiesInModules(StagePart):
    """Lets the modules hold what passes copy besides weights."""

    def __init__(self, stage: StatelessStage) -> None:
        self._stage = stage

    def forward(self, saved: SavedForward) -> AbstractContextManager[None]:
        return self._stage.store_format.installed(self._stage._untrained)

    backward = forward
