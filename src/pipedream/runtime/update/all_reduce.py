"""All-reduce of gradients over the replicas of a stage: in buckets, started while the backward still runs.

Autograd computes gradients from the output's end, so buckets are filled in reverse order. A bucket starts once the
last backward before the update has accumulated all its gradients; the program says which backward that is. All
replicas start their buckets in the same order. Missing gradients (a handle without one, an absent replica, an empty
microbatch) are added as zeros, after that backward or at the update.

On GPUs, a thread of autograd delivers the gradients on the worker's stream. An all-reduce started there waits for what
that stream has queued, and taking its result makes the stream wait for the all-reduce. So a bucket's memory is
allocated, used and freed on one stream.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from pipedream.core.errors import PlanError
from pipedream.core.plan.cost import BUCKET_BYTES, FIRST_BUCKET_BYTES, GPU_BUCKET_BYTES
from pipedream.runtime.comm.channel import Group, Pending, Waiting, wait_for
from pipedream.runtime.update.gradients import Gradients, ReducedGradients
from pipedream.runtime.update.reducer import Reducer


def fill_buckets(
    handles: Sequence[torch.Tensor], first_bytes: int = FIRST_BUCKET_BYTES, bucket_bytes: int | None = None
) -> list[list[int]]:
    """Returns the indices of the handles in each bucket, in the order in which the backward completes the buckets.

    A bucket holds one dtype. The first one is full at `first_bytes`, any other at `bucket_bytes`, by default larger on
    GPUs. Emulated weights with scaled bytes fill as many buckets as unscaled ones (`stage.emulated`).
    """
    if bucket_bytes is None:
        bucket_bytes = GPU_BUCKET_BYTES if any(handle.device.type != "cpu" for handle in handles) else BUCKET_BYTES
    scale = max((getattr(handle, "byte_scale", 1.0) for handle in handles), default=1.0)
    full: list[list[int]] = []
    filling: dict[torch.dtype, list[int]] = {}
    for index in reversed(range(len(handles))):
        dtype = handles[index].dtype
        bucket = filling.setdefault(dtype, [])
        bucket.append(index)
        size = sum(handles[i].numel() * handles[i].element_size() for i in bucket)
        if size >= scale * (bucket_bytes if full else first_bytes):
            full.append(filling.pop(dtype))
    return sorted([*full, *filling.values()], key=lambda bucket: -bucket[-1])


@dataclass
class _Bucket:
    """Gradients that are reduced together: handle -> gradient or None; `flat` once the sum has started."""

    members: list[int]
    parts: dict[int, torch.Tensor | None] = field(default_factory=dict)
    flat: torch.Tensor | None = None


class GradientAllReduce:
    """The all-reduce of one stage's gradients over its replicas.

    Args:
        encode: returns what is sent and summed for a bucket of gradients of one dtype; by default they are.
        decode: returns gradients, in any dtype, for the sum of what was sent.
        excluded: indices of handles whose gradients are not summed here.
    """

    def __init__(
        self,
        handles: Sequence[torch.Tensor],
        group: Group,
        *,
        encode: Callable[[torch.Tensor], torch.Tensor] | None = None,
        decode: Callable[[torch.Tensor], torch.Tensor] | None = None,
        excluded: Collection[int] = (),
        first_bytes: int = FIRST_BUCKET_BYTES,
        bucket_bytes: int | None = None,
    ) -> None:
        self._handles = list(handles)
        self._group = group
        self._encode = encode or _keep
        self._decode = decode or _keep
        summed = [index for index in range(len(self._handles)) if index not in excluded]
        buckets = fill_buckets([self._handles[index] for index in summed], first_bytes, bucket_bytes)
        self._members = [[summed[place] for place in bucket] for bucket in buckets]
        self._excluded = frozenset(excluded)
        self._bucket_of = {index: number for number, bucket in enumerate(self._members) for index in bucket}
        self._begin()

    def _begin(self) -> None:
        self._buckets = [_Bucket(members) for members in self._members]
        self._unsummed: dict[int, torch.Tensor | None] = {}
        self._pending_sums: list[Pending[torch.Tensor]] = []
        self._amounts: Pending[torch.Tensor] | None = None

    @property
    def started(self) -> int:
        return len(self._pending_sums)

    @property
    def closed(self) -> bool:
        """Whether this replica's part is complete."""
        return self._amounts is not None

    def put(self, index: int, gradient: torch.Tensor | None) -> None:
        """Takes the complete sum of a handle (None: no gradient), and starts buckets that are full."""
        if gradient is not None and gradient.is_sparse:
            raise PlanError(
                f"the gradient of a parameter of shape {tuple(gradient.shape)} is sparse, and its stage has replicas, "
                "which exchange dense gradients; make it dense (sparse=False), or give the stage one worker"
            )
        if index in self._excluded:
            self._unsummed[index] = gradient
            return
        bucket = self._buckets[self._bucket_of[index]]
        if index in bucket.parts:
            raise PlanError(
                "a parameter got its gradient in two backwards of a microbatch, as of a module that is called in a "
                "reentrant checkpoint and outside of it, and its stage has replicas; checkpoint it with "
                "use_reentrant=False, or give the stage one worker"
            )
        bucket.parts[index] = gradient
        if len(bucket.parts) < len(bucket.members):
            return
        while self.started < len(self._buckets):
            first = self._buckets[self.started]
            if len(first.parts) < len(first.members):
                return
            parts = [
                torch.zeros_like(self._handles[i]) if (part := first.parts[i]) is None else part for i in first.members
            ]
            first.parts = {i: None if part is None else _REDUCED for i, part in first.parts.items()}
            flat = [part.detach().reshape(-1) for part in parts]
            first.flat = self._encode(torch.cat(flat) if len(flat) > 1 else flat[0])
            self._pending_sums.append(self._group.all_reduce(first.flat))

    def close(
        self, gradients: Sequence[torch.Tensor | None], loss_weight: float, count: int, stop_request: float
    ) -> None:
        """Contributes the rest of this replica's part in the next update.

        Args:
            gradients: ignored for handles that were `put` before.
            loss_weight, count: of the microbatches.
            stop_request: not 0 stops all replicas.
        """
        assert not self.closed, "two backwards claim to be the last one of an update"
        for bucket in self._buckets:
            for index in bucket.members:
                if index not in bucket.parts:
                    self.put(index, gradients[index])
        for index in self._excluded - self._unsummed.keys():
            self.put(index, gradients[index])
        parts = self._unsummed | {i: part for bucket in self._buckets for i, part in bucket.parts.items()}
        present = [parts[i] is not None for i in range(len(self._handles))]
        # Small numbers, after the buckets, on the CPU, so that reading them does not wait for a GPU. `present`: a
        # handle gets None if no replica has a gradient.
        amounts = torch.tensor([loss_weight, count, stop_request, *present], dtype=torch.float64)
        self._amounts = self._group.all_reduce(amounts)

    def take(self) -> Waiting[tuple[list[torch.Tensor | None], float, int, float]]:
        """Returns sums, loss weight, count and stop request over all replicas, and begins the next update.

        A handle for which no replica has a gradient gets None, as in one process; excluded ones keep this replica's.
        """
        assert self._amounts is not None
        for pending in (*self._pending_sums, self._amounts):
            amounts = yield from wait_for(pending)
        loss_weight, count, stop_request, *present = amounts.tolist()
        gradients: list[torch.Tensor | None] = [None] * len(self._handles)
        for bucket in self._buckets:
            assert bucket.flat is not None
            flat = self._decode(bucket.flat).to(self._handles[bucket.members[0]].dtype)
            pieces = torch.split(flat, [self._handles[i].numel() for i in bucket.members])
            for i, piece in zip(bucket.members, pieces, strict=True):
                gradients[i] = piece.view_as(self._handles[i]) if present[i] else None
        for i, gradient in self._unsummed.items():
            gradients[i] = torch.zeros_like(self._handles[i]) if gradient is None and present[i] else gradient
        self._begin()
        return gradients, loss_weight, int(count), stop_request


