"""Refuses collective calls in the user's code, where this process alone runs it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from pipedream.core.errors import WorkerError


def refusing_collectives(caller: str) -> AbstractContextManager[Any]:
    """Context where a collective of torch.distributed is a `WorkerError`: the other ranks do not run this code."""
    return _Refusal(caller) if dist.is_initialized() and dist.get_world_size() > 1 else nullcontext()


class _Refusal(TorchFunctionMode):
    def __init__(self, caller: str) -> None:
        super().__init__()
        self._caller = caller

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == dist.distributed_c10d.__name__:
            cause = f"it calls torch.distributed.{func.__name__}(), but ranks of other stages do not"
            advice = "leave it out: minibatches, gradients and weights are whole, as in one process"
            raise WorkerError(dist.get_rank(), self._caller, cause, advice)
        return func(*args, **(kwargs or {}))
