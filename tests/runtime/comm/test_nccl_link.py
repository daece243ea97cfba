"""Links over the strict stand-in for NCCL: what is right passes, and each way to stand still is refused."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import mishaps
import processes
import pytest
import strict
import torch
import torch.distributed as dist

from pipedream.core.errors import PipelineError
from pipedream.runtime.comm import message
from pipedream.runtime.comm.channel import drain
from pipedream.runtime.comm.gloo import GlooEndpoint, GlooReceiver, GlooSender
from pipedream.runtime.comm.message import Message
from pipedream.runtime.comm.nccl_link import LinkReceiver, LinkSender, ReceivingLink, SendingLink

CPU = torch.device("cpu")
ACTIVATIONS, WEIGHTS = 3, 8
COUNT = 40


def ends(number: int, device: str = "cpu", **options: Any) -> tuple[SendingLink, ReceivingLink]:
    """Returns this rank's end of a link each way."""
    rank = dist.get_rank()
    link_ends: list[Any] = []
    for pair in ((0, 1), (1, 0)):
        communicator: Any = strict.StrictCommunicator(pair, torch.device(device), 2 * number + pair[0], **options)
        end = GlooEndpoint(1 - rank, 2 * number + pair[0], 4, dist.group.WORLD, torch.device(device), separate=device)
        if rank == pair[0]:
            link_ends.append(SendingLink(GlooSender(end, 2 * COUNT), communicator))
        else:
            link_ends.append(ReceivingLink(GlooReceiver(end), communicator, torch.device(device)))
    return (link_ends[0], link_ends[1]) if rank == 0 else (link_ends[1], link_ends[0])


def numbers(value: float, size: int = 2) -> Message:
    return Message(int(value), tensors=(torch.full((size,), value),))


def messages_arrive() -> list[int]:
    """Two channels of one link, both ways, read in another order than they were sent; returns how many are kept."""
    out, back = ends(0)
    senders = {n: LinkSender(out, n) for n in (ACTIVATIONS, WEIGHTS)}
    receivers = {n: LinkReceiver(back, n) for n in (ACTIVATIONS, WEIGHTS)}
    kept = []
    for stream in range(2):
        for i in range(COUNT):
            senders[ACTIVATIONS].send(numbers(i, 3 + 4 * i))
            if i % 4 == 0:
                mixed = (torch.zeros(0, 2), None, torch.arange(12.0).reshape(3, 4).t(), torch.tensor(i))
                senders[WEIGHTS].send(Message(-i, tensors=mixed, structure=f'{{"v":{i}}}'))
        for i in range(0, COUNT, 4):
            message = receivers[WEIGHTS].receive().result()
            empty, missing, transposed, number = message.tensors
            assert (message.microbatch, message.structure, missing) == (-i, f'{{"v":{i}}}', None)
            assert empty is not None
            assert transposed is not None
            assert empty.shape == (0, 2)
            assert torch.equal(transposed, torch.arange(12.0).reshape(3, 4).t())
            assert transposed.stride() == (1, 4)
            assert number == i
        for i in range(COUNT):
            (tensor,) = receivers[ACTIVATIONS].receive().result().tensors
            assert tensor is not None
            assert torch.equal(tensor, torch.full((3 + 4 * i,), float(i)))
        dist.barrier()
        senders[ACTIVATIONS].send(numbers(stream))
        kept.append(len(out._out))
        receivers[ACTIVATIONS].receive().result()
        drain([*senders.values(), *receivers.values()])
        strict.check_drained()
        strict.synchronize()
        assert not out._out
        assert not out._headers._out
    return kept


def refused(scenario: Callable[[], Any]) -> str:
    try:
        scenario()
    except strict.StrictError as error:
        return str(error)
    return "nothing was refused"


