"""From a loader's batch to the model's input and the loss's targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipedream.core.errors import PipelineError

AdaptBatch = Callable[[Any], tuple[Any, Any]]
"""Batch -> (inputs, targets): a `BatchAdapter`, or any function."""


@dataclass(frozen=True)
class BatchAdapter:
    """Maps a batch to (inputs, targets).

    Without functions, the inputs are the first of a pair, else the batch; the targets are the second of a pair for
    torch's own losses, else the batch. A mapping is never a pair.

    Attributes:
        torch_loss: the loss is one of torch's own.
        own_loss: the model computes the loss: its input is the whole batch, a tuple also if the loader yields a list.
        reads_batch: a weight or a metric reads the batch; otherwise there are no targets for a model's own loss.
    """

    inputs: Callable[[Any], Any] | None = None
    targets: Callable[[Any], Any] | None = None
    torch_loss: bool = False
    own_loss: bool = False
    reads_batch: bool = True

    def __call__(self, batch: Any) -> tuple[Any, Any]:
        if self.targets is not None:
            return self.input_of(batch), self.targets(batch)
        if self.own_loss and not self.reads_batch:
            return self.input_of(batch), None
        if not self.torch_loss:
            return self.input_of(batch), batch
        if not _is_pair(batch):
            raise PipelineError(
                "a loss from torch needs batches of the form (inputs, targets), but the loader yielded a "
                f"{type(batch).__name__}; pass inputs=... and targets=... to the pipeline to take them from the batch"
            )
        return self.input_of(batch), batch[1]

    def input_of(self, batch: Any) -> Any:
        if self.inputs is not None:
            return self.inputs(batch)
        if self.own_loss:
            return tuple(batch) if type(batch) is list else batch
        return batch[0] if _is_pair(batch) else batch


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, (tuple, list)) and len(batch) == 2
