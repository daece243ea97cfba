"""The clock: runs a Program in simulated time, instruction by instruction, as the runtime would.

- A rank does its instructions in order; an op takes its seconds.
- Each worker has one full-duplex link to each neighbouring stage, which the messages of all replicas there share
  (`core.cost`): it sends them in the order of its sends and receives them in the order of its receives, each for
  bytes / bandwidth. What it sends does not disturb what it receives, nor the link on its other side.
- A send never blocks its rank. Its message starts when both links are free of the message before and its receive
  is posted; receive i of a channel of depth d is posted when the consumer of receive i - d, the op behind it, is
  done. It arrives bytes / bandwidth and one latency later. What no receive is posted for yet does not keep the
  sender's link busy for longer than its bytes.
- A receive blocks its rank until the message is there.
- A sum waits for all replicas of its stage, then takes its seconds. A coupled update waits until all ranks have
  reached theirs of the same number.

Each rank runs until it waits for another; nothing needs a queue of events, for a message's arrival follows from
the past of its two ends alone, and is worked out when it is received.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from ..core.errors import DeadlockError, ScheduleError
from ..core.memory import stage_bytes
from ..core.op import Kind, Op
from ..core.program import Channel, Instruction, Move, Program, Transfer
from ..core.timeline import Span, Timeline
from .costs import Costs
from .versions import SeatVersions

__all__ = ["simulate"]

# Looking up a member of an enum costs as much as a whole instruction may.
_UPDATE, _SEND, _RECEIVE = Kind.UPDATE, Move.SEND, Move.RECEIVE


def simulate(program: Program, costs: Costs, total: int) -> Timeline:
    """Returns what `total` microbatches do, from an empty pipeline to an empty one.

    Raises:
        DeadlockError: ranks wait for each other for ever; the message lists each with its instruction.
        ScheduleError: a rank receives another message than the next of its channel, or a message has no receiver.
    """
    return _Clock(program, costs, total).run()


@dataclass(slots=True, eq=False)
class _Rank:
    """A rank on its way: its time, and the instruction it is at (None when it has ended)."""

    number: int
    stream: Iterator[Instruction]
    seats: dict[int, SeatVersions]
    now: float = 0.0
    instruction: Instruction | None = None
    spans: list[Span] = field(default_factory=list)
    sends: list[Span] = field(default_factory=list)
    received: list[_Wire] = field(default_factory=list)
    coupled: int = 0


@dataclass(slots=True, eq=False)
class _Link:
    """One direction of a worker's link to a neighbouring stage: until when its last message keeps it busy."""

    free_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Wire:
    """A channel at work: messages sent and not yet received, and the times at which receives were posted."""

    channel: Channel
    out: _Link
    into: _Link
    transfer_s: float
    occupied_s: float
    posted: deque[float]
    sent: deque[tuple[int, float]] = field(default_factory=deque)
    waiting: _Rank | None = None


@dataclass(slots=True, eq=False)
class _Meeting:
    """Ranks that wait until all have come."""

    come: list[_Rank] = field(default_factory=list)
    latest_s: float = 0.0
    complete: bool = False