def in_the_order_of_1f1b(number: int, **options: Any) -> None:
    """Rank 0 sends an activation and waits for its gradient before it sends the next one."""
    out, back = ends(number, **options)
    sender, receiver = LinkSender(out, 0), LinkReceiver(back, 0)
    for i in range(3):
        if dist.get_rank() == 0:
            sender.send(numbers(i))
        (tensor,) = receiver.receive().result().tensors
        assert tensor is not None
        assert float(tensor.sum()) == 2 * i
        if dist.get_rank() == 1:
            sender.send(numbers(i))
    drain([sender, receiver])


def word_to(rank: int) -> None:
    """Sends a word to a rank, which waits for it."""
    word, world = [torch.zeros(1)], dist.group.WORLD
    (world.recv(word, 1 - rank, 2) if dist.get_rank() == rank else world.send(word, rank, 2)).wait()


def first_use_in_the_program() -> None:
    """The same order; rank 1 posts the receive of the second activation when it has the first one's header."""
    communicator = strict.StrictCommunicator((0, 1), CPU, 1000, connects=False, timeout_s=1.0)
    word_to(1)  # the header of the first activation
    try:
        if dist.get_rank() == 1:
            communicator.recv([torch.empty(2)], 0, 0)
    finally:
        word_to(0)  # its gradient
        if dist.get_rank() == 0:
            communicator.send([torch.ones(2)], 1, 0)


def with_a_receive_ahead(function: Callable[[], None], number: int) -> None:
    """Calls a function at rank 1 while a receive is posted whose send is not issued."""
    communicator = strict.StrictCommunicator((0, 1), CPU, number)
    try:
        if dist.get_rank() == 1:
            communicator.recv([torch.empty(2)], 0, 0)
            function()
    finally:
        word_to(0)
        if dist.get_rank() == 0:
            communicator.send([torch.ones(2)], 1, 0)


def device_wide_wait() -> None:
    with_a_receive_ahead(torch.cuda.synchronize, 1001)


def drain_with_a_receive() -> None:
    with_a_receive_ahead(strict.check_drained, 1002)


def tensor_of_another_device() -> None:
    communicator = strict.StrictCommunicator((0, 1), torch.device("meta"), 2000)
    place = 1 - dist.get_rank()
    (communicator.send if place else communicator.recv)([torch.ones(2)], place, 0)


def type_that_nccl_lacks() -> None:
    communicator, place = strict.StrictCommunicator((0, 1), CPU, 2004), 1 - dist.get_rank()
    (communicator.send if place else communicator.recv)([torch.ones(2, dtype=torch.complex64)], place, 0)


def types_arrive() -> list[str]:
    """Tensors of every type that a message may have, of which NCCL lacks some; returns the types."""
    out, back = ends(6)
    tensors = [torch.arange(6).reshape(2, 3).to(torch.float32).to(dtype).t() for dtype in message._DTYPES]
    tensors.append(torch.complex(torch.ones(2), torch.arange(2.0)).conj())
    out.send(Message(0, tensors=tuple(tensors)), 0)
    received = back.receive(0).tensors
    out.drain()
    for tensor, expected in zip(received, tensors, strict=True):
        assert tensor is not None
        assert torch.equal(
            tensor.contiguous().view(torch.uint8), expected.resolve_conj().contiguous().view(torch.uint8)
        )
    return [str(tensor.dtype) for tensor in received if tensor is not None]


def orders_that_differ() -> None:
    communicator = strict.StrictCommunicator((0, 1), CPU, 2001, timeout_s=3.0)
    sizes = (2, 3) if dist.get_rank() == 0 else (3, 2)
    for size in sizes:
        if dist.get_rank() == 0:
            communicator.send([torch.ones(size)], 1, 0)
        else:
            communicator.recv([torch.ones(size)], 0, 0).wait()


def one_end_alone() -> None:
    try:
        if dist.get_rank() == 1:
            strict.StrictCommunicator((0, 1), CPU, 2002, timeout_s=0.5)
    finally:
        word_to(0)
    if dist.get_rank() == 0:
        strict.StrictCommunicator((0, 1), CPU, 2002)


