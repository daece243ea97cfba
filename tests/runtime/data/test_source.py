"""Microbatches that replica 0 of the input stage sends to the others: what arrives, and no deadlock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from drawn import Case, cases
from hypothesis import given
from hypothesis import strategies as st

from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.program import Instruction
from pipedream.runtime.comm.channel import LocalChannel
from pipedream.runtime.comm.message import Content, Message, StopReason
from pipedream.runtime.data.reader import EpochRange, IterableReader
from pipedream.runtime.data.rng import DataOrder
from pipedream.runtime.data.source import ReadingSource, ReceivingSource, Source
from pipedream.runtime.data.splitter import Splitter
from pipedream.verifier import verify
from pipedream.verifier.unrolled import Unrolled, unroll
from pipedream.verifier.waits import _Waits


def batches(count: int) -> list[Any]:
    return [{"x": torch.arange(2 + k % 3) + 10 * k, "name": str(k)} for k in range(count)]


def adapt(batch: Any) -> tuple[Any, Any]:
    return (batch["x"], batch["name"]), -batch["x"]


def reading(count: int, senders: Mapping[int, LocalChannel] | None = None) -> ReadingSource:
    reader = IterableReader(batches(count), DataOrder(), EpochRange(), None)
    return ReadingSource(reader, Splitter(adapt), senders)


def take(source: Source, microbatch: int) -> tuple[Any, ...]:
    """Returns all that is known of a microbatch, in a form that compares."""
    messages = source.take(microbatch)
    if isinstance(messages, StopReason):
        return messages, source.ended_at
    return tuple(
        value for message in messages for value in (message.without_tensors(), message.structure, *lists(message))
    )


def lists(message: Message) -> list[Any]:
    return [tensor.tolist() for tensor in message.tensors if tensor is not None]


@given(
    count=st.integers(1, 9), replicas=st.integers(2, 4), more=st.integers(0, 3), whole=st.booleans(),
    stop=st.sampled_from([None, StopReason.DRAIN, StopReason.INTERRUPT]), at=st.integers(0, 4),
)  # fmt: skip
def test_what_is_handed_over_is_what_each_would_have_read_itself(
    count: int, replicas: int, more: int, whole: bool, stop: StopReason | None, at: int
) -> None:
    parts = 1 if whole else replicas + more
    cycle = replicas if whole else 1
    channels = {replica: LocalChannel() for replica in range(1, replicas)}
    sent = reading(count, channels)
    handed = [sent, *(ReceivingSource(channel) for channel in channels.values())]
    read = [reading(count) for _ in range(replicas)]
    for sources in (handed, read):
        for replica, source in enumerate(sources):
            source.begin(parts, replica, 100, cycle)
    ended: set[int] = set()
    # By rounds: minibatches where each replica takes whole ones, else all microbatches of a minibatch.
    rounds = [range(i * replicas, (i + 1) * replicas) for i in range(12)] if whole else [
        range(i * parts, (i + 1) * parts) for i in range(12)
    ]  # fmt: skip
    for i, microbatches in enumerate(rounds):
        if stop is not None and i == at:
            for source in (*handed, *read):
                source.stop(stop)
        for microbatch in sorted(microbatches, key=lambda k: (k % replicas, k)):  # replica 0 goes first
            replica = microbatch % replicas
            if replica not in ended:
                messages = take(handed[replica], microbatch)
                assert messages == take(read[replica], microbatch)
                if isinstance(messages[0], StopReason):
                    ended.add(replica)
    assert ended == set(range(replicas))
    assert not any(channel.receive().ready() for channel in channels.values()), "each stream has one end"


def test_a_minibatch_with_fewer_samples_than_parts_has_empty_ones() -> None:
    channel = LocalChannel()
    first, other = reading(1, {1: channel}), ReceivingSource(channel)
    first.begin(6, 0, 0)
    other.begin(6, 1, 0)
    contents = [source.take(k)[0].content for k, source in enumerate([first, other] * 3)]  # type: ignore[index]
    assert contents == [Content.DATA] * 2 + [Content.EMPTY] * 4


class Handing(_Waits):
    """The graph of waits in which other replicas wait for replica 0 to admit the round of their forward."""

    def __init__(self, run: Unrolled, early: int = 0) -> None:
        super().__init__(run, None)
        self.early = early

    def _step(self, rank: int, instruction: Instruction) -> bool:
        row, m = self.run.program.placement.readers, self.run.program.microbatches
        if (
            isinstance(instruction, Op)
            and (instruction.kind, instruction.stage) == (Kind.FORWARD, 0)
            and rank != row[0]
        ):
            k, count = instruction.index, len(row)
            opens = k - k % count if m == 1 else -(-(k - k % m) // count) * count
            opens += self.early * count
            place = self.run.ops.get(Op(Kind.FORWARD, 0, opens, 0))
            if place is not None and self.position[row[0]] < place[1]:
                return False
        return super()._step(rank, instruction)


def gets_through(case: Case, early: int = 0) -> bool:
    program = case.program()
    verify(program)
    run = unroll(program, 4 * program.cycle)
    waits = Handing(run, early)
    before: list[int] = []
    while waits.position != before:
        before = list(waits.position)
        waits.ready.extend(range(len(run.streams)))
        waits.advance()
    return all(at == len(stream) for at, stream in zip(waits.position, run.streams, strict=True))


@given(case=cases())
def test_nobody_waits_in_a_circle_for_what_is_handed_over(case: Case) -> None:
    assert gets_through(case)


def test_a_circle_would_be_found() -> None:
    case = Case("pipedream", (2, 1), (2, 1), (0, 0), None)
    assert gets_through(case)
    assert not gets_through(case, early=1), "a forward that waited for a later round would stand still"


@pytest.mark.parametrize("parts", [1, 2])
def test_an_error_of_the_data_reaches_the_one_who_asks(parts: int) -> None:
    reader = IterableReader([{"x": 1}], DataOrder(), EpochRange(), None)
    source = ReadingSource(reader, Splitter(lambda batch: (batch["y"], None)), {1: LocalChannel()})
    source.begin(parts, 0, 0)
    with pytest.raises(KeyError, match="y"):
        source.take(0)
