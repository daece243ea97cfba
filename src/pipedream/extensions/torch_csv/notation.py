"""PyTorch's own notation of schedules, a CSV file: one row per rank, one action per cell, an empty cell for a wait.

``torch.distributed.pipelining`` writes and runs such files (torch 2.13: ``_Action``, ``_load_csv``, ``_dump_csv``):

    0F0,0F1,,0B0,,0B1
    ,1F0,1B0,1F1,1B1

``2F5`` is stage 2, forward, microbatch 5; ``B`` is a whole backward, ``I`` and ``W`` are its halves.
``(0F1;1B0)OVERLAP_F_B`` is a forward and a backward that run together. A lowered file also has

- ``2SEND_F5``, ``3RECV_F5``, ``3SEND_B5``, ``2RECV_B5``: messages between stages 2 and 3. A send does not wait; at a
  receive the message must have arrived;
- ``2UNSHARD``, ``2RESHARD``: the shards of a stage's weights are gathered and released (FSDP);
- ``2REDUCE_GRAD``: the stage's gradients are summed over data-parallel copies, after its last backward.

A file is one flushed minibatch; the `Schedule` repeats it, with an update of each stage after its last backward.
Messages are checked, then dropped for those of our own lowering; the proof (`verify`) finds deadlocks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

from pipedream.core.artifact import read_text
from pipedream.core.errors import ScheduleError
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.schedule import Claims, Schedule
from pipedream.core.schedule.weights import Flush
from pipedream.schedules.kit.idioms import SPLIT, B, F, flushing

SUFFIX = ".csv"

_LETTERS = ("F", "B", "I", "W")
_MESSAGES = {"SEND_F": +1, "RECV_F": -1, "SEND_B": -1, "RECV_B": +1}
_SHARDS = ("UNSHARD", "RESHARD")
_SUM = "REDUCE_GRAD"
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
# Six digits: more than a proof can take, and no number that Python would refuse to read.
_ACTION = re.compile(rf"([0-9]{{1,6}})({'|'.join((*_MESSAGES, *_SHARDS, _SUM, *_LETTERS))})([0-9]{{0,6}})")
_EXPECTED = (
    "a cell is empty or STAGE, letter, MICROBATCH, as 2F0 (F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B); STAGE and "
    "UNSHARD, RESHARD or REDUCE_GRAD; or a pair, as (0F1;1B0)OVERLAP_F_B"
)
_KINDS = {
    "F": (Kind.FORWARD,),
    "B": (Kind.BACKWARD,),
    "I": (Kind.INPUT_GRADIENT,),
    "W": (Kind.WEIGHT_GRADIENT,),
}
_HALVES = (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


@dataclass(frozen=True)
class _Repeated:
    """The order that repeats one minibatch."""

    rows: tuple[tuple[Op, ...], ...]
    microbatches: int

    def __call__(self, rank: int) -> Iterator[Op]:
        for number in count():
            for op in self.rows[rank]:
                stride = number if op.kind is Kind.UPDATE else number * self.microbatches
                yield op._replace(index=op.index + stride)


def load(path: str | Path, plan: Plan | None = None) -> Schedule:
    """Reads a file (`from_torch_csv`); the schedule has the file's name."""
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(
            f"the schedule {path} cannot be read ({error}); give a CSV file in PyTorch's notation"
        ) from None
    return from_torch_csv(text, name=str(path), plan=plan)


