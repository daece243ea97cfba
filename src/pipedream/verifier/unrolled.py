"""A program unrolled for one number of microbatches, and the rules that do not depend on how ranks interleave:

each op is done once and on its rank, and after what it needs; each message is sent and received once, in one order; all
replicas join each sum; and the runtime's further assumptions about each stage replica (`check_assumptions`):

- Forwards take microbatches in order: a stream ends at the first that does not exist.
- An update takes all gradients since the previous one, so they must not include those of another update.
- Each sum over replicas is followed by its update.
- An update that a thread makes is joined before an op that needs it, and before the end.
- Version numbers never decrease, so that older ones can be dropped; under the backward rule 'stash' a backward reads
  what its forward read.
"""

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

from pipedream.core.errors import ScheduleError
from pipedream.core.plan.placement import Carries
from pipedream.core.schedule import moves
from pipedream.core.schedule.moves import Transfer, list_ends, list_waits
from pipedream.core.schedule.op import Kind, Op, find_gradient_kind, find_last_kind
from pipedream.core.schedule.program import Instruction, Program
from pipedream.core.schedule.rules import is_in_shared_memory

Message = tuple[int, int]
"""A (channel, microbatch)."""

Place = tuple[int, int]
"""A (rank, position in its stream)."""


@dataclass(frozen=True)
class Unrolled:
    """One finite run of a program, indexed.

    Attributes:
        sent, received: position of each message at its two ends.
        sums: (rank, sum) -> position at which the rank joins it.
        steps: (rank, what it does at a stage beside ops and sums) -> position.
    """

    program: Program
    total: int
    streams: tuple[tuple[Instruction, ...], ...]
    ops: dict[Op, Place] = field(default_factory=dict)
    sent: dict[Message, int] = field(default_factory=dict)
    received: dict[Message, int] = field(default_factory=dict)
    sequences: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    sums: dict[tuple[int, Transfer], int] = field(default_factory=dict)
    steps: dict[tuple[int, Transfer], int] = field(default_factory=dict)

    @cached_property
    def routes(self) -> dict[tuple[int, int, Carries, int, int], int]:
        """(sender, receiver, carries, source, target) -> channel."""
        channels = enumerate(self.program.channels)
        return {(c.sender, c.receiver, c.carries, c.source, c.target): number for number, c in channels}

    @cached_property
    def recomputing(self) -> set[int]:
        """The stages whose backwards repeat their forwards."""
        return {stage for stage in range(self.program.placement.stages) if self.program.recomputes(stage)}

    @cached_property
    def has_threads(self) -> bool:
        return any(step.kind is moves.BEGIN_UPDATE for _, step in self.steps)

    def error(self, rank: int, position: int, reason: str) -> ScheduleError:
        program = self.program
        return ScheduleError(
            f"program {program.name!r}, plan {program.plan.config}, a run of {self.total} microbatches: rank "
            f"{rank}, instruction {position}, {self.streams[rank][position]}: {reason}; nothing was run, fix the "
            "schedule's order or its lowering"
        )

    def producer(self, message: Message) -> Op:
        """Returns the op whose result a message carries."""
        number, k = message
        channel = self.program.channels[number]
        return self._find_pass(channel.carries == Carries.GRADIENT, channel.source, k)

    def consumer(self, message: Message) -> Op:
        """Returns the op that frees the message's place in the ring."""
        number, k = message
        channel = self.program.channels[number]
        return self._find_pass(channel.carries in (Carries.GRADIENT, Carries.STAGE_INPUT), channel.target, k)

    def _find_pass(self, goes_back: bool, stage: int, k: int) -> Op:
        kind = find_gradient_kind(self.program.kinds) if goes_back else Kind.FORWARD
        return Op(kind, stage, k, self.program.placement.replica(stage, k))


