"""Microbatches that one replica of the input stage reads for others, or for the others of its machine alone."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from loaders import Numbers, Plain, listed, seed_all
from torch.utils.data import DataLoader

import pipedream as pd
from pipedream.runtime.comm import channel as links, message as wire
from pipedream.runtime.data import rng, splitter
from pipedream.runtime.data.reader import EpochRange, FollowingReader, IterableReader, LoaderReader, find_sharding
from pipedream.runtime.data.source import DataChannels, DataSources, ReadingSource, ReceivingSource, Source


def reader_of(count: int) -> LoaderReader:
    batches = [{"x": torch.arange(2 + k % 3) + 10 * k, "name": str(k)} for k in range(count)]
    reader = IterableReader(batches, rng.DataOrder(), EpochRange(), None)
    reader.adapt = lambda batch: ((batch["x"], batch["name"]), -batch["x"])
    return reader


def reading(count: int, senders: Mapping[int, links.LocalChannel] | None = None) -> ReadingSource:
    return ReadingSource(reader_of(count), splitter.Splitter(), senders, replicas=1 + len(senders or {}))


def hand_over(count: int, readers: Sequence[int]) -> tuple[list[Source], list[links.LocalChannel]]:
    """Returns the sources of replicas, for each of which `readers` says which one reads, and their channels."""
    replicas = range(len(readers))
    channels = {(a, b): links.LocalChannel() for b in replicas for a in range(b)}
    sources: list[Source] = []
    for replica in replicas:
        if readers[replica] != replica:
            sources.append(ReceivingSource(channels[readers[replica], replica]))
            continue
        reader: Any = reader_of(count)
        if replica:
            reader = FollowingReader(reader, channels[0, replica], replica)
        senders = {b: channels[replica, b] for b in replicas if readers[b] == replica != b}
        followers = [] if replica else [channels[0, b] for b in replicas if readers[b] == b != 0]
        sources.append(ReadingSource(reader, splitter.Splitter(), senders, followers, len(readers)))
    return sources, list(channels.values())


def take(source: Source, microbatch: int) -> tuple[Any, ...]:
    """Returns all that is known of a microbatch, in a form that compares."""
    messages = source.take(microbatch)
    if isinstance(messages, wire.StopReason):
        return messages, source.ended_at
    return tuple(
        (message.without_tensors(), message.structure, [None if t is None else t.tolist() for t in message.tensors])
        for message in messages
    )


@given(
    count=st.integers(1, 9), machines=st.lists(st.integers(0, 2), min_size=2, max_size=4), more=st.integers(0, 3),
    whole=st.booleans(), stops=st.lists(st.tuples(
        st.sampled_from([wire.StopReason.DRAIN, wire.StopReason.INTERRUPT]), st.integers(0, 4)), max_size=2),
)  # fmt: skip
def test_what_is_handed_over_is_what_each_would_have_read_itself(
    count: int, machines: list[int], more: int, whole: bool, stops: list[tuple[wire.StopReason, int]]
) -> None:
    """Over drains; on several machines the first replica of each reads for those of its machine."""
    replicas = len(machines)
    parts = 1 if whole else replicas + more
    handed, channels = hand_over(count, [0] * replicas if whole else [machines.index(machine) for machine in machines])
    read = [reading(count) for _ in machines]
    base = 100
    for stop, at in [*stops, (None, 0)]:
        for sources in (handed, read):
            for replica, source in enumerate(sources):
                source.begin(parts, replica, base, replicas if whole else 1)
        ended: set[int] = set()
        # By rounds: minibatches where each replica takes whole ones, else all microbatches of a minibatch.
        size = replicas if whole else parts
        for i in range(12):
            if stop is not None and i == at:
                for source in (*handed, *read):
                    source.stop(stop)
            for microbatch in sorted(range(i * size, (i + 1) * size), key=lambda k: (k % replicas, k)):
                replica = microbatch % replicas  # replica 0 goes first
                if replica not in ended:
                    messages = take(handed[replica], microbatch)
                    assert messages == take(read[replica], microbatch)
                    if isinstance(messages[0], wire.StopReason):
                        ended.add(replica)
        assert ended == set(range(replicas))
        assert not any(channel.receive().ready() for channel in channels), "each stream has one end"
        base += handed[0].ended_at
        for source in (*handed, *read):
            source.resume()


@pytest.mark.parametrize("count", [3, 4, 5])
def test_an_end_that_all_know_before_they_come_to_it_leaves_no_message(count: int) -> None:
    channels = {1: links.LocalChannel(), 2: links.LocalChannel()}
    sources = [reading(count, channels), *(ReceivingSource(end, takes_turns=True) for end in channels.values())]
    for replica, source in enumerate(sources):
        source.begin(1, replica, 0)
    for k in range(count):
        assert not isinstance(sources[k % 3].take(k), wire.StopReason)
    for source in sources:
        source.end()
    assert not any(end.receive().ready() for end in channels.values())


def test_a_replica_that_reads_other_samples_is_stopped() -> None:
    """A user's loop has changed the sampler of one rank, or the data set of another is shorter."""

    def source_of(order: list[list[int]], replica: int, channel: links.LocalChannel) -> ReadingSource:
        sharded = find_sharding(loader := DataLoader(Numbers(), batch_sampler=order)).ShardedLoader(loader)
        sharded.alike = True
        reader: Any = sharded.open(rng.DataOrder(), EpochRange(), None)
        reader.adapt = lambda batch: (batch, None)
        reader = FollowingReader(reader, channel, 7) if replica else reader
        source = ReadingSource(reader, splitter.Splitter(), replicas=2, followers=[] if replica else [channel])
        source.begin(2, replica, 0)
        return source

    for order in ([[0, 1], [2, 4]], [[0, 1]], [[0, 1], [2, 3], [4, 5]]):
        channel = links.LocalChannel()
        first, other = source_of([[0, 1], [2, 3]], 0, channel), source_of(order, 1, channel)
        for k in (0, 2):
            first.take(k)
        with pytest.raises(pd.PipelineError, match=r"(?s)rank 7.*minibatch [01] of this stream has other samples here"):
            _ = other.take(1), other.take(3)


