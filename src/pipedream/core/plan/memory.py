"""Bytes that one replica needs: numbers or numpy arrays.

Under 1F1B stage s holds W_s + 1 minibatches in flight, and as many versions of its weights under weight
stashing (PipeDream, section 3.3), two under double buffering (PipeDream-2BW, section 3.1), one under a
flush. The newest version is the optimizer's own copy.

A worker needs most at one of three moments:

    backward    all in flight, one of them in its backward. Gradients appear as activations go; if they are added to
                the sums of earlier microbatches, all sums exist already, and the largest gradient exists twice.
    forward     all in flight, the newest in its forward; sums of gradients if an update is still to come.
    update      all gradients, what the optimizer needs besides them, and one microbatch fewer in flight.

Weights that are in the memory of the machine (RoundPipe) are on a GPU for a slot alone, a stage's passes of one
minibatch; those of the slot before may not have gone yet. Updates need nothing of the GPU.

Between the halves of a split backward, a microbatch keeps part of its activations and the gradients of the layers'
outputs, which a profile does not contain: `DEFERRED_SHARE` times the activations are counted. (Measured: 0.1 for a
fused recurrent layer, 0.7 to 1.2 for transformers, 1.6 for linear layers with ReLU, 1.8 for convolutions with norms.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import lcm
from typing import Any, cast

import numpy as np

from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.activations import HOST, share_of, window_bytes
from pipedream.core.plan.cost import FIRST_BUCKET_BYTES, Numbers

DEVICE = "device"
OPTIMIZER_STATES = (DEVICE, HOST)
"""Where an optimizer and its state are: with the weights, or in the memory of the machine."""

DEFERRED_SHARE = 2
"""Upper bound."""


@dataclass(frozen=True)
class Peers:
    """The workers that one replica of a stage exchanges messages with.

    Attributes:
        before, after: number of them in the neighbouring stages.
        waiting: gradients sent to the previous stage that may be unread.
    """

    before: int = 1
    after: int = 1
    waiting: int = 0
    posted: int = 2
    sums: bool = False


def peers_of(replicas: Sequence[int], in_flight: Sequence[int]) -> tuple[Peers, ...]:
    """Returns the peers of one replica of each stage.

    With n in flight there may be n + 1 unread gradients: before a forward all other backwards have ended.
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
        received_bytes, sent_bytes: bytes of its messages on both sides; 0 at the model's ends.
        loaded_bytes: bytes of minibatches loaded ahead at the model's input.
        working_bytes, update_working_bytes: bytes that a pass or an update needs besides what is kept.
        frozen_bytes: those of `parameter_bytes` that are not trained: there is one version of them, and no gradient.
        relief_bytes: bytes that a backward which makes all gradients itself needs less than activations, gradients and
            working bytes together, since activations go before the last gradient comes. For a microbatch at least its
            share of a minibatch's, because gradients are as large.
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


