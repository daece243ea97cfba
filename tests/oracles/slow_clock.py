"""The clock once more, slow and plain: the oracle of the fast one.

It knows nothing of an order of events. It reads `Program.instructions` one by one, with the arrivals of all messages
and the ends of all sums taken from a table; from what the ranks then send and when, it works out how all of that flows;
which makes a new table; and so on until the table stays as it is. A sum begins at the backward that the runtime takes
for the last one before it; where no message is in its way, its end is that of all its buckets, one by one.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pipedream as pd
from pipedream.core.plan.cost import SumLink
from pipedream.core.schedule import moves
from pipedream.core.schedule.program import Instruction
from pipedream.core.schedule.timeline import Span
from pipedream.simulator import Costs

Kind, Op = pd.schedules.Kind, pd.schedules.Op
FIRST_BYTES, NEXT_BYTES = 1 << 20, 4 << 20

Message = tuple[int, int]
"""A channel's number and the microbatch."""

Row = tuple[str, int]
"""'message' and a channel's number, or 'sum' and a stage."""

Place = tuple[str, int, int]
"""A port: its direction, level and component."""

Table = dict[tuple[str, int, int], tuple[float, float]]
"""Begin and end of each message and each sum, by its row and its index."""


@dataclass
class Pass:
    """The ranks' actions under given arrivals: their spans, and when they send, post receives and sum up."""

    spans: list[list[Span]]
    sent: dict[Message, float] = field(default_factory=dict)
    posted: dict[Message, float] = field(default_factory=dict)
    summed: dict[tuple[int, int], list[tuple[float, float]]] = field(default_factory=dict)


def slow_clock(program: pd.Program, costs: Costs, total: int, overlap: bool, alone: bool = False) -> list[list[Span]]:
    """Returns the spans of each rank, sorted; `alone`: nothing is in the way of sums, which go bucket by bucket."""
    arrivals: Table = {}
    for _ in range(10_000):
        done = ranks_with(program, costs, total, overlap, arrivals, alone)
        again = through_ports(program, costs, done)
        if again == arrivals:
            for (kind, number, index), (start, arrival) in arrivals.items():
                if kind == "message" and arrival > start:
                    channel = program.channels[number]
                    row = done.spans[channel.sender]
                    row.append(Span(channel.sender, "send", channel.source, index, start, arrival))
            return [sorted(rows) for rows in done.spans]
        arrivals = again
    raise AssertionError("no fixed point")


