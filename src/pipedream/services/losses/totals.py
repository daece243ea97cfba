"""Sums of the losses and metrics of a minibatch's microbatches on one rank.

Losses on a GPU are read once the rank has computed its next minibatch's, those of an evaluation at its end, so that no
worker waits for its GPU.
"""

from collections.abc import Callable, Sequence

import torch

from pipedream.runtime.comm.message import ENDS_EPOCH, Message
from pipedream.runtime.results import add_numbers

Score = tuple[float | torch.Tensor, float]
"""A number of one microbatch, as value and factor: their product. A value on a GPU is read later."""


class Totals:
    """Sums over some microbatches.

    Args:
        first: message of the first one.
        check: called with the numbers of each microbatch.

    Attributes:
        message: its numbers are weighted loss, weight, then weighted value and weight of each metric.
    """

    def __init__(self, first: Message, check: Callable[[int, Sequence[float]], None]) -> None:
        flags = first.flags & ENDS_EPOCH
        self.message = Message(0, minibatch=first.minibatch, epoch=first.epoch, flags=flags)
        self._check = check
        self._unread: list[Sequence[Score]] = []
        self._copies: HostCopies | None = None

    def add(self, message: Message, scores: Sequence[Score], *, reads_late: bool) -> None:
        """Adds a microbatch's scores, or keeps them until they are read."""
        self.message.samples += message.samples
        if reads_late:
            self._unread.append(scores)
        else:
            self._add([float(value) * factor for value, factor in scores])

    def begin_reading(self) -> None:
        """Starts to copy the unread scores from the GPU."""
        self._copies = HostCopies([v for row in self._unread for v, _ in row if isinstance(v, torch.Tensor)])

    def read(self) -> Message:
        """Returns the sums, and waits for the copies."""
        if self._copies is not None:
            values = iter(self._copies.read())
            for row in self._unread:
                self._add([(next(values) if isinstance(v, torch.Tensor) else v) * factor for v, factor in row])
        return self.message

    def _add(self, numbers: Sequence[float]) -> None:
        self._check(self.message.minibatch, numbers)
        before = self.message.numbers
        self.message.numbers = add_numbers(before, numbers) if before else tuple(numbers)


class HostCopies:
    """Numbers that are being copied from a GPU, in one piece."""

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._numbers = torch.empty(0, dtype=torch.float64)
        # A metric may give a number on the CPU beside a loss on a GPU.
        self._on_cpu = [None if value.is_cuda else float(value) for value in values]
        on_gpu = [value.detach().double().reshape(()) for value in values if value.is_cuda]
        if on_gpu:
            self._numbers = torch.empty(len(on_gpu), dtype=torch.float64, pin_memory=True)
            self._numbers.copy_(torch.stack(on_gpu), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        copies = iter(self._numbers.tolist())
        return [next(copies) if value is None else value for value in self._on_cpu]
