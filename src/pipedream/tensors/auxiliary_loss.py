"""Auxiliary losses, which a model computes inside itself, such as the balance loss of its experts.

They are not sent to the last stage. The backward of the module that adds such a loss starts its gradient: the loss's
weight in the objective of the microbatch, one number that every stage knows when it runs a backward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import handle_torch_function, has_torch_function

_scale = 1.0  # not a context variable: autograd runs a GPU's backwards on threads of its own, which would not see it


def add_auxiliary_loss(value: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Returns `value`, and adds a loss to the objective of every backward that runs through it.

    The loss counts like the microbatch's loss: in a pipeline a minibatch's objective is the mean of (loss + auxiliary
    losses) over its microbatches, weighted as the loss is, whichever stages compute them. Reported losses exclude it,
    and evaluations ignore it. It does not count if nothing trained reads `value`.

    In a plain loop ``loss.backward()`` adds each auxiliary loss once. Where the loop scales its loss, as for the
    accumulation of gradients or with a `torch.amp.GradScaler`, it scales these with `auxiliary_loss_scale`.

    Args:
        value: any shape; of floating-point numbers.
        loss: one number.

    Raises:
        TypeError: an argument is not such a tensor.
    """
    if has_torch_function((value, loss)):
        return handle_torch_function(add_auxiliary_loss, (value, loss), value, loss)
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        raise TypeError(
            f"add_auxiliary_loss(value, loss) was given {_describe(value)} as its value, through which no gradient "
            "flows; give a tensor of floating-point numbers that the model computes with afterwards"
        )
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise TypeError(
            f"add_auxiliary_loss(value, loss) was given {_describe(loss)} as its loss; give a tensor with one "
            "floating-point number"
        )
    return _Auxiliary.apply(value, loss)  # type: ignore[no-any-return, no-untyped-call]


@contextmanager
def auxiliary_loss_scale(scale: float) -> Iterator[None]:
    """A context whose backwards multiply auxiliary losses by `scale`, as a plain loop multiplies its loss.

    with pipedream.auxiliary_loss_scale(1 / parts):
        (loss / parts).backward()
    """
    global _scale
    outer_scale, _scale = _scale, scale
    try:
        yield
    finally:
        _scale = outer_scale


@torch.library.custom_op("pipedream::auxiliary_gradient", mutates_args=())
def _fill_gradient(shape: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns the scale. It is an operation of its own because torch.compile would take the scale for a constant."""
    return torch.full(shape, _scale, dtype=dtype, device=device)


@_fill_gradient.register_fake
def _(shape: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


class _Auxiliary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.loss_spec = loss.shape, loss.dtype, loss.device
        ctx.mesh = loss.device_mesh if isinstance(loss, DTensor) else None
        return value.detach()  # not `value`, of which autograd would make a view that may not be written in place

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if gradients[0] is None:
            return None, None
        shape, dtype, device = ctx.loss_spec
        if torch.compiler.is_compiling():
            return gradients[0], _fill_gradient(shape, dtype, device)
        gradient = torch.full(shape, _scale, dtype=dtype, device=device)
        if ctx.mesh is not None:  # of a mesh; every rank has the whole loss
            gradient = DTensor.from_local(gradient, ctx.mesh, [Replicate()] * ctx.mesh.ndim, run_check=False)
        return gradients[0], gradient


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of {value.dtype} of shape {tuple(value.shape)}"
