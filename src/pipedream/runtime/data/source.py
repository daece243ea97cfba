"""The sources of microbatches of the input stage's workers.

- All workers in one process: one reader serves all of them.
- One replica, or a map-style DataLoader and no split minibatches: each replica reads its own.
- A map-style DataLoader and split minibatches, on several machines: the first replica of each machine reads whole
  minibatches, in the same order with the same random numbers, and sends the others of its machine theirs. Replica 0
  notifies these readers of each minibatch, and of the end. Their first minibatches are compared; if they differ, as
  with a data set that draws from its own generator, or fail, the next case applies.
- Anything else (an iterable, or split minibatches): replica 0 alone reads, a whole round at a time, and sends the
  others theirs.
- If the worker is a mesh, its first rank reads or receives, and sends everything to the others.

No deadlock: a forward of replica c waits until the replica that reads for it reads its round, at its own first forward
of it, and that until replica 0 does. These wait only for ops of earlier rounds, because no stage has more in flight
than the input stage. By induction every round is read. (Sending waits only for the receipt of much earlier rounds.)
"""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipedream.core.errors import WorkerError
from pipedream.core.schedule.program import Program
from pipedream.runtime.comm.channel import LocalChannel, Pending, Receiver, Sender
from pipedream.runtime.comm.message import Content, Message, StopReason
from pipedream.runtime.comm.process_group import gather_json, read_machine
from pipedream.runtime.comm.values import compute_crc32, flatten, map_tensors, tensors_in
from pipedream.runtime.data.generators import find_order_generators
from pipedream.runtime.data.reader import (
    EpochRange,
    FollowingReader,
    IterableReader,
    LoaderReader,
    Reader,
    find_sharding,
    make_notice,
    tee,
)
from pipedream.runtime.data.rng import DataOrder, preserved_rng, read_state, set_state
from pipedream.runtime.data.splitter import (
    AdaptBatch,
    BatchAdapter,
    BatchDim,
    Parts,
    Splitter,
    known_samples,
)

_log = logging.getLogger("pipedream")


@dataclass(frozen=True)
class DataChannels:
    """How data travels to ranks that do not read it.

    Attributes:
        group: of the first ranks of all workers; None in a single process, and at other ranks of a mesh.
        senders: at a replica of the input stage, later replica -> to it.
        receivers: at one, earlier replica -> from it.
        mesh_senders: at the first rank of an input worker with a mesh, to its other ranks.
        mesh_receiver: at those.
    """

    worker: int = 0
    group: dist.ProcessGroup | None = None
    senders: Mapping[int, Sender] = field(default_factory=dict)
    receivers: Mapping[int, Receiver] = field(default_factory=dict)
    mesh_senders: Sequence[Sender] = ()
    mesh_receiver: Receiver | None = None

    @property
    def all(self) -> list[Sender | Receiver]:
        ends: list[Sender | Receiver] = [*self.senders.values(), *self.receivers.values(), *self.mesh_senders]
        return ends if self.mesh_receiver is None else [*ends, self.mesh_receiver]


class Source(ABC):
    """One worker's microbatches.

    Life: `begin` a stream; `take` each microbatch until the answer is a `StopReason`; after a drain, `resume`.

    Attributes:
        ended_at: minibatches of the stream, once it has ended.
    """

    ended_at: int = 0

    @abstractmethod
    def begin(self, per_minibatch: int, replica: int, base: int, cycle: int = 1, until: int | None = None) -> None:
        """Begins a stream.

        Args:
            base: minibatches done before.
            cycle: as for `Reader.begin`.
            until: the same, but counted from the start of training.
        """

    @abstractmethod
    def take(self, microbatch: int) -> tuple[Message, Message] | StopReason:
        """Returns the input of the first layer and that of the loss."""

    def stop(self, stop_reason: StopReason) -> None:
        """Ends the stream with what has been read, if this rank reads."""
        return

    def end(self) -> None:
        """Ends the stream, whose end this rank may know from another one."""
        return

    def resume(self) -> None:
        """Continues after a drain."""
        return


