"""Where the workers of a local run meet: a store of the launcher's that listens on 127.0.0.1 only.

The store that torch's own rendezvous makes listens on all interfaces of the machine, and asks nobody for a
password.
"""

from __future__ import annotations

import os
import socket

from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it without saying so
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

__all__ = ["ADDRESS", "BACKEND", "register", "restrict_gloo_to_loopback"]

ADDRESS = "127.0.0.1"
BACKEND = "pipedream-loopback"


class _Loopback(StaticTCPRendezvous):
    """One agent with all workers, and the store for them."""

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        listening = socket.create_server((ADDRESS, 0), backlog=4096)
        port = listening.getsockname()[1]
        # The store takes over the socket; torch itself can only ask for a port of all interfaces.
        store = TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(ADDRESS, port))


def _loopback_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    return _Loopback(ADDRESS, 0, 0, 1, parameters.run_id, 60)


def register() -> None:
    """Makes the rendezvous known to torch's launcher, under the name `BACKEND`; again is as good as once."""
    rendezvous_handler_registry.register(BACKEND, _loopback_rendezvous)


def restrict_gloo_to_loopback() -> None:
    """Lets gloo listen on loopback only, unless the user has named an interface."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