def completion() -> list[bool]:
    """Returns whether a send is said to have ended before its receive was issued, and after."""
    communicator, events = strict.StrictCommunicator((0, 1), CPU, 2003), []
    if dist.get_rank() == 0:
        work = communicator.send([torch.ones(2)], 1, 0)
        events.append(work.is_completed())
        dist.barrier()
        work.wait()
        events.append(work.is_completed())
        header = dist.group.WORLD.send([torch.ones(2)], 1, 2)
        dist.barrier()
        events.append(header.is_completed())
        header.wait()
    else:
        dist.barrier()
        communicator.recv([torch.ones(2)], 0, 0).wait()
        header = dist.group.WORLD.recv([torch.ones(2)], 0, 2)
        header.wait()
        dist.barrier()
    return events


def wait_that_returns() -> list[Any]:
    """Returns of a receive whether its tensor is wrong before, whether a wait waits, and the right sum; at rank 1."""
    communicator, store = strict.StrictCommunicator((0, 1), CPU, 2005), dist.distributed_c10d._get_default_store()
    with strict._Stream():
        if dist.get_rank() == 0:
            store.wait(["waited"])
            communicator.send([torch.ones(2)], 1, 0)
            return []
        tensor = torch.zeros(2)
        work = communicator.recv([tensor], 0, 0)
        before = tensor.isnan().all().item()
        work.wait()
        before_send = work.is_completed()
        store.set("waited", "")
        return [before, before_send, tensor.sum().item()]


def sums_in_another_order() -> None:
    with strict.installed(on_one_machine=True):
        group = dist.new_group([0, 1], backend="strict")
        try:
            works = [
                dist.all_reduce(torch.ones(2 + (size == dist.get_rank())), group=group, async_op=True)
                for size in range(2)
            ]
            for work in works:
                assert work is not None
                work.wait()
            torch.zeros(1)
        finally:
            dist.destroy_process_group(group)


def group_of_other_ranks() -> None:
    with strict.installed(on_one_machine=True):
        dist.new_group([0, 1] if dist.get_rank() else [0])


def group_at_one_rank() -> None:
    with mock.patch.object(strict, "_HOST_TIMEOUT_S", 0.5), strict.installed(on_one_machine=True):
        if dist.get_rank() == 0:
            next(strict._groups)
        else:
            dist.new_group([1])


def sends_that_face_each_other(queues: int) -> None:
    """With a single hardware queue, each send would block the receive queued after it."""
    options: Any = {"queues": queues, "timeout_s": 1.0 if queues == 1 else 30.0}
    first = 2006 + 2 * (queues == 1)
    links = [strict.StrictCommunicator((0, 1), CPU, number, **options) for number in (first, first + 1)]
    sends, receives = links if dist.get_rank() == 0 else links[::-1]
    place = 1 - dist.get_rank()
    works = [sends.send([torch.ones(2)], place, 0), receives.recv([torch.zeros(2)], place, 0)]
    for work in works:
        work.wait()


def tensors_on_a_device_travel_apart() -> tuple[str, float]:
    """A message with a tensor on the device, here meta, and one in the memory of the CPU."""
    out, back = ends(5, device="meta")
    out.send(Message(0, tensors=(torch.empty(4, device="meta"), torch.full((3,), 7.0))), 0)
    on_device, target = back.receive(0).tensors
    assert on_device is not None
    assert target is not None
    assert on_device.is_meta
    out.drain()
    assert out._communicator.issued == back._communicator.issued == 1  # type: ignore[attr-defined]
    return str(target.device), float(target.sum())