class ReadingSource(Source):
    """Microbatches that this process reads, also for other replicas.

    Args:
        senders: replica -> to one that does not read.
        followers: to replicas with a `FollowingReader`.
        replicas: of the input stage.
    """

    def __init__(
        self,
        reader: Reader,
        splitter: Splitter,
        senders: Mapping[int, Sender] | None = None,
        followers: Sequence[Sender] = (),
        replicas: int = 1,
    ) -> None:
        self.splitter = splitter
        self._reader = reader
        self._senders = dict(senders or {})
        self._followers = followers
        self._replicas = replicas

    def begin(self, per_minibatch: int, replica: int, base: int, cycle: int = 1, until: int | None = None) -> None:
        self._reader.begin(cycle, None if until is None else until - base)
        self.splitter.begin(per_minibatch, base)
        self._per_minibatch = per_minibatch
        self._replica = replica
        self._open_senders = dict(self._senders)  # whose stream has not ended
        self._number = -1
        self._parts: Parts = []
        self.ended_at = 0

    def take(self, microbatch: int) -> tuple[Message, Message] | StopReason:
        number, part = divmod(microbatch, self._per_minibatch)
        if number != self._number:
            minibatch = self._reader.read(number, self._replica)
            if isinstance(minibatch, StopReason):
                self.ended_at = self._reader.ended_at
                for follower in self._followers:
                    follower.send(self._make_end(minibatch))
                self._send_ends(self._open_senders, minibatch)
                return minibatch
            for follower in self._followers:
                follower.send(make_notice(number, minibatch))
            self._parts = self.splitter.split(number, minibatch)
            self._number = number
            if self._open_senders:
                self._send_round(number)
        return self._parts[part]

    def stop(self, stop_reason: StopReason) -> None:
        self._reader.stop(stop_reason)

    def end(self) -> None:  # known before this reader comes to it
        self._send_ends(self._open_senders, StopReason.DATA)

    def resume(self) -> None:
        self._reader.resume()

    def _send_round(self, number: int) -> None:
        if self._per_minibatch > 1:  # its microbatches are those of all replicas
            self._send(self._parts)
            return
        for replica in range(1, self._replicas):  # of the round's minibatches, the first is this replica's
            minibatch = self._reader.read(number + replica, replica)
            if isinstance(minibatch, StopReason):
                self._send_ends(range(replica, self._replicas), minibatch)
                return
            self._send(self.splitter.split(number + replica, minibatch))

    def _send(self, parts: Parts) -> None:
        for inputs, targets in parts:
            sender = self._open_senders.get(inputs.microbatch % self._replicas)
            if sender is not None:
                sender.send(_join(inputs, targets))

    def _send_ends(self, replicas: Iterable[int], stop_reason: StopReason) -> None:
        for replica in list(replicas):
            self._open_senders.pop(replica).send(self._make_end(stop_reason))

    def _make_end(self, stop_reason: StopReason) -> Message:
        return Message(self._reader.ended_at, Content.END, flags=int(stop_reason))


class TurnSource(ReadingSource):
    """Minibatches that this process reads for all the ranks that take turns at them."""

    def begin(self, per_minibatch: int, replica: int, base: int, cycle: int = 1, until: int | None = None) -> None:
        super().begin(per_minibatch, replica, base, cycle, until)
        self._next = 0
        self._ended: StopReason | None = None

    def take(self, microbatch: int) -> tuple[Message, Message] | StopReason:
        number, part = divmod(microbatch, self._per_minibatch)
        while self._next <= number and self._ended is None:
            self.read_round()
        return self._parts[part] if number == self._number or self._ended is None else self._ended

    def read_round(self) -> None:
        """Reads a minibatch for each rank, and sends them."""
        for turn in range(self._replicas):
            minibatch = self._reader.read(self._next)
            if isinstance(minibatch, StopReason):
                self._ended, self.ended_at = minibatch, self._reader.ended_at
                self._send_ends(self._open_senders, minibatch)
                return
            parts = self.splitter.split(self._next, minibatch)
            if turn == 0:  # its minibatch before is taken: the others come to this round after later passes of that
                self._parts, self._number = parts, self._next
            for inputs, targets in parts if turn else ():
                self._open_senders[turn].send(_join(inputs, targets))
            self._next += 1


class _PullingReceiver(Receiver):
    """The end of a channel whose sender, in this process, reads further minibatches when none is there."""

    def __init__(self, channel: LocalChannel, source: TurnSource) -> None:
        self._channel, self._source = channel, source

    def receive(self) -> Pending[Message]:
        pending = self._channel.receive()
        while not pending.ready():
            self._source.read_round()
        return pending


