"""A chain is split into the modules inside its modules if that is asked for."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipedream as pd
from pipedream.core.errors import PlanError


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


def test_a_chain_of_blocks_is_cut_inside_a_block() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Residual(), Residual(), nn.Linear(4, 3)).double()
    plain = copy.deepcopy(model)
    x, y = torch.randn(6, 4).double(), torch.tensor([0, 1, 2, 0, 1, 2])
    assert [layer.name for layer in pd.profile(model, x, runs=1).graph.layers] == ["0", "1", "2"]
    with pytest.raises(PlanError, match="finest=True"):
        pd.plan(pd.profile(model, x, runs=1), pd.Cluster.local(2), cuts=("1.down",))

    profile = pd.profile(model, x, runs=1, finest=True)
    assert [layer.name for layer in profile.graph.layers] == ["0.up", "0.down", "1.up", "1.down", "2"]
    plan = pd.plan(profile, pd.Cluster.local(2), schedule="1f1b", microbatches=2, cuts=("1.down",))
    loss = [F.cross_entropy(plain(x), y).item()]
    with pd.Pipeline(
        model,
        plan,
        schedule="1f1b",
        microbatches=2,
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1),
    ) as pipeline:
        assert [done.loss for done in pipeline.train([(x, y)])] == pytest.approx(loss, rel=1e-12)
