"""One rank of a mesh, measured in one process: its parts, and the collectives that it counts."""

from dataclasses import astuple
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from built import Built
from torch import nn
from torch.nn import functional as F

import pipedream as pd

D, BATCH = 16, 8


def block() -> nn.Module:
    parts = {"up": nn.Linear(D, 4 * D), "down": nn.Linear(4 * D, D)}
    return Built(lambda module, x: x + module.down(F.relu(module.up(x))), **parts)


NAMES = {"*.up.weight": "d_ff d_model", "*.up.bias": "d_ff", "*.down.weight": "d_model d_ff"}


@cache
def profiled(rules: str, mesh: str, shard_weights: str = "") -> pd.Profile:
    torch.manual_seed(0)
    model = nn.Sequential(block(), block())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    how: dict[str, Any] = {"layout": pd.Layout(rules, NAMES, shard_weights), "meshes": (mesh,), "warmup": 0, "runs": 1}
    how |= {"loss": torch.sum, "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}
    profile = pd.profile(model, torch.randn(BATCH, D), **how)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not dist.is_initialized()
    return profile


WEIGHTS, UP_DOWN = 4 * (2 * 4 * D * D + 5 * D), 4 * (2 * 4 * D * D + 4 * D)


@pytest.mark.parametrize(
    ("rules", "mesh", "shard_weights", "weights", "sent", "is_summed"),
    [
        ("d_ff:model", "model:2", "", WEIGHTS - UP_DOWN // 2, BATCH * D * 4, True),
        ("d_ff:model", "model:4", "", WEIGHTS - UP_DOWN * 3 // 4, BATCH * D * 4, True),
        ("batch:data", "data:2", "", WEIGHTS, BATCH * D * 2, False),
        ("batch:data", "data:2", "data", WEIGHTS // 2, BATCH * D * 2, False),
    ],
)
def test_ranks_have_parts(rules: str, mesh: str, shard_weights: str, weights: int, sent: int, is_summed: bool) -> None:
    profile = profiled(rules, mesh, shard_weights)
    (rank,) = profile.ranks
    assert (rank.mesh, "at rest" in rank.layout) == (mesh, bool(shard_weights))
    rows = zip(profile.layers, rank.layers, rank.forward, rank.backward, strict=True)
    for index, (whole, part, forward, backward) in enumerate(rows):
        assert (whole.parameter_bytes, part.parameter_bytes) == (WEIGHTS, weights)
        assert part.output_bytes == sent
        assert 0 < part.activation_bytes < whole.activation_bytes
        reduced = [
            sum(row.size_bytes for row in rows if row.kind == "all-reduce" and not row.of_weights)
            for rows in (forward, backward)
        ]
        assert reduced == [is_summed * sent, is_summed * sent * (index > 0)]  # the model's input has no gradient
    assert rank.optimizer_bytes == 2 * weights
    assert pd.Profile.from_json(profile.to_json()) == profile


def test_a_backward_reads_plain_tensors_of_the_model() -> None:
    masked = Built(lambda module, x: module.inner(x).masked_fill(torch.arange(D) > 2, 0.0), inner=nn.Linear(D, D))
    options: dict[str, Any] = {"warmup": 0, "runs": 1, "layout": pd.Layout("batch:data"), "meshes": ("data:2",)}
    (rank,) = pd.profile(nn.Sequential(masked), torch.randn(BATCH, D), **options).ranks
    assert [layer.output_bytes for layer in rank.layers] == [BATCH * D * 2]


def test_what_the_ranks_of_data_exchange() -> None:
    """Whole weights: their gradients at the update. At rest: gathered for both passes, and summed, on a CPU whole."""
    (plain,) = profiled("batch:data", "data:2").ranks
    assert [*map(astuple, plain.update)] == [("all-reduce", "data", 8, 2 * WEIGHTS, True)]
    (rest,) = profiled("batch:data", "data:2", "data").ranks
    weights = ("data", 1, WEIGHTS, True)
    assert rest.update == ()
    assert [*map(astuple, rest.forward[0])] == [("all-gather", *weights)]
    assert [*map(astuple, rest.backward[1])] == [("all-gather", *weights), ("all-reduce", *weights)]


def test_a_plan_counts_what_a_rank_needs() -> None:
    """Seconds of the collectives over the cluster's link: 2 (n - 1) (2 l + b / (n B)) for a sum between CPUs."""
    profile = profiled("d_ff:model", "model:2")
    (rank,) = profile.ranks
    slow, bytes_per_s = 1.0, 100.0  # slow: two latencies
    cluster = pd.Cluster.flat(4, bytes_per_s, slow / 2)
    plan = pd.plan(profile, cluster, shape="1-1", mesh="model:2")
    assert (plan.config, plan.ranks, plan.workers) == ("1x2-1x2", 4, 2)
    sum_s = 2 * (slow + BATCH * D * 4 / (2 * bytes_per_s))
    for stage, layer in zip(plan.stages, rank.layers, strict=True):
        assert stage.forward_s == pytest.approx(layer.forward_s + sum_s)
        assert stage.parameter_bytes == layer.parameter_bytes
        assert stage.forward_fixed_s == pytest.approx(layer.forward_fixed_s + 2 * slow)
    halves = pd.plan(profile, cluster, shape="1-1", mesh="model:2", schedule="1f1b", microbatches=4)
    assert halves.stages[0].split_s(4)[0] >= 2 * slow
    whole = pd.plan(profile, pd.Cluster.flat(2, bytes_per_s, slow), shape="1-1")
    assert whole.stages[0].peak_bytes > plan.stages[0].peak_bytes


def test_a_mesh_that_was_not_profiled() -> None:
    profile = profiled("d_ff:model", "model:2")
    with pytest.raises(pd.PipelineError, match=r"mesh model:4 was asked for.*\(meshes that it has: model:2\)"):
        pd.plan(profile, pd.Cluster.flat(8), mesh="model:4")