class ReceivingSource(Source):
    """Microbatches that another rank reads and sends.

    Args:
        takes_turns: this rank's later stages may hear of the end first; then `end` receives what was sent until then.
    """

    def __init__(self, receiver: Receiver, takes_turns: bool = False) -> None:
        self._receiver = receiver
        self._takes_turns = takes_turns

    def begin(self, per_minibatch: int, replica: int, base: int, cycle: int = 1, until: int | None = None) -> None:
        self.ended_at = 0
        self._is_ended = not self._takes_turns

    def end(self) -> None:
        while not self._is_ended:
            self._is_ended = self._receiver.receive().result().content is Content.END

    def take(self, microbatch: int) -> tuple[Message, Message] | StopReason:
        message = self._receiver.receive().result()
        if message.content is Content.END:
            self.ended_at, self._is_ended = message.microbatch, True
            return StopReason(message.flags)
        assert message.microbatch == microbatch, f"received microbatch {message.microbatch} instead of {microbatch}"
        header = message.without_tensors()
        if message.content is Content.EMPTY:
            return header, header
        inputs, targets = message.value()
        return header.with_tensors(*flatten(inputs)), header.with_tensors(*flatten(targets))


class MeshSource(Source):
    """Microbatches of the first rank of a mesh, which it sends to the others.

    It has no `end`, which ranks that take turns need: these have no mesh.
    """

    def __init__(self, source: Source, senders: Sequence[Sender]) -> None:
        self.source = source
        self._senders = senders

    def begin(self, per_minibatch: int, replica: int, base: int, cycle: int = 1, until: int | None = None) -> None:
        self.source.begin(per_minibatch, replica, base, cycle, until)

    def take(self, microbatch: int) -> tuple[Message, Message] | StopReason:
        messages = self.source.take(microbatch)
        self.ended_at = self.source.ended_at
        if isinstance(messages, StopReason):
            message = Message(self.ended_at, Content.END, flags=int(messages))
        else:
            message = _join(*messages)
        for sender in self._senders:
            sender.send(message)
        return messages

    def stop(self, stop_reason: StopReason) -> None:
        self.source.stop(stop_reason)

    def resume(self) -> None:
        self.source.resume()


