"""A rank's instructions for the clock: flat tuples, made once, with indices that advance by a stride each turn.

They are executed a million times, so nothing is looked up by name. GIVE follows the backward in which a sum begins;
STEP is an update that a thread makes, JOIN its end. The instructions end with TURN or STOP.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipedream.core.schedule import moves
from pipedream.core.schedule.moves import Move
from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.program import Instruction, Program, find_per_update

OP, STEP, RECEIVE, SEND, SUM, GIVE, FETCH, JOIN, TURN, STOP = range(10)


class CompiledInstruction(NamedTuple):
    """One instruction of a rank, in turn t of the period.

    Attributes:
        what: stage of an op; a channel's number; for GIVE, (stage, first update, its stride); for a wait, its cause
            and the stage: the barrier of a SUM (`Costs.sum_s`; below 0 those of all ranks, which cost nothing), for
            FETCH the (letter, stage) of the op that reads, for JOIN the stage.
        first, stride: its index is first + t x stride; that of JOIN is the op's before which it comes.
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


_TURN = CompiledInstruction(TURN, 0, 0, 0, 0, "", None)
_STOP = CompiledInstruction(STOP, 0, 0, 0, 0, "", None)


@dataclass(frozen=True)
class CompiledRank:
    """The instructions of one rank: warm-up, then the period from `loop` on, repeated.

    Attributes:
        ops: their number in the run; only sends follow the last one.
    """

    instructions: tuple[CompiledInstruction, ...]
    loop: int
    ops: int

    def list_remainder(self, position: int, turn: int) -> list[CompiledInstruction]:
        """Returns the sends that remain after the last op."""
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
            if code not in (SEND, GIVE):
                break
            if code == SEND and first + turn * stride < limit:
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
    joint: list[CompiledInstruction] = []  # of several stages, before the next update
    instructions: list[CompiledInstruction] = []
    period_start = 0
    before: set[Move] = set()  # what the text says before an op or a receive of how it takes place
    for position, instruction in enumerate(text):
        if position == len(lowered.warmup):
            period_start = len(instructions)
        kind = instruction.kind
        if kind in (moves.BEGIN_SUM, moves.REPEAT, moves.BEGIN_UPDATE):
            before.add(kind)
            continue
        if isinstance(kind, Move) and _is_free(program, kind, has_threads):
            continue
        compiled = _compile_instruction(program, instruction, total)
        code, stage = compiled.code, compiled.what
        if code == JOIN:  # if its op does not exist, the update need not be made now
            op = next(item for item in program.stream(rank, position) if isinstance(item, Op))
            instructions.append(_compile_instruction(program, op, total)._replace(code=JOIN, what=stage, letter=""))
        elif code == SUM and isinstance(kind, Move) and not (kind.at_stages or kind.follows):
            joint.append(compiled)
        elif code == RECEIVE and moves.REPEAT in before:
            instructions.append(compiled._replace(letter="*"))
            before.discard(moves.REPEAT)
        elif code == OP:
            if compiled.letter == "U":
                instructions += [barrier._replace(what=(barrier.what[0], stage)) for barrier in joint]
                joint.clear()
            in_thread = has_threads and moves.BEGIN_UPDATE in before
            instructions.append(compiled._replace(code=STEP) if in_thread else compiled)
            if moves.BEGIN_SUM in before and stage in early_sums:
                update, stride = program.updates.update_of(stage, compiled.first), program.updates.per_update[stage]
                instructions.append(compiled._replace(code=GIVE, what=(stage, update, program.cycle // stride)))
            before -= {moves.BEGIN_SUM, moves.BEGIN_UPDATE}
        else:
            instructions.append(compiled)
    if lowered.period:
        return CompiledRank((*instructions, _TURN), period_start, program.op_count(rank, total))
    return CompiledRank((*instructions, _STOP), 0, program.op_count(rank, total))


def _is_free(program: Program, move: Move, has_threads: bool) -> bool:
    """Returns whether a move takes no time where it stands."""
    if move is moves.JOIN_UPDATE:
        return not has_threads
    # Averages are priced in the sums before all updates (`SumCosts`); a delayed norm is known in time.
    is_known = move is moves.AVERAGE or (move is moves.NORM and bool(program.norm_delay))
    return is_known or (move in program.moves and not move.is_joint)


def _compile_instruction(program: Program, instruction: Instruction, total: int) -> CompiledInstruction:
    kind, number = instruction[:2]
    what: Any = (number, number)
    letter = ""
    if isinstance(kind, Kind):
        code, what, letter = OP, number, kind.value
    elif kind.counts == "channels":
        code, what = (SEND if kind is moves.SEND else RECEIVE), number
    elif kind in moves.FETCHES:
        code, what = FETCH, ((kind.kind.value, number), number)
    elif kind is moves.JOIN_UPDATE:
        code = JOIN
    else:
        code, what = SUM, (_number_barrier(program, kind, number), number)
    stride, limit = program.cycle, total
    if per_update := find_per_update(instruction, program.updates):
        stride, limit = stride // per_update, -(-total // per_update) + 1
    return CompiledInstruction(code, what, instruction.index, stride, limit, letter, instruction)


def _number_barrier(program: Program, move: Move, number: int) -> int:
    """Numbers barriers: of stages, then of tied weights; those of all ranks are negative."""
    if move.counts == "all ranks":
        return ~(moves.NORM, *program.moves).index(move)
    return number + program.placement.stages * (move.counts == "tied weights")
