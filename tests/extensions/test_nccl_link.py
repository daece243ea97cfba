"""Links over the strict stand-in for NCCL: what is right passes, and each way to stand still is refused."""

from typing import Any
from unittest import mock

import mishaps
import processes
import pytest
import strict
import torch
import torch.distributed as dist
from exchange import assert_arrived

import pipedream as pd
from pipedream.extensions.nccl import gpu_link as nccl_link
from pipedream.runtime.comm import channel, gloo, message

Message = message.Message

CPU = torch.device("cpu")
ACTIVATIONS, WEIGHTS = 3, 8
COUNT = 40


def ends(number: int, device: str = "cpu", **options: Any) -> tuple[nccl_link.SendingLink, nccl_link.ReceivingLink]:
    """Returns this rank's end of a link each way."""
    rank = dist.get_rank()
    link_ends: dict[bool, Any] = {}
    for pair in ((0, 1), (1, 0)):  # in one order at both
        sends, tag, on = rank == pair[0], 2 * number + pair[0], torch.device(device)
        communicator: Any = strict.StrictCommunicator(pair, on, tag, **options)
        end = gloo.GlooEndpoint(1 - rank, tag, 4, dist.group.WORLD, on, separate=device)
        sending = nccl_link.SendingLink(gloo.GlooSender(end, 2 * COUNT), communicator) if sends else None
        link_ends[sends] = sending or nccl_link.ReceivingLink(gloo.GlooReceiver(end), communicator, on)
    return link_ends[True], link_ends[False]


def numbers(value: float, size: int = 2) -> Message:
    return Message(int(value), tensors=(torch.full((size,), value),))


def mixed(number: int) -> tuple[torch.Tensor | None, ...]:
    return torch.zeros(0, 2), None, torch.arange(12.0).reshape(3, 4).t(), torch.tensor(number)


def messages_arrive() -> list[int]:
    """Two channels of one link, both ways, read in another order than they were sent; returns how many are kept."""
    out, back = ends(0)
    senders = {n: nccl_link.LinkSender(out, n) for n in (ACTIVATIONS, WEIGHTS)}
    receivers = {n: nccl_link.LinkReceiver(back, n) for n in (ACTIVATIONS, WEIGHTS)}
    counts = []
    for stream in range(2):
        for i in range(COUNT):
            senders[ACTIVATIONS].send(numbers(i, 3 + 4 * i))
            if i % 4 == 0:
                senders[WEIGHTS].send(Message(-i, tensors=mixed(i), structure=f'{{"v":{i}}}'))
        for i in range(0, COUNT, 4):
            received = receivers[WEIGHTS].receive().result()
            assert (received.microbatch, received.structure) == (-i, f'{{"v":{i}}}')
            assert_arrived(received.tensors, mixed(i))
            assert received.tensors[2].stride() == (1, 4)
        for i in range(COUNT):
            assert_arrived(receivers[ACTIVATIONS].receive().result().tensors, numbers(i, 3 + 4 * i).tensors)
        dist.barrier()
        senders[ACTIVATIONS].send(numbers(stream))
        counts.append(len(out._unfinished))
        receivers[ACTIVATIONS].receive().result()
        channel.drain([*senders.values(), *receivers.values()])
        strict.check_drained()
        strict.synchronize()
        assert not out._unfinished
        assert not out._headers._unfinished
    return counts


def in_the_order_of_1f1b(number: int, **options: Any) -> None:
    """Rank 0 sends an activation and waits for its gradient before it sends the next one."""
    out, back = ends(number, **options)
    sender, receiver = nccl_link.LinkSender(out, 0), nccl_link.LinkReceiver(back, 0)
    for i in range(3):
        if dist.get_rank() == 0:
            sender.send(numbers(i))
        assert_arrived(receiver.receive().result().tensors, numbers(i).tensors)
        if dist.get_rank() == 1:
            sender.send(numbers(i))
    channel.drain([sender, receiver])


def device_wide_wait() -> None:
    """Rank 1 waits for its device while a receive is posted whose send is not issued."""
    communicator = strict.StrictCommunicator((0, 1), CPU, 1001)
    try:
        if dist.get_rank() == 1:
            communicator.recv([torch.empty(2)], 0, 0)
            torch.cuda.synchronize()
    finally:
        word, world = [torch.zeros(1)], dist.group.WORLD  # for which rank 0 waits
        (world.send(word, 0, 2) if dist.get_rank() else world.recv(word, 1, 2)).wait()
        if dist.get_rank() == 0:
            communicator.send([torch.ones(2)], 1, 0)


def orders_that_differ() -> None:
    communicator = strict.StrictCommunicator((0, 1), CPU, 2001, timeout_s=3.0)
    for size in (2, 3) if dist.get_rank() == 0 else (3, 2):
        if dist.get_rank() == 0:
            communicator.send([torch.ones(size)], 1, 0)
        else:
            communicator.recv([torch.ones(size)], 0, 0).wait()


def all_scenarios() -> dict[str, Any]:
    torch.cuda.synchronize = strict.synchronize
    results: dict[str, Any] = {"kept": messages_arrive()}
    for connects in (True, False):
        in_the_order_of_1f1b(2 + connects, connects=connects)
    for scenario in (device_wide_wait, orders_that_differ):
        try:
            scenario()
        except strict.StrictError as error:
            results[scenario.__name__] = str(error)
        dist.barrier()
    # Tensors of every type that a message may have, of which NCCL lacks some.
    out, back = ends(6)
    tensors = [torch.arange(6).reshape(2, 3).to(torch.float32).to(dtype).t() for dtype in message._DTYPES]
    tensors.append(torch.complex(torch.ones(2), torch.arange(2.0)).conj())
    out.send(Message(0, tensors=tuple(tensors)), 0)
    received = back.receive(0).tensors
    out.drain()
    assert_arrived(received, tensors)
    # A message with a tensor on the device, here meta, and one in the memory of the CPU, which travel apart.
    out, back = ends(5, device="meta")
    out.send(Message(0, tensors=(torch.empty(4, device="meta"), torch.full((3,), 7.0))), 0)
    on_device, target = back.receive(0).tensors
    out.drain()
    assert on_device.is_meta
    assert out._communicator.issued == back._communicator.issued == 1
    assert (str(target.device), float(target.sum())) == ("cpu", 21.0)
    return results


@pytest.mark.processes
def test_a_link_does_what_nccl_needs_and_the_stand_in_refuses_the_rest() -> None:
    first, second = processes.results(all_scenarios, 2)
    for results in (first, second):
        assert max(results["kept"]) <= 3, "what was sent is let go, although gloo does not say that its header was"
    assert second["device_wide_wait"].startswith("a wait for the whole device, while a receive")
    assert "a receive of [12, 4] bytes meets a send of [8, 4]" in second["orders_that_differ"]


def training_that_fails() -> list[bool]:
    """Returns of each communicator that this rank has destroyed whether it was aborted before."""
    ended, end = list[bool](), strict._Communicator.end

    def note(communicator: strict._Communicator) -> None:
        ended.append(communicator.aborted)
        end(communicator)

    with strict.installed(on_one_machine=True), mock.patch.object(strict._Communicator, "end", note):
        with pytest.raises(pd.PipelineError):
            mishaps.train("forward", 2)
        assert not strict._communicators
        return ended


@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_that_fails_aborts_its_communicators() -> None:
    waiting, failed = processes.launch(training_that_fails, 2)
    assert failed.value == [True, True]
    assert waiting.value in (None, [True, True]), "its guard ends a worker that waits"
