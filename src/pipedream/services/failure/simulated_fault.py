"""A failure on purpose, which shows a recovery before one is needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import weakref
from dataclasses import dataclass

from pipedream.core.errors import RecipeError

_SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}
_KINDS = (*_SIGNALS, "slow")
_THROTTLE = """
import os, signal, sys, time
while os.getppid() == int(sys.argv[1]):
    for number in (signal.SIGSTOP, signal.SIGCONT):
        os.kill(int(sys.argv[1]), number)
        time.sleep(0.01)
"""
FORM = f"rank=R,after=MINIBATCHES,kind={'|'.join(_KINDS)}"


@dataclass(frozen=True)
class SimulatedFault:
    """What happens to a rank, and when.

    Attributes:
        after: minibatches of the run before it, at least 1.
        kind: 'kill' ends the process, 'hang' stops it (SIGSTOP), 'slow' leaves it half its time.
    """

    rank: int
    after: int
    kind: str

    @classmethod
    def parse(cls, text: str) -> SimulatedFault:
        """Returns the fault that a text of the form `FORM` describes; raises a `RecipeError` for another."""
        parts = dict(part.partition("=")[::2] for part in text.split(","))
        rank, after, kind = (parts.get(name, "") for name in ("rank", "after", "kind"))
        is_whole = len(parts) == 3 and kind in _KINDS and rank.isdecimal() and after.isdecimal()
        if not is_whole or int(after) < 1:
            raise RecipeError(f"the fault {text!r} was asked for; give {FORM}, after at least 1 minibatch")
        return cls(int(rank), int(after), kind)


class FaultInjector:
    """Inflicts a fault on this process if it is the fault's rank, in the first attempt of a run.

    Args:
        processes: of the run.
        restarts: before this attempt.
    """

    def __init__(self, fault: SimulatedFault, rank: int, processes: int, restarts: int) -> None:
        if fault.rank >= processes:
            raise RecipeError(
                f"a fault of rank {fault.rank} was asked for, but the run has the processes 0 to {processes - 1}; "
                "name one of these"
            )
        self._fault, self._is_here = fault, rank == fault.rank and not restarts

    def finish_minibatch(self, trained: int) -> None:
        """Strikes when the run has trained as many minibatches as the fault waits for."""
        if not self._is_here or trained != self._fault.after:
            return
        if self._fault.kind == "slow":
            # Ops themselves must take longer, as on a throttled core: a sleep between them would look like no fault.
            throttle = subprocess.Popen([sys.executable, "-S", "-c", _THROTTLE, str(os.getpid())])
            weakref.finalize(self, throttle.kill)
        else:
            os.kill(os.getpid(), _SIGNALS[self._fault.kind])
