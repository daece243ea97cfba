"""Bytes that one replica of a stage holds, as numbers or numpy arrays: for a plan its peak, for a simulation each op.

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

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any, cast

import numpy as np

from pipedream.core.plan.cost import PLAIN, Numbers, Terms
from pipedream.core.plan.memory import (
    MessageBuffers,
    StageMemory,
    StageSizes,
    bucket_bytes,
    message_bytes,
    window_bytes,
)
from pipedream.core.schedule.occupancy import StageOccupancy
from pipedream.core.schedule.op import Kind
from pipedream.core.schedule.rules import Rules

DEFERRED_SHARE = 2
"""An upper bound, see above."""


@dataclass(frozen=True)
class StageBytes:
    """What adds up to the bytes of one replica of a stage.

    Attributes:
        fixed: what is always there, with one version of the weights.
        version, waiting, deferred: what each further version adds, each microbatch in flight, and each that waits only
            for its weight gradients.
        sums: gradients between a backward and the update.
        update: what an update adds.
        copied_bytes: weights on a GPU during a pass, if they are in the memory of the machine.
        running_bytes, window_bytes: activations that a whole pass adds to those that wait, and half a backward.
        freed_before_peak_bytes: see `StageSizes`; 0 if activations are offloaded.
        bucket_bytes: of gradients that replicas sum.
    """

    sizes: StageSizes
    fixed: StageMemory
    version: StageMemory
    waiting: StageMemory
    deferred: StageMemory
    sums: StageMemory
    update: StageMemory
    copied_bytes: Numbers
    running_bytes: Numbers
    window_bytes: Numbers
    freed_before_peak_bytes: Numbers
    bucket_bytes: Numbers

    @classmethod
    def of(
        cls,
        sizes: StageSizes,
        usage: StageOccupancy,
        peers: MessageBuffers,
        terms: Terms = PLAIN,
        *,
        recompute: bool = False,
        offload: bool = False,
        on_gpus: bool = False,
        matrix_bytes: tuple[Numbers, Numbers] = (0, 0),
    ) -> StageBytes:
        """Returns the bytes of a stage.

        Args:
            offload: the activations are offloaded, except for two windows.
            matrix_bytes: further bytes that compensations keep, such as bases, and that they need in an update before
                the step.
        """
        trained, memory = sizes.trained_bytes, terms.memory
        # Those of compensations, of sums and of other choices; an update temporarily needs one more.
        kept_tensors = usage.kept_tensors + peers.sums * terms.sums.kept_tensors + memory.kept_tensors
        weights_on_host = usage.weights_on_host and on_gpus
        cpu_optimizer = memory.optimizer_on_host and not usage.weights_on_host
        state = (
            _take_share(sizes.optimizer_bytes, memory.state_share)
            + (kept_tensors + cpu_optimizer) * trained
            + matrix_bytes[0]
        )
        weights: dict[str, Numbers] = {"weight_bytes": sizes.parameter_bytes, "optimizer_bytes": state}
        if weights_on_host or (cpu_optimizer and on_gpus):  # with a place for the gradients
            weights = {"host_bytes": trained + state + weights_on_host * sizes.parameter_bytes}
            weights |= {} if weights_on_host else {"weight_bytes": sizes.parameter_bytes}
        kept_bytes, kept_on_host = (0, sizes.kept_bytes) if on_gpus else (sizes.kept_bytes, 0)
        buffer_bytes = message_bytes(sizes, usage.in_flight, recompute, peers)
        fixed = _memory(message_bytes=buffer_bytes + kept_bytes, moved_bytes=kept_on_host, **weights)
        step = np.maximum(
            sizes.update_temporary_bytes + trained * (kept_tensors + matrix_bytes[0] > 0), matrix_bytes[1]
        )
        update = _memory(gradient_bytes=trained, temporary_bytes=0 if cpu_optimizer and on_gpus else step)
        # A thread makes each update during the passes of the next minibatch; replicas agree on an update first.
        if (
            usage.double_buffered
            and (cpu_optimizer or usage.weights_on_host)
            and not weights_on_host
            and not peers.sums
        ):
            fixed, update = _add([(1, fixed), (1, update)]), StageMemory()
        moved = sizes.activation_bytes if offload else 0
        waiting = sizes.input_bytes if recompute else _take_share(sizes.activation_bytes, memory.waiting_share)
        waiting = waiting - moved
        return cls(
            sizes=sizes,
            fixed=fixed,
            version=_memory(**{"host_bytes" if weights_on_host else "stash_bytes": trained}),
            waiting=_memory(activation_bytes=waiting, moved_bytes=moved),
            deferred=_memory(activation_bytes=DEFERRED_SHARE * sizes.activation_bytes - moved, moved_bytes=moved),
            sums=StageMemory() if weights_on_host else _memory(gradient_bytes=trained),
            update=StageMemory() if weights_on_host else update,
            copied_bytes=2 * sizes.parameter_bytes if weights_on_host else 0,
            running_bytes=sizes.activation_bytes - moved + window_bytes(moved) - waiting,
            window_bytes=window_bytes(moved),
            freed_before_peak_bytes=0 if offload else sizes.freed_before_peak_bytes,
            bucket_bytes=bucket_bytes(sizes, peers),
        )

    @classmethod
    def of_rules(cls, rules: Rules, stage: int, usage: StageOccupancy, peers: MessageBuffers) -> StageBytes:
        """Returns the bytes of a stage of a schedule, or a program, with the figures of its plan."""
        plan, row, terms = rules.plan, rules.plan.stages[stage], rules.plan.costs.terms[stage]
        sizes = row.sizes(
            rules.microbatches if plan.unit == "minibatch" else 1,
            plan.stages[stage - 1].output_bytes if stage else 0,
            samples=plan.batch,
            is_last=stage + 1 == len(plan.stages),
            kept=terms.memory.kept_samples,
        )
        return cls.of(
            sizes,
            usage,
            peers,
            terms,
            recompute=row.recompute,
            offload=row.offload,
            on_gpus=plan.costs.on_gpus,
            matrix_bytes=usage.matrix_bytes(row.matrices),
        )

    def during(self, kind: Kind, has_sums: bool = False) -> StageMemory:
        """Returns what an op adds to what is held; `has_sums`: there are gradients of earlier microbatches."""
        if kind is Kind.UPDATE:
            return self.update
        sizes, is_whole, adds = self.sizes, kind in (Kind.FORWARD, Kind.BACKWARD), kind in _ADDING
        return _memory(
            weight_bytes=self.copied_bytes,
            gradient_bytes=(
                (sizes.trained_bytes if adds or has_sums else 0)
                - (self.freed_before_peak_bytes if kind is Kind.BACKWARD and not has_sums else 0)
            ),
            activation_bytes=self.running_bytes if is_whole else self.window_bytes,
            temporary_bytes=(
                sizes.temporary_bytes
                + (self.bucket_bytes if adds or has_sums else 0)
                + (sizes.largest_parameter_bytes if adds and has_sums else 0)
            ),
        )

    def peak(self, usage: StageOccupancy, per_update: int = 1, update_delay: int = 0) -> StageMemory:
        """Returns the most that the stage holds; for single values.

        Args:
            per_update: microbatches of the replica in one update.
        """
        moments = (_add(parts) for parts in self._list_moments(usage, per_update, update_delay))
        worst = max(moments, key=lambda moment: int(moment.total_bytes))
        return StageMemory(*(int(getattr(worst, field.name)) for field in fields(worst)))

    def peak_bytes(self, usage: StageOccupancy, per_update: int = 1, update_delay: int = 0) -> Any:
        """Returns the bytes of `peak`; for arrays too."""
        moments = self._list_moments(usage, per_update, update_delay)
        return reduce(np.maximum, (sum(count * part.total_bytes for count, part in parts) for parts in moments))

    def _list_moments(self, usage: StageOccupancy, per_update: int, update_delay: int) -> Iterator[_Parts]:
        """Yields what is there in the first backward, in later passes and at the update, where it may be the most."""

        def add_up(kind: Kind, has_sums: bool, in_flight: int, more: int = 0) -> _Parts:
            deferred = min(usage.deferred, max(in_flight - more, 0))
            counts = (usage.versions - 1, self.version), (in_flight - deferred, self.waiting), (deferred, self.deferred)
            op = self.during(kind, has_sums)
            return [(1, self.fixed), (1, op), *((count, part) for count, part in counts if count)]

        backward = Kind.WEIGHT_GRADIENT if usage.deferred else Kind.BACKWARD
        yield add_up(backward, False, usage.in_flight)
        # Passes while other microbatches have sums; a flush ends before there are new ones.
        later_count = min(usage.in_flight, per_update - 1) if usage.flushes else usage.in_flight
        if per_update > 1:
            yield add_up(backward, True, later_count)
        if usage.deferred:  # a forward needs more than half a backward
            yield add_up(Kind.FORWARD, False, usage.in_flight, 1)
        if later_count and (update_delay or usage.deferred):
            yield add_up(Kind.FORWARD, True, later_count, 1)
        yield add_up(Kind.UPDATE, True, 0 if usage.flushes else max(usage.in_flight - 1, 0) + update_delay)


_Parts = list[tuple[int, StageMemory]]
_ADDING = Kind.BACKWARD, Kind.WEIGHT_GRADIENT
"""What adds to the sums of gradients."""


def _take_share(size_bytes: Numbers, share: float) -> Numbers:
    return size_bytes if share == 1 else np.ceil(size_bytes * share).astype(np.int64)


def _memory(**kinds: Numbers) -> StageMemory:
    return StageMemory(**cast(dict[str, int], kinds))


def _add(parts: _Parts) -> StageMemory:
    names = [field.name for field in fields(StageMemory)]
    return StageMemory(*(sum(count * getattr(part, name) for count, part in parts) for name in names))
