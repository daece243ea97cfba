"""The words of PyTorch's notation of schedules: one row a rank, one action a cell, an empty cell for a wait.

``2F5`` is stage 2, forward, microbatch 5, as here; ``B`` is a whole backward, ``I`` and ``W`` are its two halves.
``(0F1;1B0)OVERLAP_F_B`` is a forward and a backward that are run together. A file that is lowered also has

- ``2SEND_F5``, ``3RECV_F5``, ``3SEND_B5``, ``2RECV_B5``: stage 2 sends the activation of microbatch 5 to stage 3, which
  sends back its gradient. A send does not wait; a receive stands where its message must have come;
- ``2UNSHARD``, ``2RESHARD``: where the shards of a stage's weights are gathered and let go again (FSDP);
- ``2REDUCE_GRAD``: where the stage's gradients are summed over data-parallel copies, behind its last backward.

(torch.distributed.pipelining.schedules, torch 2.13: ``_Action``, ``_ComputationType``, ``_load_csv``, ``_dump_csv``.)
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pipedream.core.errors import ScheduleError

__all__ = ["Action", "check_messages", "check_sums", "read_rows"]

_LETTERS = ("F", "B", "I", "W")
_MESSAGES = {"SEND_F": +1, "RECV_F": -1, "SEND_B": -1, "RECV_B": +1}
_SHARDS = ("UNSHARD", "RESHARD")
_SUM = "REDUCE_GRAD"
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
# Six digits: more than a proof can take, and no number that Python would refuse to read.
_ONE = re.compile(rf"([0-9]{{1,6}})({'|'.join((*_MESSAGES, *_SHARDS, _SUM, *_LETTERS))})([0-9]{{0,6}})")
_EXPECTED = (
    "a cell is empty or STAGE, letter, MICROBATCH, as 2F0 (F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B); STAGE and "
    "UNSHARD, RESHARD or REDUCE_GRAD; or a pair, as (0F1;1B0)OVERLAP_F_B"
)


class Action(NamedTuple):
    """One action, and where it stands.

    Attributes:
        stage: whose.
        word: what is done: F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, or REDUCE_GRAD.
        microbatch: which; -1 for REDUCE_GRAD.
        rank: whose row it stands in.
        place: position among all actions of the row, those of pairs counted one by one.
        column: of its cell, from 1.
    """

    stage: int
    word: str
    microbatch: int
    rank: int
    place: int
    column: int

    @property
    def computes(self) -> bool:
        """It is a pass of a stage, and no message or sum."""
        return self.word in _LETTERS

    def __str__(self) -> str:
        return f"{self.stage}{self.word}{self.microbatch if self.microbatch >= 0 else ''}"

    @property
    def where(self) -> str:
        """Row, column and text, as errors begin."""
        return f"{_where(self.rank, self.column)}: {self}"


def read_rows(text: str) -> list[list[Action]]:
    """Reads the actions of each rank; those of a pair in its order. Shards are passed over.

    An UNSHARD or a RESHARD says where the weights of a stage are kept meanwhile, not what is computed, and
    PyTorch's own lowering writes them for stages without shards too; the stages here have whole weights.

    Raises:
        ScheduleError: a cell that is no action, or a row without any; names row, column and cell.
    """
    lines = text.removeprefix("\ufeff").splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    rows = [list(_actions(rank, line)) for rank, line in enumerate(lines)]
    if not rows:
        raise ScheduleError("there is no row; a schedule has a row for each rank")
    for rank, row in enumerate(rows):
        if not any(action.computes for action in row):
            raise ScheduleError(f"row {rank + 1} (rank {rank}): found no forward; a rank runs at least one stage")
    return rows


def _actions(rank: int, line: str) -> Iterator[Action]:
    place = 0
    for column, cell in enumerate(line.split(","), 1):
        token = cell.strip().strip('"').strip()
        pair = _PAIR.fullmatch(token)
        for part in pair[1].split(";") if pair else (token,) if token else ():
            found = _ONE.fullmatch(part.strip())
            numbered = found is not None and bool(found[3]) == (found[2] in (*_LETTERS, *_MESSAGES))
            if found is None or not numbered or (pair and found[2] not in _LETTERS):
                inside = f" in {token!r}" if pair else ""
                raise ScheduleError(f"{_where(rank, column)}: {part.strip()!r}{inside} is not an action; {_EXPECTED}")
            if found[2] not in _SHARDS:
                yield Action(int(found[1]), found[2], int(found[3] or -1), rank, place, column)
                place += 1


def _where(rank: int, column: int) -> str:
    return f"row {rank + 1} (rank {rank}), column {column}"


def check_sums(rows: Sequence[Sequence[Action]], rank_of: Sequence[int]) -> None:
    """Checks that a stage's gradients are summed once at most, on its own rank, behind its last backward.

    Raises:
        ScheduleError: they are not; names row, column and cell.
    """
    for row in rows:
        summed: dict[int, Action] = {}
        for action in row:
            _check_owner(action, rank_of)
            before = summed.get(action.stage)
            if before is not None and action.word in (_SUM, "B", "I", "W"):
                raise ScheduleError(
                    f"{action.where} stands behind the sum of stage {action.stage}'s gradients in column "
                    f"{before.column}; they are summed once, when all are there"
                )
            if action.word == _SUM:
                summed[action.stage] = action


def check_messages(rows: Sequence[Sequence[Action]], rank_of: Sequence[int]) -> None:
    """Checks the messages of a lowered file: each is needed, sent once and received once, on the right ranks, behind
    what makes it and before what reads it; what goes from one rank to another is received in the order in which it is
    sent; and no ranks wait for each other for ever. A file without messages says nothing about them.

    Raises:
        ScheduleError: a rule is broken; names row, column and cell.
    """
    messages = [action for row in rows for action in row if action.word in _MESSAGES]
    if not messages:
        return
    found: dict[tuple[int, str, int], Action] = {}
    for action in messages:
        _check_ends(action, rank_of)
        first = found.setdefault(action[:3], action)
        if first is not action:
            raise ScheduleError(f"{action.where} stands in column {first.column} too; a message goes once")
    # The gradient is what the whole backward, or its first half, reads and makes.
    ways = {"F": ("RECV_F", "SEND_F"), "B": ("RECV_B", "SEND_B"), "I": ("RECV_B", "SEND_B"), "W": ()}
    owned: set[tuple[int, str, int]] = set()
    for action in (action for row in rows for action in row if action.computes):
        for word in ways[action.word]:
            _check_message(action, word, found, rank_of)
            owned.add((action.stage, word, action.microbatch))
    for action in messages:
        if action[:3] not in owned:
            raise ScheduleError(
                f"{action.where} belongs to no pass: the file does not run microbatch {action.microbatch}"
            )
    _check_order(messages, rank_of)
    _check_progress(rows, rank_of)


def _check_owner(action: Action, rank_of: Sequence[int]) -> None:
    if action.stage >= len(rank_of) or rank_of[action.stage] != action.rank:
        owner = f"rank {rank_of[action.stage]}" if action.stage < len(rank_of) else "no rank"
        raise ScheduleError(f"{action.where} stands in the row of rank {action.rank}, but {owner} runs that stage")


def _peer(action: Action) -> tuple[int, str, int]:
    """Returns the other end of a message."""
    word = action.word
    other = ("RECV" if word.startswith("SEND") else "SEND") + word[-2:]
    return action.stage + _MESSAGES[word], other, action.microbatch


def _check_ends(action: Action, rank_of: Sequence[int]) -> None:
    _check_owner(action, rank_of)
    peer = _peer(action)[0]
    if not 0 <= peer < len(rank_of):
        raise ScheduleError(f"{action.where} needs a stage {peer}, but the stages are 0 to {len(rank_of) - 1}")
    if rank_of[peer] == action.rank:
        raise ScheduleError(
            f"{action.where} is a message to the rank itself, which runs stage {peer} too; drop it, it is handed over"
        )


def _check_message(
    action: Action, word: str, found: Mapping[tuple[int, str, int], Action], rank_of: Sequence[int]
) -> None:
    """Checks that what a pass reads is received before it, or that what it makes is sent behind it."""
    peer = action.stage + _MESSAGES[word]
    if not 0 <= peer < len(rank_of) or rank_of[peer] == action.rank:
        return
    wanted = f"{action.stage}{word}{action.microbatch}"
    message = found.get((action.stage, word, action.microbatch))
    if message is None:
        raise ScheduleError(
            f"{action.where}: the file has messages, but row {action.rank + 1} lacks {wanted}; give all of them or none"
        )
    if (message.place < action.place) == word.startswith("SEND"):
        side = "sends what that pass is yet to make" if word.startswith("SEND") else "comes too late for it"
        raise ScheduleError(f"{message.where} {side}: {action} stands in column {action.column}")


def _check_order(messages: Iterable[Action], rank_of: Sequence[int]) -> None:
    """Between two ranks messages have no names: the first that is received is the first that was sent."""
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for action in messages:
        peer = rank_of[_peer(action)[0]]
        if action.word.startswith("SEND"):
            sent[action.rank, peer].append(action)
        else:
            received[peer, action.rank].append(action)
    for pair in sent.keys() | received.keys():
        # As many: each end has been checked by the pass that it belongs to.
        for left, arrived in zip(sent[pair], received[pair], strict=True):
            if _peer(left) != arrived[:3]:
                raise ScheduleError(
                    f"{arrived.where} stands where {left} of rank {left.rank} (column {left.column}) arrives; between "
                    "two ranks messages are received in the order in which they are sent"
                )


def _check_progress(rows: Sequence[Sequence[Action]], rank_of: Sequence[int]) -> None:
    """Lets every rank go on as far as it can: a receive waits for its send, as in PyTorch's own dry run."""
    at = [0] * len(rows)
    sent: set[tuple[int, str, int]] = set()
    moving = True
    while moving:
        moving = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                if action.word.startswith("RECV") and _peer(action) not in sent:
                    break
                if action.word.startswith("SEND"):
                    sent.add(action[:3])
                at[rank] += 1
                moving = True
    stuck = [row[at[rank]] for rank, row in enumerate(rows) if at[rank] < len(row)]
    if stuck:
        waits = "; ".join(f"{action.where}, from rank {rank_of[_peer(action)[0]]}" for action in stuck)
        raise ScheduleError(f"these receives wait for each other for ever: {waits}")
