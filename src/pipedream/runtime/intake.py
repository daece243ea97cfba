"""The input stage's door: a minibatch from the feed becomes microbatches, each with its header."""

from __future__ import annotations

from typing import Any

from .batches import flatten, split
from .feed import Admitted, Ending, Feed
from .message import Content, Message
from .results import ENDS_EPOCH

__all__ = ["Intake"]


class Intake:
    """Splits minibatches.

    Args:
        feed: the data.
        parts: microbatches of a minibatch.
        replica: of the input stage, that takes them.
        base: minibatches done before this stream.
    """

    def __init__(self, feed: Feed, parts: int, replica: int, base: int) -> None:
        self._feed = feed
        self._parts = parts
        self._replica = replica
        self._base = base
        self._number = -1
        self._admitted: Admitted | None = None
        self._pieces: list[tuple[Any, Any, int]] = []

    def take(self, microbatch: int) -> tuple[Message, Message] | Ending:
        """Returns what the first layer takes and what goes straight to the loss, or why there is nothing.

        The minibatch is read from the feed with the first of its microbatches that this replica takes.
        """
        number, part = divmod(microbatch, self._parts)
        if number != self._number:
            found = self._feed.admit(number, self._replica)
            if isinstance(found, Ending):
                return found
            self._number, self._admitted = number, found
            self._pieces = list(
                zip(
                    split(found.inputs, found.samples, self._parts),
                    split(found.targets, found.samples, self._parts),
                    [found.samples // self._parts + (i < found.samples % self._parts) for i in range(self._parts)],
                    strict=True,
                )
            )
        assert self._admitted is not None
        inputs, targets, count = self._pieces[part]
        header = Message(
            microbatch=microbatch,
            content=Content.DATA if count else Content.EMPTY,
            minibatch=self._base + number,
            epoch=self._admitted.epoch,
            samples=count,
            flags=ENDS_EPOCH if self._admitted.ends_epoch else 0,
            share=count / self._admitted.samples,
        )
        if not count:
            return header, header
        return header.carrying(*flatten(inputs)), header.carrying(*flatten(targets))
