"""The readers of the input stage: minibatches for each replica, over epochs, with drains between."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from pipedream.runtime.comm.message import StopReason
from pipedream.runtime.data.reader import EpochRange, IterableReader, Minibatch, Reader, tee
from pipedream.runtime.data.rng import DataOrder, RngStates


class Loader:
    """Gives the numbers of its minibatches, as tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Any:
        return (torch.tensor([number]) for number in range(self.size))


def read(loader: Any, readers: int = 1, **epochs: int) -> Sequence[Reader]:
    return tee(IterableReader(loader, DataOrder(), EpochRange(**epochs), None), readers)


@given(
    size=st.integers(1, 7), epochs=st.integers(1, 3), replicas=st.integers(1, 3), stop=st.integers(0, 12),
    cycles=st.integers(1, 2),
)  # fmt: skip
def test_replicas_take_each_minibatch_once_in_order_with_a_drain_between(
    size: int, epochs: int, replicas: int, stop: int, cycles: int
) -> None:
    readers = read(Loader(size), replicas, end=epochs)
    for reader in readers:
        reader.begin(replicas * cycles)
    admitted: list[tuple[int, int, bool]] = []

    def stream(until: int | None) -> StopReason:
        ends: set[tuple[StopReason, int]] = set()
        number = 0
        while not ends:
            for replica, reader in enumerate(readers):
                if until is not None and number >= until:
                    reader.stopped = StopReason.DRAIN
                minibatch = reader.read(number + replica, replica)
                if isinstance(minibatch, Minibatch):
                    admitted.append((minibatch.epoch, int(minibatch.batch), minibatch.ends_epoch))
                else:
                    ends.add((minibatch, reader.ended_at))
            number += replicas
        ((stop_reason, count),) = ends  # all replicas end alike
        assert stop_reason is not StopReason.DRAIN or count % (replicas * cycles) == 0
        return stop_reason

    if stream(stop) is StopReason.DRAIN:
        for reader in readers:
            reader.resume()
        assert stream(None) is StopReason.DATA
    expected = [(epoch, number, number == size - 1) for epoch in range(epochs) for number in range(size)]
    assert admitted == expected


def test_an_epoch_is_announced_and_what_was_done_is_passed_over() -> None:
    loader = Loader(4)
    (reader,) = read(loader, first=2, end=4, skip=3)
    places = [(minibatch.epoch, int(minibatch.batch)) for minibatch in reader]
    assert places == [(2, 3), (3, 0), (3, 1), (3, 2), (3, 3)]
    assert reader.count == 5
    assert loader.epochs == [2, 3]


@pytest.mark.parametrize("draws", [False, True])
def test_random_states_are_read_only_where_a_loader_can_draw(draws: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, states = [], RngStates.read()
    monkeypatch.setattr(RngStates, "read", lambda only_torch=False: reads.append(1) or states)
    reader = IterableReader(Loader(9) if draws else list(Loader(9)), DataOrder(), EpochRange(), None)
    next(reader)
    before = len(reads)
    assert len(list(reader)) == 8
    assert (len(reads) > before) == draws
