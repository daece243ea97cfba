"""Layers that the user shards by `parallelize_module` train as on single ranks; anything else is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from marks import slow
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.extensions.meshes.sharding.meshes import Case, D, Mlp, check_as_single_ranks, check_refused, draw_rows


def _apply_styles(name: str, layer: nn.Module, device_mesh: DeviceMesh) -> None:
    if isinstance(layer, Mlp):
        parallelize_module(layer, device_mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _call_fully_shard(name: str, layer: nn.Module, device_mesh: DeviceMesh) -> None:
    fully_shard(layer, mesh=device_mesh)


def _replace_parameter(name: str, layer: nn.Module, device_mesh: DeviceMesh) -> None:
    for child in layer.modules():
        if isinstance(child, nn.Linear):
            child.weight = nn.Parameter(child.weight.detach().clone())


def _make_model() -> tuple[nn.Sequential, Callable[[int], torch.Tensor]]:
    """Without dropout, which draws for the parts that torch's styles give it."""
    return nn.Sequential(*(Mlp(drop=0.0) for _ in range(3)), nn.Linear(D, 4)), draw_rows


def _make_case(function: Callable[..., None], mesh: str, rules: str, *args: Any, **more: Any) -> Case:
    options = {"parallelize": function, **more.pop("options", {})}
    return Case(_make_model, mesh, rules, *args, options=options, **more)


pytestmark = pytest.mark.processes
CASES = (
    _make_case(_apply_styles, "model:2", "", "pipedream", None),
    _make_case(_apply_styles, "model:2", "", "zb_h1", 4, options={"clip_grad_norm": 0.1}),
    _make_case(_apply_styles, "data:2,model:2", "batch:data", stages=()),
    _make_case(
        _apply_styles, "data:2,model:2", "batch:data", "gpipe", stages=(), shard_weights="data", options={"ema": 0.9}
    ),
)


@pytest.mark.parametrize("case", [CASES[0], *map(slow, CASES[1:])], ids=str)
def test_layers_cut_by_torchs_styles_train_as_single_ranks_do(case: Case) -> None:
    check_as_single_ranks(case)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_call_fully_shard, r"parallelize\('0', ...\) has called fully_shard, .* by Layout\(shard_weights=...\)"),
        (_replace_parameter, r"parallelize\('0', ...\) has replaced the parameter 'weight'"),
    ],
)
def test_what_it_may_not_do(function: Callable[..., None], words: str) -> None:
    check_refused(_make_case(function, "model:2", "", stages=()), words)
