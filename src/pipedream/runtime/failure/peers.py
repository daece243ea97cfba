"""Which process a rank is, so that one that gives no sign of life can be ended, and no stranger in its place."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RankProcess", "is_running"]


@dataclass(frozen=True)
class RankProcess:
    """A process of some machine.

    Attributes:
        host: names this start of the machine and the space of its process ids.
        pid: id there.
        started: when it started, in the kernel's ticks; ids are used again, this is not.
    """

    host: str
    pid: int
    started: int

    @staticmethod
    def this() -> RankProcess:
        """Returns this process."""
        pid = os.getpid()
        return RankProcess(_this_host(), pid, _started(pid))

    @property
    def is_local(self) -> bool:
        """It is a process of this machine, and its id means here what it means to itself."""
        return bool(self.host) and self.host == _this_host()

    def kill(self) -> bool:
        """Ends it by SIGKILL, if it runs on this machine and is still the same process; tells whether it did."""
        if not self.is_local or not self.started:
            return False
        with suppress(OSError):
            file = os.pidfd_open(self.pid)  # from here on the id cannot be given to another process unnoticed
            try:
                if _started(self.pid) == self.started:
                    signal.pidfd_send_signal(file, signal.SIGKILL)
                    return True
            finally:
                os.close(file)
        return False


def is_running(pid: int) -> bool:
    """Tells whether a process exists and is neither stopped nor dead."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "TtZX"


def _this_host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no /proc here: then nobody is ended
        return ""


def _started(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat behind the command's name, which may hold anything; none without it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