def from_torch_csv(text: str, *, name: str = "torch_csv", plan: Plan | None = None) -> Schedule:
    """Reads a schedule in PyTorch's notation, either with passes only or lowered.

    If any backward is split into I and W, all are: a B becomes an I and its W. The two ops of an OVERLAP_F_B run one
    after the other.

    Args:
        plan: its stages, on the same ranks; None for equal stages (`Plan.uniform`).

    Raises:
        ScheduleError: names row, column, cell, and what was expected.
    """
    try:
        rows = _read_rows(text)
        ranks = _find_ranks(rows)
        m = _check_passes(rows, len(ranks))
        _check_sums(rows, ranks)
        _check_messages(rows, ranks)
        plan = _choose_plan(ranks, plan)
    except ScheduleError as error:
        raise ScheduleError(f"schedule {name!r}: {error}") from None
    splits = any(action.word == "I" for row in rows for action in row)
    order = _Repeated(tuple(tuple(_iterate_ops(row, splits)) for row in rows), m)
    schedule = flushing(name, plan, m, order, Claims(), kinds=SPLIT if splits else (F, B))
    return replace(schedule, claims=Claims(assumption="none: it was read from a file"))


def write(schedule: Schedule | Program) -> str:
    """Writes one minibatch of a flushing schedule in PyTorch's notation, passes only: PyTorch adds the messages.

    In each column every pass has what it needs from the columns before.

    Raises:
        ScheduleError: the notation cannot express it (updates without a flush, replicas), or it deadlocks.
    """
    name = repr(schedule.name)
    if not schedule.flushes or not isinstance(schedule.weights, Flush):
        raise ScheduleError(
            f"schedule {name} updates without a flush, and PyTorch's notation knows neither updates nor versions of "
            "weights: a file is one minibatch from an empty pipeline to an empty one; write a method that flushes"
        )
    replicas = schedule.placement.replicas
    if max(replicas) > 1:
        raise ScheduleError(
            f"schedule {name} has {'-'.join(map(str, replicas))} replicas of its stages, and PyTorch's notation one "
            "rank for each stage: it puts data parallelism around the whole pipeline; write a straight plan"
        )
    placement = schedule.placement
    for stage in filter(placement.runs_backward_elsewhere, range(placement.stages)):
        ranks = placement.rank_of(stage, 0, forward=True), placement.rank_of(stage, 0)
        raise ScheduleError(
            f"schedule {name} has the forwards of stage {stage} on rank {ranks[0]} and its "
            f"backwards on rank {ranks[1]}, and PyTorch's notation one rank for each stage; write a "
            "method whose stages stay where they are"
        )
    m = schedule.microbatches
    rows = [list(_iterate_passes(schedule, rank, m)) for rank in range(schedule.placement.workers)]
    steps = _assign_steps(schedule, rows, m, name)
    lines = []
    for row in rows:
        cells = [""] * (1 + max(steps[op] for op in row))
        for op in row:
            cells[steps[op]] = str(op)
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


# -- reading --------------------------------------------------------------------------------------------


def _find_ranks(rows: Sequence[Sequence[_Action]]) -> tuple[int, ...]:
    owners: dict[int, _Action] = {}
    for action in (action for row in rows for action in row if action.computes):
        first = owners.setdefault(action.stage, action)
        if first.rank != action.rank:
            raise ScheduleError(
                f"{action.where} runs stage {action.stage}, which rank {first.rank} runs too ({first} in its column "
                f"{first.column}); a stage lives on one rank"
            )
    for stage in range(max(owners)):
        if stage not in owners:
            raise ScheduleError(
                f"no row runs stage {stage}, but there is a stage {max(owners)}; stages are numbered without gaps"
            )
    return tuple(owners[stage].rank for stage in range(len(owners)))


