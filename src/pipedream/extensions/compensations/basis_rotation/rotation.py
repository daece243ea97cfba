"""Basis rotation: an optimizer of the Adam family steps matrices in a rotated basis (`BasisRotation`).

During the optimizer's own step zeros with the rotated gradient replace each matrix; their step is then rotated back and
added to the weight. First moments are kept in the rotated basis, and rotated when it changes; second moments stay, as
published. Weight decay is applied to the weight itself.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch

from pipedream.core.errors import ScheduleError

_FAMILY = (torch.optim.Adam, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam)
_FIRST = "exp_avg"
_NOISE = 1e-6
"""Eigenvalues below this share of their mean are rounding errors: their columns keep order and direction, so that
nothing depends on the rounding of a low-rank gradient."""
Sides = dict[str, torch.Tensor]
"""'left' or 'right' -> the basis and, for the estimate by second moments, the covariance of gradients: (1 or 2, n, n)
for n rows or columns."""


class _RotatedMatrix(NamedTuple):
    """A matrix during the optimizer's step; `weight` is its tensor, not rotated."""

    handle: torch.nn.Parameter
    weight: torch.Tensor
    sides: Sides


class RotatedStep:
    """Steps an optimizer, with matrices in a rotated basis.

    Args:
        kind: the `BasisRotation` with the frequency of this stage (`at_stage`).
        names: id of a parameter -> its name.
        state: name -> sides; gets those of a matrix at its first update.
        adds_decay: whether the weight decay of a parameter group is added to the gradient.
    """

    def __init__(
        self,
        kind: Any,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        state: Mapping[str, Sides],
        adds_decay: Callable[[Mapping[str, Any]], bool],
    ) -> None:
        self._kind = kind
        self._optimizer = optimizer
        self._names = [[names.get(id(handle)) for handle in group["params"]] for group in optimizer.param_groups]
        self._state = state
        self._adds_decay = adds_decay

    def step(self, step: Callable[[], None]) -> None:
        """Makes a step on rotated matrices. On a mesh the optimizer has whole weights meanwhile, in the same order."""
        rotated = [
            self._rotate_gradient(handle, group, self._state[name])
            for group, names in zip(self._optimizer.param_groups, self._names, strict=True)
            for handle, name in zip(group["params"], names, strict=True)
            if name is not None and handle.grad is not None and self._rotates(handle)
        ]
        for handle, weight, _ in rotated:
            handle.data = torch.zeros_like(weight)
        step()
        for handle, weight, sides in rotated:
            change = _rotate(_to_matrix(handle.data), sides, back=True)
            handle.data = weight
            weight.add_(change.reshape(weight.shape))

    def _rotates(self, handle: torch.nn.Parameter) -> bool:
        is_dense = not handle.is_complex() and handle.grad is not None and not handle.grad.is_sparse
        return is_dense and bool(self._kind.kept_shapes(handle.shape))

    def _rotate_gradient(self, handle: torch.nn.Parameter, group: Mapping[str, Any], sides: Sides) -> _RotatedMatrix:
        assert handle.grad is not None
        weight, sign = handle.data, -1 if group.get("maximize", False) else 1
        gradient = sign * _to_matrix(handle.grad)
        if decay := group["weight_decay"]:
            if self._adds_decay(group):
                gradient = gradient + decay * _to_matrix(weight)
            else:
                weight.mul_(1 - group["lr"] * decay)
        self._update_basis(handle, group["betas"], gradient, sides)
        handle.grad = (sign * _rotate(gradient, sides)).reshape(weight.shape).to(handle.grad.dtype)
        return _RotatedMatrix(handle, weight, sides)

    def _update_basis(
        self, handle: torch.nn.Parameter, betas: tuple[float, float], gradient: torch.Tensor, sides: Sides
    ) -> None:
        """Adds a gradient to the estimate, and renews the basis if that is due."""
        moments, is_new = self._optimizer.state.get(handle, {}), not sides
        if is_new:
            sides |= {side: gradient.new_zeros(size) for side, size in self._kind.kept_shapes(handle.shape).items()}
        if self._kind.keeps_covariance:
            for side, matrices in sides.items():
                matrices[1].lerp_(gradient @ gradient.T if side == "left" else gradient.T @ gradient, 1 - betas[1])
        if not is_new and (int(moments["step"]) + 1) % self._kind.every:
            return
        average = None
        if _FIRST in moments:
            average = _to_matrix(moments[_FIRST])
            average = average if is_new else _rotate(average, sides, back=True)
        mean = (1 - betas[0]) * gradient + (0 if average is None else betas[0] * average)
        second_moments = [key for key, tensor in moments.items() if key != _FIRST and tensor.shape == handle.shape]
        for side, matrices in sides.items():
            order = self._renew_side(matrices, mean if side == "left" else mean.T, is_new)
            for key in second_moments:
                reordered = _to_matrix(moments[key]).index_select(0 if side == "left" else 1, order)
                moments[key].copy_(reordered.reshape(handle.shape))
        if average is not None:
            moments[_FIRST].copy_(_rotate(average, sides).reshape(handle.shape))
        for key in second_moments if is_new else ():
            moments[key].copy_(_rotate(_to_matrix(moments[key]), _square(sides)).reshape(handle.shape))

    def _renew_side(self, matrices: torch.Tensor, mean: torch.Tensor, is_new: bool) -> torch.Tensor:
        """Renews the basis of one side: the first exactly, later ones by a step of power iteration.

        Returns the order in which the step takes the old columns.
        """
        total = matrices[1].trace() if self._kind.keeps_covariance else mean.square().sum()
        noise = _NOISE * total / len(mean)
        if is_new:
            matrices[0] = matrices[1] if self._kind.keeps_covariance else mean @ mean.T
            matrices[0].diagonal().add_(torch.arange(len(mean), 0, -1, device=mean.device) * noise / len(mean))
            # Numbers that are not finite have spoilt the weights already, and raise no error here. The matrix is
            # negated because eigh returns the least eigenvalues first.
            matrices[0] = torch.linalg.eigh(matrices[0].nan_to_num_(0.0, 0.0, 0.0).neg_()).eigenvectors
            return torch.arange(len(mean), device=mean.device)
        image = matrices[1] @ matrices[0] if self._kind.keeps_covariance else mean @ (mean.T @ matrices[0])
        order = (matrices[0] * image).sum(0).clamp_(min=noise).argsort(descending=True, stable=True)
        image = image.addcmul_(matrices[0], noise)[:, order]
        matrices[0] = torch.linalg.qr(image).Q
        return order


