"""The clock: runs a Program in simulated time, instruction by instruction, as the runtime would.

- A send never blocks its rank, but sends and receives keep it from computing for a while (`Costs.end_s`). A message
  flows when its receive is posted (`simulator.messages`); receive i of a channel of depth d is posted when the op that
  consumes receive i - d is done.
- A sum over replicas begins inside the last backward before it (`costs`), or, for a replica without one, at its update.
  The update waits for the sum. A coupled update waits until all ranks have reached it, one of tied weights for the sum
  over their holders, which begins when all have reached it.
- A backward that recomputes begins early: it has repeated its forward by the time its gradient arrives.
- A fetch waits until what another rank leaves in shared memory is there, and copied.
- An update that a thread makes takes no time of its rank's, whose thread makes one at a time. Its rank waits where it
  joins it.

Each rank runs ahead until it waits for another. When all wait, the earliest pending start or end of a flow happens.
Nothing that a rank does later comes before it, so ports see all events in the order of time.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from operator import itemgetter, mul
from typing import Any, NoReturn

from pipedream.core.errors import DeadlockError, ScheduleError
from pipedream.core.garbage import pause_collection
from pipedream.core.schedule import moves
from pipedream.core.schedule.moves import Transfer, list_joint_stages
from pipedream.core.schedule.occupancy import count_most_in_flight
from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.program import Program, advance_instruction
from pipedream.core.schedule.timeline import Span, Timeline
from pipedream.simulator.compiled import (
    FETCH,
    GIVE,
    JOIN,
    OP,
    RECEIVE,
    SEND,
    STEP,
    STOP,
    SUM,
    TURN,
    CompiledInstruction,
    CompiledRank,
    compile_rank,
)
from pipedream.simulator.costs import Costs, Stragglers
from pipedream.simulator.memory import trace_memory
from pipedream.simulator.messages import Network, Wire, describe_message

_new: Callable[..., Any] = tuple.__new__  # faster than calling the class
_Work = tuple[int, Any, int, int, int, str, float]
_TOLERANCE = 1e-9  # relative


def simulate(
    program: Program, costs: Costs, total: int, stragglers: Stragglers | None = None, *, in_turns: bool = False
) -> Timeline:
    """Returns the timeline of `total` microbatches, from an empty pipeline to an empty one.

    Args:
        stragglers: how the seconds of ops differ from the costs.
        in_turns: the ranks share a thread, so that only one computes at a time.

    Raises:
        DeadlockError: ranks wait for each other for ever; the message lists each with its instruction.
        ScheduleError: a rank does not receive the next message of a channel, or a message has no receiver.
        ValueError: a slow rank does not exist.
    """
    with pause_collection():
        clock = _Clock(program, costs.with_compensation(program), total, stragglers or Stragglers(), in_turns)
        clock.run()
        return clock.build_timeline()


def time_updates(program: Program, costs: Costs, total: int, first: int, last: int) -> tuple[float, int]:
    """Returns the seconds between two updates of the input stage, each finished on all replicas, and the updates.

    The clock stops at earlier updates once the run repeats: all ops of as many microbatches as are in flight, on all
    ranks, are equally later than those one cycle, or one such round, before.

    Args:
        total: microbatches; more than the last update needs, so that the pipeline does not drain before it.

    Raises:
        ValueError: the updates take no time.
    """
    clock = _UpdateClock(program, costs, total, first, last)
    with suppress(_EnoughError):
        clock.run()
    seconds = clock.updated_s[clock.last] - clock.updated_s[clock.first]
    if seconds <= 0:
        raise ValueError(f"updates {first} to {last} of the input stage were asked for, and take no time")
    return seconds, clock.last - clock.first


class _EnoughError(Exception):
    """The clock has run far enough."""


@dataclass(slots=True, eq=False)
class _Rank:
    """A rank: its time, and its current instruction.

    Attributes:
        instructions: those of `text`, with wires instead of channels, and with seconds.
        missing: ops not yet done; `missing_before` is their number one turn ago.
        slowness: factor on its seconds.
        joined: stage -> newest update whose sum has this rank's gradients.
        thread_updates: stage -> its newest update that a thread makes, and its end in seconds.
        arrival_s: of the newest message received; an op may begin before it, but not end.
    """

    number: int
    text: CompiledRank
    instructions: list[_Work]
    draw: Callable[[str], float] | None
    missing: int
    missing_before: int = -1
    slowness: float = 1.0
    position: int = 0
    turn: int = 0
    now: float = 0.0
    ended: bool = False
    spans: list[Span] = field(default_factory=list)
    sends: list[Span] = field(default_factory=list)
    received: list[Wire] = field(default_factory=list)
    joined: dict[int, int] = field(default_factory=dict)
    arrival_s: float = 0.0
    thread_updates: dict[int, tuple[int, float]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Barrier:
    """Ranks that wait until all have arrived and their sum is done.

    Attributes:
        missing, staying: ranks that have yet to arrive, and to leave.
        arrivals: times of arrival, each with the seconds of the backward that ended then.
    """

    missing: int
    staying: int
    arrivals: list[tuple[float, float]] = field(default_factory=list)
    over_s: float | None = None
    waiting: list[_Rank] = field(default_factory=list)


class _Clock:
    def __init__(self, program: Program, costs: Costs, total: int, stragglers: Stragglers, in_turns: bool) -> None:
        self.program = program
        self.total = total
        self.in_turns = in_turns
        self.costs = costs
        placement = program.placement
        stragglers.check_ranks(placement.workers)
        early_sums = range(placement.stages) if costs.buckets else ()
        # On a CPU passes and updates share the cores: updates in a thread save no time.
        has_threads = costs.runtime.overlap_device
        texts = [
            compile_rank(program, number, total, early_sums=early_sums, has_threads=has_threads)
            for number in range(placement.workers)
        ]
        self.ranks = [_Rank(number, text, [], stragglers.draws(number), text.ops) for number, text in enumerate(texts)]
        self.ready: list[_Rank] = []
        self.messages = Network(program, costs, [rank.sends for rank in self.ranks], self.ready)
        for rank in self.ranks:
            instructions = list(rank.text.instructions) if rank.missing else rank.text.list_remainder(0, 0)
            rank.slowness = stragglers.slowness(rank.number) / costs.speed(rank.number)
            rank.instructions = self._add_seconds(instructions, rank.slowness)
        self.member_counts = [*placement.replicas, *(len(tied.ranks(placement)) for tied in program.plan.tied_weights)]
        self.barriers: dict[tuple[int, int], _Barrier] = {}
        self.awaits: dict[int, Callable[[_Rank, Any, int, float], float | None]] = {
            SUM: self._await_barrier,
            FETCH: self._await_shared,
            JOIN: lambda rank, stage, index, now: rank.thread_updates[stage][1],
        }
        fetching = {item.what[0][0] for text in texts for item in text.instructions if item.code == FETCH}
        self.fetched_kinds = ("F" in fetching) * "U" + bool(fetching & {"B", "U"}) * "B"  # whose results others fetch
        self.noted = {"U", *self.fetched_kinds}
        self.fetched_s = {Op(Kind.UPDATE, stage, 0): 0.0 for stage in range(placement.stages)}  # in shared memory
        self.readers: dict[Op, list[_Rank]] = defaultdict(list)
        self.last_updates = [
            max(program.updates.updates(stage, total) for stage, _ in placement.stage_replicas(rank.number))
            for rank in self.ranks
        ]

    def _add_seconds(self, instructions: list[CompiledInstruction], slowness: float) -> list[_Work]:
        @cache
        def find_seconds(code: int, what: Any, letter: str) -> tuple[Any, float]:
            if code in (OP, STEP):
                return what, self.costs.op_s(Kind(letter), what) * slowness
            if code in (SEND, RECEIVE):
                wire = self.messages.wires[what]
                if letter:  # the forward is repeated before the message arrives
                    wire.early_s = self.costs.early_s(wire.channel.target) * slowness
                return wire, self.costs.end_s(wire.channel) * slowness
            return what, 0.0

        return [
            (code, (timed := find_seconds(code, what, letter))[0], first, stride, limit, letter, timed[1])
            for code, what, first, stride, limit, letter, _ in instructions
        ]

    def run(self) -> None:
        self.ready += self.ranks[::-1]
        free_s = 0.0  # when the shared thread is free again
        while self.ready:
            while self.ready:
                rank = self.ready.pop()
                if self.in_turns:
                    rank.now = max(rank.now, free_s)
                self._advance(rank)
                free_s = rank.now
            self.messages.advance()
        if not all(rank.ended for rank in self.ranks):
            raise DeadlockError(_describe_waits(self.program, self.ranks, self.total))
        for message in self.messages.find_unreceived():
            raise ScheduleError(
                f"program {self.program.name!r}: {describe_message(*message)} is sent and "
                "never received; lower the schedule again"
            )

    def _advance(self, rank: _Rank) -> None:
        number, spans, draw = rank.number, rank.spans, rank.draw
        instructions, received, send = rank.instructions, rank.received, self.messages.send
        load_s, microbatches = self.costs.load_s * rank.slowness, self.program.microbatches
        position, turn, missing, now = rank.position, rank.turn, rank.missing, rank.now
        while True:
            code, what, first, stride, limit, letter, seconds = instructions[position]
            index = first + turn * stride
            if index >= limit:
                if code == TURN:
                    self._check_progress(rank, missing)
                    position, turn = rank.text.loop, turn + 1
                    continue
                if code == STOP:
                    now = self._end_rank(rank, missing, now)
                    break
            elif code <= STEP:
                if load_s and not what and letter == "F" and not index % microbatches:
                    now += load_s
                if code:
                    now = self._await_late_updates(rank, what, index, now)
                end = now + seconds if draw is None else max(now + seconds * draw(letter), rank.arrival_s)
                if code:
                    end = self._begin_step(rank, what, index, now, end - now)
                spans.append(_new(Span, (number, letter, what, index, now, end)))
                now = end
                if letter in self.noted:
                    self._note_done(letter, what, index, now)
                if received:
                    self._post_receives(received, now)
                missing -= 1
                if not missing:
                    instructions, position, turn = self._list_remainder(rank, position + 1, turn), 0, 0
                    continue
            elif code == RECEIVE:
                if not what.arrived:
                    what.waiting = rank
                    break
                arrival = self._take_arrival(rank, what, index)
                if arrival > now:
                    spans.append(_new(Span, (number, "wait", what.channel.target, index, now, arrival)))
                    now = arrival
                now += seconds
                received.append(what)
            elif code == SEND:
                now += seconds
                send(what, index, now)
            elif code == GIVE:
                stage, update, updates = what
                backward_s = now - spans[-1].start_s
                self._join_barrier(rank, stage, update + turn * updates, now, backward_s)
            else:
                barrier, what = what
                over_s = self.awaits[code](rank, barrier, index, now)
                if over_s is None:
                    break
                if over_s > now:
                    spans.append(_new(Span, (number, "wait", what, index, now, over_s)))
                    now = over_s
            position += 1
        rank.position, rank.turn, rank.missing, rank.now = position, turn, missing, now

    def _list_remainder(self, rank: _Rank, position: int, turn: int) -> list[_Work]:
        """Returns what a rank has to send once its ops are done."""
        rank.instructions = self._add_seconds(rank.text.list_remainder(position, turn), rank.slowness)
        return rank.instructions

    def _begin_step(self, rank: _Rank, stage: int, update: int, now: float, seconds: float) -> float:
        """Lets a rank's thread make an update; returns the end of the op."""
        start_s = max([now, *(end_s for _, end_s in rank.thread_updates.values())])
        end_s = start_s + seconds
        rank.thread_updates[stage] = update, end_s
        rank.sends.append(_new(Span, (rank.number, "step", stage, update, start_s, end_s)))
        self._note_fetched(Op(Kind.UPDATE, stage, update), end_s)
        return now

    def _await_late_updates(self, rank: _Rank, stage: int, update: int, now: float) -> float:
        """Returns when the updates have been made whose gradients an update replaces, if no op has joined them."""
        for joined in list_joint_stages(self.program, rank.number, stage):
            if joined in rank.thread_updates and rank.thread_updates[joined][0] < update:
                now = self._wait(rank, joined, rank.thread_updates[joined], now)
        return now

    def _wait(self, rank: _Rank, stage: int, update_end: tuple[int, float], now: float) -> float:
        update, end_s = update_end
        if end_s > now:
            rank.spans.append(_new(Span, (rank.number, "wait", stage, update, now, end_s)))
        return max(now, end_s)

    def _note_done(self, letter: str, stage: int, index: int, now: float) -> None:
        if letter in self.fetched_kinds:
            self._note_fetched(Op(Kind(letter), stage, index), now)
        if letter == "U":
            self._note_update(stage, index, now)

    def _note_update(self, stage: int, update: int, now: float) -> None:
        """Notes the end of an update, or the begin of one that a thread makes."""

    def _note_fetched(self, op: Op, now: float) -> None:
        if op not in self.fetched_s:  # else a thread makes it
            self.fetched_s[op] = now
            self.ready += self.readers.pop(op, [])

    def _await_shared(self, rank: _Rank, op: Any, index: int, now: float) -> float | None:
        """Returns when what an op of a (letter, stage) reads from shared memory has arrived; None while unknown."""
        letter, stage = op
        placement, home = self.program.placement, self.program.placement.ranks[stage][0]
        needs = self.program.list_fetched(Op(Kind(letter), stage, index), self.total)
        if letter == "F" and not any(need.kind is Kind.UPDATE for need in needs):
            needs.append(Op(Kind.UPDATE, stage, 0))  # the weights at the start
        there_s = now
        for need in needs:
            left_s = self.fetched_s.get(need)
            if left_s is None:
                self.readers[need].append(rank)
                return None
            source = home if need.kind is Kind.UPDATE else placement.rank_of(stage, need.index)
            # A rank copies weights of its own, too, from the memory of the machine to its device.
            is_copied = source != rank.number or (letter == "F" and need.kind is Kind.UPDATE)
            there_s = max(there_s, left_s + self.costs.copy_s(stage, source, rank.number) * is_copied)
        return there_s

    def _post_receives(self, received: list[Wire], now: float) -> None:
        for wire in received:
            self.messages.post(wire, now)
        received.clear()

    def _take_arrival(self, rank: _Rank, wire: Wire, index: int) -> float:
        """Returns the second at which the op that receives a message may begin."""
        sent_index, rank.arrival_s = wire.arrived.popleft()
        if sent_index != index:
            channel = wire.channel
            raise ScheduleError(
                f"program {self.program.name!r}: rank {channel.receiver} wants {describe_message(channel, index)}, but "
                f"the next on its channel is that of microbatch {sent_index}; receive in the order of sending"
            )
        return rank.arrival_s - wire.early_s

    def _end_rank(self, rank: _Rank, missing: int, now: float) -> float:
        if missing:
            _refuse_missing_ops(self.program, rank, self.total)
        rank.ended = True
        for stage, update_end in rank.thread_updates.items():
            now = self._wait(rank, stage, update_end, now)
        return now

    def _check_progress(self, rank: _Rank, missing: int) -> None:
        if missing == rank.missing_before:
            _refuse_missing_ops(self.program, rank, self.total)  # indices only grow
        rank.missing_before = missing

    def _join_barrier(self, rank: _Rank, stage: int, update: int, now: float, backward_s: float) -> None:
        key = stage, update
        barrier = self.barriers.get(key)
        if barrier is None:
            size = sum(last >= update for last in self.last_updates) if stage < 0 else self.member_counts[stage]
            barrier = self.barriers[key] = _Barrier(size, size)
        rank.joined[stage] = update
        barrier.arrivals.append((now, backward_s))
        barrier.missing -= 1
        if barrier.missing:
            return
        if stage < 0:
            self._end_barrier(barrier, 0.0, 0.0)
        else:
            self.messages.sum_up(
                stage,
                self.costs.sum_parts(stage, barrier.arrivals),
                partial(self._end_barrier, barrier, self.costs.summing_s(stage)),
            )

    def _end_barrier(self, barrier: _Barrier, busy_s: float, now: float) -> None:
        barrier.over_s = max(now, *(arrival_s + busy_s for arrival_s, _ in barrier.arrivals))
        self.ready.extend(barrier.waiting)
        barrier.waiting.clear()

    def _await_barrier(self, rank: _Rank, stage: int, update: int, now: float) -> float | None:
        """Returns when a barrier that a rank has reached ends; None while unknown."""
        if rank.joined.get(stage, 0) < update:
            self._join_barrier(rank, stage, update, now, 0.0)
        barrier = self.barriers[stage, update]
        if barrier.over_s is None:
            barrier.waiting.append(rank)
            return None
        barrier.staying -= 1
        if not barrier.staying:
            del self.barriers[stage, update]
        return barrier.over_s

    def build_timeline(self) -> Timeline:
        program = self.program
        in_flight = count_most_in_flight(program, self.total)
        traces = [trace_memory(program, rank.number, self.total, rank.spans, in_flight) for rank in self.ranks]
        spans: list[Span] = []
        for rank in self.ranks:
            spans += sorted(rank.spans + rank.sends, key=itemgetter(4))
        return Timeline(
            name=program.name,
            source="simulated",
            workers=len(self.ranks),
            spans=tuple(spans),
            microbatches=self.total,
            minibatch_microbatches=program.microbatches,
            batch=program.plan.batch,
            gradient_versions=tuple(gradient for trace in traces for gradient in trace.gradient_versions),
            peak_bytes=tuple(max(trace.memory) for trace in traces),
            peak_versions=tuple(trace.peak_versions for trace in traces),
            memory=tuple(trace.memory for trace in traces),
        )


