"""The largest GPT that trains in the memory of each worker, by the way to train it.

A trial has processes of its own, to which the kernel gives no more than a limit (RLIMIT_DATA), Python and torch
included. The first number of blocks is the planner's; further trials are around it, until one number trains and the
next one does not.
"""

from __future__ import annotations

import errno
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scaffold import TIGHT_MALLOC, WorkersFailedError, format_table, run_processes

import pipedream as pd
from pipedream.core.errors import PlanError
from pipedream.core.model.graph import Layer, LayerGraph
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.units import format_bytes

WORKER = Path(__file__).with_name("worker.py")
LIMIT_BYTES = 1_000_000_000
SHAPE = {"width": 512, "length": 64, "samples": 2}
"""Of the GPT and a microbatch of tokens."""

MICROBATCHES = 4
MINIBATCHES = 3
PLANNED_SHARE = 0.98
"""Of the memory that Python and torch leave; the rest is for what is not predicted. A stage that moves activations
fills all of its memory."""

_MAX_BLOCKS = 400


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        runs: 'pipeline', or a loop of torch: 'one', 'ddp' or 'fsdp' (worker.py).
        how: for `pipedream.plan`, which predicts the bytes.
    """

    name: str
    runs: str
    how: dict[str, Any] = field(default_factory=dict)


_COPIES: dict[str, Any] = {"schedule": "1f1b", "shape": "data-parallel"}
_STRAIGHT: dict[str, Any] = {"schedule": "1f1b", "shape": "straight"}
WAYS = (
    Way("one worker", "one", _COPIES),
    Way("torch DDP", "ddp", _COPIES),
    Way("torch FSDP", "fsdp", _COPIES),
    Way("1F1B", "pipeline", _STRAIGHT),
    Way("1F1B, recomputation", "pipeline", _STRAIGHT | {"recompute": "always"}),
    Way("V-Half", "pipeline", {"schedule": "v_half"}),
    Way("V-Min", "pipeline", {"schedule": "v_min"}),
    Way("2BW", "pipeline", {"schedule": "pipedream_2bw", "shape": "straight"}),
    Way("RoundPipe", "pipeline", {"schedule": "roundpipe", "chunks": 2}),
)


_TEST_WAYS = ("one worker", "1F1B, recomputation")
_TEST_ROOM_BYTES = 250_000_000
"""Memory beside Python and torch."""


def measure(
    size: str, folder: Path, log: Callable[[str], None], workers_of: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """Returns a row for each way and number of workers.

    Args:
        size: 'test' or 'full'.
        folder: for files between processes.
        workers_of: numbers of workers; None: all of the size.
    """
    gpt = SHAPE | {"blocks": 3, "microbatches": MICROBATCHES}
    profile = measure_profile(gpt, folder / "gpt.json")
    is_test, rows = size == "test", []
    for workers in workers_of or ((1, 2) if is_test else (1, 2, 4)):
        setting = _Setting(profile, workers, folder)
        ways = [
            way for way in WAYS if (way.runs == "one") == (workers == 1) and (not is_test or way.name in _TEST_WAYS)
        ]
        base_bytes: dict[str, int] = {}
        for way in ways:
            if way.runs not in base_bytes:
                base_bytes[way.runs] = setting.measure_base(way)
            limit_bytes = base_bytes[way.runs] + _TEST_ROOM_BYTES if is_test else LIMIT_BYTES
            rows.append(_search(setting, way, limit_bytes, limit_bytes - base_bytes[way.runs], log))
            log(str(rows[-1]))
    return rows


def measure_profile(request: Mapping[str, Any], file: Path) -> Profile:
    """Returns the profile of the model that a request to the worker describes."""
    run_processes(WORKER, {**request, "do": "profile", "file": str(file)}, 1, TIGHT_MALLOC)
    return Profile.load(file)


def find_largest(first: int, trains: Callable[[int], bool], least: int = 1) -> int:
    """Returns the largest number that trains, found from `first` on by steps that double, then by bisection.

    Returns least - 1 if not even the least trains.
    """
    low, high, count, step = least - 1, _MAX_BLOCKS + 1, max(least, min(first, _MAX_BLOCKS)), 1
    while low < high - 1:
        if trains(count):
            low = count
        else:
            high = count
        if high > _MAX_BLOCKS:
            count = min(low + step, _MAX_BLOCKS)
        elif low < least:
            count = max(least, high - step)
        else:
            count = (low + high) // 2
        step *= 2
    return low


def lengthen(profile: Profile, blocks: int) -> Profile:
    """Returns the profile of a GPT with another number of equal blocks: embedding, blocks, norm, words."""
    first, middle, *last = profile.layers[0], profile.layers[2], *profile.layers[-2:]
    kinds = [layer.kind for layer in profile.graph.layers]
    names = (kinds[0], *[kinds[2]] * blocks, *kinds[-2:])
    longer = replace(
        profile,
        layers=(first, *[middle] * blocks, *last),
        graph=LayerGraph.chain(tuple(Layer(str(place), kind) for place, kind in enumerate(names))),
    )
    share = longer.parameter_bytes / profile.parameter_bytes
    return replace(
        longer,
        update_s=profile.update_s * share,
        copy_s=profile.copy_s * share,
        optimizer_bytes=int(profile.optimizer_bytes * share),
    )


def tables(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yields a table for each number of workers."""
    alone = [row for row in rows if row["workers"] == 1]
    for workers in sorted({row["workers"] for row in rows} - {1}):
        lines = []
        for row in (*alone, *(row for row in rows if row["workers"] == workers)):
            figures = [str(row["layers"]), str(row["planned_layers"])]
            if row["layers"]:
                ratio = f"{row['rise_bytes'] / row['peak_bytes']:.2f}"
                sizes = map(format_bytes, (row["peak_bytes"], row["rise_bytes"]))
                figures += [f"{row['samples_per_s']:.3g}", *sizes, ratio]
            lines.append([row["way"], *figures, *["-"] * (6 - len(figures))])
        room_bytes = [row["room_bytes"] for row in rows if row["workers"] in (1, workers)]
        limit, least, most = map(format_bytes, (rows[-1]["limit_bytes"], min(room_bytes), max(room_bytes)))
        room = least if least == most else f"{least} (pipelines) to {most}"
        yield f"{workers} workers of {limit}, of which Python and torch leave {room}:\n"
        yield format_table("|layers|planned|samples/s|peak predicted|measured|measured / predicted", "lr", lines) + "\n"


