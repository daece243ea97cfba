"""Chooses the transport of each channel between processes.

| a message | transport |
| --- | --- |
| between ranks of one machine | `extensions/shared_memory/`, or `gloo` without it |
| between other ranks | `gloo` |
| between ranks with a GPU each | `extensions/nccl/` for the tensors on GPUs; the rest on one of those above |
| between workers whose meshes differ | `extensions/meshes/`: parts of tensors, on channels between their ranks |
| of results or data | `gloo` |

Within one process `assemble.make_local_workers` opens a `channel.LocalChannel`; between stages of one rank the
`Mailbox` keeps a copy. A transport does not know what a message carries; the plan's choice wraps the ends of channels
whose messages are encoded.

docs/architecture.md follows a message from stage to stage, such as a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipedream.core.extensions import list_offers
from pipedream.core.plan.placement import Carries
from pipedream.core.schedule.occupancy import count_most_in_flight
from pipedream.core.schedule.program import Program
from pipedream.runtime.comm.channel import ConnectionReceiver, ConnectionSender, Receiver, Sender
from pipedream.runtime.comm.connections import Connections
from pipedream.runtime.comm.gloo import GlooEndpoint, GlooReceiver, GlooSender

_DEPTH = 2
"""Receives posted ahead on channels of results and data."""


class Transport:
    """Opens this rank's ends of channels, for all phases; ranks that share channels open them in one order."""

    def __init__(self, connections: Connections, programs: Sequence[Program], device: torch.device) -> None:
        self._connections, self._links = connections, connections.links
        self._programs = programs
        self._messages = programs[0].plan.choices.messages
        self._device = device
        self._channels = programs[0].channels
        self._placement = programs[0].placement

    def open_channels(self) -> tuple[dict[int, Sender], dict[int, Receiver]]:
        """Returns this worker's ends of the program's channels, by the channel's number."""
        worker, max_unread = self._connections.worker_number, self._count_unread()
        ends: dict[int, dict[int, Any]] = {}  # channel -> rank of the other worker -> end
        on_links: dict[tuple[int, int], list[int]] = {}  # (sender, receiver) -> channels
        for number, channel in enumerate(self._channels):
            if worker not in (channel.sender, channel.receiver):
                continue
            sends, ends[number] = worker == channel.sender, {}
            for peer in self._connections.peers(channel.receiver if sends else channel.sender):
                pair = (self._connections.process, peer) if sends else (peer, self._connections.process)
                if pair in self._links and channel.carries != Carries.INPUT:  # targets stay in the memory of the CPU
                    on_links.setdefault(pair, []).append(number)
                else:
                    connection = self._connect(peer, number, channel.depth, max_unread[number])
                    ends[number][peer] = connection.open_sender() if sends else connection.open_receiver()
        for pair, numbers in on_links.items():
            # If more messages are under way than all channels together may have unread, one channel has too many: its
            # oldest one has been read, and so has all that was sent before.
            depth, unread = sum(self._channels[n].depth for n in numbers), sum(max_unread[n] for n in numbers)
            peer, opened = self._open_link(pair, numbers, depth, unread)
            for number, end in opened.items():
                ends[number][peer] = end
        senders, receivers = {}, {}
        for number, by_peer in ends.items():
            channel = self._channels[number]
            if worker == channel.sender:
                encode = partial(self._messages.wrap_sender, carries=channel.carries)
                senders[number] = self._join(channel.receiver, {p: encode(end) for p, end in by_peer.items()}, True)
            else:
                decode = partial(self._messages.wrap_receiver, carries=channel.carries)
                receivers[number] = self._join(channel.sender, {p: decode(end) for p, end in by_peer.items()}, False)
        return senders, receivers

    def open_result_channels(self) -> tuple[dict[int, Sender], dict[int, Receiver]]:
        """Returns the channels for results: (receiving worker -> sender, last-stage worker -> receiver)."""
        connections, workers, here = self._connections, self._placement.workers, self._connections.worker_number
        senders: dict[int, Sender] = {}
        receivers: dict[int, Receiver] = {}
        for owner in self._placement.scorers:
            for other in range(workers):
                number = len(self._channels) + owner * workers + other
                if here == owner != other:
                    peers = connections.peers(other)
                    ends = {peer: self._open_data_sender(peer, number, connections.everyone) for peer in peers}
                    senders[other] = self._join(other, ends, True)
                elif here == other != owner:
                    peers = connections.peers(owner)
                    sources = {peer: _open_data_receiver(peer, number, connections.everyone) for peer in peers}
                    receivers[owner] = self._join(owner, sources, False)
        return senders, receivers

    def open_data_channels(self) -> tuple[dict[int, GlooSender], dict[int, GlooReceiver]]:
        """Returns how a replica of the input stage hands out data: senders by later, receivers by earlier replica."""
        worker, leaders = self._connections.worker_number, self._connections.leaders
        ranks = self._placement.readers
        senders: dict[int, GlooSender] = {}
        receivers: dict[int, GlooReceiver] = {}
        if leaders is None or worker not in ranks:
            return senders, receivers
        begin = len(self._channels) + self._placement.workers**2  # after those of the results
        replica = ranks.index(worker)
        for other, rank in enumerate(ranks):
            number = begin + min(replica, other) * len(ranks) + max(replica, other)
            if other > replica:
                senders[other] = self._open_data_sender(rank, number, leaders)
            elif other < replica:
                receivers[other] = _open_data_receiver(rank, number, leaders)
        return senders, receivers

    def open_mesh_data_channels(self) -> tuple[list[GlooSender], GlooReceiver | None]:
        """Returns the channels for data within a worker: at its first rank the senders, elsewhere the receiver."""
        group = self._connections.worker_group
        if group is None:
            return [], None
        if group.rank():
            return [], _open_data_receiver(0, group.rank(), group)
        return [self._open_data_sender(peer, peer, group) for peer in range(1, group.size())], None

    def _open_link(
        self, pair: tuple[int, int], numbers: Sequence[int], depth: int, max_unread: int
    ) -> tuple[int, dict[int, Any]]:
        """Returns the other rank, and by number the ends of all channels to or from it, which share a communicator."""
        sends, communicator = pair[0] == self._connections.process, self._links[pair]
        peer = pair[1] if sends else pair[0]
        headers = self._connect(peer, numbers[0], depth, max_unread, self._device.type)
        (link, *_) = list_offers("gpu_link")
        if sends:
            return peer, link.open_senders(headers.open_sender(), communicator, numbers)
        return peer, link.open_receivers(headers.open_receiver(), communicator, self._device, numbers)

    def _connect(self, peer: int, number: int, depth: int, max_unread: int, separate: str = "") -> PeerConnection:
        return PeerConnection(self._connections, self._device, peer, number, depth, max_unread, separate)

    def _join(self, worker: int, ends: Mapping[int, Any], sends: bool) -> Any:
        """Returns the end of a channel to or from another worker, from those to its ranks."""
        meshes, first = self._connections.meshes, min(ends)
        here, there = meshes[self._connections.worker_number], meshes[worker]
        if here == there:
            return ends[first]
        by_rank, rank = {peer - first: end for peer, end in ends.items()}, self._connections.rank_in_worker
        (channel_ends, *_) = list_offers("channel_ends")
        if sends:
            return channel_ends.join_senders(here, there, rank, by_rank)
        return channel_ends.join_receivers(there, here, rank, by_rank)

    def _open_data_sender(self, peer: int, number: int, group: dist.ProcessGroup) -> GlooSender:
        max_in_flight = max(max(*program.plan.in_flight, program.microbatches) for program in self._programs)
        return GlooSender(GlooEndpoint(peer, number, _DEPTH, group), max_in_flight * max(self._placement.replicas) + 2)

    def _count_unread(self) -> list[int]:
        """Returns how many messages of each channel may be unread.

        A replica that begins a forward has finished all backwards but those in flight, so the next stage has received
        all other activations. The end of a stream is one more message. So waiting for an older message never depends on
        future work.
        """
        in_flight = [max(counts) for counts in zip(*map(count_most_in_flight, self._programs), strict=True)]
        return [in_flight[min(channel.source, channel.target)] + 1 for channel in self._channels]


