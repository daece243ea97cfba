"""The clock once more, slow and plain: the oracle of the fast one, to the bit.

It reads `Program.instructions` one by one and looks at all ranks in turn until nobody can go on. A sum is made of all
its buckets, and begins at the backward that the runtime takes for the last one before it.
"""

from __future__ import annotations

from collections import defaultdict, deque

from pipedream.core.cost import all_reduce_s
from pipedream.core.op import Kind, Op
from pipedream.core.program import Move, Program
from pipedream.core.timeline import Span
from pipedream.runtime.reduction import last_backwards
from pipedream.simulator import Costs

FIRST_BYTES, NEXT_BYTES = 1 << 20, 4 << 20


def slow_clock(program: Program, costs: Costs, total: int, overlap: bool) -> list[list[Span]]:
    """Returns the spans of each rank, sorted."""
    ranks = range(program.placement.workers)
    texts = [list(program.instructions(rank, total)) for rank in ranks]
    is_last = [last_backwards(program, rank) for rank in ranks] if overlap else []
    at, now = [0] * len(ranks), [0.0] * len(ranks)
    spans: list[list[Span]] = [[] for _ in ranks]
    link_free: defaultdict[tuple[str, int, int, str], float] = defaultdict(float)
    sent: list[deque[tuple[int, float]]] = [deque() for _ in program.channels]
    posted = [deque([0.0] * channel.depth) for channel in program.channels]
    received: list[list[int]] = [[] for _ in ranks]
    # (stage, update) -> rank -> when its gradients began to come and when they all were there
    brought: defaultdict[tuple[int, int], dict[int, tuple[float, float]]] = defaultdict(dict)

    def wait(rank: int, stage: int, index: int, until: float) -> None:
        if until > now[rank]:
            spans[rank].append(Span(rank, "wait", stage, index, now[rank], until))
            now[rank] = until

    def can(rank: int) -> bool:
        """Does the next instruction of a rank, if it can."""
        one = texts[rank][at[rank]]
        if isinstance(one, Op):
            end = now[rank] + costs.op_s(one.kind, one.stage)
            spans[rank].append(Span(rank, one.kind.value, one.stage, one.index, now[rank], end))
            backward = one.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)
            if overlap and backward and is_last[rank](one) and program.placement.replicas[one.stage] > 1:
                brought[one.stage, program.updates.update_of(one.stage, one.index)][rank] = now[rank], end
            now[rank] = end
            for number in received[rank]:
                posted[number].append(end)
            received[rank] = []
        elif one.kind is Move.SYNC:
            members = program.placement.ranks[one.channel]
            brought[one.channel, one.index].setdefault(rank, (now[rank], now[rank]))
            if len(brought[one.channel, one.index]) < len(members):
                return False
            times = list(brought[one.channel, one.index].values())
            wait(rank, one.channel, one.index, sum_end(program, costs, one.channel, times, overlap))
        elif one.kind is Move.SEND:
            channel = program.channels[one.channel]
            key = "out", channel.sender, channel.source, channel.carries
            leaves = max(now[rank], link_free[key])
            link_free[key] = leaves + costs.occupied_s(channel)
            sent[one.channel].append((one.index, leaves))
        else:
            if not sent[one.channel] or not posted[one.channel]:
                return False
            channel = program.channels[one.channel]
            key = "in", channel.receiver, channel.target, channel.carries
            index, leaves = sent[one.channel].popleft()
            assert index == one.index
            start = max(leaves, link_free[key], posted[one.channel].popleft())
            link_free[key] = start + costs.occupied_s(channel)
            arrival = start + costs.transfer_s(channel)
            if arrival > start:
                spans[channel.sender].append(Span(channel.sender, "send", channel.source, index, start, arrival))
            wait(rank, channel.target, index, arrival)
            received[rank].append(one.channel)
        at[rank] += 1
        return True

    going = True
    while going:
        going = False
        for rank in ranks:
            while at[rank] < len(texts[rank]) and can(rank):
                going = True
    assert all(at[rank] == len(texts[rank]) for rank in ranks)
    return [sorted(rows) for rows in spans]


def sum_end(program: Program, costs: Costs, stage: int, times: list[tuple[float, float]], overlap: bool) -> float:
    """Returns when the last bucket of a sum is there."""
    if not overlap:
        return max(end for _, end in times) + costs.sync_s[stage]
    row, cluster = program.plan.stages[stage], program.plan.cluster
    sizes, left = [], row.parameter_bytes
    while left or not sizes:
        sizes.append(min(left, NEXT_BYTES if sizes else FIRST_BYTES))
        left -= sizes[-1]
    done = reached = 0.0
    for size in sizes:
        reached += size
        share = reached / row.parameter_bytes if row.parameter_bytes else 1.0
        ready = max(end - (1 - share) * (end - start) for start, end in times)
        done = max(done, ready) + all_reduce_s(size, row.replicas, cluster.bandwidth_bytes_per_s, cluster.latency_s)
    return done