def unroll(program: Program, total: int) -> Unrolled:
    """Unrolls a program, and checks the rules that do not depend on how its ranks interleave."""
    ranks = range(program.placement.workers)
    run = Unrolled(program, total, tuple(_read_stream(program, rank, total) for rank in ranks))
    for rank in ranks:
        _index_stream(run, rank)
        _check_complete(program, rank, total, run.ops)
    _check_messages(run)
    _check_steps(run)
    last = program.placement.stages - 1
    # The targets must reach the last stage, whether or not the program has a channel for them.
    inputs = {(c.source, c.target) for c in program.channels if c.carries == Carries.INPUT} | (
        {(0, last)} if last else set()
    )
    for op, (rank, position) in run.ops.items():
        _check_needs(run, op, rank, position)
        for source, target in inputs:
            if op.kind is Kind.FORWARD and op.stage == target:
                need = Op(Kind.FORWARD, source, op.index, program.placement.replica(source, op.index))
                check_arrival(run, op, need, run.ops[need][0], Carries.INPUT)
    return run


def _read_stream(program: Program, rank: int, total: int) -> tuple[Instruction, ...]:
    stream: list[Instruction] = []
    try:
        stream.extend(program.instructions(rank, total))
    except ScheduleError:
        _check_complete(program, rank, total, set(stream))
        raise
    return tuple(stream)


def _check_complete(program: Program, rank: int, total: int, present: Collection[Instruction]) -> None:
    ops = (op for row in program.expected_ops(rank, total) for op in row.ops())
    missing = [op for op in ops if op not in present]
    if missing:
        first = min(missing, key=lambda op: (op.stage, op.kind is Kind.UPDATE, op.index))
        raise ScheduleError(
            f"program {program.name!r}: rank {rank} lacks {first} in a run of {total} microbatches; each op of "
            "each microbatch must come once"
        )


def _index_stream(run: Unrolled, rank: int) -> None:
    placement, channels = run.program.placement, run.program.channels
    stage_replicas = set(placement.stage_replicas(rank))
    updates = [Op(Kind.UPDATE, stage, 1, replica) for stage, replica in stage_replicas]
    waits = [item for op in updates for item in (*list_waits(run.program, rank, op), *list_ends(run.program, rank, op))]
    summed = {item[:2] for item in waits}
    passes = {is_forward: set(placement.passes(rank, forward=is_forward)) for is_forward in (True, False)}
    for position, instruction in enumerate(run.streams[rank]):
        if isinstance(instruction, Op):
            kind, stage, index, replica = instruction
            if kind is not Kind.UPDATE and kind not in run.program.kinds:
                raise run.error(rank, position, "an op of a kind that this schedule does not have")
            expected = replica if kind is Kind.UPDATE else placement.replica(stage, index)
            is_forward = kind is Kind.FORWARD
            allowed = stage_replicas if kind is Kind.UPDATE else passes[is_forward]
            in_turn = kind is Kind.UPDATE or placement.rank_of(stage, index, forward=is_forward) == rank
            if (stage, replica) not in allowed or replica != expected or not in_turn:
                raise run.error(rank, position, f"an op of another rank or replica ({replica} of stage {stage})")
            if instruction in run.ops:
                raise run.error(rank, position, f"done before, at instruction {run.ops[instruction][1]}")
            run.ops[instruction] = (rank, position)
            continue
        assert isinstance(instruction, Transfer)
        move, number, index = instruction
        if move.is_joint:
            if (move, number) not in summed:
                raise run.error(rank, position, f"a {move.words} ({number}) that this rank is not part of")
            if run.sums.setdefault((rank, instruction), position) != position:
                raise run.error(rank, position, "this sum was joined before")
            continue
        if move.counts != "channels":
            if run.steps.setdefault((rank, instruction), position) != position:
                raise run.error(rank, position, "done before")
            continue
        sends = move is moves.SEND
        if not 0 <= number < len(channels):
            raise run.error(rank, position, f"there are {len(channels)} channels")
        if rank != (channels[number].sender if sends else channels[number].receiver):
            raise run.error(rank, position, "this rank is not at this end of the channel")
        if (run.sent if sends else run.received).setdefault((number, index), position) != position:
            raise run.error(rank, position, f"microbatch {index} was {'sent' if sends else 'received'} before")
        if sends:
            run.sequences[number].append(index)


