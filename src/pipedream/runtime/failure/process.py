"""Identity of a rank's process, so that an unresponsive one is killed, and no other in its place."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RankProcess:
    """A process on some machine.

    Attributes:
        host: boot id of the machine and namespace of its process ids.
        started: in kernel ticks; unlike an id not used again.
    """

    host: str
    pid: int
    started: int

    @staticmethod
    def this() -> RankProcess:
        return RankProcess.of(os.getpid())

    @staticmethod
    def of(pid: int) -> RankProcess:
        """Returns a process of this machine; it started at 0 if there is none."""
        return RankProcess(_name_host(), pid, _read_start(pid))

    @property
    def is_local(self) -> bool:
        return bool(self.host) and self.host == _name_host()

    def kill(self) -> bool:
        """Returns whether it still ran on this machine."""
        if not self.is_local or not self.started:
            return False
        with suppress(OSError):
            file = os.pidfd_open(self.pid)  # from here on a reused id would be noticed
            try:
                if _read_start(self.pid) == self.started:
                    signal.pidfd_send_signal(file, signal.SIGKILL)
                    return True
            finally:
                os.close(file)
        return False


def is_running(pid: int) -> bool:
    """Returns whether a process is neither stopped nor dead."""
    fields = _read_stat(pid)
    return bool(fields) and fields[0] not in "TtZX"


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped, not by a debugger."""
    return _read_stat(pid)[:1] == ["T"]


def parent_of(pid: int) -> int:
    """Returns the id of a process's parent; 0 if there is no such process."""
    return int((_read_stat(pid) or ["", "0"])[1])


def children() -> list[int]:
    """Returns the ids of this process's children, as far as the system says."""
    pids: list[int] = []
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            pids += map(int, file.read_text(encoding="ascii").split())
    return pids


def _name_host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no /proc here: then no process is killed
        return ""


def _read_start(pid: int) -> int:
    fields = _read_stat(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def _read_stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the command's name."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
