"""Packets of this process's TCP connections that are lost, as the kernel counts them; gloo and NCCL do not say."""

import ctypes
import os
import socket
from collections.abc import Iterator

# A `socket.socket` could change its owner's descriptor. A PyDLL keeps Python's lock; these calls do not wait.
_LIBC = ctypes.PyDLL(None)
_RETRANSMITS = 2  # byte of struct tcp_info: how often the oldest packet that is not acknowledged was sent again


def list_resent() -> dict[str, int]:
    """Returns "SENDER RECEIVER" of each connection that sends a packet again -> how often it has; Linux only."""
    return {f"{here} {there}": times for here, there, times in _list_connections() if times}


def receives(connection: str) -> bool:
    """Returns whether this process has the other end of a connection that another rank has listed."""
    return any(connection == f"{there} {here}" for here, there, _ in _list_connections())


def _list_connections() -> Iterator[tuple[str, str, int]]:
    """Yields (own end, other end, how often its oldest packet was sent again)."""
    for file in map(int, os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ()):
        info = _ask("getsockopt", file, socket.IPPROTO_TCP, socket.TCP_INFO)
        if info and (here := _ask("getsockname", file)) and (there := _ask("getpeername", file)):
            yield here[2:24].hex(), there[2:24].hex(), info[_RETRANSMITS]  # port and address, of IPv4 or 6


def _ask(function: str, *arguments: int) -> bytes:
    """Returns what a call fills a buffer with; nothing if it fails, as for other files than sockets of TCP."""
    buffer, size = ctypes.create_string_buffer(256), ctypes.c_uint32(256)
    return b"" if _LIBC[function](*arguments, buffer, ctypes.byref(size)) else buffer.raw[: size.value]