@dataclass(frozen=True)
class PeerConnection:
    """A connection to another rank, of which this is one side; tensors on devices `separate` are not sent here."""

    connections: Connections
    device: torch.device
    peer: int
    number: int
    depth: int
    max_unread: int
    separate: str = ""

    def open_sender(self) -> ConnectionSender:
        process = self.connections.process
        memory = self.connections.memory.get((process, self.peer))
        if memory is not None and self.max_unread <= memory.max_unread:
            return memory.open_sender(self.peer, self.max_unread, self.separate)
        return GlooSender(self._make_endpoint(process < self.peer), self.max_unread)

    def open_receiver(self) -> ConnectionReceiver:
        process = self.connections.process
        memory = self.connections.memory.get((self.peer, process))
        if memory is not None and self.max_unread <= memory.max_unread:
            return memory.open_receiver(self.peer, self.device)
        return GlooReceiver(self._make_endpoint(self.peer < process))

    def _make_endpoint(self, is_upward: bool) -> GlooEndpoint:
        group = self.connections.upward if is_upward else self.connections.everyone
        return GlooEndpoint(self.peer, self.number, self.depth, group, self.device, self.separate)


def _open_data_receiver(peer: int, number: int, group: dist.ProcessGroup) -> GlooReceiver:
    return GlooReceiver(GlooEndpoint(peer, number, _DEPTH, group))