def _check_passes(rows: Sequence[Sequence[_Action]], stages: int) -> int:
    """Returns m; checks that each stage has each pass of each microbatch once."""
    passes: dict[tuple[int, str, int], _Action] = {}
    for action in (action for row in rows for action in row if action.computes):
        first = passes.setdefault(action[:3], action)
        if first is not action:
            raise ScheduleError(f"{action.where} is also in column {first.column}; each pass is done once")
    m = 1 + max(microbatch for _, _, microbatch in passes)
    for stage in range(stages):
        rank = next(action.rank for key, action in passes.items() if key[0] == stage)
        for k in range(m):
            words = "".join(word for word in "FBIW" if (stage, word, k) in passes)
            if words in ("FB", "FIW"):
                continue
            if "B" in words and ("I" in words or "W" in words):
                raise ScheduleError(
                    f"row {rank + 1} (rank {rank}) has {stage}B{k} and a half of it; give B, or I and W"
                )
            missing = next(w for w in ("F", "W" if "I" in words else "I" if "W" in words else "B") if w not in words)
            example = next((action for action in passes.values() if action.microbatch == k), None)
            reason = f"{example.where} names microbatch {k}" if example else f"the last microbatch is {m - 1}"
            raise ScheduleError(
                f"row {rank + 1} (rank {rank}) lacks {stage}{missing}{k}: {reason}, and each stage runs F and B, or F, "
                "I and W, of each"
            )
    return m


def _choose_plan(ranks: tuple[int, ...], plan: Plan | None) -> Plan:
    if plan is None:
        is_straight = ranks == tuple(range(len(ranks)))
        return Plan.uniform(len(ranks), order=() if is_straight else ranks)
    expected = tuple((rank,) for rank in ranks)
    if plan.placement.ranks != expected:
        plan_ranks = ", ".join("+".join(map(str, row)) for row in plan.placement.ranks)
        raise ScheduleError(
            f"it has {len(ranks)} stages on ranks {', '.join(map(str, ranks))}, the plan {plan.config} on "
            f"{plan_ranks}; give a plan with these stages and this order of workers"
        )
    return plan


def _iterate_ops(row: Sequence[_Action], splits: bool) -> Iterator[Op]:
    """Yields the passes of a row, and each stage's update after its last pass."""
    last = {action.stage: action for action in row if action.computes}
    for action in row:
        if not action.computes:
            continue
        kinds = _HALVES if splits and action.word == "B" else _KINDS[action.word]
        yield from (Op(kind, action.stage, action.microbatch) for kind in kinds)
        if last[action.stage] is action:
            yield Op(Kind.UPDATE, action.stage, 1)


# -- writing --------------------------------------------------------------------------------------------


def _iterate_passes(schedule: Schedule | Program, rank: int, total: int) -> Iterator[Op]:
    items = schedule.ops(rank, total) if isinstance(schedule, Schedule) else schedule.instructions(rank, total)
    return (op for op in items if isinstance(op, Op) and op.kind is not Kind.UPDATE)


def _assign_steps(schedule: Schedule | Program, rows: Sequence[Sequence[Op]], total: int, name: str) -> dict[Op, int]:
    """Returns the step of each pass, after all that it requires and after the previous pass of its rank."""
    steps: dict[Op, int] = {}
    positions = [0] * len(rows)
    advances = True
    while advances:
        advances = False
        for rank, row in enumerate(rows):
            while positions[rank] < len(row):
                op = row[positions[rank]]
                needs = [need for need in schedule.requires(op, total) if need.kind is not Kind.UPDATE]
                if any(need not in steps for need in needs):
                    break
                previous = row[positions[rank] - 1 : positions[rank]]
                steps[op] = 1 + max((steps[need] for need in (*needs, *previous)), default=-1)
                positions[rank] += 1
                advances = True
    stuck = [f"rank {rank} at {row[positions[rank]]}" for rank, row in enumerate(rows) if positions[rank] < len(row)]
    if stuck:
        raise ScheduleError(f"schedule {name} deadlocks: {', '.join(stuck)} need what comes after them")
    return steps


# -- actions ----------------------------------------------------------------------------------------------


class _Action(NamedTuple):
    """One action, and its place in the file.

    Attributes:
        microbatch: -1 for REDUCE_GRAD.
        place: position in the row; the actions of a pair count separately.
        column: from 1.
    """

    stage: int
    word: str
    microbatch: int
    rank: int
    place: int
    column: int

    @property
    def computes(self) -> bool:
        return self.word in _LETTERS

    def __str__(self) -> str:
        return f"{self.stage}{self.word}{self.microbatch if self.microbatch >= 0 else ''}"

    @property
    def where(self) -> str:
        return f"{_format_place(self.rank, self.column)}: {self}"