@dataclass(frozen=True)
class _Setting:
    """What the ways have in common.

    Attributes:
        profile: of a few blocks.
        folder: for files between processes.
    """

    profile: Profile
    workers: int
    folder: Path

    def plan(self, way: Way, blocks: int, room_bytes: int | None) -> Plan:
        """Plans for so many blocks; raises a `PlanError` if they do not fit."""
        how = way.how | {"microbatches": MICROBATCHES}
        cluster = pd.Cluster.flat(self.workers, memory_bytes=None if way.runs in ("ddp", "fsdp") else room_bytes)
        profile = lengthen(self.profile, blocks)
        plan = pd.plan(profile, cluster, **how)
        if way.runs not in ("ddp", "fsdp"):
            return plan
        (stage,) = plan.stages
        stage = replace(stage, peak_bytes=_predict_torch(way.runs, profile, self.workers))
        if room_bytes is not None and stage.peak_bytes > room_bytes:
            raise PlanError(f"{stage.peak_bytes} bytes do not fit")
        return replace(plan, stages=(stage,))

    def fits(self, way: Way, blocks: int, room_bytes: int) -> bool:
        try:
            self.plan(way, blocks, room_bytes)
        except PlanError:
            return False
        return True

    def plan_tightest(self, way: Way, blocks: int, room_bytes: int) -> Plan:
        """Returns a plan that fits, or one that needs little more."""
        while not self.fits(way, blocks, room_bytes):
            room_bytes = room_bytes * 51 // 50
        return self.plan(way, blocks, room_bytes)

    @property
    def short(self) -> int:
        """The fewest blocks that all ways can train."""
        return 2 * self.workers

    def measure_base(self, way: Way) -> int:
        """Returns what RLIMIT_DATA counts of a worker that holds no model: Python, torch, its threads' stacks."""
        answers = self.run(way, {}, None)
        assert answers is not None, "memory is not limited"
        return max(answer["base_bytes"] for answer in answers)

    def run(self, way: Way, plans: dict[int, Plan], limit_bytes: int | None) -> list[dict[str, Any]] | None:
        """Trains GPTs of so many blocks; returns what each worker took, or None if one had too little memory.

        Before, a short GPT trains in the same processes: what torch and its kernels keep is no part of the figures.
        """
        request: dict[str, Any] = SHAPE | {"do": "fit", "runs": way.runs, "limit_bytes": limit_bytes, "jobs": []}
        for blocks, plan in ((self.short, self.plan(way, self.short, None)), *plans.items()):
            file = self.folder / f"plan_{len(request['jobs'])}.json"
            plan.save(file)
            request["jobs"].append({"blocks": blocks, "plan": str(file)})
        request |= {"microbatches": MICROBATCHES, "minibatches": MINIBATCHES}
        try:
            answers: list[dict[str, Any]] = run_processes(WORKER, request, self.workers, TIGHT_MALLOC)
        except WorkersFailedError as failure:
            if any(status == errno.ENOMEM or (status or 0) < 0 for status in failure.statuses):
                return None
            raise
        return answers