def all_scenarios() -> dict[str, Any]:
    torch.cuda.synchronize = strict.synchronize
    results: dict[str, Any] = {"kept": messages_arrive(), "right order": refused(lambda: in_the_order_of_1f1b(2))}
    results["lazy"] = refused(lambda: in_the_order_of_1f1b(3, connects=False))
    scenarios = (
        tensor_of_another_device,
        type_that_nccl_lacks,
        one_end_alone,
        device_wide_wait,
        drain_with_a_receive,
        orders_that_differ,
        first_use_in_the_program,
    )
    results |= try_all(scenarios)
    results["completion"] = completion()
    results["types"] = types_arrive()
    results["apart"] = tensors_on_a_device_travel_apart()
    return results


def try_all(scenarios: Sequence[Callable[[], None]]) -> dict[str, str]:
    answers = {}
    for scenario in scenarios:
        answers[scenario.__name__] = refused(scenario)
        dist.barrier()
    return answers


def queues_and_groups() -> dict[str, Any]:
    results: dict[str, Any] = try_all((sums_in_another_order, group_of_other_ranks, group_at_one_rank))
    results["wait"] = wait_that_returns()
    results["facing"] = [refused(partial(sends_that_face_each_other, queues)) for queues in (32, 1)]
    return results


def peer_that_dies() -> list[bool]:
    """Returns whether its transfer has ended, and whether the process could exit: before it aborts, and after."""
    communicator = strict.StrictCommunicator((0, 1), CPU, 0)
    if dist.get_rank() == 1:
        os._exit(3)
    work = communicator.recv([torch.empty(2)], 1, 0)
    leaving = threading.Thread(target=strict._hang_at_exit, daemon=True)
    leaving.start()
    leaving.join(0.2)
    before = not leaving.is_alive()
    communicator.abort()
    leaving.join(60.0)
    return [work.is_completed(), before, not leaving.is_alive()]


@pytest.mark.processes
def test_a_link_does_what_nccl_needs_and_the_stand_in_refuses_the_rest() -> None:
    first, second = processes.results(all_scenarios, 2)
    for results in (first, second):
        assert results["right order"] == results["lazy"] == "nothing was refused"
        assert max(results["kept"]) <= 3, "what was sent is let go, although gloo does not say that its header was"
        assert "a tensor on cpu was issued on a communicator of meta" in results["tensor_of_another_device"]
        assert results["apart"] == ("cpu", 21.0)
    assert first["completion"] == [False, True, False], "gloo does not say that a send has ended; NCCL does"
    assert "waits at rank 1 for rank 0, which waits for something else" in second["one_end_alone"]
    assert second["device_wide_wait"].startswith("a wait for the whole device, while a receive")
    assert second["drain_with_a_receive"].startswith("a drain, while a receive")
    assert "a receive of [12, 4] bytes meets a send of [8, 4]" in second["orders_that_differ"]
    assert "waits at rank 1 for rank 0, which waits for something else" in second["first_use_in_the_program"]


@pytest.mark.slow
@pytest.mark.processes
def test_the_stand_in_has_nccls_streams_queues_and_groups() -> None:
    first, second = processes.results(queues_and_groups, 2)
    assert second["wait"] == [True, False, 2.0]
    assert second["group_at_one_rank"].endswith(" is not made by rank 0")
    for results in (first, second):
        assert "meets another collective" in results["sums_in_another_order"]
        assert "[0, 1] at rank 1" in results["group_of_other_ranks"]
        assert results["facing"][0] == "nothing was refused"
        assert results["facing"][1].endswith("does not end")


def training_that_fails() -> list[bool]:
    """Returns whether this rank has aborted each of its communicators."""
    with strict.installed(on_one_machine=True):
        with pytest.raises(PipelineError):
            mishaps.train("forward", 2)
        return [communicator.aborted for communicator in strict._communicators]


@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_that_fails_aborts_its_communicators() -> None:
    waiting, failed = processes.launch(training_that_fails, 2)
    assert failed.value == [True, True]
    assert waiting.value in (None, [True, True]), "its guard ends a worker that waits"


@pytest.mark.processes
def test_transfers_of_a_rank_that_is_gone_never_end() -> None:
    assert processes.launch(peer_that_dies, 2)[0].value == [False, False, True]