def _check_messages(run: Unrolled) -> None:
    arrivals: dict[int, list[int]] = defaultdict(list)
    for number, k in run.received:
        arrivals[number].append(k)
    for message, position in run.received.items():
        rank = run.program.channels[message[0]].receiver
        if message not in run.sent:
            raise run.error(rank, position, f"microbatch {message[1]} is received but never sent")
        place = run.ops.get(run.consumer(message))
        if place is None or place[0] != rank or place[1] < position:
            raise run.error(rank, position, f"{run.consumer(message)}, which reads it, does not follow on this rank")
        _check_repeat(run, message, position)
    for message, position in run.sent.items():
        rank = run.program.channels[message[0]].sender
        if message not in run.received:
            raise run.error(rank, position, f"microbatch {message[1]} is sent but never received")
        producer = run.producer(message)
        place = run.ops.get(producer)
        if place is None or place[0] != rank or place[1] > position:
            raise run.error(rank, position, f"{producer}, which makes it, does not come before")
    for number, order in run.sequences.items():
        for i, (sent_k, received_k) in enumerate(zip(order, arrivals[number], strict=True)):
            if sent_k != received_k:
                receiver = run.program.channels[number].receiver
                raise run.error(
                    receiver,
                    run.received[number, received_k],
                    f"message {i} of a first-in-first-out channel is sent as microbatch {sent_k} and received as "
                    f"microbatch {received_k}",
                )


def _check_repeat(run: Unrolled, message: Message, position: int) -> None:
    """Checks that a forward is repeated after its input is received, and before the gradient of its output."""
    number, k = message
    channel = run.program.channels[number]
    if channel.target not in run.recomputing:
        return
    repeat = Transfer(moves.REPEAT, channel.target, k)
    repeat_position = run.steps.get((channel.receiver, repeat))
    if channel.carries == Carries.GRADIENT and (repeat_position is None or repeat_position > position):
        raise run.error(channel.receiver, position, f"no {repeat}, which repeats its forward, comes before it")
    if channel.carries == Carries.STAGE_INPUT and repeat_position is not None and repeat_position < position:
        raise run.error(channel.receiver, position, f"{repeat}, which reads it, comes before it")


def _check_steps(run: Unrolled) -> None:
    """Checks that what a rank does for an op beside messages and sums is of use to one that follows."""
    program, placement = run.program, run.program.placement
    kinds = {moves.REPEAT: find_gradient_kind(program.kinds), moves.BEGIN_SUM: find_last_kind(program.kinds)}
    for (rank, step), position in run.steps.items():
        if not 0 <= step.channel < placement.stages:
            raise run.error(rank, position, f"there are {placement.stages} stages")
        if step.kind is moves.JOIN_UPDATE:
            _check_join(run, rank, step, position)
            continue
        kind, stage, index = kinds.get(step.kind, step.kind.kind), step.channel, step.index
        replica = dict(placement.stage_replicas(rank)).get(stage, 0)
        op = Op(kind, stage, index, replica if kind is Kind.UPDATE else placement.replica(stage, index))
        place = run.ops.get(op)
        if place is None or place[0] != rank or (place[1] < position and not step.kind.follows):
            order = "come before" if step.kind.follows else "follow"
            raise run.error(rank, position, f"{op}, for which it is, does not {order} on this rank")
        if step.kind is moves.BEGIN_SUM:
            is_useful = placement.replicas[stage] > 1
        elif step.kind is moves.BEGIN_UPDATE:
            is_useful = program.overlaps_update(stage)
            _check_joined(run, op, rank, len(run.streams[rank]), "the end of the run")
        else:
            placed = (list_ends if step.kind.follows else list_waits)(program, rank, op)
            is_useful = program.recomputes(stage) if step.kind is moves.REPEAT else step in placed
        if not is_useful:
            raise run.error(rank, position, f"{op} does not need it")


