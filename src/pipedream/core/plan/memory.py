"""Bytes that one replica needs, as numbers or numpy arrays.

Under 1F1B stage s holds W_s + 1 minibatches in flight, and as many versions of its weights under weight
stashing (PipeDream, section 3.3), two under double buffering (PipeDream-2BW, section 3.1), one under a
flush. The newest version is the optimizer's own copy.

A worker's memory peaks at one of three moments:

    backward    all are in flight, one in its backward. Gradients appear as activations are freed; if they are added to
                sums of earlier microbatches, all sums already exist, and the largest gradient exists twice.
    forward     all are in flight, the newest in its forward; sums of gradients exist before an update.
    update      all gradients, the optimizer's temporaries, and one microbatch fewer in flight.

Weights in the memory of the machine are on a GPU only for a slot, a stage's passes of one minibatch; those
of the previous slot may still be there. Updates need no memory of the GPU.

Between the halves of a split backward, a microbatch keeps part of its activations and the gradients of the layers'
outputs, which a profile does not contain: `DEFERRED_SHARE` times the activations are counted. (Measured: 0.1 for a
fused recurrent layer, 0.7 to 1.2 for transformers, 1.6 for linear layers with ReLU, 1.8 for convolutions with norms.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import lcm
from typing import Any, ClassVar, cast

import numpy as np

from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.activations import window_bytes
from pipedream.core.plan.cost import FIRST_BUCKET_BYTES, Numbers

DEFERRED_SHARE = 2
"""An upper bound, see above."""


@dataclass(frozen=True)
class Peers:
    """The workers that one replica of a stage exchanges messages with.

    Attributes:
        before, after: their numbers in the previous and the next stage.
        waiting: sent gradients that the previous stage may not have read.
    """

    before: int = 1
    after: int = 1
    waiting: int = 0
    posted: int = 2
    sums: bool = False


def peers_of(replicas: Sequence[int], in_flight: Sequence[int]) -> tuple[Peers, ...]:
    """Returns the peers of one replica of each stage.

    With n in flight there may be n + 1 unread gradients, as all other backwards have ended before a forward.
    """
    peers = []
    for s, count in enumerate(replicas):
        before = lcm(replicas[s - 1], count) // count if s else 0
        after = lcm(replicas[s + 1], count) // count if s + 1 < len(replicas) else 0
        peers.append(Peers(before, after, before * (in_flight[s - 1] + 1) if s else 0, sums=count > 1))
    return tuple(peers)


@dataclass(frozen=True)
class StageSizes:
    """Bytes that a stage's layers need; activations and messages are for one microbatch.

    Attributes:
        received_bytes, sent_bytes: bytes of a message from the previous, and to the next stage; 0 at the model's ends.
        loaded_bytes: bytes of minibatches loaded ahead at the model's input.
        working_bytes, update_working_bytes: temporary bytes of a pass or an update.
        frozen_bytes: the part of `parameter_bytes` that is not trained, with one version and no gradient.
        relief_bytes: what a backward that makes all gradients itself saves against the sum of activations, gradients
            and working bytes, because it frees activations before the last gradient exists. A microbatch saves at least
            its share of that, because gradients are as large.
    """

    parameter_bytes: Numbers
    optimizer_bytes: Numbers = 0
    activation_bytes: Numbers = 0
    input_bytes: Numbers = 0
    received_bytes: Numbers = 0
    sent_bytes: Numbers = 0
    loaded_bytes: Numbers = 0
    working_bytes: Numbers = 0
    relief_bytes: Numbers = 0
    largest_parameter_bytes: Numbers = 0
    update_working_bytes: Numbers = 0
    frozen_bytes: Numbers = 0

    @property
    def trained_bytes(self) -> Numbers:
        return self.parameter_bytes - self.frozen_bytes


ELSEWHERE = ("host_bytes", "moved_bytes")
"""Kinds of bytes outside of the worker's memory."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one replica of a stage at one moment, by kind.

    Attributes:
        optimizer_bytes: includes what compensations keep.
        activation_bytes: with recomputation, inputs and one microbatch's activations.
        message_bytes: bytes of posted receives, and of messages that may not have been sent yet.
        host_bytes: weights, gradients and optimizer state in the memory of the machine, beside that of a GPU.
        moved_bytes: offloaded activations (`Plan.activations`).
    """

    DROPPED: ClassVar[frozenset[str]] = frozenset({"snapshot_bytes"})

    weight_bytes: int = 0
    stash_bytes: int = 0
    optimizer_bytes: int = 0
    gradient_bytes: int = 0
    activation_bytes: int = 0
    message_bytes: int = 0
    working_bytes: int = 0
    host_bytes: int = 0
    moved_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of the worker's memory, or an array of them."""
        total: int = sum(getattr(self, field.name) for field in fields(self) if field.name not in ELSEWHERE)
        return total


