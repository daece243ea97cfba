"""The clock once more, slow and plain: the oracle of the fast one, to the bit.

It knows nothing of an order of events. It reads `Program.instructions` one by one, with the arrivals of all messages
taken from a table; from what the ranks then send and when, it works out how each port serves all that ever reaches it,
port after port; the arrivals make a new table; and so on until the table stays as it is. A sum is made of all its
buckets, and begins at the backward that the runtime takes for the last one before it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from pipedream.core.cost import all_reduce_s
from pipedream.core.op import Kind, Op
from pipedream.core.program import Move, Program
from pipedream.core.timeline import Span
from pipedream.runtime.reduction import last_backwards
from pipedream.simulator import Costs

FIRST_BYTES, NEXT_BYTES = 1 << 20, 4 << 20

Message = tuple[int, int]
"""A channel's number and the microbatch."""

Guest = tuple[float, int, int, tuple[int, int], float]
"""What reaches a port: when, after how many other ports (-1: a sum), what decides between two; the message, or the
stage and update of the sum; and the seconds that it keeps the port busy."""


@dataclass
class Pass:
    """What the ranks do, the arrivals being given: their spans, and when they send, post receives and sum up."""

    spans: list[list[Span]]
    sent: dict[Message, float] = field(default_factory=dict)
    posted: dict[Message, float] = field(default_factory=dict)
    summed: dict[tuple[int, int], float] = field(default_factory=dict)


def slow_clock(program: Program, costs: Costs, total: int, overlap: bool) -> list[list[Span]]:
    """Returns the spans of each rank, sorted."""
    arrivals: dict[Message, tuple[float, float]] = {}
    for _ in range(10_000):
        done = ranks_with(program, costs, total, overlap, arrivals)
        again = through_ports(program, costs, done)
        if again == arrivals:
            for (number, index), (start, arrival) in arrivals.items():
                channel = program.channels[number]
                if arrival > start:
                    row = done.spans[channel.sender]
                    row.append(Span(channel.sender, "send", channel.source, index, start, arrival))
            return [sorted(rows) for rows in done.spans]
        arrivals = again
    raise AssertionError("no fixed point")


def ranks_with(
    program: Program, costs: Costs, total: int, overlap: bool, arrivals: dict[Message, tuple[float, float]]
) -> Pass:
    """Looks at all ranks in turn until nobody can go on."""
    ranks = range(program.placement.workers)
    texts = [list(program.instructions(rank, total)) for rank in ranks]
    is_last = [last_backwards(program, rank) for rank in ranks] if overlap else []
    at, now = [0] * len(ranks), [0.0] * len(ranks)
    done = Pass([[] for _ in ranks])
    taken: list[list[int]] = [[] for _ in program.channels]  # microbatches in the order of their receives
    for text in texts:
        for one in text:
            if not isinstance(one, Op) and one.kind is Move.RECEIVE:
                taken[one.channel].append(one.index)
    for number, channel in enumerate(program.channels):
        done.posted.update({(number, k): 0.0 for k in taken[number][: channel.depth]})
    received: list[list[Message]] = [[] for _ in ranks]
    # (stage, update) -> rank -> when its gradients began to come and when they all were there
    brought: defaultdict[tuple[int, int], dict[int, tuple[float, float]]] = defaultdict(dict)

    def wait(rank: int, stage: int, index: int, until: float) -> None:
        if until > now[rank]:
            done.spans[rank].append(Span(rank, "wait", stage, index, now[rank], until))
            now[rank] = until

    def can(rank: int) -> bool:
        """Does the next instruction of a rank, if it can."""
        one = texts[rank][at[rank]]
        if isinstance(one, Op):
            end = now[rank] + costs.op_s(one.kind, one.stage) * (1.0 / costs.speed(rank))
            done.spans[rank].append(Span(rank, one.kind.value, one.stage, one.index, now[rank], end))
            backward = one.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)
            if overlap and backward and is_last[rank](one) and program.placement.replicas[one.stage] > 1:
                brought[one.stage, program.updates.update_of(one.stage, one.index)][rank] = now[rank], end
            now[rank] = end
            for number, k in received[rank]:
                later = taken[number].index(k) + program.channels[number].depth
                done.posted.update({(number, k): end for k in taken[number][later : later + 1]})
            received[rank] = []
        elif one.kind is Move.SYNC:
            members = program.placement.ranks[one.channel]
            brought[one.channel, one.index].setdefault(rank, (now[rank], now[rank]))
            if len(brought[one.channel, one.index]) < len(members):
                return False
            times = list(brought[one.channel, one.index].values())
            done.summed[one.channel, one.index] = max(end for _, end in times)
            wait(rank, one.channel, one.index, sum_end(program, costs, one.channel, times, overlap))
        elif one.kind is Move.SEND:
            done.sent[one.channel, one.index] = now[rank]
        else:
            message = one.channel, one.index
            if message not in done.sent or message not in done.posted:
                return False
            first_guess = max(done.sent[message], done.posted[message])
            wait(rank, program.channels[one.channel].target, one.index, arrivals.get(message, (0.0, first_guess))[1])
            received[rank].append(message)
        at[rank] += 1
        return True

    going = True
    while going:
        going = False
        for rank in ranks:
            while at[rank] < len(texts[rank]) and can(rank):
                going = True
    assert all(at[rank] == len(texts[rank]) for rank in ranks)
    return done


