"""Counts what failures cost a run, in files of the launcher, which outlives the workers."""

from __future__ import annotations

import json
import os
import struct
import time
import weakref
from dataclasses import dataclass, replace
from difflib import unified_diff
from pathlib import Path
from typing import Any

from pipedream.core.artifact import write_text
from pipedream.core.errors import RecipeError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.without import drop_worker
from pipedream.runtime.comm.process_group import name_code
from pipedream.runtime.failure.processes import find_launch_folder, read_lost

_FILE = "minibatches"
_PLAN = "plan.json"
_BEGIN = "begin.json"
_RECIPE = "recipe.py"
_LIBRARY = "library.txt"
_TOTALS = struct.Struct("dq")
_MINIBATCH = struct.Struct("d")


class Restarts:
    """Counts a run's restarts by its launcher, the seconds lost and the minibatches repeated.

    Rank 0 notes each minibatch, in a microsecond, in a file of the launcher, so a kill at any moment loses nothing.
    Under another launcher only the restarts are counted.
    """

    def __init__(self, rank: int) -> None:
        self._count = count_restarts()
        self._lost_s, self._repeated, self._trained_before = 0.0, 0, 0
        self._file: int | None = None
        folder = find_launch_folder()
        if folder is None or rank:
            return
        self._file = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT)
        weakref.finalize(self, os.close, self._file)
        size = os.fstat(self._file).st_size
        if size:
            self._lost_s, self._repeated = _TOTALS.unpack(os.pread(self._file, _TOTALS.size, 0))
            self._trained_before = (size - _TOTALS.size) // _MINIBATCH.size
        elif self._count:  # earlier attempts have trained nothing
            first_began_s, began_s = ((folder / str(attempt)).stat().st_mtime for attempt in (0, self._count))
            self._lost_s = began_s - first_began_s

    def begin(self, number: int) -> None:
        """Notes that training continues after `number` minibatches."""
        if self._file is None:
            return
        if self._count:
            row = {"minibatches": self._trained_before, "resumed_from": number}
            write_text(_find_begin_file(self._count), json.dumps(row))
        if 0 < self._trained_before <= number:
            self._add_lost_seconds()
        self._write_totals()
        for earlier in range(self._trained_before, number):
            self.note_time(earlier)

    def finish(self, number: int) -> None:
        """Notes a minibatch that this attempt has trained."""
        if number < self._trained_before:
            self._repeated += 1
            if number + 1 == self._trained_before:
                self._add_lost_seconds()
            if self._file is not None:
                self._write_totals()
        self.note_time(number)

    def note_time(self, number: int) -> None:
        """Notes when a minibatch is first trained, not when a later attempt repeats it."""
        if self._file is not None and number >= self._trained_before:
            os.pwrite(self._file, _MINIBATCH.pack(time.time()), _TOTALS.size + number * _MINIBATCH.size)

    def list_figures(self) -> dict[str, Any]:
        """Returns the restarts, workers lost, seconds until training had caught up, and minibatches trained again; and
        for each restart the minibatches before it and those kept.

        Seconds and repeated minibatches are None where unknown.
        """
        has_figures = self._file is not None or not self._count
        begins = [_find_begin_file(attempt) for attempt in range(1, self._count + 1)] if self._file is not None else []
        return {
            "restarts": self._count,
            "workers_lost": sum(len(lost) for _, lost in _list_attempts()),
            "seconds_lost": self._lost_s if has_figures else None,
            "minibatches_repeated": self._repeated if has_figures else None,
            "each": [json.loads(begin.read_text(encoding="utf-8")) for begin in begins if begin.exists()],
        }

    def _add_lost_seconds(self) -> None:
        assert self._file is not None
        offset = _TOTALS.size + (self._trained_before - 1) * _MINIBATCH.size
        self._lost_s += time.time() - _MINIBATCH.unpack(os.pread(self._file, _MINIBATCH.size, offset))[0]
        self._trained_before = 0

    def _write_totals(self) -> None:
        assert self._file is not None
        os.pwrite(self._file, _TOTALS.pack(self._lost_s, self._repeated), 0)


