"""The order of the data is that of a plain loop, whoever reads it, whatever else draws, and from any position on."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, islice, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from loaders import LOADERS, SHARDED, WITH_PROCESSES, Numbers, Stateful, Stream, listed, noise, plain_loop, seed_all
from marks import slow, spread, thinned
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

import pipedream as pd
from pipedream.runtime.comm.message import StopReason
from pipedream.runtime.data import rng
from pipedream.runtime.data.reader import EpochRange, IterableReader, Minibatch, Reader, find_sharding, tee

OTHERS_AHEAD = ("own batches, loaded ahead", "a generator, loaded ahead", "iterable, loaded ahead")
"""Loaders whose kind and whose processes the default run has apart."""
SLOW = {0: LOADERS, 3: (*WITH_PROCESSES, "iterable, loaded ahead"), "epoch": LOADERS, "epoch and 1": OTHERS_AHEAD}
"""Loaders that only the slow tests leave after so many batches."""


def reader_of(
    loader: Any, order: rng.DataOrder, extent: EpochRange, state: Any = None, replica: int = 0, replicas: int = 1
) -> Any:
    if offer := find_sharding(loader):
        return offer.ShardedLoader(loader, replica, replicas).open(order, extent, state)
    return IterableReader(loader, order, extent, state)


def batches_of(reader: Reader, most: int | None = None) -> list[tuple[int, int, list[int], bool]]:
    """Reads on, with noise in between; returns (number, epoch, batch, ends_epoch) of each."""
    minibatches: list[tuple[int, int, list[int], bool]] = []
    for item in islice(reader, most):
        minibatches.append((item.number, item.epoch, listed(item.batch), item.ends_epoch))
        noise()
    return minibatches


def saved_at(reader: Any, *position: int) -> Any:
    """Returns the state of a position as a checkpoint has it."""
    return json.loads(json.dumps(reader.state(*position)))


def in_order(epochs: list[list[list[int]]]) -> list[tuple[int, list[int], bool]]:
    """Returns (epoch, batch, ends_epoch) of each minibatch."""
    ends = [(epoch, n, n == len(batches) - 1) for epoch, batches in enumerate(epochs) for n in range(len(batches))]
    return [(epoch, epochs[epoch][n], is_last) for epoch, n, is_last in ends]


@pytest.mark.parametrize(
    ("done", "name"),
    spread(
        thinned(
            pytest.param(done, name, marks=pytest.mark.slow if name in slow else ())
            for done, slow in SLOW.items()
            for name in LOADERS
        ),
        every=3,
    ),
)
def test_order_is_that_of_a_plain_loop_from_any_position_whatever_else_draws(name: str, done: int | str) -> None:
    """Reads three epochs, from some minibatches on as a new process does."""
    make = LOADERS[name]
    epochs = plain_loop(make(), 3)
    size, expected = len(epochs[0]), in_order(epochs)
    number = {"epoch": size, "epoch and 1": size + 1}.get(str(done), done)
    assert isinstance(number, int)
    assert bool(find_sharding(make())) == (name in SHARDED)
    loader = make()
    seed_all(5)
    reader = reader_of(loader, rng.DataOrder(), EpochRange(end=3))
    before = batches_of(reader, number)
    position = (number // size, number % size) if number <= size else (1, number - size)
    state = saved_at(reader, *position)
    reader.close()
    loader = make()
    seed_all(99)
    on = reader_of(loader, rng.DataOrder(), EpochRange(position[0], 3, position[1]), state)
    assert on.state(*position) == state
    generators = torch.get_rng_state(), random.getstate()
    first = next(on)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1], "the process's own generators have not moved"
    before.append((first.number, first.epoch, listed(first.batch), first.ends_epoch))
    assert [part[1:] for part in before + batches_of(on)] == expected
    for each in (reader, on):
        if hasattr(each, "_sharded"):
            each._sharded.close()
    if name in SHARDED and name not in WITH_PROCESSES:
        left = sum(len(batch) for _, batch, _ in expected[number:])
        assert len(loader.dataset.loaded) == left, "what was done is passed over, not loaded"
    if name == "stateful":
        assert loader.read == 18 - number, "its own state brought it there"


class Lists:
    """A batch sampler with epochs of given lengths, in an order that is drawn; its epoch has a name of its own."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.begun = -1

    def set_epoch(self, epoch: int) -> None:
        self.begun = epoch

    def __iter__(self) -> Iterator[list[int]]:
        for index in torch.randperm(self.lengths[self.begun]).tolist():
            yield [100 * self.begun + index]


