"""A stage's backward: autograd adds to the sums that it is given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipedream.runtime.stage.stage_module import SavedForward, StageModule
from pipedream.runtime.stage.versions import Versions
from pipedream.runtime.update.optimizer import Gradients


class Twice(nn.Module):
    """Two weights whose gradients autograd hands out as one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.a + self.b)


def test_sums_grow_in_place_and_share_nothing() -> None:
    layer = Twice()
    handles = dict(layer.named_parameters())
    stage = StageModule([("twice", layer)], handles, torch.device("cpu"), seed=0)
    versions, gradients = Versions(handles), Gradients([torch.float32] * 2)
    expected, sums = torch.zeros(3), []
    for k in range(3):
        arrived = torch.randn(2, 3)
        held = versions.read(0)
        value, boxes = stage.enter("", (arrived.clone(),), (True,))
        output = stage.forward(value, held.leaves, k, first=False)
        scale = torch.randn(2, 3)
        accumulators = gradients.accumulators
        found, back = stage.backward(SavedForward(held, boxes, (output,), (True,), k), [scale], accumulators)
        assert k == 0 or all(new is old for new, old in zip(found, accumulators, strict=True))
        gradients.add(found, 1.0)
        expected += (arrived * scale).sum(0)
        torch.testing.assert_close(back[0], scale * (layer.a + layer.b).detach())
        assert all(leaf.grad is None for leaf in held.leaves.values())
        assert layer.a.grad is None
        sums.append(gradients.accumulators)
    (a, b), weight, count = gradients.take()
    assert (weight, count) == (3.0, 3)
    assert sums[0][0] is sums[2][0] is a
    assert a is not b
    torch.testing.assert_close(a, expected)
    torch.testing.assert_close(b, expected)


def test_leaves_are_clean_after_a_backward_that_fails() -> None:
    layer = Twice()
    handles = dict(layer.named_parameters())
    stage = StageModule([("twice", layer)], handles, torch.device("cpu"), seed=0)
    held = Versions(handles).read(0)
    output = stage.forward(torch.ones(2, 3), held.leaves, 0, first=True)
    kept = SavedForward(held, (), (output,), (), 0)
    stage.backward(kept, [torch.ones(2, 3)], [None, None])
    with pytest.raises(RuntimeError):  # its graph is gone
        stage.backward(kept, [torch.ones(2, 3)], [torch.zeros(3), None])
    assert all(leaf.grad is None for leaf in held.leaves.values())