def _find_begin_file(attempt: int) -> Path:
    """Returns the file in which an attempt notes where it began to train."""
    folder = find_launch_folder()
    assert folder is not None, "only attempts of our launcher note this"
    return folder / str(attempt) / _BEGIN


def check_code_stays(source: str, rank: int) -> None:
    """Raises a `RecipeError` if the recipe's file, or this library, is not what the run began with.

    Workers are forks of a launcher that has imported the library, where that is possible; each attempt reads the recipe
    again.

    Args:
        source: the recipe's file.
    """
    folder = find_launch_folder()
    if folder is None:
        return
    restart = f"restart {count_restarts()} must continue with"
    if (library := _keep_first(folder / _LIBRARY, name_code(), rank)) != name_code():
        raise RecipeError(
            f"{restart} {library}, but rank {rank} has {name_code()}; install the first again and give --resume, or "
            "start another run"
        )
    if (first_source := _keep_first(folder / _RECIPE, source, rank)) != source:
        changes = unified_diff(first_source.splitlines(), source.splitlines(), lineterm="", n=0)
        first = next((line for line in changes if line[0] in "+-" and line[:3] not in ("---", "+++")), "")
        raise RecipeError(
            f"{restart} the recipe of the run, but its file has changed ({first!r}); put the file back and give "
            "--resume, or start another run"
        )


def _keep_first(file: Path, text: str, rank: int) -> str:
    """Returns rank 0's text of the first attempt; in the first attempt, keeps this one."""
    if file.exists():
        return file.read_text(encoding="utf-8")
    if rank == 0:
        write_text(file, text)
    return text


def keep_plan_of_attempt(plan: Plan) -> None:
    """Keeps the plan for `find_survivors`; does nothing under another launcher."""
    folder = find_launch_folder()
    if folder is not None:
        plan.save(folder / str(count_restarts()) / _PLAN)


@dataclass(frozen=True)
class Survivors:
    """What remains of the attempts before this one.

    Attributes:
        last_plan: the plan of the newest attempt that had one.
        lost: the ranks lost since, in order; each counts only the workers that the earlier losses left.
        plan: the last plan without them; None if a stage would have no worker.
    """

    last_plan: Plan | None = None
    lost: tuple[int, ...] = ()
    plan: Plan | None = None

    @property
    def cluster(self) -> Cluster | None:
        """The cluster without the lost workers; None if nothing was lost, or it had more workers than the plan."""
        if self.last_plan is None or not self.lost or self.last_plan.cluster.workers != self.last_plan.ranks:
            return None
        cluster = self.last_plan.cluster
        for rank in self.lost:
            cluster = cluster.without(rank)
        return cluster


def find_survivors() -> Survivors:
    """Returns what remains of earlier attempts: nothing in the first one, or under another launcher."""
    survivors = Survivors()
    for folder, lost in _list_attempts():
        if (folder / _PLAN).exists():
            plan = Plan.load(folder / _PLAN)
            survivors = Survivors(plan, (), plan)
        remaining_plan = survivors.plan
        for rank in lost:
            remaining_plan = remaining_plan and drop_worker(remaining_plan, rank)
        survivors = replace(survivors, lost=(*survivors.lost, *lost), plan=remaining_plan)
    return survivors


def _list_attempts() -> list[tuple[Path, list[int]]]:
    """Returns the folders of the attempts before this one, each with the ranks that were lost by it."""
    root = find_launch_folder()
    folders = [root / str(attempt) for attempt in range(count_restarts())] if root is not None else []
    return [(folder, read_lost(folder)) for folder in folders]


def count_restarts() -> int:
    """Returns how often the launcher has restarted this machine's workers."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
