"""The part of a DTensor that a rank has."""

from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor's part, outside of autograd, or any other tensor itself, once its collective is complete."""
    local: torch.Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def spec_of(tensor: torch.Tensor) -> Any:
    """Returns a DTensor's mesh, placements and size; None for any other tensor."""
    return tensor._spec if isinstance(tensor, DTensor) else None


def like_part(part: torch.Tensor, spec: Any) -> torch.Tensor:
    """Returns a DTensor around a part; the part itself where `spec` is None."""
    return part if spec is None else DTensor(part, spec, requires_grad=part.requires_grad)  # type: ignore[no-untyped-call]