def moments(
    sizes: StageSizes,
    *,
    versions: int,
    in_flight: int,
    per_update: int = 1,
    flushes: bool = False,
    update_delay: int = 0,
    recompute: bool = False,
    peers: Peers | None = None,
    kept_tensors: int = 0,
    matrix_bytes: tuple[Numbers, Numbers] = (0, 0),
    deferred: int = 0,
    on_host: bool = False,
    offload: bool = False,
    hosted: bool = False,
    on_gpus: bool = False,
    overlaps: bool = False,
) -> tuple[StageMemory, ...]:
    """Returns what one replica of a stage holds at its peaks: first backward, later passes, update.

    Args:
        per_update: microbatches of the replica in one update.
        peers: None for one worker in the previous stage, with one microbatch more in flight, and one in the next.
        kept_tensors: tensors that compensations keep for each weight; an update temporarily needs one more.
        matrix_bytes: further bytes that they keep, such as bases, and that they need in an update before the step.
        deferred: microbatches that wait for their weight gradients.
        on_host: weights are in the memory of the machine, and the worker is a GPU.
        offload: the activations are offloaded, except for two windows.
        hosted: the optimizer steps copies of the weights in the memory of the machine; without a GPU, the worker's own.
        overlaps: a thread makes each update during the passes of the next minibatch.
    """
    trained, moved = sizes.trained_bytes, sizes.activation_bytes * offload
    waiting = (sizes.input_bytes if recompute else sizes.activation_bytes) - moved
    running = sizes.activation_bytes - moved + window_bytes(moved)  # of the microbatch whose pass runs
    unread = message_bytes(sizes, in_flight, recompute, peers)

    def build(gradients: Numbers, activations: Numbers, working: Numbers) -> StageMemory:
        stash = trained * (versions - 1)
        state = sizes.optimizer_bytes + kept_tensors * trained + matrix_bytes[0] + hosted * trained
        weights, host = trained + sizes.frozen_bytes, 0 * trained
        if on_host or (hosted and on_gpus):  # with a place for the gradients
            host, state = trained + state + on_host * (weights + stash), 0 * trained
            stash = (not on_host) * stash
        kinds = weights * (1 + on_host), stash, state, gradients, activations, unread, working, host, in_flight * moved
        return StageMemory(*cast(tuple[int, ...], kinds))

    def sum_activations(count: int) -> Numbers:
        if deferred:
            later = min(deferred, count)
            deferred_bytes = DEFERRED_SHARE * sizes.activation_bytes - moved
            return (count - later) * waiting + later * deferred_bytes + (running - waiting) * offload
        return (count - 1) * waiting + running if count else 0 * running

    step_bytes = sizes.update_working_bytes + trained * (kept_tensors + matrix_bytes[0] > 0)
    step_bytes = 0 * trained if hosted and on_gpus else np.maximum(step_bytes, matrix_bytes[1])
    is_overlapped = overlaps and not (peers is not None and peers.sums)  # replicas agree on an update first
    overlapped = is_overlapped * trained  # gradients of the update that a thread makes
    working = sizes.working_bytes + bucket_bytes(sizes, peers) + is_overlapped * step_bytes
    relief = 0 if deferred or offload else sizes.relief_bytes
    late = np.minimum(relief, trained)  # gradients still to come at the peak
    peaks = [build(overlapped + trained - late, sum_activations(in_flight), working - (relief - late))]
    # Passes while other microbatches have sums; a flush ends before there are new ones.
    later_count = min(in_flight, per_update - 1) if flushes else in_flight
    if per_update > 1:
        peaks.append(build(overlapped + trained, sum_activations(later_count), working + sizes.largest_parameter_bytes))
    if per_update > 1 or update_delay:
        peaks.append(build(overlapped + trained, sum_activations(later_count), working))
    if on_host:
        return tuple(peaks)
    remaining_bytes = (0 if flushes else max(in_flight - 1, 0) + update_delay) * waiting
    return (*peaks, build(trained, remaining_bytes, step_bytes))