def _keep(flat: torch.Tensor) -> torch.Tensor:
    return flat


_REDUCED = torch.empty(0)
"""Replaces a gradient that was copied into its bucket, to free its memory."""


class GradientSum(Reducer):
    """Sums of the gradients over all replicas."""

    sums_in_backward = True

    def __init__(self, all_reduce: GradientAllReduce) -> None:
        self._all_reduce = all_reduce

    def put(self, index: int, gradient: torch.Tensor) -> None:
        self._all_reduce.put(index, gradient)

    def close(self, gradients: Gradients, stop_request: float) -> None:
        if not self._all_reduce.closed:
            self._all_reduce.close(*gradients.take(), stop_request)

    def take(
        self, gradients: Gradients, stop_request: float, find_divisor: Callable[[ReducedGradients], float]
    ) -> Waiting[ReducedGradients]:
        self.close(gradients, stop_request)
        return ReducedGradients(*(yield from self._all_reduce.take()))


def all_reduce_many(group: Group, tensors: Sequence[torch.Tensor]) -> Waiting[list[torch.Tensor]]:
    """Returns the sums of tensors over a group, with one message per dtype and device."""
    gradients = list(tensors)
    kinds = [(tensor.dtype, tensor.device) for tensor in tensors]
    for kind in dict.fromkeys(kinds):
        members = [i for i, other in enumerate(kinds) if other == kind]
        total = yield from wait_for(group.all_reduce(torch.cat([tensors[i].detach().reshape(-1) for i in members])))
        pieces = torch.split(total, [tensors[i].numel() for i in members])
        for i, piece in zip(members, pieces, strict=True):
            gradients[i] = piece.view_as(tensors[i])
    return gradients