def ranks_with(program: pd.Program, costs: Costs, total: int, overlap: bool, arrivals: Table, alone: bool) -> Pass:
    """Looks at all ranks in turn until nobody can go on."""
    ranks = range(program.placement.workers)
    texts = [list(program.instructions(rank, total)) for rank in ranks]
    longer = total + 2 * program.cycle  # an update that the end of the run cuts short does not count
    last = [last_backwards(program.instructions(rank, longer)) for rank in ranks] if overlap else []
    at, now = [0] * len(ranks), [0.0] * len(ranks)
    done = Pass([[] for _ in ranks])
    receives: list[list[int]] = [[] for _ in program.channels]  # microbatches in the order of their receives
    for text in texts:
        for instruction in text:
            if not isinstance(instruction, Op) and instruction.kind is moves.RECEIVE:
                receives[instruction.channel].append(instruction.index)
    for number, channel in enumerate(program.channels):
        done.posted.update({(number, k): 0.0 for k in receives[number][: channel.depth]})
    received: list[list[Message]] = [[] for _ in ranks]
    update_ends: dict[tuple[int, int], float] = {}  # by (stage, update)
    # (stage, update) -> rank -> when its gradients began to come and when they all were there
    brought: defaultdict[tuple[int, int], dict[int, tuple[float, float]]] = defaultdict(dict)

    def wait(rank: int, stage: int, index: int, until: float) -> None:
        if until > now[rank]:
            done.spans[rank].append(Span(rank, "wait", stage, index, now[rank], until))
            now[rank] = until

    def end_s(number: int) -> float:
        size = costs.channel_bytes(program.channels[number])
        host = costs.runtime
        return 0.0 if host.overlap_device else host.message_s + host.message_s_per_byte * size

    def can(rank: int) -> bool:
        """Does the next instruction of a rank, if it can."""
        instruction, slowness = texts[rank][at[rank]], 1.0 / costs.speed(rank)
        host = costs.runtime  # what keeps a GPU's host busy is in the seconds of its ops
        if isinstance(instruction, Op):
            kind, stage, index = instruction.kind, instruction.stage, instruction.index
            if kind is Kind.FORWARD and program.placement.runs_backward_elsewhere(stage):
                version = program.weights.forward_version(stage, index) if program.trains else 0
                if version and (stage, version) not in update_ends:
                    return False
                copied = costs.copy_s(stage, program.placement.rank_of(stage, index), rank)
                wait(rank, stage, index, update_ends.get((stage, version), 0.0) + copied)
            if kind is Kind.FORWARD and stage == 0 and index % program.microbatches == 0:
                now[rank] += 0.0 if host.overlap_device else host.load_s * slowness
            end = now[rank] + costs.op_s(kind, stage) * slowness
            done.spans[rank].append(Span(rank, kind.value, stage, index, now[rank], end))
            if kind is Kind.UPDATE:
                update_ends[stage, index] = end
            backward = kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)
            if overlap and backward and instruction in last[rank] and program.placement.replicas[stage] > 1:
                brought[stage, program.updates.update_of(stage, index)][rank] = now[rank], end
            now[rank] = end
            for number, k in received[rank]:
                later = receives[number].index(k) + program.channels[number].depth
                done.posted.update({(number, k): end for k in receives[number][later : later + 1]})
            received[rank] = []
        elif instruction.kind is moves.SYNC:
            members = program.placement.ranks[instruction.channel]
            brought[instruction.channel, instruction.index].setdefault(rank, (now[rank], now[rank]))
            if len(brought[instruction.channel, instruction.index]) < len(members):
                return False
            times = list(brought[instruction.channel, instruction.index].values())
            done.summed[instruction.channel, instruction.index] = times
            _, over = arrivals.get(("sum", instruction.channel, instruction.index), (0.0, max(end for _, end in times)))
            closed = sum_end(program, costs, instruction.channel, times) if alone else over
            if not host.overlap_device and costs.sum_bytes and instruction.channel < len(costs.sum_bytes):
                # Meanwhile each member's core sends and receives the bytes of the sum.
                busy_s = 2 * host.message_s_per_byte * costs.sum_bytes[instruction.channel]
                closed = max(closed, max(end for _, end in times) + busy_s)
            wait(rank, instruction.channel, instruction.index, closed)
        elif instruction.kind.counts == "stages":
            pass  # ops wait for shared memory here, and sums begin with the last backward of the order
        elif instruction.kind is moves.SEND:
            now[rank] += end_s(instruction.channel) * slowness
            done.sent[instruction.channel, instruction.index] = now[rank]
        else:
            message = instruction.channel, instruction.index
            if message not in done.sent or message not in done.posted:
                return False
            channel, first_guess = program.channels[instruction.channel], max(done.sent[message], done.posted[message])
            _, until = arrivals.get(("message", *message), (0.0, first_guess))
            if costs.recompute_s and channel.carries == "gradient":
                # Its wait and what it recomputes meanwhile; drawn as if the wait came first.
                until = max(now[rank], until - costs.recompute_s[channel.target] * slowness)
            wait(rank, channel.target, instruction.index, until)
            now[rank] += end_s(instruction.channel) * slowness
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


def last_backwards(text: Iterable[Instruction]) -> set[Op]:
    """Returns the backwards after which the next backward or update of their stage is an update."""
    before: dict[int, Op] = {}
    ops = set()
    for op in text:
        if isinstance(op, Op) and op.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
            before[op.stage] = op
        elif isinstance(op, Op) and op.kind is Kind.UPDATE and op.stage in before:
            ops.add(before.pop(op.stage))
    return ops