def undo_rotation(moments: Mapping[str, torch.Tensor], sides: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns an optimizer's moments of a matrix without the rotation.

    Second moments are turned as if the elements of a gradient were uncorrelated.
    """
    bases = {key: sides if key == _FIRST else _square(sides) for key in moments}
    return {key: _rotate(_to_matrix(t), bases[key], back=True).reshape(t.shape) for key, t in moments.items()}


def select_sides(saved: Mapping[str, torch.Tensor]) -> Sides:
    """Returns the sides among what was saved of a weight."""
    return {side: saved[side] for side in ("left", "right") if side in saved}


def leave_basis(stage: Any, name: str, sides: Sides) -> None:
    """Turns the optimizer's moments of a weight back."""
    handle = stage.handles[name]
    sides = {side: matrix.to(handle.device) for side, matrix in sides.items()}
    moments = {n: t for n, t in stage.optimizer.state.get(handle, {}).items() if torch.is_tensor(t) and t.dim()}
    for key, moment in undo_rotation(stage.gather(name, moments), sides).items():
        moments[key].copy_(stage.take_part(name, moment))


def check_has_moments(kind: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raises a `ScheduleError` if an optimizer is not of the Adam family."""
    if not isinstance(optimizer, _FAMILY):
        raise ScheduleError(
            f"compensation {kind} rotates the moments of Adam, AdamW, NAdam, RAdam or Adamax, found "
            f"{type(optimizer).__name__}, which keeps no such moments; use one of these, or error_feedback for any "
            "optimizer"
        )


def _to_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as a matrix of its first dimension and all others, in float32 or more."""
    matrix = tensor.detach().reshape(tensor.shape[0], prod(tensor.shape[1:]))
    return matrix.to(torch.promote_types(tensor.dtype, torch.float32))


def _rotate(matrix: torch.Tensor, sides: Mapping[str, torch.Tensor], *, back: bool = False) -> torch.Tensor:
    """Returns U^T X V or, back, U X V^T."""
    if "left" in sides:
        basis = sides["left"][0]
        matrix = (basis if back else basis.T) @ matrix
    if "right" in sides:
        basis = sides["right"][0]
        matrix = matrix @ (basis.T if back else basis)
    return matrix


def _square(sides: Mapping[str, torch.Tensor]) -> Sides:
    return {side: matrices[:1].square() for side, matrices in sides.items()}