def stream(readers: Sequence[Reader], rounds: int | None) -> tuple[StopReason, list[int]]:
    """Lets the replicas read `rounds` rounds and then drain; returns why it ended, and what was read.

    Replicas that still had a minibatch in the round in which the data ended learn of the end in the next one, and
    a drain that is asked for in between must not tell them another.
    """
    numbers: list[int] = []
    ends: dict[int, tuple[StopReason, int]] = {}
    for number in count(0, len(readers)):
        for reader in readers:
            if (rounds is not None and number >= rounds * len(readers)) or ends:
                reader.stop(StopReason.DRAIN)
        for replica in [replica for replica in range(len(readers)) if replica not in ends]:
            minibatch = readers[replica].read(number + replica, replica)
            if isinstance(minibatch, Minibatch):
                assert not ends, "nothing comes after the end"
                assert minibatch.epoch == int(minibatch.batch) // 100
                numbers.append(int(minibatch.batch))
            else:
                ends[replica] = minibatch, readers[replica].ended_at
        if len(ends) == len(readers):
            break
    assert set(ends.values()) == {(ends[0][0], len(numbers))}, "all say the same"
    return ends[0][0], numbers


LEG = st.tuples(st.integers(1, 4), st.integers(1, 2), st.integers(0, 4), st.integers(0, 4))


@pytest.mark.parametrize("is_shared", [True, slow(False)])
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4), legs=st.lists(LEG, min_size=1, max_size=3))
def test_replicas_load_each_minibatch_once_in_order_over_drains_breaks_and_plans(
    is_shared: bool, lengths: list[int], legs: list[tuple[int, int, int, int]]
) -> None:
    """A leg is a run of its own: so many replicas, a cycle, a drain after some rounds, a break after some more."""
    seed_all(3)
    plain = DataLoader(Numbers(1000), batch_sampler=Lists(lengths))
    expected = []
    for epoch in range(len(lengths)):
        plain.batch_sampler.set_epoch(epoch)
        expected += [int(batch) for batch in plain]
    places = [(epoch, n) for epoch, size in enumerate(lengths) for n in range(size)] + [(len(lengths), 0)]
    indices: list[int] = []
    state: Any = None
    for i, (replicas, cycles, drain, leave) in enumerate(legs):
        if len(indices) == len(expected):
            break
        epoch, skip = places[len(indices)]
        data, sources, extent = [Numbers(1000) for _ in range(replicas)], [], EpochRange(epoch, len(lengths), skip)
        for replica in range(replicas):
            seed_all(3)  # of rank 0; a session sends its state to the others
            loader, order = DataLoader(data[replica], batch_sampler=Lists(lengths)), rng.DataOrder()
            how = loader, order, extent, state
            sources.append(IterableReader(*how) if is_shared else reader_of(*how, replica, replicas))
        readers = tee(sources[0], replicas) if is_shared else sources
        for reader in readers:
            reader.begin(replicas * cycles)
        leg_indices: list[int] = []
        for rounds in (drain, leave if i < len(legs) - 1 else None):
            stop_reason, numbers = stream(readers, rounds)
            leg_indices += numbers
            if stop_reason is StopReason.DATA:
                break
            assert len(numbers) % (replicas * cycles) == 0
            for reader in readers:
                reader.resume()
        loaded = [index for part in data for index in part.loaded]
        assert is_shared or sorted(loaded) == sorted(leg_indices), "each is loaded by one replica, and nothing ahead"
        indices += leg_indices
        state = saved_at(sources[0], *places[len(indices)])
    assert indices == expected[: len(indices)]
    assert len(indices) == len(expected) or stop_reason is not StopReason.DATA


