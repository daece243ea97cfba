"""Versions of weights equal copies that were made one after the other, and are never written under a reader."""

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from pipedream.runtime.stage.versions import Versions

STEPPERS = [
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
    partial(torch.optim.AdamW, lr=0.1),
    partial(torch.optim.AdamW, lr=0.1, fused=True),
    partial(torch.optim.AdamW, lr=0.1, foreach=False),
]


def make_handles() -> dict[str, nn.Parameter]:
    return {"a": nn.Parameter(torch.randn(3, 2)), "b": nn.Parameter(torch.randn(4))}


def update(versions: Versions, readable: Iterable[int] = (), step: Callable[[], object] | None = None) -> None:
    """Makes an update, by default one that adds 1; the versions in `readable` may be read later."""
    versions.choose_storage(readable)
    versions.move_handles()
    if step is None:
        with torch.no_grad():
            for handle in versions.handles.values():
                handle.add_(1.0)
    else:
        step()
    versions.after_step()


@given(late=st.integers(0, 5), updates=st.integers(1, 12), stepper=st.sampled_from(STEPPERS))
def test_each_version_equals_the_copy_of_a_serial_run(late: int, updates: int, stepper: partial) -> None:
    handles = make_handles()
    plain = {name: nn.Parameter(handle.detach().clone()) for name, handle in handles.items()}
    versions, optimizer, serial = Versions(handles), stepper(handles.values()), stepper(plain.values())
    history = [{name: p.detach().clone() for name, p in plain.items()}]
    in_flight = []
    # 1F1B at a stage with so many warm-up forwards: minibatch k reads version max(0, k - late).
    for k in range(updates + late):
        if k < updates:
            in_flight.append(versions.acquire(max(0, k - late)))
        if k < late:
            continue
        reading = in_flight.pop(0)
        for name, leaf in reading.leaves.items():
            assert torch.equal(leaf, history[reading.version][name]), "until its backward"
        versions.release(reading)
        for name in handles:
            handles[name].grad = torch.randn_like(handles[name])
            plain[name].grad = handles[name].grad.clone()
        update(versions, range(max(0, k + 1 - late), versions.newest + 1), optimizer.step)
        serial.step()
        history.append({name: p.detach().clone() for name, p in plain.items()})
        assert all(torch.equal(versions.peek().leaves[name], plain[name]) for name in plain)
        assert versions.storages <= late + 1
    assert versions.newest == updates
    versions.rewind()
    assert (versions.newest, versions.kept_count) == (0, 1)
    assert all(torch.equal(versions.acquire(0).leaves[name], plain[name]) for name in plain)


def test_an_update_stops_before_it_writes_a_version_that_is_read() -> None:
    versions = Versions(make_handles())
    update(versions)
    versions._free.append(versions.acquire(1))  # as if it had no reader
    with pytest.raises(AssertionError, match="a backward still needs"):
        versions.choose_storage((1,))


def test_kept_views_are_sets_of_their_own() -> None:
    handles = make_handles()
    versions = Versions(handles, single=True)

    def double(into: dict[str, torch.Tensor]) -> None:
        for name, target in into.items():
            target.copy_(2.0 * handles[name].detach())

    first, expected = versions.read_prediction(0, double), {n: 2.0 * handle.detach() for n, handle in handles.items()}
    update(versions)
    second = versions.read_prediction(1, double)
    assert versions.read_prediction(0, double) is first, "kept, not computed again"
    assert all(torch.equal(first.leaves[name], w) for name, w in expected.items())
    for _ in range(2):  # as often as it was read
        assert (versions.kept_count, versions.storages) == (3, 3)
        versions.release(first)
    with pytest.raises(AssertionError, match="the newest is 1"):
        versions.read_prediction(0, double)
    versions.release(second)
    assert (versions.kept_count, versions.storages) == (1, 3), "free sets are used again"
    versions.rewind()


def test_weights_in_one_buffer_stay_in_one() -> None:
    buffer, apart = torch.randn(12), nn.Parameter(torch.randn(1000)[:3])
    handles = {"a": nn.Parameter(buffer[:6].view(3, 2)), "apart": apart, "b": nn.Parameter(buffer[6:10])}
    versions = Versions(handles)
    versions.acquire(0)
    versions.choose_storage(())
    versions.move_handles()
    leaves = versions._sets[1].leaves
    assert list(leaves) == list(handles)
    assert leaves["a"].untyped_storage().data_ptr() == leaves["b"].untyped_storage().data_ptr()
    assert [leaf.storage_offset() for leaf in leaves.values()] == [0, 0, 6]
    assert leaves["apart"].untyped_storage().nbytes() == 12, "not all of what the weight is a part of"
    assert all(torch.equal(leaf, versions.peek(0).leaves[name]) for name, leaf in leaves.items())
    assert all(leaf.requires_grad and leaf.is_leaf for leaf in leaves.values())
