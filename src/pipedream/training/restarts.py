"""What failures have cost a run, kept by its launcher while it replaces the workers."""

from __future__ import annotations

import os
import struct
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipedream.core.errors import PlanError
from pipedream.core.units import format_bytes
from pipedream.runtime.failure.processes import MEMORY, find_launch_folder

_FILE = "minibatches"
_TOTALS = struct.Struct("dq")
_MINIBATCH = struct.Struct("dd")


class Restarts:
    """The restarts of a run by its launcher: seconds lost, minibatches repeated.

    Rank 0 notes each minibatch, in a microsecond, in a file of the launcher, so a kill at any moment loses nothing.
    Under another launcher only the restarts are counted.
    """

    def __init__(self, rank: int) -> None:
        self._count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._lost_s, self._repeated, self._before = 0.0, 0, 0
        self._file: int | None = None
        folder = find_launch_folder()
        if folder is None or rank:
            return
        self._file = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT)
        weakref.finalize(self, os.close, self._file)
        size = os.fstat(self._file).st_size
        if size:
            self._lost_s, self._repeated = _TOTALS.unpack(os.pread(self._file, _TOTALS.size, 0))
            self._before = (size - _TOTALS.size) // _MINIBATCH.size
        elif self._count:  # the attempts before have trained nothing
            self._lost_s = _read_begin_s(folder / str(self._count)) - _read_begin_s(folder / "0")

    def begin(self, losses: Iterable[tuple[int, float]], number: int) -> None:
        """Notes that training continues after these minibatches, `number` in all."""
        if self._file is None:
            return
        if 0 < self._before <= number:
            self._catch_up()
        self._write_totals()
        for earlier, loss in losses:
            if earlier >= self._before:
                self.keep(earlier, loss)

    def finish(self, number: int, loss: float) -> None:
        """Notes a minibatch that this attempt has trained."""
        if number < self._before:
            self._repeated += 1
            if number + 1 == self._before:
                self._catch_up()
            if self._file is not None:
                self._write_totals()
        self.keep(number, loss)

    def keep(self, number: int, loss: float) -> None:
        """Keeps a minibatch's loss; and when it was trained, unless training is not yet where it had been."""
        if self._file is not None:
            row = _MINIBATCH.pack(loss, time.time())[: 8 if number < self._before else None]
            os.pwrite(self._file, row, _TOTALS.size + number * _MINIBATCH.size)

    def figures(self) -> dict[str, Any]:
        """Returns the restarts; the seconds until training was where it had been; the minibatches trained again.

        The latter two are None where they are not known.
        """
        has_figures = self._file is not None or not self._count
        return {
            "restarts": self._count,
            "seconds_lost": self._lost_s if has_figures else None,
            "minibatches_repeated": self._repeated if has_figures else None,
        }

    def _catch_up(self) -> None:
        assert self._file is not None
        at = _TOTALS.size + (self._before - 1) * _MINIBATCH.size
        self._lost_s += time.time() - _MINIBATCH.unpack(os.pread(self._file, _MINIBATCH.size, at))[1]
        self._before = 0

    def _write_totals(self) -> None:
        assert self._file is not None
        os.pwrite(self._file, _TOTALS.pack(self._lost_s, self._repeated), 0)


def _read_begin_s(folder: Path) -> float:
    """Returns when the workers of an attempt were started."""
    return folder.stat().st_mtime


def read_losses(minibatches: int) -> list[tuple[int, float]]:
    """Returns (number, loss) of the first minibatches of the run, as far as the launcher has them."""
    folder = find_launch_folder()
    if folder is None:
        return []
    rows = (folder / _FILE).read_bytes()[_TOTALS.size :][: minibatches * _MINIBATCH.size]
    whole = len(rows) // _MINIBATCH.size * _MINIBATCH.size
    return [(number, loss) for number, (loss, at_s) in enumerate(_MINIBATCH.iter_unpack(rows[:whole])) if at_s]


def find_snapshots() -> Path | None:
    """Returns the folder of the run's snapshots in its launcher's memory; None if its launcher keeps none."""
    folder = find_launch_folder()
    return folder / "snapshots" if folder is not None and folder.parent == MEMORY else None


def check_memory(every: int, snapshot_bytes: int, free_bytes: int) -> None:
    """Raises a `PlanError` if two snapshots, and the copies of which a third is written, do not fit the memory.

    Args:
        free_bytes: what programs may still take.
    """
    status = os.statvfs(MEMORY)
    folder = find_snapshots()
    used_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder is not None else 0
    places = {
        f"in {MEMORY}": (2 * snapshot_bytes, status.f_bavail * status.f_frsize + used_bytes),
        "in memory": (3 * snapshot_bytes, free_bytes + used_bytes),
    }
    for place, (needed, free) in places.items():
        if needed > free:
            raise PlanError(
                f"--snapshot-every {every} takes {format_bytes(needed)} {place} (a snapshot has "
                f"{format_bytes(snapshot_bytes)}), and {format_bytes(free)} are free: {format_bytes(needed - free)} "
                f"are missing; enlarge {MEMORY} (docker run --shm-size, mount -o remount,size=...), free memory, or "
                "give --checkpoint-every instead"
            )
