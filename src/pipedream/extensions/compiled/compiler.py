"""Compiles the layers of a stage."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn


def make_compiler(compile: bool | str | Mapping[str, Any]) -> Callable[[nn.Module], Callable[..., Any]]:
    """Returns what compiles a layer, by `compile` of the `PipelineOptions`."""
    arguments = {"backend": compile} if isinstance(compile, str) else compile
    return partial(compile_layer, arguments=arguments if isinstance(arguments, Mapping) else {})


def compile_layer(layer: nn.Module, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns a layer compiled, or a slice whose modules are; the user's modules stay as they are.

    Weight versions are inputs of what is compiled, so that a new version is not compiled again.
    """
    from torch._functorch import config  # here, because it takes seconds

    config.donated_buffer = False  # a split backward goes through a compiled function twice
    parameters = inspect.signature(torch.compile).parameters
    # Blocks of one class share code; without isolation the limit of recompiles counts all of them together.
    isolation = {"isolate_recompiles": True} if "isolate_recompiles" in parameters else {}
    compile_module: Any = partial(torch.compile, **isolation | dict(arguments))
    compile_inside: Any = getattr(layer, "compile_inside", None)
    if compile_inside is None:
        return compile_module(layer)  # type: ignore[no-any-return]
    compile_inside(compile_module)
    return layer
