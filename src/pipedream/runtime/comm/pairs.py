"""What an extension may offer between two ranks of one machine, in place of gloo."""

from typing import Any, Protocol

import torch

from pipedream.core.extensions import list_offers
from pipedream.runtime.comm.channel import ConnectionReceiver, ConnectionSender


class Pair(Protocol):
    """One rank's side of what two ranks share; at most `max_unread` messages of a channel may be under way."""

    max_unread: int

    def open_sender(self, peer: int, max_unread: int, separate: str) -> ConnectionSender:
        """Returns the sending end of a channel; tensors on devices of the type `separate` are not sent here."""

    def open_receiver(self, peer: int, device: torch.device) -> ConnectionReceiver:
        """Returns the receiving end of a channel, whose tensors go to a device."""

    def close(self) -> None: ...


class Listener(Protocol):
    """Lets receivers reach this rank; they need its `name`, '' if they cannot."""

    name: str

    def connect(self, name: str, key: str) -> Any:
        """Returns a connection to a sender, by its name; None if it cannot be reached."""

    def accept(self, key: str) -> Any:
        """Returns the connection that a receiver has made."""

    def make_pair(self, connection: Any, *, sends: bool) -> Pair: ...

    def close(self) -> None: ...


def make_listener() -> Listener | None:
    """Returns what lets others reach this rank; None if no extension offers it."""
    offers = list_offers("pair_memory")
    return offers[0].Listener() if offers else None