class _Clock:
    def __init__(self, program: Program, costs: Costs, total: int) -> None:
        self.program = program
        self.total = total
        self.costs = costs
        self.ranks = [
            _Rank(
                number,
                program.instructions(number, total),
                {s: SeatVersions(program, s, replica, total) for s, replica in program.placement.seats(number)},
            )
            for number in range(program.placement.workers)
        ]
        out: defaultdict[tuple[int, int, str], _Link] = defaultdict(_Link)
        into: defaultdict[tuple[int, int, str], _Link] = defaultdict(_Link)
        self.wires = [
            _Wire(
                channel,
                out[channel.sender, channel.source, channel.carries],
                into[channel.receiver, channel.target, channel.carries],
                costs.transfer_s(channel),
                costs.occupied_s(channel),
                deque([0.0] * channel.depth),
            )
            for channel in program.channels
        ]
        self.meetings: dict[tuple[str, int, int], _Meeting] = {}
        self.ready: list[_Rank] = []
        stages = range(program.placement.stages)
        self.op_s = {kind: (kind.value, [costs.op_s(kind, s) for s in stages]) for kind in Kind}
        last_updates = [max(program.updates.updates(s, total) for s in rank.seats) for rank in self.ranks]
        self.members_of_update = (
            [sum(last >= n for last in last_updates) for n in range(max(last_updates) + 1)]
            if program.couples_updates
            else []
        )

    def run(self) -> Timeline:
        for rank in self.ranks:
            rank.instruction = next(rank.stream, None)
        self.ready = self.ranks[::-1]
        while self.ready:
            self._advance(self.ready.pop())
        waiting = [rank for rank in self.ranks if rank.instruction is not None]
        if waiting:
            raise DeadlockError(self._who_waits(waiting))
        lost = [wire for wire in self.wires if wire.sent]
        if lost:
            raise ScheduleError(
                f"program {self.program.schedule!r}: {_described(lost[0].channel, lost[0].sent[0][0])} is sent and "
                "never received; lower the schedule again"
            )
        return self._timeline()

    def _advance(self, rank: _Rank) -> None:
        """Runs a rank until it waits for another or has ended."""
        now, instruction = rank.now, rank.instruction
        number, spans, stream, seats, received = rank.number, rank.spans, rank.stream, rank.seats, rank.received
        op_s, wires, couples = self.op_s, self.wires, self.program.couples_updates
        while instruction is not None:
            if isinstance(instruction, Op):
                kind, stage, index, _ = instruction
                if couples and kind is _UPDATE:
                    rank.now = now
                    latest = self._coupled(rank, index)
                    if latest is None:
                        break
                    now = _waited(rank, stage, index, now, latest)
                letter, seconds = op_s[kind]
                end = now + seconds[stage]
                spans.append(Span(number, letter, stage, index, now, end))
                seats[stage].follow(instruction)
                now = end
                if received:
                    for wire in received:
                        wire.posted.append(now)
                    received.clear()
            elif instruction.kind is _SEND:
                wire = wires[instruction.channel]
                leaves = max(now, wire.out.free_s)
                wire.out.free_s = leaves + wire.occupied_s
                wire.sent.append((instruction.index, leaves))
                if wire.waiting is not None:
                    self.ready.append(wire.waiting)
                    wire.waiting = None
            elif instruction.kind is _RECEIVE:
                wire = wires[instruction.channel]
                if not wire.sent or not wire.posted:
                    wire.waiting = rank
                    break
                arrival = self._arrival(wire, instruction)
                if arrival > now:
                    now = _waited(rank, wire.channel.target, instruction.index, now, arrival)
                received.append(wire)
            else:
                rank.now = now
                stage, index = instruction.channel, instruction.index
                latest = self._meet(("sync", stage, index), rank, self.program.placement.replicas[stage])
                if latest is None:
                    break
                now = _waited(rank, stage, index, now, latest + self.costs.sync_s[stage])
            instruction = next(stream, None)
        rank.now, rank.instruction = now, instruction

    def _arrival(self, wire: _Wire, receive: Transfer) -> float:
        """Returns when the next message of a channel arrives, and takes it off the link."""
        index, leaves = wire.sent.popleft()
        if index != receive.index:
            raise ScheduleError(
                f"program {self.program.schedule!r}: rank {wire.channel.receiver} wants "
                f"{_described(wire.channel, receive.index)}, but the next on its channel is that of microbatch "
                f"{index}; receive in the order of sending"
            )
        start = max(leaves, wire.into.free_s, wire.posted.popleft())
        wire.into.free_s = start + wire.occupied_s
        arrival = start + wire.transfer_s
        if arrival > start:
            channel = wire.channel
            sender = self.ranks[channel.sender]
            sender.sends.append(Span(sender.number, "send", channel.source, index, start, arrival))
        return arrival

    def _coupled(self, rank: _Rank, index: int) -> float | None:
        """Returns when all ranks have reached their update of a number, or None: not yet."""
        if index <= rank.coupled:
            return rank.now
        latest = self._meet(("update", 0, index), rank, self.members_of_update[index])
        if latest is not None:
            rank.coupled = index
        return latest

    def _meet(self, key: tuple[str, int, int], rank: _Rank, members: int) -> float | None:
        """Returns when the last member of a meeting came, or None: not yet."""
        meeting = self.meetings.setdefault(key, _Meeting())
        if not meeting.complete:
            meeting.come.append(rank)
            meeting.latest_s = max(meeting.latest_s, rank.now)
            if len(meeting.come) < members:
                return None
            meeting.complete = True
            self.ready.extend(other for other in meeting.come if other is not rank)
        meeting.come.remove(rank)
        if not meeting.come:
            del self.meetings[key]
        return meeting.latest_s

    def _timeline(self) -> Timeline:
        program = self.program
        spans: list[Span] = []
        for rank in self.ranks:
            spans += sorted(rank.spans + rank.sends, key=attrgetter("start_s"))
        seats = [seat for rank in self.ranks for seat in rank.seats.values()]
        return Timeline(
            name=program.schedule,
            source="simulated",
            workers=len(self.ranks),
            spans=tuple(spans),
            microbatches=self.total,
            minibatch_microbatches=program.microbatches,
            batch=program.plan.batch,
            tags=tuple(tag for seat in seats for tag in seat.tags),
            peak_bytes=tuple(self._peak_bytes(rank) for rank in self.ranks),
            peak_versions=tuple(sum(seat.peak for seat in rank.seats.values()) for rank in self.ranks),
        )

    def _peak_bytes(self, rank: _Rank) -> int:
        """Returns the predicted peak of a rank: the sum over its seats."""
        plan = self.program.plan
        parts = self.program.microbatches if plan.unit == "minibatch" else 1
        return sum(
            stage_bytes(
                parameter_bytes=plan.stages[s].parameter_bytes,
                optimizer_bytes=plan.stages[s].optimizer_bytes,
                activation_bytes=-(-plan.stages[s].activation_bytes // parts),
                input_bytes=-(-plan.stages[s - 1].output_bytes // parts) if s else 0,
                versions=seat.peak,
                in_flight=seat.peak_in_flight,
            )
            for s, seat in rank.seats.items()
        )

    def _who_waits(self, waiting: list[_Rank]) -> str:
        rows = []
        for rank in waiting:
            at = rank.instruction
            what = f"{at}"
            if isinstance(at, Transfer) and at.kind is Move.RECEIVE:
                what += f": {_described(self.wires[at.channel].channel, at.index)}"
            elif isinstance(at, Transfer):
                what += f": the other replicas of stage {at.channel}"
            else:
                what += ": the update of the other ranks"
            rows.append(f"  rank {rank.number} waits at {what}")
        return "\n".join(
            [
                f"program {self.program.schedule!r} of {self.total} microbatches: {len(waiting)} of {len(self.ranks)} "
                "ranks wait for ever; each receive must follow, on all ranks, what its sender needs",
                *rows,
            ]
        )


def _waited(rank: _Rank, stage: int, index: int, now: float, until: float) -> float:
    """Returns the later of two times, and notes the wait between them."""
    if until <= now:
        return now
    rank.spans.append(Span(rank.number, "wait", stage, index, now, until))
    return until


def _described(channel: Channel, index: int) -> str:
    return f"the {channel.carries} of microbatch {index} from rank {channel.sender} to rank {channel.receiver}"
