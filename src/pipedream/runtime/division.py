"""How the ranks of a worker divide a stage's tensors; on a single rank, not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from pipedream.core.box import Box
from pipedream.core.model.profile import Collective, StageCollectives
from pipedream.core.schedule.program import Program
from pipedream.runtime.comm.message import Message

_NOTHING = nullcontext()


class Division:
    """A stage on a worker of a single rank, whose tensors are whole; what divides them extends this class.

    A *part* is what this rank has of a tensor.

    Attributes:
        ranks: of the worker.
        is_divided: whether a rank may have less than all of a tensor.
        is_first: whether this is the first rank of its worker.
    """

    ranks = 1
    is_divided = False
    is_first = True

    # -- layers ---------------------------------------------------------------------------------------

    def choose_caller(self, layer: nn.Module) -> Callable[..., Any]:
        """Returns what is called in place of a layer."""
        return layer

    def prepare(self, modules: Iterable[nn.Module]) -> None:
        """Prepares the modules of the stage, once."""

    def wrap_weights(
        self, leaves: Mapping[str, torch.Tensor], names_by_layer: Iterable[Sequence[str]]
    ) -> Mapping[str, Any]:
        """Returns the weights as the layers see them; their gradients go to the leaves."""
        return leaves

    def enter_pass(self, what: str) -> AbstractContextManager[None]:
        """Returns the context of a pass: "forward", "backward" or "weights' backward"."""
        return _NOTHING

    def count_collectives(self, what: str) -> AbstractContextManager[None]:
        """Returns the context of a part of a pass or of an update."""
        return _NOTHING

    def watch_memory(self, sample: Callable[[], None]) -> None:
        """Lets a function be called in a backward where much memory is taken."""

    # -- activations ----------------------------------------------------------------------------------

    def prepare_input(self, value: Any, samples: int) -> Any:
        """Returns the model's input, which every rank has whole, for the layers."""
        return value

    def unpack(self, structure: str, tensors: Sequence[torch.Tensor]) -> tuple[str, Sequence[torch.Tensor]]:
        """Returns what `pack` took at the previous stage."""
        return structure, tensors

    def pack(
        self, structure: str, tensors: tuple[torch.Tensor, ...], samples: int
    ) -> tuple[str, tuple[torch.Tensor, ...]]:
        """Returns the structure and the parts of an output, as the next stage gets them."""
        return structure, tensors

    def gradient_structure(self, message: Message) -> str:
        """Returns the structure of the message with the gradients of a message's tensors."""
        return ""

    def gather_output(self, output: Any) -> Any:
        """Returns an output of the model, whole."""
        return output

    # -- weights --------------------------------------------------------------------------------------

    def find_box(self, names: Sequence[str], shape: Sequence[int]) -> Box:
        """Returns which part this rank has of a weight, or of a state of its size.

        Args:
            names: names of the weight; what has others is whole on every rank.
            shape: shape of the whole.
        """
        return tuple(map(range, shape))

    def locate_saved(self, names: Sequence[str], part: torch.Tensor) -> tuple[Box, Sequence[int]] | None:
        """Returns the box of a part and the shape of the whole; None if another rank with the same part saves it."""
        return tuple(map(range, part.shape)), part.shape

    def check_shapes(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raises a `CaptureError` if a weight that is to be loaded has another shape than the model's."""

    def take_part(self, names: Sequence[str], whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a weight, or of a state of its size."""
        return whole

    def gather(self, names: Sequence[str], part: torch.Tensor) -> torch.Tensor:
        """Returns a weight, or a state of its size, from the parts of all ranks, which all call it."""
        return part

    # -- updates --------------------------------------------------------------------------------------

    def adapt_optimizer(self, optimizer: torch.optim.Optimizer, *, rotates: bool) -> None:
        """Decides how the optimizer steps parts; `rotates`: it rotates the weights."""

    def stepping(
        self, optimizer: torch.optim.Optimizer, handles: Mapping[str, nn.Parameter]
    ) -> AbstractContextManager[None]:
        """Returns the context of the optimizer's step."""
        return _NOTHING

    def sum_gradients(self, names: Sequence[str], sums: Sequence[torch.Tensor | None]) -> None:
        """Adds up, in place, the gradients that are still partial sums over the ranks."""

    def is_counted(self, name: str) -> bool:
        """Returns whether this rank counts its part of a weight in the norm."""
        return True

    def sum(self, number: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all ranks of the worker."""
        return number

    # -- measurements ---------------------------------------------------------------------------------

    def make_parts(self, facts: Any) -> Iterator[Any]:
        """Yields the `StagePart`s that a stage has because of its division; for `facts` see `StageFacts`."""
        yield from ()

    @property
    def collectives(self) -> Mapping[str, tuple[Collective, ...]]:
        """Collectives of the first forward, backward and update; empty until all have run."""
        return {}

    def compare_collectives(self, program: Program, *, needs_norms: bool) -> StageCollectives:
        """Returns the collectives of the first microbatch and update, measured and predicted.

        Args:
            program: that the first microbatch was trained with.
            needs_norms: of each update's gradients.
        """
        return StageCollectives({})