class Changed(Numbers):
    """Draws from a generator of its own making, in each process another."""

    def __getitem__(self, index: int) -> Any:
        return np.random.default_rng().random()


class Missing(Numbers):
    """Its files are on another machine."""

    def __getitem__(self, index: int) -> Any:
        raise FileNotFoundError(index)


OF_SIX = [5, 5, *[6] * 6]
"""Samples of the minibatches of two epochs of a `loader_of`."""


def loader_of(data: Any) -> DataLoader[Any]:
    return DataLoader(data, 6, shuffle=True, generator=torch.Generator().manual_seed(7))


class Replicas:
    """`DataSources` of replicas of a stage, opened one after the other as if they met to exchange texts.

    Each exchange is completed by opening all replicas again, until none lacks what another one gave.
    """

    def __init__(self, machines: str, microbatches: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
        self.machines, self.microbatches, self.monkeypatch = machines, microbatches, monkeypatch

    def open(self, make_loader: Callable[[int], Any], split: Any = lambda batch: (batch, None)) -> list[Any]:
        """Returns the sources of all replicas."""
        ranks = range(len(self.machines))
        placement = SimpleNamespace(readers=tuple(ranks), rotates=False)
        programs: Any = [SimpleNamespace(placement=placement, microbatches=m) for m in self.microbatches]
        channels = {(a, b): links.LocalChannel() for b in ranks for a in range(b)}
        rows: list[list[str]] = []  # of each exchange, by rank

        class LacksText(BaseException):
            pass

        def open_one(rank: int) -> Any:
            exchanges = iter(range(9))

            def gather(value: Any, group: Any) -> list[Any]:
                number = next(exchanges)
                if number == len(rows):
                    rows.append([""] * len(ranks))
                row = rows[number]
                row[rank] = row[rank] or json.dumps(value)
                if not all(row):
                    raise LacksText
                return list(map(json.loads, row))

            self.monkeypatch.setattr("pipedream.runtime.data.source.gather_json", gather)
            self.monkeypatch.setattr("pipedream.runtime.data.source.read_machine", lambda: self.machines[rank])
            group: Any = object()
            senders = {b: channel for (a, b), channel in channels.items() if a == rank}
            receivers = {a: channel for (a, b), channel in channels.items() if b == rank}
            sources = DataSources(programs, [rank], DataChannels(rank, group, senders, receivers))
            seed_all(5 + rank)
            before = torch.get_rng_state()
            source = sources.open_training(make_loader(rank), split, EpochRange(end=2), None)[rank]
            assert torch.equal(torch.get_rng_state(), before), "the process's own generator has not moved"
            return source

        opened: list[Any] = [None] * len(ranks)
        while None in opened:
            for rank in ranks:
                if opened[rank] is None:
                    with suppress(LacksText):
                        opened[rank] = open_one(rank)
        return opened


def take_all(sources: Sequence[Source], parts: int) -> list[list[int]]:
    """Returns the samples of each minibatch."""
    minibatches: list[list[int]] = []
    for replica, source in enumerate(sources):
        source.begin(parts, replica, 0)
    while True:
        samples: list[list[int]] = [[]] * parts
        first = len(minibatches) * parts
        for k in sorted(range(first, first + parts), key=lambda k: (k % len(sources), k)):
            messages = sources[k % len(sources)].take(k)
            if isinstance(messages, wire.StopReason):
                return minibatches
            samples[k - first] = listed(messages[0].value()) if messages[0].content is wire.Content.DATA else []
        minibatches.append([sample for part in samples for sample in part])


@pytest.mark.parametrize(
    ("make_loader", "microbatches", "sizes", "reason"),
    [
        (lambda rank: loader_of(Changed()), [2], OF_SIX, "first minibatch of the loader is not the same"),
        (lambda rank: loader_of(Missing() if rank else Numbers()), [2], OF_SIX, "is not the same on each machine"),
        (lambda rank: loader_of(Numbers()), [2, 1], OF_SIX, "only some phases split minibatches"),
        (lambda rank: Plain(), [2], [3, 3, *[4] * 10], "no map-style DataLoader"),
    ],
)
def test_what_each_machine_would_read_differently_is_handed_over(
    make_loader: Any, microbatches: list[int], sizes: list[int], reason: str, monkeypatch: Any, caplog: Any
) -> None:
    sources = Replicas("ab", microbatches, monkeypatch).open(make_loader)
    assert [type(source) for source in sources] == [ReadingSource, ReceivingSource]
    assert reason in caplog.text
    assert "which no prediction counts" in caplog.text
    assert sorted(map(len, take_all(sources, 2))) == sizes
    caplog.clear()
    Replicas("aa", microbatches, monkeypatch).open(make_loader)
    assert not caplog.text


@pytest.mark.parametrize("draws", [False, True])
def test_the_first_minibatch_is_compared_as_the_model_gets_it(draws: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that changes its batch gets a copy; one that draws leaves the process's generators as they were."""

    def pop(batch: dict[str, Any]) -> Any:
        return batch.pop("x") + (torch.rand(()) if draws else 0), None

    loader = DataLoader([{"x": float(i)} for i in range(23)], 6)
    sources = Replicas("abb", [3], monkeypatch).open(lambda rank: loader, pop)
    first_of_b = ReceivingSource if draws else ReadingSource
    assert [type(source) for source in sources] == [ReadingSource, first_of_b, ReceivingSource]
    assert sorted(map(len, take_all(sources, 3))) == OF_SIX
