"""Channels between real processes: what is sent arrives, whatever was posted for it."""

from __future__ import annotations

import processes
import pytest
import torch
from exchange import SIZES, exchange, message_of

from pipedream.runtime.comm.gloo import _PostedReceives


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("shares_memory", [False, True])
def test_messages_of_any_size_arrive_whole_and_in_order(shares_memory: bool) -> None:
    depths = [1, 2, 5]
    for arrived in processes.results(exchange, 2, depths, shares_memory):
        for name, sizes in SIZES.items():
            for which in (f"{name}, depth {depth}, stream {stream}" for depth in depths for stream in range(2)):
                assert len(arrived[which]) == len(sizes)
                for number, (size, got) in enumerate(zip(sizes, arrived[which], strict=True)):
                    sent = message_of(number, size)
                    assert got[:4] == (number, sent.content, sent.loss_weight, sent.structure), which
                    assert len(got[4]) == len(sent.tensors)
                    for received, tensor in zip(got[4], sent.tensors, strict=True):
                        assert (received is None) == (tensor is None)
                        assert tensor is None or (received.dtype == tensor.dtype and torch.equal(received, tensor))
        ((*_, sums),) = arrived["sums"]
        assert [float(tensor.sum()) for tensor in sums] == [18.0, 3.0, 8.0]


def test_a_receive_holds_the_largest_message_that_both_ends_know_of() -> None:
    posted = _PostedReceives(depth=2)
    posted.begin()
    # Message i was posted when message i - 2 had been read.
    assert [posted.take(size) for size in (4, 9, 2, 0, 7, 30, 1, 1)] == [0, 0, 4, 9, 9, 9, 9, 30]
    posted.begin()
    # A new stream: what trains after an evaluation would otherwise keep its large receives until the backwards.
    assert [posted.take(size) for size in (1, 4, 1, 1)] == [0, 0, 1, 4]