@pytest.mark.parametrize("draws", [False, True])
def test_random_states_are_read_only_where_a_loader_can_draw(draws: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, states, loader = [], rng.RngStates.read(), LOADERS["late"]()
    monkeypatch.setattr(rng.RngStates, "read", lambda only_torch=False: reads.append(1) or states)
    reader = IterableReader(loader if draws else list(loader), rng.DataOrder(), EpochRange(), None)
    next(reader)
    before = len(reads)
    assert len(list(reader)) == 4
    assert (len(reads) > before) == draws


def halves(kind: str) -> DataLoader[Any]:
    """Returns a loader that gives this process half of the samples."""
    sampler = torch.utils.data.DistributedSampler(range(12), num_replicas=2, rank=0)
    if kind == "batch_sampler":
        return DataLoader(range(12), batch_sampler=torch.utils.data.BatchSampler(sampler, 2, drop_last=False))
    loader = DataLoader(Noise(), sampler=sampler if kind == "sampler" else None)
    if not kind:
        loader.dataset._distributed = SimpleNamespace(rank=0, world_size=2)
    return loader


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DataLoader(Numbers(), batch_sampler=[]), "yielded nothing"),
        (lambda: iter([]), "yielded nothing"),
        (lambda: DataLoader(Stream(), 30, drop_last=True), "yielded nothing"),
        *((partial(halves, kind), "gives each of 2 processes only") for kind in ("sampler", "batch_sampler", "")),
    ],
)
def test_a_loader_without_minibatches_or_with_a_part_of_them_is_refused(make: Any, words: str) -> None:
    with pytest.raises(pd.PipelineError, match=words):
        next(reader_of(make(), rng.DataOrder(), EpochRange()))
    of_one = DataLoader(range(12), sampler=torch.utils.data.DistributedSampler(range(12), 1, 0))
    assert len(list(reader_of(of_one, rng.DataOrder(), EpochRange()))) == 12


def test_a_state_that_json_cannot_hold_is_refused() -> None:
    loader = Stateful()
    loader.state_dict = lambda: {"at": [1, {2}]}
    reader = IterableReader(loader, rng.DataOrder(), EpochRange(), None)
    next(reader)
    with pytest.raises(pd.PipelineError, match=r"state_dict\(\)\['at'\]\[1\] is a set, which JSON cannot hold"):
        reader.state(0, 1)
    assert reader.state(0, 0)["epoch"] == 0
    with pytest.raises(pd.PipelineError, match="ask for the position at a drain"):
        IterableReader(loader, rng.DataOrder(), EpochRange(2, 3), None).state(1, 0)


def test_replicas_seed_their_workers_apart() -> None:
    class Seeds(Numbers):
        def __getitem__(self, index: int) -> int:
            return torch.initial_seed()

    def seeds(replica: int, replicas: int) -> set[int]:
        seed_all(2)
        loader = DataLoader(Seeds(), batch_size=4, num_workers=2)
        reader = reader_of(loader, rng.DataOrder(), EpochRange(), None, replica, replicas)
        return {seed for part in batches_of(reader) for seed in part[2]}

    seed_all(2)
    plain = {int(seed) for batch in DataLoader(Seeds(), batch_size=4, num_workers=2) for seed in batch}
    assert seeds(0, 1) == seeds(0, 3) == plain
    assert len(plain | seeds(1, 3) | seeds(2, 3)) == 6


def test_what_a_loader_gives_out_of_order_is_read_in_order() -> None:
    plain = plain_loop(DataLoader(Numbers(), 4, shuffle=True, num_workers=2), 1)[0]
    seed_all(5)
    loader = DataLoader(Numbers(), 4, shuffle=True, num_workers=2, in_order=False)
    assert [part[2] for part in batches_of(reader_of(loader, rng.DataOrder(), EpochRange()))] == plain


def test_what_shares_itself_out_over_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(IterableWrapper(range(8)), batch_size=4)
    batches = [part[2] for part in batches_of(reader_of(loader, rng.DataOrder(), EpochRange()))]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7]]
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(pd.PipelineError, match="give an IterableDataset"):
        next(reader_of(loader, rng.DataOrder(), EpochRange()))