ELSEWHERE = ("host_bytes", "moved_bytes", "snapshot_bytes")
"""Kinds of bytes that are not in the worker's memory; snapshots are, if it is the machine's (`add_snapshots`)."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one replica of a stage at one moment, by kind.

    Attributes:
        optimizer_bytes: includes what compensations keep.
        activation_bytes: with recomputation inputs, and one microbatch's activations.
        message_bytes: bytes of posted receives, and of messages that may still have to leave.
        host_bytes: weights, gradients and optimizer state in the memory of the machine, beside that of a GPU.
        moved_bytes: activations that wait elsewhere, on disk or in the memory of the machine (`Plan.activations`).
        snapshot_bytes: snapshots in the memory of the machine (`Cluster.snapshots`), on the fullest replica.
    """

    weight_bytes: int = 0
    stash_bytes: int = 0
    optimizer_bytes: int = 0
    gradient_bytes: int = 0
    activation_bytes: int = 0
    message_bytes: int = 0
    working_bytes: int = 0
    host_bytes: int = 0
    moved_bytes: int = 0
    snapshot_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum of what the worker has, or an array of them."""
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
    apart: bool = False,
    offload: float = 0.0,
    hosted: bool = False,
    on_gpus: bool = False,
    overlaps: bool = False,
) -> tuple[StageMemory, ...]:
    """Returns what one replica of a stage holds at its worst moments: a first backward, further passes, the update.

    Args:
        per_update: microbatches of the replica in one update.
        peers: None: one worker in the previous stage, which holds one microbatch more, and one in the next.
        kept_tensors: number that compensations keep for each weight; an update temporarily needs one more.
        matrix_bytes: what they keep besides, such as bases, and what they need in an update before the step.
        deferred: microbatches that wait for their weight gradients.
        apart: weights are in the memory of the machine, and the worker is a GPU.
        offload: share of the activations that wait elsewhere, but for two windows of them.
        hosted: the optimizer steps copies of the weights in the memory of the machine, which is also that of a worker
            without a GPU.
        overlaps: a thread makes each update from its gradients beside the passes of the next minibatch.
    """
    whole, moved = sizes.trained_bytes, share_of(sizes.activation_bytes, offload)
    waiting = (sizes.input_bytes if recompute else sizes.activation_bytes) - moved
    running = sizes.activation_bytes - moved + window_bytes(moved)  # of the microbatch whose pass runs
    messages = message_bytes(sizes, in_flight, recompute, peers)

    def at(gradients: Numbers, activations: Numbers, working: Numbers) -> StageMemory:
        stash = whole * (versions - 1)
        state = sizes.optimizer_bytes + kept_tensors * whole + matrix_bytes[0] + hosted * whole
        weights, host = whole + sizes.frozen_bytes, 0 * whole
        if apart or (hosted and on_gpus):  # with a place for the gradients
            host, state = whole + state + apart * (weights + stash), 0 * whole
            stash = (not apart) * stash
        kinds = weights * (1 + apart), stash, state, gradients, activations, messages, working, host, in_flight * moved
        return StageMemory(*cast(tuple[int, ...], kinds))

    def most(count: int) -> Numbers:
        if deferred:
            later = min(deferred, count)
            deferred_bytes = DEFERRED_SHARE * sizes.activation_bytes - moved
            return (count - later) * waiting + later * deferred_bytes + (running - waiting) * (offload > 0)
        return (count - 1) * waiting + running if count else 0 * running

    step_bytes = sizes.update_working_bytes + whole * (kept_tensors + matrix_bytes[0] > 0)
    step_bytes = 0 * whole if hosted and on_gpus else np.maximum(step_bytes, matrix_bytes[1])
    is_overlapped = overlaps and not (peers is not None and peers.sums)  # replicas agree on an update first
    older = is_overlapped * whole  # gradients of the update that a thread makes
    working = sizes.working_bytes + bucket_bytes(sizes, peers) + is_overlapped * step_bytes
    relief = 0 if deferred else sizes.relief_bytes - share_of(sizes.relief_bytes, offload)
    late = np.minimum(relief, whole)  # gradients still to come at the peak
    worst = [at(older + whole - late, most(in_flight), working - (relief - late))]
    # Passes while other microbatches have sums; a flush ends before there are new ones.
    further = min(in_flight, per_update - 1) if flushes else in_flight
    if per_update > 1:
        worst.append(at(older + whole, most(further), working + sizes.largest_parameter_bytes))
    if per_update > 1 or update_delay:
        worst.append(at(older + whole, most(further), working))
    if apart:
        return tuple(worst)
    left = (0 if flushes else max(in_flight - 1, 0) + update_delay) * waiting
    return (*worst, at(whole, left, step_bytes))


def read_optimizer_state(value: str | None) -> str:
    """Returns one of `OPTIMIZER_STATES`, by default on the device; raises a PlanError for another word."""
    if value not in (None, *OPTIMIZER_STATES):
        raise PlanError(f"optimizer_state={value!r} was asked for; give {' or '.join(OPTIMIZER_STATES)}")
    return value or DEVICE


def place_state(dispatched: bool, double_buffered: bool, cluster: Cluster, on_gpus: Any) -> dict[str, bool]:
    """Returns the arguments of `moments` that say where weights and optimizers are.

    Args:
        dispatched: as in RoundPipe.
        double_buffered: as in 2BW.
    """
    hosted, apart = cluster.hosts_optimizers and not dispatched, dispatched and bool(on_gpus)
    overlaps = double_buffered and (hosted or (dispatched and not apart))
    return {"apart": apart, "hosted": hosted, "on_gpus": bool(on_gpus), "overlaps": overlaps}


def stage_memory(sizes: StageSizes, **how: Any) -> StageMemory:
    """Returns the worst of the `moments`; numbers only."""
    worst = max(moments(sizes, **how), key=lambda moment: int(moment.total_bytes))
    return StageMemory(*(int(getattr(worst, field.name)) for field in fields(worst)))


def stage_bytes(sizes: StageSizes, **how: Any) -> Any:
    """Returns the greatest of the `moments`."""
    first, *others = (moment.total_bytes for moment in moments(sizes, **how))
    for other in others:
        first = np.maximum(first, other)
    return first


def part_bytes(whole_bytes: Numbers, parts: int, samples: int = 1) -> Numbers:
    """Returns the bytes of the largest of `parts` parts of a minibatch: ceil(samples / parts) samples.

    With fewer samples than parts they are equal.
    """
    largest, all_ = (-(-samples // parts), samples) if samples >= parts else (1, parts)
    return -(-whole_bytes * largest // all_)


def bucket_bytes(sizes: StageSizes, peers: Peers | None) -> Numbers:
    """Returns the bytes of one bucket."""
    return np.minimum(FIRST_BUCKET_BYTES, sizes.trained_bytes) if peers is not None and peers.sums else 0


def message_bytes(sizes: StageSizes, in_flight: int, recompute: bool = False, peers: Peers | None = None) -> Numbers:
    """Returns the bytes of posted receives, messages that may be unread, and loaded minibatches.

    As many may be unread as the other stage has in flight, plus one. Without recomputation outputs are kept anyway,
    except the last one.
    """
    joined = peers or Peers(waiting=in_flight + 2)
    received = joined.before * joined.posted + joined.waiting
    sent = joined.after * (joined.posted + 1) + (in_flight if recompute else 0)
    return received * sizes.received_bytes + sent * sizes.sent_bytes + sizes.loaded_bytes
