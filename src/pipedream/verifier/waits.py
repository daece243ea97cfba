"""No deadlock: the graph of waits has no cycle.

A program of fixed order with bounded rings is a marked graph: deadlocks do not depend on speeds. So every rank is
advanced as far as possible, once: if not all finish, following who waits for whom leads into the cycle. The waits are

- program order on each rank; a receive waits until its message is delivered;
- a message is delivered once it is sent and its receive is posted, after the consumer of message i - depth;
- on a lane (what a transport runs in order, such as an NCCL communicator) a rank's transfers complete in the order in
  which they were issued, receives from one sender in that sender's order;
- a sum or an average waits for all ranks that join it; a sum of norms for that of the update `norm_delay` before;
- a fetch waits for what another rank leaves in memory that they share.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable

from pipedream.core.errors import DeadlockError
from pipedream.core.schedule import moves
from pipedream.core.schedule.moves import Transfer
from pipedream.core.schedule.op import Op
from pipedream.core.schedule.program import Channel, Instruction
from pipedream.verifier.unrolled import Message, Unrolled

_Lane = tuple[int, Hashable]  # (rank, lane)


def check_waits(run: Unrolled, lanes: Callable[[Channel], Hashable] | None = None) -> None:
    """Raises a DeadlockError if not all ranks of a run can finish; `lanes` as in `verify`."""
    waits = _Waits(run, lanes)
    waits.advance()
    stuck = [rank for rank, stream in enumerate(run.streams) if waits.position[rank] < len(stream)]
    if stuck:
        raise DeadlockError(waits.explain(stuck[0]))


class _Waits:
    """The state of a run.

    `advance` runs the ranks until none can continue; `explain` then follows the waits from a stuck rank.
    """

    def __init__(self, run: Unrolled, lanes: Callable[[Channel], Hashable] | None) -> None:
        self.run = run
        self.channels = run.program.channels
        self.position = [0] * len(run.streams)
        self.lane: list[Hashable] = [
            number if lanes is None else lanes(channel) for number, channel in enumerate(self.channels)
        ]
        self.issued: dict[_Lane, deque[Message]] = defaultdict(deque)
        self.sent: set[Message] = set()
        self.posted: set[Message] = set()
        self.consumed: set[Message] = set()
        self.delivered: set[Message] = set()
        self.ready = deque(range(len(run.streams)))
        self.arrived: dict[Transfer, set[int]] = defaultdict(set)  # sum -> ranks
        self._prepare()

    def _prepare(self) -> None:
        run = self.run
        # messages in the sender's order
        self.unposted: dict[int, dict[tuple[Hashable, int], deque[Message]]] = defaultdict(lambda: defaultdict(deque))
        self.previous_in_place: dict[Message, Message] = {}  # message -> the earlier one in its place of the ring
        for message in sorted(run.sent, key=run.sent.__getitem__):
            ends = self.channels[message[0]]
            self.unposted[ends.receiver][self.lane[message[0]], ends.sender].append(message)
        self.consumers: dict[Op, list[Message]] = defaultdict(list)
        for number, order in run.sequences.items():
            depth = self.channels[number].depth
            for i, k in enumerate(order):
                self.consumers[run.consumer((number, k))].append((number, k))
                if i >= depth:
                    self.previous_in_place[number, k] = (number, order[i - depth])
        self.members: dict[Transfer, set[int]] = defaultdict(set)
        for rank, item in run.sums:
            self.members[item].add(rank)
        self.needs: dict[tuple[int, Instruction], list[Op]] = {}  # a rank's fetch -> ops on other ranks
        self.done: set[Op] = set()
        self.readers: dict[Op, list[int]] = defaultdict(list)
        for rank, fetch in run.steps:
            if fetch.kind not in moves.FETCHES:
                continue
            op = Op(fetch.kind.kind, fetch.channel, fetch.index)  # a stage with shared weights has one replica
            fetched = run.program.list_fetched(op, run.total)
            self.needs[rank, fetch] = [need for need in fetched if run.ops[need][0] != rank]
        self.needed = {need for needs in self.needs.values() for need in needs}

    def advance(self) -> None:
        for rank in range(len(self.run.streams)):
            self._post(rank)
        while self.ready:
            rank = self.ready.popleft()
            stream = self.run.streams[rank]
            while self.position[rank] < len(stream) and self._step(rank, stream[self.position[rank]]):
                self.position[rank] += 1

    def _step(self, rank: int, instruction: Instruction) -> bool:
        missing = self._find_missing(rank, instruction)
        if missing is not None:
            self.readers[missing].append(rank)
            return False
        if isinstance(instruction, Transfer):
            if instruction.kind.is_joint:
                return self._arrive(rank, instruction)
            if instruction.kind.counts != "channels":
                return True
            message = instruction.channel, instruction.index
            if instruction.kind is moves.RECEIVE:
                return message in self.delivered
            self.sent.add(message)
            self._issue(rank, message)
            return True
        if instruction in self.needed:
            self.done.add(instruction)
            self.ready.extend(self.readers.pop(instruction, ()))
        if instruction in self.consumers:
            self.consumed.update(self.consumers[instruction])
            self._post(rank)
        return True

    def _find_missing(self, rank: int, instruction: Instruction) -> Op | None:
        return next((need for need in self.needs.get((rank, instruction), ()) if need not in self.done), None)

    def _arrive(self, rank: int, item: Transfer) -> bool:
        """Joins a sum; returns whether the one that it waits for is complete."""
        arrived = self.arrived[item]
        if rank not in arrived:
            arrived.add(rank)
            if arrived == self.members[item]:
                self.ready.extend(arrived - {rank})
        awaited = self._find_awaited(item)
        return self.arrived[awaited] == self.members[awaited]

    def _find_awaited(self, item: Transfer) -> Transfer:
        delay = self.run.program.norm_delay if item.kind is moves.NORM else 0
        return item._replace(index=item.index - delay)

    def _post(self, rank: int) -> None:
        for messages in self.unposted[rank].values():
            while messages:
                previous = self.previous_in_place.get(messages[0])
                if previous is not None and previous not in self.consumed:
                    break
                message = messages.popleft()
                self.posted.add(message)
                self._issue(rank, message)

    def _issue(self, rank: int, message: Message) -> None:
        lane = self.lane[message[0]]
        queue = self.issued[rank, lane]
        queue.append(message)
        self._deliver(queue, lane)

    def _deliver(self, first_queue: deque[Message], lane: Hashable) -> None:
        """Delivers each message that is first at both of its ends."""
        changed = [first_queue]
        while changed:
            queue = changed.pop()
            if not queue:
                continue
            message = queue[0]
            ends = self.channels[message[0]]
            sending, receiving = self.issued[ends.sender, lane], self.issued[ends.receiver, lane]
            if message in self.sent and message in self.posted and sending and sending[0] == message == receiving[0]:
                sending.popleft()
                receiving.popleft()
                self.delivered.add(message)
                self.ready.append(ends.receiver)
                changed += [sending, receiving]

    def explain(self, rank: int) -> str:
        node: int | Message = rank
        lines: list[str] = []
        line_of: dict[int | Message, int] = {}
        while node not in line_of:
            line_of[node] = len(lines)
            line, node = self._explain_rank(node) if isinstance(node, int) else self._explain_message(node)
            lines.append(line)
        cycle = lines[line_of[node] :]
        program = self.run.program
        return "\n  ".join(
            [
                f"program {program.name!r}, plan {program.plan.config}: in a run of {self.run.total} microbatches "
                "these wait for each other for ever; change the order, the depth of a ring or the lanes:",
                *cycle,
            ]
        )

    def _explain_rank(self, rank: int) -> tuple[str, int | Message]:
        position = self.position[rank]
        instruction = self.run.streams[rank][position]
        head = f"rank {rank} waits at instruction {position}, {instruction}, for "
        if isinstance(instruction, Transfer) and instruction.kind is moves.RECEIVE:
            ends = self.channels[instruction.channel]
            return f"{head}the {ends.carries} of microbatch {instruction.index} from rank {ends.sender}", (
                instruction.channel,
                instruction.index,
            )
        if (missing := self._find_missing(rank, instruction)) is not None:
            return f"{head}{missing}", self.run.ops[missing][0]
        assert isinstance(instruction, Transfer)
        awaited = self._find_awaited(instruction)
        other = min(self.members[awaited] - self.arrived[awaited])
        return f"{head}rank {other} to reach the {awaited.kind.words}", other

    def _explain_message(self, message: Message) -> tuple[str, int | Message]:
        number, k = message
        ends = self.channels[number]
        head = f"message {number}:{k} (rank {ends.sender} to {ends.receiver}, {ends.carries}) waits for "
        if message not in self.sent:
            return f"{head}rank {ends.sender} to send it", ends.sender
        if message not in self.posted:
            first = self.unposted[ends.receiver][self.lane[number], ends.sender][0]
            if first != message:
                return f"{head}message {first[0]}:{first[1]}, whose receive is posted before", first
            reader = self.run.consumer(self.previous_in_place[message])
            return (
                f"{head}a place in the ring of {ends.depth}, which {reader} on rank {ends.receiver} would free",
                ends.receiver,
            )
        for rank in (ends.sender, ends.receiver):
            first = self.issued[rank, self.lane[number]][0]
            if first != message:
                return f"{head}message {first[0]}:{first[1]}, issued before it on the same lane of rank {rank}", first
        raise AssertionError(f"message {message} could have been delivered")