def _check_join(run: Unrolled, rank: int, join: Transfer, position: int) -> None:
    """Checks that an update which is joined has begun."""
    begin, update = join._replace(kind=moves.BEGIN_UPDATE), Op(Kind.UPDATE, join.channel, join.index)
    if (rank, begin) not in run.steps or run.ops[update][1] > position:
        raise run.error(rank, position, f"{begin} and {update}, which it waits for, do not come before it")


def _check_joined(run: Unrolled, update: Op, rank: int, position: int, reader: str) -> None:
    """Checks that an update has been made at a position of its rank, if a thread makes it."""
    if not run.has_threads:
        return
    _, stage, index, _ = update
    begin, join = Transfer(moves.BEGIN_UPDATE, stage, index), Transfer(moves.JOIN_UPDATE, stage, index)
    begin_position = run.steps.get((rank, begin))
    if begin_position is not None and run.steps.get((rank, join), position) >= position:
        reason = f"a thread makes {update}, and no {join} comes before {reader}, which needs it"
        raise run.error(rank, begin_position, reason)


def _check_needs(run: Unrolled, op: Op, rank: int, position: int) -> None:
    program, index = run.program, op.index
    last_allowed = position
    for item in list_waits(program, rank, op):
        wait_position = (run.sums if item.kind.is_joint else run.steps).get((rank, item))
        if wait_position is None or wait_position > position:
            words = "wait for shared memory" if item.kind in moves.FETCHES else item.kind.words
            raise run.error(rank, position, f"no {words}, {item}, comes before it")
        if item.kind is moves.SYNC:
            last_allowed = wait_position  # the rank's own gradients; those of others are checked at their updates
        elif item.kind.is_joint:
            _check_rank_gradients(run, op, rank, wait_position)
        elif item.kind is moves.FETCH_GRADIENTS and index > 1:  # where the thread reads those of the update before
            _check_joined(run, Op(Kind.UPDATE, item.channel, index - 1), rank, wait_position, str(item))
    for number, item in enumerate(list_ends(program, rank, op), 1):
        if (run.sums if item.kind.is_joint else run.steps).get((rank, item)) != position + number:
            raise run.error(rank, position, f"no {item.kind.words}, {item}, follows it directly")
    for required in program.requires(op, run.total):
        place = run.ops.get(required)
        if place is None:
            raise run.error(rank, position, f"needs {required}, which this run does not have")
        if place[0] == rank:
            if place[1] > last_allowed:
                raise run.error(rank, position, f"needs {required}, which comes later, at instruction {place[1]}")
            if required.kind is Kind.UPDATE:
                _check_joined(run, required, rank, position, str(op))
        elif not is_in_shared_memory(op, required):
            check_arrival(run, op, required, place[0], _choose_cargo(op, required))


def _choose_cargo(op: Op, need: Op) -> Carries:
    if op.kind is Kind.FORWARD:
        return Carries.ACTIVATION
    return Carries.STAGE_INPUT if need.kind is Kind.FORWARD else Carries.GRADIENT


def _check_rank_gradients(run: Unrolled, op: Op, rank: int, position: int) -> None:
    """Checks that a sum of several stages, before an update, follows the gradients of all stages of its rank."""
    program = run.program
    for stage, replica in program.placement.stage_replicas(rank):
        for need in program.requires(Op(Kind.UPDATE, stage, op.index, replica), run.total):
            place = run.ops.get(need)
            if need.kind is Kind.UPDATE:
                _check_joined(run, need, rank, position, str(run.streams[rank][position]))
            if need.kind is not Kind.UPDATE and place is not None and place[0] == rank and place[1] > position:
                raise run.error(rank, position, f"waits for all stages, but {need} on this rank comes later")


