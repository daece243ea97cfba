"""What failures have cost a run, kept by its launcher while it replaces the workers."""

from __future__ import annotations

import os
import struct
import time
import weakref
from pathlib import Path
from typing import Any

from pipedream.runtime.failure.processes import find_launch_folder

_FILE = "minibatches"
_TOTALS = struct.Struct("dq")
_MINIBATCH = struct.Struct("d")


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

    def begin(self, number: int) -> None:
        """Notes that training continues after these minibatches, `number` in all."""
        if self._file is None:
            return
        if 0 < self._before <= number:
            self._catch_up()
        self._write_totals()
        for earlier in range(self._before, number):
            self.keep(earlier)

    def finish(self, number: int) -> None:
        """Notes a minibatch that this attempt has trained."""
        if number < self._before:
            self._repeated += 1
            if number + 1 == self._before:
                self._catch_up()
            if self._file is not None:
                self._write_totals()
        self.keep(number)

    def keep(self, number: int) -> None:
        """Notes when a minibatch was trained, unless training is not yet where it had been."""
        if self._file is not None and number >= self._before:
            os.pwrite(self._file, _MINIBATCH.pack(time.time()), _TOTALS.size + number * _MINIBATCH.size)

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
        self._lost_s += time.time() - _MINIBATCH.unpack(os.pread(self._file, _MINIBATCH.size, at))[0]
        self._before = 0

    def _write_totals(self) -> None:
        assert self._file is not None
        os.pwrite(self._file, _TOTALS.pack(self._lost_s, self._repeated), 0)


def _read_begin_s(folder: Path) -> float:
    """Returns when the workers of an attempt were started."""
    return folder.stat().st_mtime