def place_state(shares_weights: bool, double_buffered: bool, hosts: bool, on_gpus: Any) -> dict[str, bool]:
    """Returns the arguments of `moments` that say where weights and optimizers are.

    Args:
        hosts: optimizers are chosen to be in the memory of the machine.
        shares_weights: ranks share the weights, in the memory of their machine.
        double_buffered: gradients are one update stale, as in 2BW.
    """
    hosted, on_host = hosts and not shares_weights, shares_weights and bool(on_gpus)
    overlaps = double_buffered and (hosted or (shares_weights and not on_host))
    return {"on_host": on_host, "hosted": hosted, "on_gpus": bool(on_gpus), "overlaps": overlaps}


def hosted_copies_s(trained_bytes: Numbers, cluster: Cluster) -> Numbers:
    """Returns the seconds in which an update brings gradients from a GPU to the host, and the weights back.

    0 if the rate of copies is not known.
    """
    return 2 * trained_bytes / cluster.host_bytes_per_s if cluster.host_bytes_per_s else 0.0


def stage_memory(sizes: StageSizes, **how: Any) -> StageMemory:
    """Returns the largest of the `moments`; for single values."""
    worst = max(moments(sizes, **how), key=lambda moment: int(moment.total_bytes))
    return StageMemory(*(int(getattr(worst, field.name)) for field in fields(worst)))


def stage_bytes(sizes: StageSizes, **how: Any) -> Any:
    """Returns the most bytes over the `moments`; for arrays too."""
    first, *others = (moment.total_bytes for moment in moments(sizes, **how))
    for other in others:
        first = np.maximum(first, other)
    return first


def part_bytes(whole_bytes: Numbers, parts: int, samples: int = 1) -> Numbers:
    """Returns the bytes of the largest of `parts` parts of a minibatch: ceil(samples / parts) samples.

    With fewer samples than parts, parts are equal.
    """
    largest, total = (-(-samples // parts), samples) if samples >= parts else (1, parts)
    return -(-whole_bytes * largest // total)


def bucket_bytes(sizes: StageSizes, peers: Peers | None) -> Numbers:
    """Returns the bytes of one bucket of gradients; 0 without sums over replicas."""
    return np.minimum(FIRST_BUCKET_BYTES, sizes.trained_bytes) if peers is not None and peers.sums else 0


def message_bytes(sizes: StageSizes, in_flight: int, recompute: bool = False, peers: Peers | None = None) -> Numbers:
    """Returns the bytes of posted receives, messages that may be unread, and loaded minibatches.

    As many messages may be unread as the other stage has in flight, plus one. Without recomputation, activations
    include all outputs but the last.
    """
    neighbours = peers or Peers(waiting=in_flight + 2)
    received = neighbours.before * neighbours.posted + neighbours.waiting
    sent = neighbours.after * (neighbours.posted + 1) + (in_flight if recompute else 0)
    return received * sizes.received_bytes + sent * sizes.sent_bytes + sizes.loaded_bytes