def _read_rows(text: str) -> list[list[_Action]]:
    """Reads the actions of each rank.

    UNSHARD and RESHARD are skipped: PyTorch writes them for all stages, and the stages here have unsharded weights.
    """
    lines = text.removeprefix("\ufeff").splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    rows = [list(_read_actions(rank, line)) for rank, line in enumerate(lines)]
    if not rows:
        raise ScheduleError("there is no row; a schedule has a row for each rank")
    for rank, row in enumerate(rows):
        if not any(action.computes for action in row):
            raise ScheduleError(f"row {rank + 1} (rank {rank}): found no forward; a rank runs at least one stage")
    return rows


def _read_actions(rank: int, line: str) -> Iterator[_Action]:
    place = 0
    for column, cell in enumerate(line.split(","), 1):
        token = cell.strip().strip('"').strip()
        pair = _PAIR.fullmatch(token)
        for part in pair[1].split(";") if pair else (token,) if token else ():
            match = _ACTION.fullmatch(part.strip())
            has_right_form = match is not None and bool(match[3]) == (match[2] in (*_LETTERS, *_MESSAGES))
            if match is None or not has_right_form or (pair and match[2] not in _LETTERS):
                in_pair = f" in {token!r}" if pair else ""
                raise ScheduleError(
                    f"{_format_place(rank, column)}: {part.strip()!r}{in_pair} is not an action; {_EXPECTED}"
                )
            if match[2] not in _SHARDS:
                yield _Action(int(match[1]), match[2], int(match[3] or -1), rank, place, column)
                place += 1


def _format_place(rank: int, column: int) -> str:
    return f"row {rank + 1} (rank {rank}), column {column}"


# -- checks of messages -----------------------------------------------------------------------------------


def _check_sums(rows: Sequence[Sequence[_Action]], rank_of: Sequence[int]) -> None:
    """Checks that a stage's gradients are summed at most once, after its last backward."""
    for row in rows:
        summed: dict[int, _Action] = {}
        for action in row:
            _check_owner(action, rank_of)
            sum_action = summed.get(action.stage)
            if sum_action is not None and action.word in (_SUM, "B", "I", "W"):
                raise ScheduleError(
                    f"{action.where} comes after the sum of stage {action.stage}'s gradients in column "
                    f"{sum_action.column}; they are summed once, when all are there"
                )
            if action.word == _SUM:
                summed[action.stage] = action


def _check_messages(rows: Sequence[Sequence[_Action]], rank_of: Sequence[int]) -> None:
    """Checks the messages of a lowered file.

    Each is needed, sent and received once, on the right ranks, after the pass that makes it and before the pass that
    reads it; two ranks receive in the order of sending; and no ranks wait for each other forever.
    """
    messages = [action for row in rows for action in row if action.word in _MESSAGES]
    if not messages:
        return
    by_message: dict[tuple[int, str, int], _Action] = {}
    for action in messages:
        _check_ends(action, rank_of)
        first = by_message.setdefault(action[:3], action)
        if first is not action:
            raise ScheduleError(f"{action.where} is also in column {first.column}; a message is sent once")
    # Gradients are read and made by a whole backward, or by its first half.
    message_words = {"F": ("RECV_F", "SEND_F"), "B": ("RECV_B", "SEND_B"), "I": ("RECV_B", "SEND_B"), "W": ()}
    pass_messages: set[tuple[int, str, int]] = set()
    for action in (action for row in rows for action in row if action.computes):
        for word in message_words[action.word]:
            _check_message(action, word, by_message, rank_of)
            pass_messages.add((action.stage, word, action.microbatch))
    for action in messages:
        if action[:3] not in pass_messages:
            raise ScheduleError(
                f"{action.where} belongs to no pass: the file does not run microbatch {action.microbatch}"
            )
    _check_order(messages, rank_of)
    _check_progress(rows, rank_of)


