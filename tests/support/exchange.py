"""Messages of many sizes between two processes."""

from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from pipedream.extensions.shared_memory import pair_memory as shared_memory
from pipedream.runtime.comm import channel, connections as links, message as wire, transport
from pipedream.runtime.update.all_reduce import all_reduce_many

SIZES = {
    "equal": [5] * 8,
    "growing": [1, 2, 40, 41, 5000, 70_000, 300_000],
    "shrinking": [300_000, 70_000, 41, 40, 2, 1, 1, 1],
    "with gaps": [7, 0, 0, 9, 0, 8000, 0, 3, 400_000, 0, 0, 0, 12],
    "nothing": [0] * 6,
}


def message_of(number: int, size: int) -> wire.Message:
    """Returns message `number`: half of them carry several tensors, of which one is missing."""
    numbers = torch.arange(size, dtype=torch.float64) + number
    tensors: tuple[Tensor | None, ...] = (numbers,)
    if number % 2:
        tensors = (numbers.to(torch.int32), None, numbers.reshape(-1, 1).expand(-1, 2), torch.tensor(number > 3))
    content = wire.Content.DATA if size else wire.Content.EMPTY
    structure = '{"v":1}' if number % 3 == 2 else f'"{"long" * 10_000}"' if number == 4 else ""
    return wire.Message(number, content, tensors if size else (None,) * (number % 3), structure, loss_weight=number / 7)


def assert_arrived(tensors: Iterable[Tensor | None], sent: Iterable[Tensor | None]) -> None:
    """Checks that tensors have the shapes, types and bits of those that were sent, and that the same are missing."""
    for arrived, tensor in zip(tensors, sent, strict=True):
        assert (arrived is None) == (tensor is None)
        if arrived is not None and tensor is not None:
            assert (arrived.shape, arrived.dtype) == (tensor.shape, tensor.dtype)
            assert torch.equal(_bits(arrived), _bits(tensor))


def _bits(tensor: Tensor) -> Tensor:
    dense = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.uint8)


def exchange(
    depths: list[int], shares_memory: bool
) -> dict[str, list[tuple[int, int, float, str, list[Tensor | None]]]]:
    """Sends all lists of sizes both ways on channels of each depth, by memory or gloo; returns what arrived."""
    group = dist.group.WORLD
    ways = (0, 1), (1, 0)
    with mock.patch.object(shared_memory, "is_supported", return_value=shares_memory):
        connections = links.connect_groups(ways, [[0], [1]], [], *[torch.device("cpu")] * 2)
    assert set(connections.memory) == (set(ways) if shares_memory else set())
    assert (connections.upward is connections.everyone) == shares_memory
    arrived = {}
    for i, (name, sizes) in enumerate(SIZES.items()):
        for j, depth in enumerate(depths):
            # A channel each way; its number is the same at both ends.
            first = 2 * (i * len(depths) + j)
            rank, cpu = dist.get_rank(), torch.device("cpu")
            ends: dict[int, Any] = {}
            for i in ways[0]:  # in one order at both
                connection = transport.PeerConnection(connections, cpu, 1 - rank, first + i, depth, len(sizes))
                ends[i] = connection.open_sender() if i == rank else connection.open_receiver()
            sender, receiver = ends[rank], ends[1 - rank]
            for stream in range(2):  # the second begins with what both ends know from the first
                for number, size in enumerate(sizes):
                    sender.send(message_of(number, size))
                messages = [receiver.receive().result() for _ in sizes]
                arrived[f"{name}, depth {depth}, stream {stream}"] = [
                    (m.microbatch, int(m.content), m.loss_weight, m.structure, list(m.tensors)) for m in messages
                ]
                channel.drain([sender, receiver])
            assert sender.sent_bytes > 0 or not any(sizes)
    ones = [torch.full((2, 3), float(dist.get_rank() + 1)), torch.tensor(dist.get_rank() + 1), torch.ones(4).double()]
    adding = all_reduce_many(channel.DistributedGroup(group), ones)
    try:
        while True:
            next(adding)
    except StopIteration as end:
        sums = end.value
    connections.close()
    arrived["sums"] = [(0, 0, 0.0, "", list(sums))]
    return arrived
