"""A chain is split into the modules inside its modules if that is asked for."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from built import Built
from torch import nn

import pipedream as pd


def residual() -> nn.Module:
    parts = {"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}
    return Built(lambda block, x: x + block.down(F.relu(block.up(x))), **parts)


def test_a_chain_of_blocks_is_cut_inside_a_block() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(residual(), residual(), nn.Linear(4, 3)).double()
    plain = copy.deepcopy(model)
    x, y = torch.randn(6, 4).double(), torch.tensor([0, 1, 2, 0, 1, 2])
    assert [layer.name for layer in pd.profile(model, x, runs=1).graph.layers] == ["0", "1", "2"]
    with pytest.raises(pd.PipelineError, match="finest=True"):
        pd.plan(pd.profile(model, x, runs=1), pd.Cluster.local(2), cuts=("1.down",))

    profile = pd.profile(model, x, runs=1, finest=True)
    assert [layer.name for layer in profile.graph.layers] == ["0.up", "0.down", "1.up", "1.down", "2"]
    plan = pd.plan(profile, pd.Cluster.local(2), schedule="1f1b", microbatches=2, cuts=("1.down",))
    loss = [F.cross_entropy(plain(x), y).item()]
    with pd.Pipeline(model, plan, loss=F.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1)) as pipeline:
        assert [done.loss for done in pipeline.train([(x, y)])] == pytest.approx(loss, rel=1e-12)
