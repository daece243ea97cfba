"""Compares a pipeline's numbers with those of the model, by fingerprints."""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import isfinite

import torch

from pipedream.capture.compare import fingerprint
from pipedream.core.errors import WorkerError
from pipedream.core.fingerprint import Difference, Fingerprint, find_difference
from pipedream.runtime.stage.replicas import describe_difference

_log = logging.getLogger("pipedream")

_FLOOR = 0.01
"""A gradient below this share of the greatest mean gradient may cancel out, and differ by rounding."""

_CAUSES = (
    "the forward does something that the pipeline cannot see: it passes values on through Python objects, decides anew "
    "at each call, or was changed after the plan was made"
)
_BUFFER_CAUSES = (
    "a buffer should be written only by the module that holds it, not be shared with other stages, and not be written "
    "again by a checkpoint (leave it out, use recompute='always')"
)


@dataclass
class Reference:
    """The numbers of the model.

    Attributes:
        gradients: by each name of a parameter; None where it has none.
        tolerance: relative difference that the precision allows.
        scale: greatest mean of the absolute values of a gradient.
        incomparable: why the pipeline's numbers may differ; '' if they must not.
        written: a buffer of a replicated stage that the forward writes; '' if there is none.
        parts: why the minibatch's loss may differ from that of its parts; '' if it must not.
        encoding: what encoded messages changed; '' if they are not encoded.
    """

    loss: float = 0.0
    gradients: dict[str, Fingerprint | None] = field(default_factory=dict)
    buffers: dict[str, Fingerprint] = field(default_factory=dict)
    tolerance: float = 0.0
    scale: float = 0.0
    incomparable: str = ""
    written: str = ""
    parts: str = ""
    encoding: str = ""

    def note_gradients(self, gradients: Iterable[tuple[str, torch.Tensor | None]], factor: float = 1.0) -> None:
        """Takes gradients that were multiplied by a factor."""
        for name, gradient in gradients:
            self.gradients[name] = numbers = None if gradient is None else fingerprint(gradient, factor)
            if gradient is not None and numbers is not None and gradient.numel():
                self.scale = max(self.scale, numbers[2] / gradient.numel())

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Comparer:
    """Compares the numbers of one rank's stages with a reference. Each method raises a WorkerError if they differ.

    Args:
        receive: returns the JSON of another rank's reference.
    """

    def __init__(self, rank: int, receive: Callable[[], str] = str) -> None:
        self.rank = rank
        self._receive = receive

    @cached_property
    def reference(self) -> Reference:
        return Reference(**json.loads(self._receive()))

    def compare_outputs(self, stage: int, expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]) -> None:
        """Compares a stage's outputs with those that its layers compute from the same input."""
        layers, pipeline = ({str(i): fingerprint(t) for i, t in enumerate(side)} for side in (expected, actual))
        if difference := find_difference(layers, pipeline, self.reference.tolerance):
            raise self.make_error(
                f"for its first microbatch stage {stage} has another output {difference.name} than its layers give for "
                f"the same input ({difference.describe('in the pipeline', 'by the layers')}); {_CAUSES}"
            )

    def compare_gradients(self, stage: int, gradients: Mapping[str, torch.Tensor | None], factor: float = 1.0) -> None:
        """Compares a stage's gradients, divided by `factor`, before its first update."""
        reference = self.reference
        if reference.incomparable or not isfinite(reference.loss):
            return
        measured = {name: None if g is None else fingerprint(g, factor) for name, g in gradients.items()}
        # Others have overflowed, as a scaled loss may.
        actual = {name: numbers for name, numbers in measured.items() if all(map(isfinite, numbers or ()))}
        floors = {name: g.numel() * reference.scale * _FLOOR for name, g in gradients.items() if g is not None}
        expected = {name: reference.gradients.get(name) for name in actual}
        if difference := find_difference(expected, actual, reference.tolerance, floors):
            raise self.make_error(
                f"at its first update stage {stage} has another gradient of {difference.name!r} than the model itself "
                f"({difference.describe('in the pipeline', 'in the model')}); "
                f"{self._explain_written() or _explain_gradient(difference)}"
            )

    def compare_buffers(self, stage: int, buffers: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Compares a stage's buffers after the minibatch's last forward."""
        reference = self.reference
        if reference.incomparable:
            return
        actual = {name: fingerprint(buffer) for name, buffer in buffers if name in reference.buffers}
        expected = {name: reference.buffers[name] for name in actual}
        if difference := find_difference(expected, actual, reference.tolerance):
            raise self.make_error(
                f"after the first minibatch the buffer {difference.name!r} of stage {stage} is another than in the "
                f"model itself ({difference.describe('in the pipeline', 'in the model')}); {_BUFFER_CAUSES}"
            )

    def compare_loss(self, loss: float) -> None:
        """Compares the loss of the minibatch; logs what could not be compared."""
        reference = self.reference
        if self.rank == 0 and reference.encoding:
            _log.warning("%s", reference.encoding)
        if self.rank == 0 and reference.incomparable:
            _log.warning("the first minibatch was not compared with the model's own: %s", reference.incomparable)
        if self.rank == 0 and reference.parts:
            _log.warning("the loss of the first minibatch was not compared with its microbatches': %s", reference.parts)
        if reference.incomparable or not isfinite(reference.loss) or not isfinite(loss):
            return
        if abs(loss - reference.loss) > reference.tolerance * max(abs(loss), abs(reference.loss)):
            raise self.make_error(
                f"the loss of the first minibatch is {loss:.7g} in the pipeline and {reference.loss:.7g} in the model "
                f"itself; {self._explain_written() or _CAUSES}"
            )

    def _explain_written(self) -> str:
        return self.reference.written and f"perhaps because {describe_difference(self.reference.written)}"

    def make_error(self, cause: str) -> WorkerError:
        return WorkerError(
            self.rank,
            "the comparison of the first minibatch with the model",
            cause,
            "to train regardless, turn the comparison off: check=False (on the command line --no-check)",
        )


def _explain_gradient(difference: Difference) -> str:
    if difference.actual is None:
        return (
            "it is read where the pipeline does not see it: through a list, a dict, a closure or a reference in "
            "another module, or by the loss. Read it in the forward of the module that holds it, and pass tensors on"
        )
    if difference.expected is None:
        return "the model itself does not use it on this data"
    return (
        "perhaps it is also read by the loss or through a reference in another module, or a hook on a tensor does more "
        "than scale its gradient, or is removed before the backward (microbatches=1 allows both), or "
        f"{_CAUSES}"
    )