def _search(
    setting: _Setting, way: Way, limit_bytes: int, room_bytes: int, log: Callable[[str], None]
) -> dict[str, Any]:
    """Returns the row of a way: the most blocks that it trains, and what they take."""
    counts = range(setting.short, _MAX_BLOCKS + 1)
    plan_bytes = int(PLANNED_SHARE * room_bytes)
    planned = setting.short - 1 + bisect_left(counts, 1, key=lambda blocks: not setting.fits(way, blocks, plan_bytes))
    row: dict[str, Any] = {"way": way.name, "workers": setting.workers, "planned_layers": planned, "layers": 0}
    row |= {"limit_bytes": limit_bytes, "room_bytes": room_bytes}

    def trains(blocks: int) -> bool:
        plan = setting.plan_tightest(way, blocks, plan_bytes)
        answers = setting.run(way, {blocks: plan}, limit_bytes)
        log(f"{way.name}, {setting.workers} workers, {blocks} blocks: {answers or 'out of memory'}")
        if answers is None:
            return False
        row.update(
            layers=blocks,
            peak_bytes=max(plan.worker_bytes.values()),
            rise_bytes=max(answer["rise_bytes"] for answer in answers),
            samples_per_s=min(answer["samples_per_s"] for answer in answers),
        )
        return True

    find_largest(planned, trains, setting.short)
    return row


def _predict_torch(runs: str, profile: Profile, workers: int) -> int:
    """Returns the peak of a worker of DDP or FSDP."""
    weights, accumulates = profile.parameter_bytes, workers < MICROBATCHES
    activations = sum(layer.activation_bytes for layer in profile.layers) // MICROBATCHES
    if runs == "ddp":
        # After its first backward DDP makes its buckets again, which have all gradients; sums are in the first ones.
        return (2 + accumulates) * weights + profile.optimizer_bytes + activations
    share, state = weights // workers, (weights + profile.optimizer_bytes) // workers
    # The gradients of a first microbatch come as its activations go.
    passes = share + activations if accumulates else max(share, activations)
    # While the weights of a layer are gathered, those of the one before are still there, or its gradients.
    return state + passes + 2 * 2 * max(layer.parameter_bytes for layer in profile.layers)