def check_arrival(run: Unrolled, op: Op, need: Op, sender: int, carries: Carries) -> None:
    """Checks that a result of another rank is received before an op reads it."""
    rank, position = run.ops[op]
    if sender == rank:
        return
    channel = run.routes.get((sender, rank, carries, need.stage, op.stage))
    if channel is None:
        raise run.error(rank, position, f"needs {need} of rank {sender}, but no channel brings its {carries}")
    arrival = run.received.get((channel, op.index))
    if arrival is None or arrival > position:
        raise run.error(rank, position, f"needs {need} of rank {sender}, but <{channel}:{op.index} is not before it")


def check_assumptions(run: Unrolled) -> None:
    """Checks the runtime's assumptions on an unrolled run."""
    for rank in range(len(run.streams)):
        _check_order(run, rank)
    ranks_of = Counter(item for _, item in run.sums)
    for (rank, item), position in run.sums.items():
        move, number, update = item
        if move in run.program.moves and move.run is None and ranks_of[item] < len(run.streams):
            count = f"only {ranks_of[item]} of {len(run.streams)}"
            raise run.error(rank, position, f"all ranks wait for each other at it, and {count} have it in this run")
        for stage, replica in run.program.placement.stage_replicas(rank):
            place = run.ops.get(Op(Kind.UPDATE, stage, update, replica))
            is_needed = not move.follows and (not move.at_stages or stage == number)
            if is_needed and (place is None or place[1] < position):
                raise run.error(rank, position, f"no update {stage}U{update} follows this sum")
    for stage in range(run.program.placement.stages):
        _check_versions(run, stage)


def _check_order(run: Unrolled, rank: int) -> None:
    program = run.program
    last_kind = find_last_kind(program.kinds)
    last_forward: dict[int, int] = {}
    gradients: dict[int, list[int]] = {}
    summing: dict[int, int] = {}  # stage -> the microbatch in whose backward the sum began
    for position, op in enumerate(run.streams[rank]):
        if not isinstance(op, Op):
            if op.kind is moves.BEGIN_SUM:
                summing[op.channel] = op.index
            continue
        kind, stage, index, _ = op
        if kind is Kind.FORWARD:
            previous = last_forward.get(stage, -1)
            if index < previous:
                raise run.error(
                    rank, position, f"comes after {stage}F{previous}; microbatches are forwarded in their order"
                )
            last_forward[stage] = index
        elif kind is last_kind:
            gradients.setdefault(stage, []).append(index)
        elif kind is Kind.UPDATE:
            members = program.updates.members(stage, index, run.total)
            begun, last = summing.pop(stage, None), gradients.get(stage, [None])[-1]
            is_complete = len(members) == program.updates.per_update[stage]
            if program.placement.replicas[stage] > 1 and begun != last and (is_complete or begun is not None):
                began = "nowhere" if begun is None else f"in {stage}{last_kind.value}{begun}"
                raise run.error(
                    rank,
                    position,
                    f"the sum of stage {stage} begins {began}, not in the last backward before it, +{stage}:{last}",
                )
            foreign = [k for k in gradients.pop(stage, []) if k not in members]
            if foreign:
                raise run.error(
                    rank,
                    position,
                    f"{stage}{last_kind.value}{foreign[0]} comes before it, but its gradient is for update "
                    f"{program.updates.update_of(stage, foreign[0])}",
                )


def _check_versions(run: Unrolled, stage: int) -> None:
    program, rule = run.program, run.program.weights
    newest = [0] * program.placement.replicas[stage]
    for k in range(run.total):
        replica = program.placement.replica(stage, k)
        rank, position = run.ops[Op(Kind.FORWARD, stage, k, replica)]
        version = rule.forward_version(stage, k)
        if version < newest[replica]:
            raise run.error(
                rank,
                position,
                f"weight rule {rule.name!r} reads version {version}, but version {newest[replica]} for an earlier "
                "microbatch; older versions may have been dropped",
            )
        newest[replica] = version
        backward_version = rule.backward_version(stage, k)
        if rule.backward_rule == "stash" and len(program.kinds) > 1 and backward_version != version:
            raise run.error(
                rank,
                position,
                f"weight rule {rule.name!r} reads version {version} here and version {backward_version} in the "
                "backward, which must use the weights of its forward",
            )
