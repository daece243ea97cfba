"""Decisions before an update: whether its gradients are finite, and how much they are clipped.

A stage decides by its own gradients or by those of all stages, whose norm is the whole model's
(`torch.nn.utils.clip_grad_norm_`). Without a flush, an update is clipped by the norm of an earlier one
(`core.schedule.update_policy`).
"""

from collections import deque
from collections.abc import Mapping
from math import isfinite, sqrt

import torch

from pipedream.core.schedule.program import Program
from pipedream.core.schedule.update_policy import Policy
from pipedream.runtime.comm.channel import Group, Pending, Waiting, wait_for
from pipedream.runtime.update.decision import Decision
from pipedream.runtime.update.optimizer import Optimizer


class Clipping(Decision):
    """Decides by the norms of gradients.

    Args:
        group: of all workers.
    """

    needs_norms = True

    def __init__(self, policy: Policy, program: Program, group: Group) -> None:
        self._skips = policy.skips
        self._clips_locally = policy.clip == "local"
        self._max_norm = policy.clip_grad_norm
        if self._clips_locally and self._max_norm is not None:
            # Squares of norms add up: stages of equal norms together then have the norm that was asked for.
            self._max_norm /= sqrt(len(program.plan.stages))
        self._group = group
        self._norm_delay = program.norm_delay
        self._pending_norms: deque[Pending[torch.Tensor]] = deque()
        is_policy_global = self._skips or (self._max_norm is not None and not self._clips_locally)
        self.is_global = is_policy_global and program.couples_updates

    def decide(self, optimizers: Mapping[int, Optimizer]) -> Waiting[None]:
        if self.is_global:
            yield from self._decide_globally(optimizers)
        else:
            for optimizer in optimizers.values():
                self.decide_locally(optimizer)

    def decide_locally(self, optimizer: Optimizer) -> None:
        square = find_norm_square(optimizer)
        if self._max_norm is None or self._skips or square.device.type == "cpu":
            norm_square = float(square)  # waits for a GPU
            self._decide(optimizer, norm_square, norm_square)
        else:  # nothing to decide on the host, which need not wait for the GPU
            optimizer.finite = True
            _clip(optimizer, self._max_norm, square.sqrt())

    def _decide_globally(self, optimizers: Mapping[int, Optimizer]) -> Waiting[None]:
        on_device = {stage: find_norm_square(optimizer) for stage, optimizer in optimizers.items()}
        squares = {stage: float(square) for stage, square in on_device.items()}  # waits for a GPU once
        # The replicas, and the ranks of each, have the same square of the stage: each contributes its share.
        share = sum(squares[stage] / (each.rule.replicas * each.division.ranks) for stage, each in optimizers.items())
        self._pending_norms.append(self._group.all_reduce(torch.tensor([share], dtype=torch.float64)))
        global_square = 0.0
        if len(self._pending_norms) > self._norm_delay:
            global_square = yield from self._receive_norm()
        for stage, optimizer in optimizers.items():
            square = squares[stage]
            if not self._norm_delay:
                self._decide(optimizer, global_square, square if self._clips_locally else global_square)
            else:
                # This update's global norm is at least the stage's own.
                self._decide(optimizer, square, max(square, self.norm_square))

    def finish(self) -> Waiting[None]:
        while self._pending_norms:
            yield from self._receive_norm()

    def _receive_norm(self) -> Waiting[float]:
        square = float((yield from wait_for(self._pending_norms.popleft())))
        if isfinite(square):
            self.norm_square = square
        return square

    def _decide(self, optimizer: Optimizer, square: float, clip_square: float) -> None:
        """Skips an update if `square` is not finite, else clips it; both arguments are squared norms."""
        optimizer.finite = isfinite(square) or not self._skips
        if self._max_norm is not None and optimizer.finite:
            _clip(optimizer, self._max_norm, clip_square**0.5)


def find_norm_square(optimizer: Optimizer) -> torch.Tensor:
    """Returns the square of a stage's gradient norm, without weights that another stage counts; float64, on their
    device. On a mesh all ranks of the worker call it.
    """
    division = optimizer.division
    gradients = [
        _view_as_dense(handle.grad)
        for name, handle in optimizer.named.items()
        if handle.grad is not None and name not in optimizer.rule.counted_elsewhere and division.is_counted(name)
    ]
    if gradients:
        # In double precision the squares of all finite float32 are finite.
        return division.sum(torch.stack(list(torch._foreach_norm(gradients, 2, torch.float64))).square().sum())
    # A mesh sums on the device of its handles.
    device = next((handle.device for handle in optimizer.named.values() if division.is_divided), None)
    return division.sum(torch.zeros((), dtype=torch.float64, device=device))


def _clip(optimizer: Optimizer, max_norm: float, norm: float | torch.Tensor) -> None:
    """Clips gradients of a given norm, without waiting for the norm if it is on their device."""
    scale = max_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
    gradients = [handle.grad for handle in optimizer.named.values() if handle.grad is not None]
    if isinstance(scale, torch.Tensor):
        scale = torch.where(scale < 1.0, scale, 1.0)  # 1 for a nan, too
        torch._foreach_mul_(gradients, scale.to(torch.promote_types(gradients[0].dtype, torch.float32)))
    elif scale < 1.0 and gradients:
        torch._foreach_mul_(gradients, scale)


def _view_as_dense(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a dense, real tensor that has the norm of a gradient."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
