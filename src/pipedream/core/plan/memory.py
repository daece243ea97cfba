"""Nouns of a stage's memory: its sizes, its peak by kinds of bytes, and the workers that it exchanges messages with."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import lcm
from typing import ClassVar

import numpy as np

from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.cost import FIRST_BUCKET_BYTES, Numbers


@dataclass(frozen=True)
class MessageBuffers:
    """What the message buffers of one replica of a stage depend on.

    Attributes:
        before, after: how many workers of the previous and the next stage it exchanges messages with.
        waiting: sent gradients that the previous stage may not have read.
        posted: receives that each channel posts ahead, at the least depth that lowering gives it.
        sums: replicas sum their gradients, in buckets.
    """

    before: int = 1
    after: int = 1
    waiting: int = 0
    posted: int = 2
    sums: bool = False


def peers_of(replicas: Sequence[int], in_flight: Sequence[int]) -> tuple[MessageBuffers, ...]:
    """Returns the peers of one replica of each stage.

    A sender of gradients keeps its last n + 1, n being in flight at the previous stage: that stage may not have read
    them (`runtime.comm.transport`).
    """
    peers = []
    # Round robin: the microbatches of a replica in one common round all come from, or go to, different workers.
    for s, count in enumerate(replicas):
        before = lcm(replicas[s - 1], count) // count if s else 0
        after = lcm(replicas[s + 1], count) // count if s + 1 < len(replicas) else 0
        peers.append(MessageBuffers(before, after, before * (in_flight[s - 1] + 1) if s else 0, sums=count > 1))
    return tuple(peers)


@dataclass(frozen=True)
class StageSizes:
    """Bytes that a stage's layers need; activations and messages are for one microbatch.

    Attributes:
        received_bytes, sent_bytes: bytes of a message from the previous, and to the next stage; 0 at the model's ends.
        kept_bytes: of messages that the stage keeps (`MemoryTerms.kept_samples`).
        prefetched_bytes: bytes of minibatches loaded ahead at the model's input.
        temporary_bytes, update_temporary_bytes: temporary bytes of a pass or an update.
        frozen_bytes: the part of `parameter_bytes` that is not trained, with one version and no gradient.
        freed_before_peak_bytes: what a backward that makes all gradients itself saves against the sum of activations,
            gradients and temporary bytes, because it frees activations before the last gradient exists. A microbatch
            saves at least its share of that: its activations are smaller, but its gradients are not.
    """

    parameter_bytes: Numbers
    optimizer_bytes: Numbers = 0
    activation_bytes: Numbers = 0
    input_bytes: Numbers = 0
    received_bytes: Numbers = 0
    sent_bytes: Numbers = 0
    kept_bytes: Numbers = 0
    prefetched_bytes: Numbers = 0
    temporary_bytes: Numbers = 0
    freed_before_peak_bytes: Numbers = 0
    largest_parameter_bytes: Numbers = 0
    update_temporary_bytes: Numbers = 0
    frozen_bytes: Numbers = 0

    @property
    def trained_bytes(self) -> Numbers:
        return self.parameter_bytes - self.frozen_bytes


ELSEWHERE = ("host_bytes", "moved_bytes")
"""Kinds of bytes outside of the worker's memory."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one replica of a stage at one moment, by kind. In a plan they are numbers, in a search arrays.

    Attributes:
        optimizer_bytes: includes what compensations keep.
        activation_bytes: with recomputation, inputs and one microbatch's activations.
        message_bytes: of posted receives, of messages that may not have been sent yet, and of those that are kept.
        host_bytes: weights, gradients and optimizer state in the memory of the machine, beside that of a GPU.
        moved_bytes: offloaded activations (`Choices.activations`), and beside a GPU the samples that are kept.
    """

    DROPPED: ClassVar[frozenset[str]] = frozenset({"snapshot_bytes"})  # plan files of older versions still load

    weight_bytes: int = 0
    stash_bytes: int = 0
    optimizer_bytes: int = 0
    gradient_bytes: int = 0
    activation_bytes: int = 0
    message_bytes: int = 0
    temporary_bytes: int = field(default=0, metadata={"json": "working_bytes"})  # its name in files
    host_bytes: int = 0
    moved_bytes: int = 0

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of the worker's memory, or an array of them."""
        total: int = sum(getattr(self, field.name) for field in fields(self) if field.name not in ELSEWHERE)
        return total


def hosted_copies_s(trained_bytes: Numbers, cluster: Cluster) -> Numbers:
    """Returns the seconds in which an update brings gradients from a GPU to the host, and the weights back.

    0 if the rate of copies is not known.
    """
    return 2 * trained_bytes / cluster.host_bytes_per_s if cluster.host_bytes_per_s else 0.0


def part_bytes(whole_bytes: Numbers, parts: int, samples: int = 1) -> Numbers:
    """Returns the bytes of the largest of `parts` parts of a minibatch: ceil(samples / parts) samples.

    With fewer samples than parts, parts are equal.
    """
    largest, total = (-(-samples // parts), samples) if samples >= parts else (1, parts)
    return -(-whole_bytes * largest // total)


def bucket_bytes(sizes: StageSizes, peers: MessageBuffers) -> Numbers:
    """Returns the bytes of one bucket of gradients; 0 without sums over replicas."""
    return np.minimum(FIRST_BUCKET_BYTES, sizes.trained_bytes) if peers.sums else 0


WINDOW_SHARE = 1 / 8
"""Share of a microbatch's offloaded bytes that may still be on the GPU to be copied; as many may be copied ahead."""


def window_bytes(moved_bytes: Numbers) -> Numbers:
    """Returns how many of a microbatch's offloaded bytes are on the GPU."""
    return moved_bytes // round(0.5 / WINDOW_SHARE)


def message_bytes(sizes: StageSizes, in_flight: int, recompute: bool, peers: MessageBuffers) -> Numbers:
    """Returns the bytes of posted receives, messages that may be unread, and loaded minibatches.

    A gradient is as large as the output that it belongs to. As many outputs may be unread as are in flight, plus one;
    without recomputation, activations include all but the last.
    """
    received = peers.before * peers.posted + peers.waiting
    sent = peers.after * (peers.posted + 1) + (in_flight if recompute else 0)
    return received * sizes.received_bytes + sent * sizes.sent_bytes + sizes.prefetched_bytes
