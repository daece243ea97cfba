"""A rank's instructions for the clock: flat tuples, made once, with indices that advance by a stride each turn.

They are executed a million times, so nothing is looked up by name. GIVE follows the backward in which a sum begins;
STEP is an update that a thread makes, JOIN its end. The instructions end with TURN or STOP.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipedream.core.schedule.op import Op
from pipedream.core.schedule.program import (
    FETCHES,
    Instruction,
    Move,
    Program,
    find_per_update,
)

OP, STEP, RECEIVE, SEND, SYNC, GIVE, NORM, TIED, FETCH, JOIN, TURN, STOP = range(12)


class CompiledInstruction(NamedTuple):
    """One instruction of a rank, in turn t of the period.

    Attributes:
        what: stage of an op; a channel's number; for GIVE, (stage, first update, its stride); for a wait, its cause
            and the stage: the barrier of a sum (`Costs.sum_s` or `ALL_RANKS`), for FETCH the (letter, stage) of the op
            that reads, for JOIN the stage.
        first, stride: its index is first + t x stride.
        limit: it exists if its index is below this.
        letter: of an op; "*" for a receive before which a forward is repeated.
    """

    code: int
    what: Any
    first: int
    stride: int
    limit: int
    letter: str
    source: Instruction | None


ALL_RANKS = -1
"""The barrier of a global norm, beside those of stages and of tied weights."""

_CODES = {
    Move.SEND: SEND,
    Move.RECEIVE: RECEIVE,
    Move.SYNC: SYNC,
    Move.TIED: TIED,
    Move.NORM: NORM,
    Move.JOIN_UPDATE: JOIN,
}
_CODES |= dict.fromkeys(FETCHES, FETCH)
_TURN = CompiledInstruction(TURN, 0, 0, 0, 0, "", None)
_STOP = CompiledInstruction(STOP, 0, 0, 0, 0, "", None)


@dataclass(frozen=True)
class CompiledRank:
    """The instructions of one rank: warm-up, then the period from `loop` on, repeated.

    Attributes:
        ops: their number in the run; only sends, and ends of updates, follow the last one.
    """

    instructions: tuple[CompiledInstruction, ...]
    loop: int
    ops: int

    def list_remainder(self, position: int, turn: int) -> list[CompiledInstruction]:
        """Returns what remains after the last op: its sends, and updates to join before ops that do not exist."""
        has_joins = any(instruction.code == JOIN for instruction in self.instructions)
        remaining: list[CompiledInstruction] = []
        turns = 0
        while True:
            code, what, first, stride, limit, letter, source = self.instructions[position]
            if code == TURN:
                # A period that has only sends ends here.
                position, turn, turns = self.loop, turn + 1, turns + 1
                if turns > 2:
                    break
                continue
            if code == STOP or not (has_joins or code in (SEND, GIVE)):
                break
            if code in (SEND, JOIN) and first + turn * stride < limit:
                remaining.append(CompiledInstruction(code, what, first + turn * stride, 0, limit, letter, source))
            position += 1
        return [*remaining, _STOP]


def compile_rank(
    program: Program, rank: int, total: int, *, early_sums: Collection[int], has_threads: bool
) -> CompiledRank:
    """Compiles a rank.

    Args:
        early_sums: stages whose sums begin in the backward.
        has_threads: updates of threads take place beside the passes, not in their place.
    """
    lowered = program.ranks[rank]
    text = (*lowered.warmup, *lowered.period)
    common_sums: list[CompiledInstruction] = []  # of several stages, before the next update
    instructions: list[CompiledInstruction] = []
    period_start = 0
    begins_sum = begins_update = repeats = False
    for position, instruction in enumerate(text):
        if position == len(lowered.warmup):
            period_start = len(instructions)
        if instruction.kind is Move.BEGIN_SUM:
            begins_sum = instruction.channel in early_sums
            continue
        if instruction.kind is Move.REPEAT:
            repeats = True
            continue
        if instruction.kind is Move.BEGIN_UPDATE:
            begins_update = has_threads
            continue
        if instruction.kind is Move.AVERAGE or (instruction.kind is Move.JOIN_UPDATE and not has_threads):
            continue  # averages are priced in the sums before all updates (`SumCosts`)
        compiled = _compile_instruction(program, instruction, total)
        if compiled.code == RECEIVE and repeats:
            compiled, repeats = compiled._replace(letter="*"), False
        if compiled.code in (TIED, NORM):
            if not (compiled.code == NORM and program.norm_delay):  # a delayed norm is known in time
                common_sums.append(compiled)
            continue
        if compiled.letter == "U":
            for common in common_sums:
                number = program.placement.stages + common.what[0] if common.code == TIED else ALL_RANKS
                instructions.append(common._replace(what=(number, compiled.what)))
            common_sums.clear()
            if begins_update:
                compiled, begins_update = compiled._replace(code=STEP), False
        instructions.append(compiled)
        if begins_sum and compiled.code == OP:
            update = program.updates.update_of(compiled.what, compiled.first)
            stride = program.cycle // program.updates.per_update[compiled.what]
            instructions.append(compiled._replace(code=GIVE, what=(compiled.what, update, stride)))
            begins_sum = False
    if lowered.period:
        return CompiledRank((*instructions, _TURN), period_start, program.op_count(rank, total))
    return CompiledRank((*instructions, _STOP), 0, program.op_count(rank, total))


def _compile_instruction(program: Program, instruction: Instruction, total: int) -> CompiledInstruction:
    what: Any
    if isinstance(instruction, Op):
        code, what, letter = OP, instruction.stage, instruction.kind.value
    else:
        code, what, letter = _CODES[instruction.kind], instruction.channel, ""
        if code == FETCH:
            what = (FETCHES[instruction.kind].value, what), what
        elif code in (SYNC, TIED, NORM, JOIN):
            what = what, what
    stride, limit = program.cycle, total
    if per_update := find_per_update(instruction, program.updates):
        stride, limit = stride // per_update, -(-total // per_update) + 1
    return CompiledInstruction(code, what, instruction.index, stride, limit, letter, instruction)
