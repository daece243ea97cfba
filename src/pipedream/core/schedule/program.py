"""The Program: a schedule with its messages as finite text, verified once and run for any number of microbatches.

Each rank has a warm-up and a period; in repetition t of the period each index is t strides greater. A drain is the same
stream without the instructions of microbatches beyond the run.

Text form: ``2F5`` an op; ``>3:5`` send microbatch 5 on channel 3; ``<3:5`` receive it. Sums before update 2: ``=0:2``
of the gradients over the replicas of stage 0; ``~1:2`` of those of the tied weights number 1 over their holders;
``|0:2`` of squared norms over all ranks. In memory that ranks share, ``^F0:5`` waits for the weights that 0F5 reads,
``^B0:5`` for the buffers that 0B5 continues from, ``^U0:2`` for the gradients of 0U2. ``*0:5`` repeats 0F5 while the
gradient of its output is on its way; ``+0:5`` begins the sum of stage 0's gradients within 0B5. ``{0:2`` lets a thread
make 0U2 beside the ops that follow; ``}0:2`` waits until it is made. ``@0:2`` averages the weights of stage 0 over its
replicas after 0U2, if a period of updates has ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, get_type_hints

from pipedream.core.artifact import Artifact, decode
from pipedream.core.errors import ArtifactError, ScheduleError
from pipedream.core.plan.placement import Carries, Placement
from pipedream.core.schedule import moves
from pipedream.core.schedule.moves import Move, Transfer
from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.rules import Rules, UpdateRule
from pipedream.core.tabular import Tabular

Instruction = Op | Transfer


class Route(NamedTuple):
    """A channel between stages, on whatever ranks they are."""

    carries: Carries
    source: int
    target: int
    depth: int


MAX_AHEAD = 8
"""Limit of a channel's depth."""


@dataclass(frozen=True)
class Channel:
    """One direction between a stage's rank and another's, first in, first out.

    Attributes:
        depth: receives that are posted ahead; receive i waits for the consumer of receive i - depth.
    """

    sender: int
    receiver: int
    carries: Carries
    source: int
    target: int
    depth: int = 2

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(f"depth must be at least 1, found {self.depth}")


@dataclass(frozen=True)
class RankProgram:
    """The instructions of a rank: a warm-up, then a period that repeats."""

    warmup: tuple[Instruction, ...]
    period: tuple[Instruction, ...]

    def encoded(self) -> dict[str, str]:
        return {"warmup": format_instructions(self.warmup), "period": format_instructions(self.period)}


