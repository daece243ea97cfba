"""Carries packets between two network interfaces, those of one way after a latency: netem for kernels without it.

`pipedream.slow_links` runs this file in the namespace of the interfaces, and ends it by closing its input:
``python latency_relay.py SENDER RECEIVER SECONDS`` delays what arrives at SENDER.
"""

import errno
import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress

# Of linux/if_packet.h and asm-generic/socket.h; the socket module does not name them.
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_ALL_PROTOCOLS = 3

_PACKET_BYTES = 1 << 17  # more than the longest packet, which has 64 KiB before it is segmented
_QUEUE_BYTES = 1 << 26  # of each socket: a shaped link may hold 16 MB, and a send that waits would delay the other way


def main(sender: str, receiver: str, latency_s: float) -> None:
    """Carries packets until the input ends; prints an empty line once it does."""
    near, far = _open(sender), _open(receiver)
    delayed = deque[tuple[float, bytes]]()  # when to send, and what
    print(flush=True)  # from now on nothing is lost
    while True:
        left_s = max(0.0, delayed[0][0] - time.monotonic()) if delayed else None
        ready, _, _ = select.select([sys.stdin, near, far], [], [], left_s)
        if sys.stdin in ready:
            return
        if near in ready:
            delayed.append((time.monotonic() + latency_s, near.recv(_PACKET_BYTES)))
        if far in ready:
            _send(near, far.recv(_PACKET_BYTES))
        while delayed and delayed[0][0] <= time.monotonic():
            _send(far, delayed.popleft()[1])


def _send(packets: socket.socket, packet: bytes) -> None:
    """Sends a packet, or loses it where the link's queue is full; TCP sends it again."""
    try:
        packets.send(packet)
    except OSError as error:
        if error.errno != errno.ENOBUFS:
            raise


def _open(interface: str) -> socket.socket:
    """Returns a socket for the packets that arrive at an interface, and for those to send by it."""
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    # A packet keeps the header that says what is left for a network card to do: its checksum, its segments.
    packets.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    packets.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    with suppress(PermissionError):  # in a user's namespace the kernel's usual 200 kB must do
        for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
            packets.setsockopt(socket.SOL_SOCKET, option, _QUEUE_BYTES)
    packets.bind((interface, _ALL_PROTOCOLS))
    return packets


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