def through_ports(program: pd.Program, costs: Costs, done: Pass) -> Table:
    """Returns when each message begins to flow and is there, and when each sum is over."""
    cluster = costs.cluster

    def rate(direction: str, level: int) -> float:
        row = cluster.levels[level]
        if direction == "in" and row.receive_bytes_per_s is not None:
            return row.receive_bytes_per_s
        return row.bandwidth_bytes_per_s

    rows: dict[Row, list[tuple[float, float, int]]] = {}
    ways: dict[Row, dict[Place, float]] = {}
    table: Table = {}
    for number, channel in enumerate(program.channels):
        size, ends = costs.channel_bytes(channel), (costs.worker(channel.sender), costs.worker(channel.receiver))
        both = [m for m in done.sent if m[0] == number and m in done.posted]
        theirs = sorted((max(done.sent[m], done.posted[m]), m[1]) for m in both)
        if not size or ends[0] == ends[1]:
            table |= {("message", number, k): (at, at + costs.latency_s(channel)) for at, k in theirs}
            continue
        order = sorted((done.sent[number, k], k) for _, k in theirs)
        rows["message", number] = [(max(done.sent[number, k], done.posted[number, k]), size, k) for _, k in order]
        ways["message", number] = {
            (direction, level, cluster.component(level, ends[direction == "in"])): rate(direction, level)
            for level in range(cluster.reach(*ends) + 1)
            for direction in ("out", "in")
        }
    for stage, ranks in enumerate(program.placement.ranks):
        workers = [costs.worker(rank) for rank in ranks]
        size, seconds = (costs.sum_bytes or (0.0,) * (stage + 1))[stage], costs.sum_s(stage)
        for update, times in sorted(
            (update, at) for (at_stage, update), at in done.summed.items() if at_stage == stage
        ):
            parts = costs.sum_parts(stage, [(end, end - start) for start, end in times])
            if size and seconds and len(ranks) > 1:
                rows.setdefault(("sum", stage), []).extend((at, part, update) for at, part, _ in parts)
                continue
            over = 0.0
            for at, _, lasts in parts:
                over = max(over, at) + lasts
            table["sum", stage, update] = over, over
        if ("sum", stage) in rows:
            ways["sum", stage] = {("own", stage, 0): size / seconds}
            for level in range(cluster.reach(*workers) + 1):
                places = {cluster.component(level, worker) for worker in workers}
                if len(places) > 1:
                    ways["sum", stage] |= {(d, level, at): rate(d, level) for at in places for d in ("out", "in")}
    for row, index, start, end in flowing(rows, ways):
        late = costs.latency_s(program.channels[row[1]]) if row[0] == "message" else 0.0
        table[*row, index] = start, end + late
    return table


def flowing(
    rows: dict[Row, list[tuple[float, float, int]]], ways: dict[Row, dict[Place, float]]
) -> Iterator[tuple[Row, int, float, float]]:
    """Lets what is in each row flow, one after the other, all that share a place sharing its rate; yields what was
    there, when it began and when it ended."""
    now = 0.0
    at = dict.fromkeys(rows, 0)
    going: dict[Row, list[float]] = {}  # when it began, what is left
    free = dict.fromkeys(rows, 0.0)
    while True:
        speeds = fair(going, ways)
        ends = {row: now + rest_bytes / speeds[row] for row, (_, rest_bytes) in going.items()}
        waiting = [row for row in rows if row not in going and at[row] < len(rows[row])]
        starts = {row: max(rows[row][at[row]][0], free[row]) for row in waiting}
        following = min([*ends.values(), *starts.values()], default=None)
        if following is None:
            return
        for row in going:
            going[row][1] = max(0.0, going[row][1] - speeds[row] * (following - now))
        now = following
        for row in [row for row, end in ends.items() if end == now]:
            yield row, rows[row][at[row]][2], going.pop(row)[0], now
            at[row] += 1
            free[row] = now
        for row in [row for row, start in starts.items() if start == now]:
            going[row] = [now, rows[row][at[row]][1]]


def fair(going: Iterable[Row], ways: dict[Row, dict[Place, float]]) -> dict[Row, float]:
    """Returns the rates of max-min fairness: none can be raised but at the cost of one that is no larger."""
    speeds: dict[Row, float] = {}
    while rest := [row for row in going if row not in speeds]:
        shares = {}
        for place in {place for row in rest for place in ways[row]}:
            users = [row for row in going if place in ways[row]]
            used = sum(speeds[row] for row in users if row in speeds)
            shares[place] = (ways[users[0]][place] - used) / sum(row not in speeds for row in users)
        least = min(shares.values())
        narrow = next(place for place, share in shares.items() if share == least)
        speeds |= {row: least for row in rest if narrow in ways[row]}
    return speeds


def sum_end(program: pd.Program, costs: Costs, stage: int, times: list[tuple[float, float]]) -> float:
    """Returns when the last bucket of a sum is there that nothing is in the way of."""
    row, cluster = program.plan.stages[stage], costs.cluster
    link = SumLink.across(cluster, cluster.reach(*map(costs.worker, program.placement.ranks[stage])))
    sizes, rest_bytes = [], row.parameter_bytes
    while rest_bytes or not sizes:
        sizes.append(min(rest_bytes, NEXT_BYTES if sizes else FIRST_BYTES))
        rest_bytes -= sizes[-1]
    done = reached = 0.0
    for size in sizes:
        reached += size
        share = reached / row.parameter_bytes if row.parameter_bytes else 1.0
        ready = max(end - (1 - share) * (end - start) for start, end in times)
        done = max(done, ready) + link.all_reduce_s(size, row.replicas)
    return done
