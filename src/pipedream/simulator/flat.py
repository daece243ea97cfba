"""A rank's instructions as the clock reads them: flat tuples, made once, whose indices move on by a stride each turn.

An instruction is worked on a million times, so what it needs stands in it and nothing is looked up by name. Two things
that the program says by order alone get an instruction of their own: a rank has brought all its gradients of a sum
(GIVE, behind the last backward before it), and an update waits for those of all ranks (COUPLE, in front of it). TURN
and STOP stand at the end of the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.program import Instruction, Move, Program, moved

__all__ = [
    "COUPLE",
    "FETCH",
    "GIVE",
    "OP",
    "RECEIVE",
    "SEND",
    "STOP",
    "SYNC",
    "TURN",
    "FlatInstruction",
    "FlatRank",
    "flatten",
]

OP, RECEIVE, SEND, SYNC, GIVE, COUPLE, FETCH, TURN, STOP = range(9)

_BACKWARDS = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)  # with which a microbatch's gradients are there


class FlatInstruction(NamedTuple):
    """One instruction of a rank, in turn t of the period; plain tuples where the clock reads them.

    Attributes:
        code: what is done.
        what: stage of an op or a sum; a channel's number; of GIVE, stage, first update and its stride.
        first, stride: its index is first + t x stride.
        limit: it exists, if its index is below this.
        letter: of an op's kind.
        source: the instruction it comes from, in turn 0.
    """

    code: int
    what: Any
    first: int
    stride: int
    limit: int
    letter: str
    source: Instruction | None


_TURN = FlatInstruction(TURN, 0, 0, 0, 0, "", None)
_STOP = FlatInstruction(STOP, 0, 0, 0, 0, "", None)


@dataclass(frozen=True)
class FlatRank:
    """The flat instructions of one rank: warm-up, then the period from `loop` on, again and again.

    Attributes:
        instructions: the last one is TURN, or STOP where there is no period.
        loop: where the period begins.
        ops: ops of the run; when all are done, only the sends behind the last one are left.
    """

    instructions: tuple[FlatInstruction, ...]
    loop: int
    ops: int

    def behind(self, position: int, turn: int) -> list[FlatInstruction]:
        """Returns what is left when all ops are done: the sends that stand at a position and behind it."""
        left: list[FlatInstruction] = []
        turns = 0
        while True:
            code, what, first, stride, limit, letter, source = self.instructions[position]
            if code == TURN:
                # Instructions of other kinds end it; a period of sends alone would not.
                position, turn, turns = self.loop, turn + 1, turns + 1
                if turns > 2:
                    break
                continue
            if code not in (SEND, GIVE):
                break
            if code == SEND and first + turn * stride < limit:
                left.append(FlatInstruction(SEND, what, first + turn * stride, 0, limit, letter, source))
            position += 1
        return [*left, _STOP]


def flatten(program: Program, rank: int, total: int, *, gives: Iterable[int]) -> FlatRank:
    """Returns the flat instructions of a rank in a run of `total` microbatches.

    Args:
        program: whose.
        rank: which.
        total: microbatches of the run.
        gives: stages whose sums begin while the backward runs.
    """
    mine = program.ranks[rank]
    text = [*mine.warmup, *mine.period]
    loop = len(mine.warmup)
    given = {stage: _last_backwards(program, text, loop, stage) for stage in gives}
    flat: list[FlatInstruction] = []
    start = 0
    for position, instruction in enumerate(text):
        if position == loop:
            start = len(flat)
        one = _flat(program, instruction, total)
        # A delayed norm is known before it is asked for (`core.schedule.coupling`).
        if program.couples_updates and not program.norm_delay and one.letter == Kind.UPDATE.value:
            flat.append(one._replace(code=COUPLE))
        flat.append(one)
        sum_of = given[one.what].get(position) if one.code == OP and one.what in given else None
        if sum_of is not None:
            flat.append(one._replace(code=GIVE, what=(one.what, *sum_of)))
    if mine.period:
        return FlatRank((*flat, _TURN), start, sum(program.op_counts(rank, total)))
    return FlatRank((*flat, _STOP), 0, sum(program.op_counts(rank, total)))


def _flat(program: Program, instruction: Instruction, total: int) -> FlatInstruction:
    stride = moved(instruction, program.cycle, program.updates).index - instruction.index
    if isinstance(instruction, Op):
        what, letter = instruction.stage, instruction.kind.value
        code = FETCH if instruction.kind is Kind.FETCH else OP
        counts_updates = instruction.kind is Kind.UPDATE
    else:
        code = {Move.SEND: SEND, Move.RECEIVE: RECEIVE, Move.SYNC: SYNC}[instruction.kind]
        what, letter = instruction.channel, ""
        counts_updates = instruction.kind is Move.SYNC
    limit = program.updates.updates(what, total) + 1 if counts_updates else total
    return FlatInstruction(code, what, instruction.index, stride, limit, letter, instruction)


def _last_backwards(program: Program, text: list[Instruction], loop: int, stage: int) -> dict[int, tuple[int, int]]:
    """Returns where the last backwards before the sums of a stage stand, and of which update: first and stride.

    It is the last, where the next backward, sum or update of its stage is the sum. Behind the end follows the period's
    next turn.
    """
    cycle, updates = program.cycle, program.updates
    following = [*text, *(moved(instruction, cycle, updates) for instruction in text[loop:])]
    found: dict[int, tuple[int, int]] = {}
    before: int | None = None
    for position, instruction in enumerate(following):
        if isinstance(instruction, Op):
            if instruction.stage != stage:
                continue
            if instruction.kind in _BACKWARDS:
                before = position
            elif instruction.kind is Kind.UPDATE:
                before = None
        elif instruction.kind is Move.SYNC and instruction.channel == stage:
            if before is not None and before < len(text):
                found[before] = (instruction.index, cycle // updates.per_update[stage])
            before = None
    return found
