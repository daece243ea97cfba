"""What a run keeps between its launcher's attempts, in files of the launcher, which outlives the workers.

The restarts and the minibatches that they repeat; the code and the plan; and the plan without lost workers.
"""

import os
import struct
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from difflib import unified_diff
from itertools import accumulate
from pathlib import Path
from typing import Any

from pipedream.core.artifact import write_text
from pipedream.core.errors import RecipeError
from pipedream.core.hardware.cluster import Cluster, Workers
from pipedream.core.plan import depth
from pipedream.core.plan.plan import Plan
from pipedream.services.failure.processes import find_launch_folder, read_lost
from pipedream.services.joining.joining import name_code

_PROGRESS = "progress"
_PLAN = "plan.json"
_RECIPE = "recipe.py"
_LIBRARY = "library.txt"
_ROW = struct.Struct("qq")  # of an attempt: minibatches that it began with, and minibatches trained


class Restarts:
    """Counts a run's restarts by its launcher, and the minibatches that each repeats.

    Rank 0 notes each minibatch in a file of the launcher, so a kill at any moment loses nothing. Under another launcher
    only the restarts are counted.
    """

    def __init__(self, rank: int) -> None:
        self._count = count_restarts()
        self._folder = None if rank else find_launch_folder()
        self._resumed_from, self._file = 0, -1

    def begin(self, number: int) -> None:
        """Notes that training continues after `number` minibatches."""
        if self._folder is not None:
            self._resumed_from = number
            self._file = os.open(self._folder / str(self._count) / _PROGRESS, os.O_WRONLY | os.O_CREAT)
            weakref.finalize(self, os.close, self._file)
            self.finish(number - 1)

    def finish(self, number: int) -> None:
        """Notes a minibatch that this attempt has trained."""
        if self._folder is not None:
            os.pwrite(self._file, _ROW.pack(self._resumed_from, number + 1), 0)

    def list_figures(self) -> dict[str, Any]:
        """Returns the restarts, the workers lost, the minibatches trained again (None where unknown), and for each
        restart the minibatches before it and those kept.
        """
        rows, repeated, furthest = list[dict[str, int]](), 0, 0
        folders = [] if self._folder is None else [self._folder / str(attempt) for attempt in range(self._count + 1)]
        for attempt, folder in enumerate(folders):
            file = folder / _PROGRESS
            if not file.exists():  # it has trained nothing
                continue
            resumed_from, trained = _ROW.unpack(file.read_bytes())
            if attempt:
                rows.append({"minibatches": furthest, "resumed_from": resumed_from})
            repeated += max(0, min(trained, furthest) - resumed_from)
            furthest = max(furthest, trained)
        return {
            "restarts": self._count,
            "workers_lost": sum(len(lost) for _, lost in _list_attempts()),
            "minibatches_repeated": repeated if self._folder is not None or not self._count else None,
            "each": rows,
        }


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
            cluster = remove_worker(cluster, rank)
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


def drop_worker(plan: Plan, rank: int) -> Plan | None:
    """Returns the plan with one replica fewer in the stages of a rank; None if one of them has no other replica.

    The stages keep their layers and predictions. In-flight counts that a user gave, or that memory limited, are raised
    where they are not legal.
    """
    if plan.ranks > plan.workers:  # a mesh that loses a rank cannot go on
        return None
    order = plan.worker_order or tuple(range(plan.workers))
    worker = sorted(set(order))[rank]
    stages = range(len(plan.stages))
    counts = tuple(plan.replicas[s] - (worker in plan.workers_of(s)) for s in stages)
    if min(counts) < 1:
        return None
    delays = tuple(plan.update_delay[s] if counts[s] > 1 and len(stages) > 1 else 0 for s in stages)
    reduced = replace(
        plan,
        stages=tuple(replace(stage, replicas=count) for stage, count in zip(plan.stages, counts, strict=True)),
        in_flight=depth.raise_to_legal(plan.in_flight, counts, delays),
        update_delay=delays,
        cluster=remove_worker(plan.cluster, worker),
        worker_order=tuple(w - (w > worker) for w in order if w != worker) if plan.worker_order else (),
        bound_s=0.0,
        note="",
        choices=plan.choices.on_replicas(counts),
    )
    return reduced.with_depth(plan.depth_mode) if plan.depth_mode in ("noam", "full") else reduced


def remove_worker(cluster: Cluster, worker: int) -> Cluster:
    """Returns the cluster without one worker, and without its machine if the worker was alone there."""
    remaining = [w for w in range(cluster.workers) if w != worker]
    rows = [[cluster.component(number, w) for w in remaining] for number in range(len(cluster.levels))]
    levels = []
    for level, components, outer_row in zip(cluster.levels, rows, [*rows[1:], [0] * len(remaining)], strict=True):
        groups = dict(zip(components, outer_row, strict=True)).values()  # of each remaining component
        levels.append(level.with_sizes(tuple(Counter(groups).values())))
    kinds: list[Workers] = []
    for kind, first in zip(cluster.kinds, accumulate((kind.count for kind in cluster.kinds), initial=0), strict=False):
        count = kind.count - (first <= worker < first + kind.count)
        kinds += [replace(kind, count=count)] if count else []
    return replace(cluster, levels=tuple(levels), kinds=tuple(kinds))


def _list_attempts() -> list[tuple[Path, list[int]]]:
    """Returns the folders of the attempts before this one, each with the ranks that were lost by it."""
    root = find_launch_folder()
    folders = [root / str(attempt) for attempt in range(count_restarts())] if root is not None else []
    return [(folder, read_lost(folder)) for folder in folders]


def count_restarts() -> int:
    """Returns how often the launcher has restarted this machine's workers."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
