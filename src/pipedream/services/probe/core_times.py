"""Measures how much other work keeps this process from the processor's cores, from Linux's /proc."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CoreTimes:
    """Seconds since some time in the past.

    Attributes:
        run_s: this process's threads were on a core.
        wait_s: they waited for one (``schedstat`` of each in /proc); 0 where the kernel does not say.
        used_s, stolen_s: cores of the machine were in use, or taken from it by its host (/proc/stat).
    """

    run_s: float = 0.0
    wait_s: float = 0.0
    used_s: float = 0.0
    stolen_s: float = 0.0

    @classmethod
    def now(cls, proc: Path = Path("/proc")) -> CoreTimes:
        """Reads the times, from another folder in tests."""
        waits, used, stolen = [0], 0, 0
        for file in (proc / "self" / "task").glob("*/schedstat"):
            with suppress(OSError, ValueError, IndexError):  # the thread has ended
                waits.append(int(file.read_text(encoding="ascii").split()[1]))
        with suppress(OSError, ValueError):
            row = (proc / "stat").read_text(encoding="ascii").split(maxsplit=9)[1:9]
            user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(int, row)
            used = user + nice + system + interrupts + soft_interrupts
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        return cls(time.process_time(), 1e-9 * sum(waits), used / ticks_per_s, stolen / ticks_per_s)

    def slowness_until(self, end: CoreTimes, run_s: float | None = None) -> float:
        """Returns how many times longer work has taken than on free cores; 1 where unknown.

        Args:
            run_s: what all processes of this work ran for meanwhile on this machine; by default, what this one did.
        """
        own_run_s, wait_s = end.run_s - self.run_s, max(0.0, end.wait_s - self.wait_s)
        used_s, stolen_s = end.used_s - self.used_s, max(0.0, end.stolen_s - self.stolen_s)
        # Threads also wait for each other. Other work delays a process by no more than the time that it ran itself.
        others_s = max(0.0, used_s - (own_run_s if run_s is None else run_s))
        delays = (min(wait_s, others_s), own_run_s), (stolen_s, used_s)
        waiting, stealing = (delay_s / done_s if done_s > 0 else 0.0 for delay_s, done_s in delays)
        return (1 + waiting) * (1 + stealing)
