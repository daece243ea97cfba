"""Lowering: turns a Schedule, the order of ops, into a Program, which also has the messages.

1. Each op gets its messages, and what it waits for besides: sums, and what other ranks leave in shared memory. Targets
   go directly from the input stage to the output stage. A forward is repeated before the gradient of its output is
   received. A sum begins within the last backward before its update. An update that a thread makes is joined before the
   first op that needs it. An average of weights follows an update.
2. Each direction across a boundary between two ranks has its own channel: sharing one would deadlock two stages.
3. The endless order of each rank is folded into a warm-up and a period, and the fold is checked.

A send should find its receive posted. So the depth of a channel is the difference of the two stages' microbatches in
flight, divided among the channels between them, plus one; at most `MAX_AHEAD`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import chain, islice
from math import lcm
from operator import mul

from pipedream.core.errors import ScheduleError
from pipedream.core.plan.placement import Carries, Placement
from pipedream.core.schedule import moves
from pipedream.core.schedule.moves import Transfer, list_ends, list_waits, needs_join
from pipedream.core.schedule.op import Kind, Op, find_gradient_kind, find_last_kind
from pipedream.core.schedule.program import (
    MAX_AHEAD,
    Channel,
    Instruction,
    Program,
    RankProgram,
    Route,
    advance_instruction,
    count_indices,
)
from pipedream.core.schedule.rules import Rules
from pipedream.core.schedule.schedule import Schedule

MAX_PROVED = 4096
"""Limit of the workers, and of the microbatches in a round of all replicas: a proof unrolls two periods."""

_Cargo = tuple[Carries, int]  # and the stage that sends it
_Numbers = list[int | None]  # the channel of each microbatch of a round; None: both ends are on one rank
_FindNumbers = Callable[[Kind, int], tuple[list[_Numbers], list[_Numbers]]]
"""Returns, for ops of a kind at a stage, the channels of what each receives and sends."""


def lower(schedule: Schedule) -> Program:
    """Returns a schedule's program.

    Raises:
        ScheduleError: the order has no period, or one that is too long to be proved; or stages that share weights do
            not all make the same updates.
    """
    schedule = schedule.with_tied_weights()
    if why := explain_unproved(schedule.placement):
        raise ScheduleError(why)
    channels, numbers = _make_channels(schedule.placement, schedule.plan.in_flight)

    @cache
    def find_numbers(kind: Kind, stage: int) -> tuple[list[_Numbers], list[_Numbers]]:
        received, sent = _list_arrivals(kind, stage, schedule), _list_departures(kind, stage, schedule)
        return [numbers[cargo] for cargo in received], [numbers[cargo] for cargo in sent]

    ranks = tuple(_fold(schedule, rank, find_numbers) for rank in range(schedule.placement.workers))
    rules = {field.name: getattr(schedule, field.name) for field in fields(Rules)}
    return Program(**rules, cycle=schedule.cycle, channels=channels, ranks=ranks)


def explain_unproved(placement: Placement) -> str:
    """Returns why no program of a placement can be proved; '' if one can."""
    if max(placement.workers, placement.cycle) <= MAX_PROVED:
        return ""
    if placement.rotates:
        return (
            f"workers were asked to take turns of {placement.turn} microbatches: the program repeats after "
            f"{placement.cycle}; up to {MAX_PROVED} can be proved; choose fewer microbatches or workers, or no delay"
        )
    return (
        f"a program for {placement.workers} workers with replica counts {placement.replicas} was asked for: it repeats "
        f"after {placement.cycle} microbatches (their common multiple); up to {MAX_PROVED} can be proved; choose "
        "fewer workers, or counts that divide each other"
    )


def with_common_channels(programs: Sequence[Program]) -> tuple[Program, ...]:
    """Returns the programs with common channels, as deep as any of them needs, so that they can take turns in a run."""
    first = programs[0]
    for other in programs[1:]:
        routes = [[(c.sender, c.receiver, c.carries, c.source, c.target) for c in p.channels] for p in (first, other)]
        if other.placement != first.placement or routes[0] != routes[1]:
            raise ScheduleError(
                f"schedules {first.name!r} and {other.name!r} were asked for in one run: their stages live on "
                "other ranks, or their messages go other ways, and a change of phase moves no weights; take methods of "
                "one placement"
            )
    depths = [max(c.depth for c in ends) for ends in zip(*(p.channels for p in programs), strict=True)]
    common = tuple(replace(c, depth=depth) for c, depth in zip(first.channels, depths, strict=True))
    return tuple(replace(program, channels=common) for program in programs)


def _make_channels(
    placement: Placement, in_flight: tuple[int, ...]
) -> tuple[tuple[Channel, ...], dict[_Cargo, _Numbers]]:
    """Returns the channels, and the numbers of those of each cargo."""
    last = placement.stages - 1
    routes: list[Route] = []
    for stage in range(last):
        replicas, next_replicas = placement.replicas[stage], placement.replicas[stage + 1]
        difference = in_flight[stage] * replicas - in_flight[stage + 1] * next_replicas
        ahead = max(2, -(-difference // lcm(replicas, next_replicas)) + 1)
        routes += [Route(Carries.ACTIVATION, stage, stage + 1, ahead), Route(Carries.GRADIENT, stage + 1, stage, ahead)]
    if last:
        routes.append(Route(Carries.INPUT, 0, last, max(2, in_flight[0])))
    routes += [
        Route(Carries.STAGE_INPUT, s, s, MAX_AHEAD) for s in range(last + 1) if placement.runs_backward_elsewhere(s)
    ]
    channels: dict[Channel, int] = {}
    numbers: dict[_Cargo, _Numbers] = {}
    for carries, source, target, depth in routes:
        ends = (placement.ends(carries, source, target, k) for k in range(placement.cycle))
        numbers[carries, source] = [
            None
            if sender == receiver
            else channels.setdefault(
                Channel(sender, receiver, carries, source, target, min(depth, MAX_AHEAD)), len(channels)
            )
            for sender, receiver in ends
        ]
    return tuple(channels), numbers


def _expand(op: Op, waits: Sequence[Transfer], find_numbers: _FindNumbers, repeats: bool) -> list[Instruction]:
    """Returns an op with its transfers; those of the same op one cycle later are shifted by that cycle.

    Args:
        repeats: the last message that the op receives is a gradient, and the forward is repeated first.
    """
    kind, stage, k, _ = op
    received, sent = find_numbers(kind, stage)
    numbers = [row[k % len(row)] for row in received]
    receives = [Transfer(moves.RECEIVE, number, k) for number in numbers if number is not None]
    if repeats and numbers[-1] is not None:
        receives.insert(-1, Transfer(moves.REPEAT, stage, k))
    # A forward copies weights when all else is there; a repeated one needs them before its gradient arrives.
    first, second = (receives, waits) if kind is Kind.FORWARD else (waits, receives)
    return [
        *first,
        *second,
        op,
        *[Transfer(moves.SEND, number, k) for row in sent if (number := row[k % len(row)]) is not None],
    ]


def _list_arrivals(kind: Kind, stage: int, rules: Rules) -> Iterator[_Cargo]:
    last = rules.placement.stages - 1
    if kind is Kind.FORWARD and stage:
        if stage == last:
            yield Carries.INPUT, 0
        yield Carries.ACTIVATION, stage - 1
    elif kind is find_gradient_kind(rules.kinds):
        if rules.placement.runs_backward_elsewhere(stage):
            yield Carries.STAGE_INPUT, stage
        if stage < last:
            yield Carries.GRADIENT, stage + 1


def _list_departures(kind: Kind, stage: int, rules: Rules) -> Iterator[_Cargo]:
    last = rules.placement.stages - 1
    if kind is Kind.FORWARD:
        if stage < last:
            yield Carries.ACTIVATION, stage
            if not stage:  # targets last: the last stage waits for them first, and wakes when all has come
                yield Carries.INPUT, 0
        if rules.trains and rules.placement.runs_backward_elsewhere(stage):
            yield Carries.STAGE_INPUT, stage
    elif kind is find_gradient_kind(rules.kinds) and stage:
        yield Carries.GRADIENT, stage


def _fold(schedule: Schedule, rank: int, find_numbers: _FindNumbers) -> RankProgram:
    """Finds the shortest warm-up before a rank's instructions repeat."""
    cycle = schedule.cycle
    max_in_flight = max(map(mul, schedule.plan.in_flight, schedule.placement.replicas))
    steady = (max_in_flight // cycle + 2) * cycle  # every warm-up has ended by this microbatch
    placement = schedule.placement
    forwards = placement.passes(rank, forward=True)
    if not forwards and len(schedule.kinds) == 1:
        return RankProgram((), ())  # other ranks run the forwards of all its stages
    anchor_kind = Kind.FORWARD if forwards else Kind.BACKWARD  # a rank may have backwards alone
    window: list[Op] = []
    anchor_positions: list[int] = []  # positions in `window`, one cycle apart
    max_ops = 100 * (steady + 3 * cycle) * len(forwards or placement.stage_replicas(rank)) + 1000
    next_anchor: Instruction | None = None
    for op in islice(schedule.order(rank), max_ops):
        if op.kind is anchor_kind and (op == next_anchor if anchor_positions else op.index >= steady):
            anchor_positions.append(len(window))
            next_anchor = advance_instruction(op, cycle, schedule.updates)
        window.append(op)
        if len(anchor_positions) > 2:
            break
    if len(anchor_positions) < 2:
        raise ScheduleError(f"schedule {schedule.name!r}: the order of rank {rank} does not settle into a period")
    start, second = anchor_positions[:2]
    length = second - start

    joins = _find_joins(schedule, rank, window)

    def repeats(i: int) -> bool:
        op, later = window[i], window[i + length]
        advance = count_indices(op, cycle, schedule.updates)
        if later.index - op.index != advance or later[:2] != op[:2] or later.replica != op.replica:
            return False
        if not joins:
            return True
        advanced = [advance_instruction(join, cycle, schedule.updates) for join in joins.get(i, ())]
        return advanced == joins.get(i + length, [])

    while start and repeats(start - 1):
        start -= 1
    # A period must contain all ops of a cycle; otherwise only a run of equal ops repeats.
    if length != (due := schedule.op_count(rank, cycle)) or not all(
        repeats(i) for i in range(start, len(window) - length)
    ):
        counts = f": it has {length} ops there, not {due}; run each pass and update once" if length != due else ""
        raise ScheduleError(
            f"schedule {schedule.name!r}: the order of rank {rank} does not repeat itself every {cycle} microbatches"
            f"{counts}"
        )
    instructions = _place(schedule, rank, window, start + length, joins, find_numbers)
    warmup, period = (list(chain.from_iterable(part)) for part in (instructions[:start], instructions[start:]))
    # The last transfers of the warm-up may repeat although their op does not.
    while warmup and period[-1] == advance_instruction(warmup[-1], cycle, schedule.updates):
        period = [warmup.pop(), *period[:-1]]
    return RankProgram(tuple(warmup), tuple(period))


def _place(
    schedule: Schedule,
    rank: int,
    window: Sequence[Op],
    end: int,
    joins: Mapping[int, list[Transfer]],
    find_numbers: _FindNumbers,
) -> list[list[Instruction]]:
    """Returns the ops of a window before its `end`, each with what belongs to it."""
    placement = schedule.placement
    updated: set[int] = set()
    instructions: list[list[Instruction]] = []
    begin_sums = _find_last_gradients(schedule, window) if max(placement.replicas) > 1 else ()
    gradient_kind = find_gradient_kind(schedule.kinds)
    repeating = {stage for stage in range(placement.stages - 1) if schedule.recomputes(stage)}
    for number, op in enumerate(window[:end]):
        waits = [*joins.get(number, ()), *list_waits(schedule, rank, op, is_first=op.index not in updated)]
        if op.kind is Kind.UPDATE:
            updated.add(op.index)
            if schedule.overlaps_update(op.stage):
                waits.append(Transfer(moves.BEGIN_UPDATE, op.stage, op.index))
        if number in begin_sums:
            waits.append(Transfer(moves.BEGIN_SUM, op.stage, op.index))
        repeats_forward = op.stage in repeating and op.kind is gradient_kind
        instructions.append([*_expand(op, waits, find_numbers, repeats_forward), *list_ends(schedule, rank, op)])
    return instructions


def _find_joins(schedule: Schedule, rank: int, window: Sequence[Op]) -> dict[int, list[Transfer]]:
    """Returns the updates made by a thread that are joined before ops, by position."""
    overlapping = [stage for stage, _ in schedule.placement.stage_replicas(rank) if schedule.overlaps_update(stage)]
    joins: dict[int, list[Transfer]] = {}
    begun: dict[int, Transfer] = {}  # stage -> the join of its update
    for position, op in enumerate(window if overlapping else ()):
        if op.stage not in overlapping:
            continue
        due_joins = [
            begun[stage] for stage in overlapping if stage in begun and needs_join(schedule, rank, op, begun[stage])
        ]
        if due_joins:
            joins[position] = [begun.pop(join.channel) for join in due_joins]
        if op.kind is Kind.UPDATE:
            begun[op.stage] = Transfer(moves.JOIN_UPDATE, op.stage, op.index)
    return joins


def _find_last_gradients(schedule: Schedule, window: Sequence[Op]) -> set[int]:
    """Returns the positions of the ops that complete a replicated stage's gradients for an update."""
    last_kind = find_last_kind(schedule.kinds)
    positions: set[int] = set()
    waiting: set[int] = set()  # stages whose next update needs a sum
    for position in reversed(range(len(window))):
        kind, stage, _, _ = window[position]
        if kind is Kind.UPDATE and schedule.placement.replicas[stage] > 1:
            waiting.add(stage)
        elif kind is last_kind and stage in waiting:
            waiting.discard(stage)
            positions.add(position)
    return positions
