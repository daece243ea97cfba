"""Errors for models that cannot be captured."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from pipedream.core.errors import CaptureError
from pipedream.core.user_code import note_module, with_place

_DISTRIBUTED = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")


def check_model(model: nn.Module) -> None:
    """Raises a CaptureError for a model that cannot be looked into, or that another tool distributes."""
    for name, module in model.named_modules():
        where = f"the module {name!r}" if name else f"the model {type(model).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(f"{where} is a TorchScript module and cannot be looked into; pass the eager module")
        wrapper = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _DISTRIBUTED), None)
        if wrapper is not None:  # found by name: torch.distributed.fsdp takes long to import
            how = "sharded by fully_shard (an FSDPModule)" if wrapper == "FSDPModule" else f"wrapped in {wrapper}"
            raise CaptureError(
                f"{where} is {how}, which would synchronise by itself; pass the plain module: the plan decides "
                "which stages are replicated"
            )
    if is_compiled(model):
        raise CaptureError(
            f"the model {type(model).__name__} is compiled as a whole and cannot be looked into; pass the module "
            "before torch.compile, and compile=True to compile what lies within a stage"
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise CaptureError(f"parameter {name!r} has no shape yet (a lazy module); run the model once before")


def is_compiled(module: nn.Module) -> bool:
    """Returns whether a module was compiled in place, or is what torch.compile returned."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def explain_failure(model: nn.Module, training: bool, error: Exception) -> CaptureError:
    """Returns the error to raise when the forward raised one on the sample."""
    advice = (
        "it depends on the value of a tensor, and here tensors have none: profile it on a device that computes"
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
        else "give a sample of the shape, dtype and device that it takes"
    )
    note_module(error, model.named_modules())
    return CaptureError(
        f"the forward of {type(model).__name__} should run on the sample, but in "
        f"{'training' if training else 'evaluation'} mode it raised {with_place(error)}; {advice}"
    )
