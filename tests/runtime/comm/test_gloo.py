"""Channels between real processes: what is sent arrives, whatever was posted for it."""

from unittest.mock import Mock

import processes
import pytest
from exchange import SIZES, assert_arrived, exchange, message_of

from pipedream.runtime.comm.gloo import GlooEndpoint, GlooSender, _PostedReceives


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
                    assert_arrived(got[4], sent.tensors)
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


def test_the_header_which_wakes_the_receiver_is_sent_last() -> None:
    """But what a long header has more goes before the rest of a payload, as both have one tag and are read so."""
    group = Mock()
    endpoint = GlooEndpoint(1, 0, 2, group)
    sender = GlooSender(endpoint, 100)
    head, payload, rest = endpoint.head_tag, endpoint.payload_tag, endpoint.rest_tag
    sent = []
    for number, size in enumerate([5000, 5000, 5000, 5000, 50_000, 5000]):
        sender.send_on(message_of(number, size), 0)
        sent.append([tag for (_, _, tag), _ in group.send.call_args_list])
        group.reset_mock()
    # No receive is posted for the first two payloads. Message 4 has a long header, and is larger than its receive.
    short = [payload, head]
    assert sent == [[rest, head], [rest, head], short, short, [rest, payload, rest, head], short]