def through_ports(program: Program, costs: Costs, done: Pass) -> dict[Message, tuple[float, float]]:
    """Returns of each message when it enters the last port, and when it is there.

    Ports into the network come before those out of it, and the outer ones lie between: in that order each port
    knows what reaches it.
    """
    cluster = costs.cluster
    reached, ended = dict(done.sent), dict(done.sent)
    crossed = dict.fromkeys(done.sent, 0)
    order = {message: number for number, message in enumerate(done.sent)}  # of one rank: that of its sends
    way = [("out", level) for level in range(len(cluster.levels))]
    way += [("in", level) for level in reversed(range(len(cluster.levels)))]
    for direction, level in way:
        row = cluster.levels[level]
        rate = row.bandwidth_bytes_per_s
        if direction == "in" and row.receive_bytes_per_s is not None:
            rate = row.receive_bytes_per_s
        guests: defaultdict[int, list[Guest]] = defaultdict(list)
        for message in done.sent:
            channel, size = program.channels[message[0]], costs.channel_bytes(program.channels[message[0]])
            ends = costs.worker(channel.sender), costs.worker(channel.receiver)
            if size and level <= cluster.reach(*ends):
                if (direction, level) == ("in", 0):
                    reached[message] = max(reached[message], done.posted[message])
                place = cluster.component(level, ends[0 if direction == "out" else 1])
                ties = order[message] if (direction, level) == ("out", 0) else message[0]
                guests[place].append((reached[message], crossed[message], ties, message, size / rate))
        for (stage, update), at in done.summed.items():
            size = (costs.sum_bytes or (0.0,) * (stage + 1))[stage]
            places = {cluster.component(level, costs.worker(r)) for r in program.placement.ranks[stage]}
            if size and len(places) > 1:
                for place in places:
                    guests[place].append((at, -1, stage, (stage, update), size / rate))
        for rows in guests.values():
            for message, start, end in served(sorted(rows)):
                crossed[message] += 1
                reached[message], ended[message] = start, max(ended[message], end)
    found = {}
    for message, posted in done.posted.items():
        if message in done.sent:
            channel = program.channels[message[0]]
            start = reached[message]
            if not costs.channel_bytes(channel):
                start = ended[message] = max(start, posted)
            found[message] = start, ended[message] + costs.latency_s(channel)
    return found


def served(rows: list[Guest]) -> list[tuple[Message, float, float]]:
    """Returns how one port serves messages and sums that reach it in this order: each message, its start and end."""
    busy_until, found = 0.0, []
    owed: list[tuple[int, float]] = []
    for at, hop, _, message, seconds in rows:
        idle = max(0.0, at - busy_until)
        while owed and idle > 0:
            stage, left = owed.pop(0)
            if left > idle:
                owed.insert(0, (stage, left - idle))
            idle -= left
        busy_until = max(at, busy_until)
        if hop < 0:
            busy_until += sum(left for stage, left in owed if stage == message[0])
            owed = [(stage, left) for stage, left in owed if stage != message[0]] + [(message[0], seconds)]
        else:
            found.append((message, busy_until, busy_until + seconds))
            busy_until += seconds
    return found


def sum_end(program: Program, costs: Costs, stage: int, times: list[tuple[float, float]], overlap: bool) -> float:
    """Returns when the last bucket of a sum is there."""
    if not overlap:
        return max(end for _, end in times) + costs.sync_s[stage]
    row, cluster = program.plan.stages[stage], costs.cluster
    link = cluster.sum_link(cluster.reach(*(costs.worker(rank) for rank in program.placement.ranks[stage])))
    sizes, left = [], row.parameter_bytes
    while left or not sizes:
        sizes.append(min(left, NEXT_BYTES if sizes else FIRST_BYTES))
        left -= sizes[-1]
    done = reached = 0.0
    for size in sizes:
        reached += size
        share = reached / row.parameter_bytes if row.parameter_bytes else 1.0
        ready = max(end - (1 - share) * (end - start) for start, end in times)
        done = max(done, ready) + all_reduce_s(size, row.replicas, *link, how=cluster.sums)
    return done