class DataSources:
    """Opens loaders for the workers of one process, rank -> `Source`.

    Args:
        programs: one for each phase of the training.
        ranks: workers here that read a loader or receive from its reader.
        batch_dim: of the model's inputs.
        planned_samples: of the first minibatch, see `Splitter`.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        ranks: Iterable[int],
        channels: DataChannels | None = None,
        batch_dim: BatchDim = 0,
        planned_samples: int = 1,
    ) -> None:
        self._input_ranks = programs[0].placement.readers
        self._takes_turns = programs[0].placement.rotates
        self._ranks_here = [rank for rank in self._input_ranks if rank in set(ranks)]
        self._batch_dim, self._planned_samples = batch_dim, planned_samples
        self._training = _OpenLoader({program.microbatches > 1 for program in programs})
        self._evaluation = _OpenLoader({False})
        self._borrowed: list[tuple[Any, Any]] = []
        self.channels = channels or DataChannels()

    @property
    def uses_loader(self) -> bool:
        """Whether a loader may be read here; elsewhere it may be any."""
        return bool(self._ranks_here)

    @property
    def begun(self) -> int:
        """The last epoch that the training data is read of here; -1 if none is."""
        return -1 if self._training.reader is None else self._training.reader.begun

    def open_training(
        self, loader: Any, adapt: AdaptBatch, epochs: EpochRange, state: Mapping[str, Any] | None
    ) -> dict[int, Source]:
        """Opens a loader for training; without a `state` the order continues."""
        sources = self._open(self._training, _DataRequest(loader, adapt, epochs, state, self._batch_dim))
        source = sources.get(self._input_ranks[0])
        if isinstance(source := source.source if isinstance(source, MeshSource) else source, ReadingSource):
            source.splitter.planned_samples, self._planned_samples = self._planned_samples, 1
            source.splitter.loader = loader
        return sources

    def open_evaluation(self, loader: Any, adapt: AdaptBatch) -> dict[int, Source]:
        """Opens a loader for one epoch; the training's order stays as it is."""
        self._borrowed = [(generator, read_state(generator)) for generator in find_order_generators(loader).values()]
        self._evaluation.order = DataOrder()
        return self._open(self._evaluation, _DataRequest(loader, adapt, EpochRange(), None, self._batch_dim))

    def close_evaluation(self) -> None:
        """Restores the loader's generators, which may be the training's."""
        self._evaluation.close_reader()
        for generator, state in self._borrowed:
            set_state(generator, state)
        self._borrowed = []

    def state(self, epoch: int, batches: int) -> dict[str, Any]:
        """Returns what is needed to continue reading; empty where the loader is not read."""
        reader = self._training.reader
        return {} if reader is None else reader.state(epoch, batches)

    def close(self) -> None:
        self._training.close()
        self._evaluation.close()
        self.channels = DataChannels()  # lets go of the group

    def _open(self, target: _OpenLoader, request: _DataRequest) -> dict[int, Source]:
        target.close_reader()
        channels = self.channels
        if channels.mesh_receiver is not None:
            return {channels.worker: ReceivingSource(channels.mesh_receiver)}
        sources: dict[int, Source]
        if self._takes_turns and target is self._training and channels.group is None:
            ends = {number: LocalChannel() for number in range(1, len(self._input_ranks))}
            splitter = Splitter(self._batch_dim)
            source = TurnSource(target.open(request), splitter, ends, replicas=len(self._input_ranks))
            receivers = (ReceivingSource(_PullingReceiver(end, source), takes_turns=True) for end in ends.values())
            return dict(zip(self._input_ranks, (source, *receivers), strict=True))
        if channels.group is None or len(self._input_ranks) == 1:
            readers = tee(target.open(request), len(self._ranks_here)) if self._ranks_here else []
            sources = {
                rank: ReadingSource(reader, Splitter(self._batch_dim))
                for rank, reader in zip(self._ranks_here, readers, strict=True)
            }
        else:
            sources = self._open_among_replicas(target, request)
        if channels.mesh_senders:
            return {rank: MeshSource(source, channels.mesh_senders) for rank, source in sources.items()}
        return sources

    def _open_among_replicas(self, target: _OpenLoader, request: _DataRequest) -> dict[int, Source]:
        """Opens a loader as replica 0 decides for all."""
        loader, replicas = request.loader, len(self._input_ranks)
        replica = self._input_ranks.index(self._ranks_here[0]) if self._ranks_here else None
        facts = None
        if replica is not None:
            state = request.state
            if replica == 0 and not state and find_sharding(loader):
                state = target.initial_state(loader, request.epochs, replicas)
            facts = [find_sharding(loader) is not None, read_machine(), state if replica == 0 else None]
        rows = gather_json(facts, self.channels.group)
        first = self._input_ranks[0]
        can_shard, _, state = rows[first]
        request = replace(request, state=state)
        takes_turns = self._takes_turns and target is self._training
        sharded = can_shard and True not in target.splits and not takes_turns
        readers = [] if sharded else self._choose_readers(target, request, rows)
        if replica is None:
            return {}
        rank = self._ranks_here[0]
        if sharded and not find_sharding(loader):
            raise WorkerError(
                rank,
                "the loader",
                f"it is a {type(loader).__name__}, but rank {first} has a DataLoader over a map-style data set",
                "create the same loader on every rank",
            )
        splitter = Splitter(self._batch_dim)
        if sharded:
            return {rank: ReadingSource(target.open(request, replica, replicas), splitter)}
        if readers[replica] != replica:
            # In an evaluation, too, ranks that take turns hear of the end from each other.
            return {rank: ReceivingSource(self.channels.receivers[readers[replica]], self._takes_turns)}
        senders = {other: sender for other, sender in self.channels.senders.items() if readers[other] == replica}
        reader = target.reader or target.open(request)  # `load_first` may have opened it
        if replica:
            follower = FollowingReader(reader, self.channels.receivers[0], rank)
            return {rank: ReadingSource(follower, splitter, senders, replicas=replicas)}
        if takes_turns:
            return {rank: TurnSource(reader, splitter, senders, replicas=replicas)}
        followers = [self.channels.senders[other] for other in sorted({*readers} - {0})]
        return {rank: ReadingSource(reader, splitter, senders, followers, replicas)}

    def _choose_readers(self, target: _OpenLoader, request: _DataRequest, rows: Sequence[Any]) -> list[int]:
        """Returns which replica reads for each.

        Args:
            rows: of all workers; of those of the input stage, whether the loader can be sharded, and the machine.
        """
        can_shard, machines, _ = zip(*(rows[rank] for rank in self._input_ranks), strict=True)
        nearest = [machines.index(machine) for machine in machines]
        if not any(nearest):
            return nearest
        reason = "the loader is no map-style DataLoader"
        if all(can_shard):
            reason = "only some phases split minibatches"
        if all(can_shard) and False not in target.splits:
            reads = any(self._input_ranks[replica] in self._ranks_here for replica in nearest)
            fingerprints = gather_json(target.load_first(request) if reads else [], self.channels.group)
            first, *others = [fingerprints[self._input_ranks[replica]] for replica in nearest]
            if first and all(other == first for other in others):
                return nearest
            target.close()
            reason = "the first minibatch of the loader is not the same on each machine"
        if target is self._training and self._input_ranks[0] in self._ranks_here:
            message = "rank %d reads the training data and sends other machines theirs, which no prediction counts: %s"
            _log.warning(message, self._input_ranks[0], reason)
        return [0] * len(nearest)