class Noise(torch.utils.data.Dataset[torch.Tensor]):
    """Draws from each global generator, and from three of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.transforms = [random.Random(1).random, partial(np.random.default_rng(1).normal, 0.0)]

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [torch.rand((), generator=self.generator), *(transform() for transform in self.transforms)]
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()), *drawn], dtype=torch.float64)


@contextmanager
def alike(loader: Any, seed: int, extent: EpochRange, state: Any = None) -> Iterator[Any]:
    """Opens the reader of a process that has this seed."""
    seed_all(seed)
    sharded: Any = find_sharding(loader).ShardedLoader(loader)
    sharded.alike = True
    reader = sharded.open(rng.DataOrder(), extent, state)
    yield reader
    reader.close()
    sharded.close()


def state_after(make: Callable[[], Any], batches: int) -> Any:
    with alike(make(), 5, EpochRange(end=2)) as reader:
        list(islice(reader, batches))
        return saved_at(reader, 0, batches)


@pytest.mark.parametrize(
    "name", thinned(pytest.param(name, marks=pytest.mark.slow if name in WITH_PROCESSES else ()) for name in SHARDED)
)
def test_processes_that_read_alike_read_what_a_plain_loop_does(name: str) -> None:
    """Also from a position within an epoch, and whatever their own generators draw."""
    make = LOADERS[name]
    expected = in_order(plain_loop(make(), 2))
    for skip, seed in product((0, 3), (5, 6)):
        with alike(make(), seed, EpochRange(0, 2, skip), state_after(make, skip)) as reader:
            peeked = reader.peek()
            assert peeked is not None
            assert peeked.number == next(reader).number
            first = (peeked.epoch, listed(peeked.batch), peeked.ends_epoch)
            assert [first, *(part[1:] for part in batches_of(reader))] == expected[skip:]


@pytest.mark.parametrize("workers", [0, slow(2)])
def test_processes_that_read_alike_draw_the_same_numbers_for_their_samples(workers: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Noise(), 2, num_workers=workers)

    def rows(seed: int, skip: int) -> list[list[float]]:
        with alike(make(), seed, EpochRange(0, 2, skip), state_after(make, skip)) as reader:
            return rows_of(reader)

    whole, rest = rows(3, 0), rows(3, 4)
    assert (rows(4, 0), rows(4, 4)) == (whole, rest)
    assert {len({row[column] for row in whole}) for column in ((1, 2, 3) if workers else range(1, 7))} == {24}
    assert rest == whole[8:]


def rows_of(reader: Reader, most: int | None = None) -> list[list[float]]:
    return [row for minibatch in islice(reader, most) for row in minibatch.batch.tolist()]


def test_replicas_draw_different_numbers_in_their_own_processes_and_the_same_after_a_resume() -> None:
    def rows(replica: int, extent: EpochRange, state: Any = None) -> list[list[float]]:
        seed_all(3)
        reader = reader_of(DataLoader(Noise(), batch_size=2), rng.DataOrder(), extent, state, replica, 2)
        state_at_start.append(reader.state(extent.first, extent.skip))
        return rows_of(reader)

    state_at_start: list[Any] = []
    both = [rows(replica, EpochRange(end=2)) for replica in (0, 1)]
    assert {len({row[column] for row in both[0] + both[1]}) for column in range(1, 7)} == {24}
    again = rows(1, EpochRange(first=0, end=2, skip=2), state_at_start[1])
    assert again == both[1][2:], "of minibatches 1, 3, 5, ... without the first two of both replicas"


class Streamed(torch.utils.data.IterableDataset[torch.Tensor]):
    def __init__(self) -> None:
        self.noise = Noise()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.noise[i] for i in range(12))


@pytest.mark.parametrize("kind", [Noise, Streamed])
def test_a_data_set_draws_on_from_generators_of_its_own_after_a_resume(kind: Any) -> None:
    loader = DataLoader(kind(), 2)
    expected = [row[4:] for _ in range(2) for batch in loader for row in batch.tolist()]
    reader = reader_of(DataLoader(kind(), 2), rng.DataOrder(), EpochRange(end=2))
    before = rows_of(reader, 8)
    resumed = rows_of(reader_of(DataLoader(kind(), 2), rng.DataOrder(), EpochRange(1, 2, 2), saved_at(reader, 1, 2)))
    assert [row[4:] for row in before + resumed] == expected