@dataclass(frozen=True, kw_only=True, repr=False)
class Program(Tabular, Rules, Artifact):
    """A lowered schedule: its rules, and the instructions of each rank.

    Attributes:
        cycle: microbatches by which one period advances.
    """

    FORMAT = 1

    cycle: int
    channels: tuple[Channel, ...]
    ranks: tuple[RankProgram, ...]

    def __post_init__(self) -> None:
        stages, workers = self.placement.stages, self.placement.workers
        if len(self.ranks) != workers:
            raise ValueError(f"the placement has {workers} ranks, the program is for {len(self.ranks)}")
        if len(self.plan.stages) != stages or len(self.updates.per_update) != stages:
            raise ValueError(
                f"the placement has {stages} stages, the plan {len(self.plan.stages)}, the update rule "
                f"{len(self.updates.per_update)}"
            )
        shortest_cycle = self.shortest_cycle
        if shortest_cycle < 1 or self.cycle < 1 or self.cycle % shortest_cycle:
            raise ValueError(
                f"a cycle must be a whole number of rounds ({self.placement.cycle} microbatches), minibatches "
                f"({self.microbatches}) and updates {self.updates.per_update}, found {self.cycle}"
            )

    @cached_property
    def fetched_gradients(self) -> frozenset[int]:
        """The stages whose passes leave their gradients in shared memory, also those on the rank of the updates."""
        return frozenset(item[1] for rank in self.ranks for item in rank.period if item.kind is moves.FETCH_GRADIENTS)

    @property
    def round_minibatches(self) -> int:
        """A drain waits for a multiple of so many minibatches, so that every round of replicas is complete."""
        return self.placement.cycle if self.updates.mean_of_rounds else 1

    def stream(self, rank: int, begin: int = 0) -> Iterator[Instruction]:
        """Yields a rank's instructions without end, from number `begin` on."""
        rank_program = self.ranks[rank]
        yield from rank_program.warmup[begin:]
        if not rank_program.period:
            return
        laps, position = divmod(max(0, begin - len(rank_program.warmup)), len(rank_program.period))
        strides = [count_indices(item, self.cycle, self.updates) for item in rank_program.period]
        while True:
            for instruction, stride in zip(rank_program.period[position:], strides[position:], strict=True):
                yield _shift(instruction, laps * stride) if laps else instruction
            laps, position = laps + 1, 0

    def instructions(self, rank: int, total: int, executed: int = 0) -> Iterator[Instruction]:
        """Yields the instructions of a rank for a run of `total` microbatches, drain included.

        Args:
            executed: instructions that the rank executed before it knew the total. All of them exist, except that the
                last may be the op that found the end.
        """
        exists = self.exists(total)
        missing = self.count_work(rank, total) - self._count_work_before(rank, executed, exists)
        # Indices only grow: what a whole period lacks, no later one has.
        max_idle = len(self.ranks[rank].warmup) + len(self.ranks[rank].period)
        idle = 0
        before_op: list[Transfer] = []
        late_joins: list[Transfer] = []  # of updates that were to be made before ops which do not exist
        for instruction in self.stream(rank, executed):
            # The sends after the last op still belong to it. An update is joined before an op that may not exist.
            if not missing and instruction.kind is not moves.SEND:
                break
            is_in_run = exists(instruction)
            idle = 0 if is_in_run else idle + 1
            if idle > max_idle:
                raise ScheduleError(f"program {self.name!r}: rank {rank} lacks {missing} ops of {total} microbatches")
            missing -= is_in_run and is_work(instruction)
            if isinstance(instruction, Transfer):
                before_op += [instruction] * is_in_run
                continue
            if is_in_run:
                due_joins = [join for join in late_joins if moves.needs_join(self, rank, instruction, join)]
                late_joins = [join for join in late_joins if join not in due_joins]
                yield from due_joins
                yield from before_op
                yield instruction
            else:
                late_joins += [item for item in before_op if item.kind is moves.JOIN_UPDATE]
                yield from (item for item in before_op if item.kind is not moves.JOIN_UPDATE)
            before_op.clear()
        late_joins += [item for item in before_op if item.kind is moves.JOIN_UPDATE]
        yield from (*(item for item in before_op if item.kind is not moves.JOIN_UPDATE), *late_joins)

    def count_work(self, rank: int, total: int) -> int:
        """Returns how many ops and ends of updates (`is_work`) a rank has in a run."""
        ends = sum(self.updates.updates(stage, total) for _, stage in self._update_ends[rank])
        return self.op_count(rank, total) + ends

    @cached_property
    def _update_ends(self) -> list[set[tuple[Any, int]]]:
        """The kinds and stages of each rank's ends of updates."""
        texts = ((*rank.warmup, *rank.period) for rank in self.ranks)
        return [{item[:2] for item in text if isinstance(item, Transfer) and is_work(item)} for text in texts]

    def _count_work_before(self, rank: int, executed: int, exists: Callable[[Instruction], bool]) -> int:
        """Counts the work among a rank's `executed` instructions; see `instructions`."""
        rank_program = self.ranks[rank]
        count = _count_work(rank_program.warmup[:executed])
        if executed > len(rank_program.warmup):
            laps, position = divmod(executed - len(rank_program.warmup), len(rank_program.period))
            count += laps * _count_work(rank_program.period) + _count_work(rank_program.period[:position])
        if executed:
            last = next(self.stream(rank, executed - 1))
            count -= isinstance(last, Op) and not exists(last)
        return count

    def exists(self, total: int) -> Callable[[Instruction], bool]:
        """Returns the function that says whether an instruction belongs to a run of `total` microbatches."""

        limits: dict[tuple[Any, ...], int] = {}

        def is_in_run(instruction: Instruction) -> bool:
            if (key := instruction[:2]) not in limits:
                per_update = find_per_update(instruction, self.updates)
                limits[key] = total if per_update is None else -(-total // per_update) + 1
            return instruction.index < limits[key]

        return is_in_run

    def describe(self, instruction: Instruction) -> str:
        """Returns an instruction in words: ``stage 1, 1F17`` or ``stage 1, receiving activation of microbatch 17``."""
        if isinstance(instruction, Op):
            return f"stage {instruction.stage}, {instruction}"
        move, number, index = instruction
        if move.counts == "channels":
            channel = self.channels[number]
            stage = channel.source if move is moves.SEND else channel.target
            return f"stage {stage}, {move.words} {channel.carries} {move.when} {index}"
        stage_words = f"stage {number}, " if move.at_stages else ""
        return f"{stage_words}{move.words} {move.when} {index}"

    @classmethod
    def decoded(cls, value: Any, where: str) -> Program:
        """Reads JSON values, in which instructions are text."""
        value = dict(value)
        hints = get_type_hints(cls)
        names = {field.name for field in fields(cls)} - {"moves"}
        missing, unknown = sorted(names - set(value)), sorted(set(value) - names)
        if missing or unknown:
            raise ArtifactError(f"{where} lacks the fields {missing} and has unknown fields {unknown}")
        placement = decode(Placement, value.pop("placement"), f"{where}.placement")
        rows = decode(tuple[dict[str, str], ...], value.pop("ranks"), f"{where}.ranks")
        ranks = tuple(
            RankProgram(
                _parse(row.get("warmup", ""), placement, rank, f"{where}.ranks[{rank}].warmup"),
                _parse(row.get("period", ""), placement, rank, f"{where}.ranks[{rank}].period"),
            )
            for rank, row in enumerate(rows)
        )
        kinds = (item.kind for row in ranks for item in (*row.warmup, *row.period) if isinstance(item, Transfer))
        own_moves = tuple(dict.fromkeys(kind for kind in kinds if kind.value not in moves.LIBRARY))
        other_fields: dict[str, Any] = {"moves": own_moves}
        other_fields |= {name: decode(hints[name], item, f"{where}.{name}") for name, item in value.items()}
        try:
            return cls(placement=placement, ranks=ranks, **other_fields)
        except ValueError as error:
            raise ArtifactError(f"{where}: {error}") from None

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each instruction of the warm-up and of one period.

        `stage` computes, sends or receives, None for several; `index` is a microbatch or an update.
        """
        rows = []
        for rank, rank_program in enumerate(self.ranks):
            for part, instructions in (("warmup", rank_program.warmup), ("period", rank_program.period)):
                for position, instruction in enumerate(instructions):
                    cells = {"rank": rank, "part": part, "position": position, "instruction": str(instruction)}
                    rows.append(
                        cells
                        | {
                            "kind": instruction.kind.value,
                            "stage": self._find_stage(instruction),
                            "index": instruction.index,
                        }
                    )
        return rows

    def _find_stage(self, instruction: Instruction) -> int | None:
        if isinstance(instruction, Op) or instruction.kind.at_stages:
            return instruction[1]
        if instruction.kind.counts != "channels":
            return None
        channel = self.channels[instruction.channel]
        return channel.source if instruction.kind is moves.SEND else channel.target

    def __str__(self) -> str:
        head = f"Program {self.name}, plan {self.plan.config}, {self.microbatches} microbatches a minibatch"
        rows = [
            f"rank {rank}: {format_instructions(rank_program.warmup)} | ( {format_instructions(rank_program.period)} )"
            for rank, rank_program in enumerate(self.ranks)
        ]
        return "\n".join([head, *rows])


def is_work(instruction: Instruction) -> bool:
    """Returns whether a rank has to execute an instruction before it has ended: an op, or the end of an update."""
    if isinstance(instruction, Op):
        return True
    return instruction.kind is moves.JOIN_UPDATE or (instruction.kind.follows and instruction.kind.at_updates)


def _count_work(instructions: tuple[Instruction, ...]) -> int:
    return sum(map(is_work, instructions))


def advance_instruction(instruction: Instruction, microbatches: int, updates: UpdateRule) -> Instruction:
    """Returns an instruction, advanced by some microbatches (a multiple of the cycle)."""
    return _shift(instruction, count_indices(instruction, microbatches, updates))


def _shift(instruction: Instruction, stride: int) -> Instruction:
    if isinstance(instruction, Op):
        kind, stage, index, replica = instruction
        return Op(kind, stage, index + stride, replica)
    return Transfer(instruction.kind, instruction.channel, instruction.index + stride)


def count_indices(instruction: Instruction, microbatches: int, updates: UpdateRule) -> int:
    """Returns an instruction's index increment over some microbatches (a multiple of the cycle)."""
    per_update = find_per_update(instruction, updates)
    return microbatches if per_update is None else microbatches // per_update


def find_per_update(instruction: Instruction, updates: UpdateRule) -> int | None:
    """Returns the microbatches of an update, or of that after a sum; None for an instruction of one microbatch."""
    kind, stage = instruction[:2]
    if isinstance(kind, Kind):
        return updates.per_update[stage] if kind is Kind.UPDATE else None
    # The updates of stages that wait for each other have the same microbatches.
    return updates.per_update[stage if kind.at_stages else 0] if kind.at_updates else None


def format_instructions(instructions: tuple[Instruction, ...]) -> str:
    """Returns the text form."""
    return " ".join(map(str, instructions))


def _parse(text: str, placement: Placement, rank: int, where: str) -> tuple[Instruction, ...]:
    replica_of = {**dict(placement.passes(rank, forward=True)), **dict(placement.passes(rank, forward=False))}
    replica_of |= dict(placement.stage_replicas(rank))
    instructions: list[Instruction] = []
    for token in text.split():
        op = re.fullmatch(r"(\d+)([FBIWU])(\d+)", token)
        transfer = re.fullmatch(r"(\W+[FBU]?)(\d+):(\d+)", token)
        if op and int(op[1]) in replica_of:
            instructions.append(Op(Kind(op[2]), int(op[1]), int(op[3]), replica_of[int(op[1])]))
        elif transfer and transfer[1] in Move.by_signs:
            instructions.append(Transfer(Move.by_signs[transfer[1]], int(transfer[2]), int(transfer[3])))
        else:
            raise ArtifactError(f"{where}: {token!r} is not an instruction of this rank")
    return tuple(instructions)