@dataclass(frozen=True)
class _DataRequest:
    """What to read; `state` is where to continue."""

    loader: Any
    adapt: AdaptBatch
    epochs: EpochRange
    state: Mapping[str, Any] | None
    batch_dim: BatchDim

    def count_samples(self, batch: Any, is_adapted: bool) -> int:
        """Returns the samples of a batch, without the user's functions, which may draw numbers."""
        targets = batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch
        if is_adapted:
            batch = batch[0]
        elif isinstance(self.adapt, BatchAdapter) and self.adapt.inputs is None:
            batch = self.adapt.input_of(batch)
        tensors = map_tensors(batch, lambda array: torch.empty(array.shape, device="meta"), np.ndarray)
        return known_samples(tensors, self.batch_dim, targets) or (len(batch) if isinstance(batch, list) else 1)


class _OpenLoader:
    """A loader with the random state of its order; `splits`: whether minibatches are split, in all or some phases."""

    def __init__(self, splits: Set[bool]) -> None:
        self.splits = splits
        self.order = DataOrder()
        self.reader: LoaderReader | None = None
        self._sharded: Any = None

    def open(self, request: _DataRequest, replica: int = 0, replicas: int = 1, *, alike: bool = False) -> LoaderReader:
        loader, epochs, state = request.loader, request.epochs, request.state
        reader: LoaderReader
        if find_sharding(loader):
            sharded = self._shard(loader, replica, replicas)
            sharded.alike = alike
            reader = sharded.open(self.order, epochs, state)
        else:
            reader = IterableReader(loader, self.order, epochs, state)
            reader.count_samples = request.count_samples
        reader.adapt, self.reader = request.adapt, reader
        return reader

    def initial_state(self, loader: Any, epochs: EpochRange, replicas: int) -> dict[str, Any]:
        """Returns replica 0's state, with which all replicas begin."""
        seeded = self._shard(loader, 0, 1 if True in self.splits else replicas).seeded
        return {"epoch": epochs.first, "order": self.order.snapshot(loader), "seeded": seeded}

    def load_first(self, request: _DataRequest) -> list[Any]:
        """Opens a loader that other processes read alike; returns a fingerprint of its first minibatch.

        The minibatch stays the next one. The fingerprint is empty if it cannot be loaded.
        """
        try:
            minibatch = self.open(request, alike=True).peek()
            if minibatch is None:
                return ["the end"]
            with preserved_rng(request.loader):
                values = request.adapt(copy.deepcopy(minibatch.batch))  # which may write into its batch
            checksums = [compute_crc32(tensor.detach().cpu()) for tensor in tensors_in(values)]
        except Exception:  # at replica 0 it happens again where the minibatch is read
            return []
        return [minibatch.epoch, minibatch.ends_epoch, minibatch.indices_crc32, checksums]

    def close_reader(self) -> None:
        if self.reader is not None:
            self.reader.close()
            self.reader = None

    def close(self) -> None:
        self.close_reader()
        if self._sharded is not None:
            self._sharded.close()
            self._sharded = None

    def _shard(self, loader: Any, replica: int, replicas: int) -> Any:
        """Returns the same object for the same loader, whose workers may live on."""
        sharded = self._sharded
        if sharded is None or sharded.loader is not loader or sharded.replicas != replicas:
            if sharded is not None:
                sharded.close()
            offer: Any = find_sharding(loader)
            sharded = self._sharded = offer.ShardedLoader(loader, replica, replicas)
        return sharded


def _join(inputs: Message, targets: Message) -> Message:
    """Returns one message with both, for a `ReceivingSource`."""
    if inputs.content is not Content.DATA:
        return inputs
    return inputs.with_tensors(*flatten((inputs.value(), targets.value())))