def _check_owner(action: _Action, rank_of: Sequence[int]) -> None:
    if action.stage >= len(rank_of) or rank_of[action.stage] != action.rank:
        owner = f"rank {rank_of[action.stage]}" if action.stage < len(rank_of) else "no rank"
        raise ScheduleError(f"{action.where} is in the row of rank {action.rank}, but {owner} runs that stage")


def _find_peer(action: _Action) -> tuple[int, str, int]:
    word = action.word
    other = ("RECV" if word.startswith("SEND") else "SEND") + word[-2:]
    return action.stage + _MESSAGES[word], other, action.microbatch


def _check_ends(action: _Action, rank_of: Sequence[int]) -> None:
    _check_owner(action, rank_of)
    peer = _find_peer(action)[0]
    if not 0 <= peer < len(rank_of):
        raise ScheduleError(f"{action.where} needs a stage {peer}, but the stages are 0 to {len(rank_of) - 1}")
    if rank_of[peer] == action.rank:
        raise ScheduleError(
            f"{action.where} is a message to the rank itself, which runs stage {peer} too; drop it, it is handed over"
        )


def _check_message(
    action: _Action, word: str, by_message: Mapping[tuple[int, str, int], _Action], rank_of: Sequence[int]
) -> None:
    peer = action.stage + _MESSAGES[word]
    if not 0 <= peer < len(rank_of) or rank_of[peer] == action.rank:
        return
    missing = f"{action.stage}{word}{action.microbatch}"
    message = by_message.get((action.stage, word, action.microbatch))
    if message is None:
        raise ScheduleError(
            f"{action.where}: the file has messages, but row {action.rank + 1} lacks {missing}; give all of them or "
            "none"
        )
    if (message.place < action.place) == word.startswith("SEND"):
        side = "sends what that pass has yet to compute" if word.startswith("SEND") else "comes too late for it"
        raise ScheduleError(f"{message.where} {side}: {action} is in column {action.column}")


def _check_order(messages: Iterable[_Action], rank_of: Sequence[int]) -> None:
    """Checks the order of messages between two ranks: they have no names, so the first sent is the first received."""
    sent: dict[tuple[int, int], list[_Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[_Action]] = defaultdict(list)
    for action in messages:
        peer = rank_of[_find_peer(action)[0]]
        if action.word.startswith("SEND"):
            sent[action.rank, peer].append(action)
        else:
            received[peer, action.rank].append(action)
    for pair in sent.keys() | received.keys():
        # Equally many: the passes of both ends of each message have been checked.
        for departed, arrived in zip(sent[pair], received[pair], strict=True):
            if _find_peer(departed) != arrived[:3]:
                raise ScheduleError(
                    f"{arrived.where} is received where {departed} of rank {departed.rank} (column {departed.column}) "
                    "arrives; between two ranks messages are received in the order in which they are sent"
                )


def _check_progress(rows: Sequence[Sequence[_Action]], rank_of: Sequence[int]) -> None:
    """Runs every rank as far as possible; a receive waits for its send, as in PyTorch's own dry run."""
    positions = [0] * len(rows)
    sent: set[tuple[int, str, int]] = set()
    advances = True
    while advances:
        advances = False
        for rank, row in enumerate(rows):
            while positions[rank] < len(row):
                action = row[positions[rank]]
                if action.word.startswith("RECV") and _find_peer(action) not in sent:
                    break
                if action.word.startswith("SEND"):
                    sent.add(action[:3])
                positions[rank] += 1
                advances = True
    stuck = [row[positions[rank]] for rank, row in enumerate(rows) if positions[rank] < len(row)]
    if stuck:
        waits = "; ".join(f"{action.where}, from rank {rank_of[_find_peer(action)[0]]}" for action in stuck)
        raise ScheduleError(f"these receives wait for each other forever: {waits}")