def _refuse_missing_ops(program: Program, rank: _Rank, total: int) -> NoReturn:
    raise ScheduleError(
        f"program {program.name!r}: rank {rank.number} lacks ops of the {rank.text.ops} that {total} microbatches "
        "need; lower the schedule again"
    )


def _describe_waits(program: Program, ranks: Sequence[_Rank], total: int) -> str:
    waiting = [rank for rank in ranks if not rank.ended]
    rows = []
    for rank in waiting:
        source = rank.text.instructions[rank.position].source
        assert isinstance(source, Transfer)
        instruction = advance_instruction(source, rank.turn * program.cycle, program.updates)
        words = source.kind.words if source.kind.is_joint else "what another rank leaves in shared memory"
        if source.kind is moves.RECEIVE:
            words = describe_message(program.channels[source.channel], instruction.index)
        rows.append(f"  rank {rank.number} waits at {instruction}: {words}")
    return "\n".join(
        [
            f"program {program.name!r} of {total} microbatches: {len(waiting)} of {len(ranks)} ranks wait for ever; "
            "each receive must follow, on all ranks, what its sender needs",
            *rows,
        ]
    )


class _UpdateClock(_Clock):
    """A clock that runs until two updates of the input stage, or until earlier ones that are as far apart."""

    def __init__(self, program: Program, costs: Costs, total: int, first: int, last: int) -> None:
        super().__init__(program, costs, total, Stragglers(), in_turns=False)
        self.first, self.last = first, last
        self.replicas_done: Counter[int] = Counter()
        self.updated_s: dict[int, float] = {}
        in_flight = max(map(mul, program.plan.in_flight, program.placement.replicas))
        self.round = -(-in_flight // program.cycle) * program.cycle
        self.repeated = {program.cycle: 0, self.round: 0}

    def _note_update(self, stage: int, update: int, now: float) -> None:
        if stage:
            return
        self.replicas_done[update] += 1
        self.updated_s[update] = max(now, self.updated_s.get(update, now))
        if self.replicas_done[update] < self.member_counts[0]:
            return
        per_update = self.program.updates.per_update[0]
        for distance in self.repeated if not update * per_update % self.program.cycle else ():
            before = update - distance // per_update
            if before > 0 and self._is_repeated(update, before, distance):
                self.first, self.last = before, update
                break
        if update == self.last:
            raise _EnoughError

    def _is_repeated(self, update: int, before: int, distance: int) -> bool:
        """Returns whether all ops in flight are equally later than those `distance` microbatches before.

        Compares the ranks only once as many updates of the input stage repeat as are in flight.
        """
        cycle, updated_s = self.program.cycle, self.updated_s
        step = cycle // self.program.updates.per_update[0]
        seconds = updated_s[update] - updated_s[before]
        repeats = abs(seconds - updated_s[update - step] + updated_s.get(before - step, 0.0)) <= _TOLERANCE * seconds
        self.repeated[distance] = self.repeated[distance] + cycle if repeats else 0
        if self.repeated[distance] < self.round:
            return False
        self.repeated[distance] //= 2
        return all(self._is_repeated_on(rank, distance, seconds) for rank in self.ranks)

    def _is_repeated_on(self, rank: _Rank, distance: int, seconds: float) -> bool:
        ops_between = self.program.op_count(rank.number, distance)
        count = ops_between + self.program.op_count(rank.number, self.round)
        latest = [span for span in rank.spans[-8 * count :] if span.kind != "wait"][-count:]
        return len(latest) == count and all(
            a[1:3] == b[1:3] and abs(b.end_s - a.end_s - seconds) <= _TOLERANCE * seconds
            for a, b in zip(latest, latest[ops_between:], strict=False)
        )
