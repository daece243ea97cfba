"""A split that would lose something is found, and the model is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipedream.capture import capture
from pipedream.capture.compare import fingerprint
from pipedream.capture.slice import ModelSlice
from pipedream.core.errors import CaptureError

X = torch.randn(3, 4)


class Blocks(nn.Module):
    """A residual network with running statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.first(x))
        return {"logits": self.last(self.dropout(self.norm(x)) + x)}


class Counter(nn.Module):
    """Changes its own attributes."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.memory = x
        return x + self.calls


def make_chain() -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(4), nn.Dropout(0.5), Counter())


@pytest.mark.parametrize("make", [Blocks, make_chain])
def test_the_model_and_the_sample_are_left_as_they_were(make: Callable[[], nn.Module]) -> None:
    model, is_chain = make(), make is make_chain
    first = next(model.parameters())
    first.grad = kept_grad = torch.ones_like(first)
    for module in model.modules():
        module.train(not isinstance(module, nn.Dropout))
        if not is_chain:  # a container with hooks is none
            module.register_forward_hook(lambda *_: None)
    modules = list(model.modules())
    state = {name: (value, value.clone(), value._version) for name, value in model.state_dict(keep_vars=True).items()}
    flags, attributes = [m.training for m in modules], [dict(m.__dict__) for m in modules]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in modules]
    generator, x = torch.get_rng_state(), X.clone().requires_grad_(not is_chain)
    assert len(capture(model, x).graph.layers) > 2
    for name, value in model.state_dict(keep_vars=True).items():
        assert value is state[name][0]
        assert torch.equal(value, state[name][1])
        assert value._version == state[name][2]
    assert [m.training for m in modules] == flags
    assert [dict(m.__dict__) for m in modules] == attributes
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in modules] == hooks
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert first.grad is kept_grad
    assert torch.equal(kept_grad, torch.ones_like(first))
    assert all(parameter.grad is None for parameter in model.parameters() if parameter is not first)
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(x, X)
    assert x.grad is None


def without_gradient(bundle: Any) -> Any:
    return {**bundle, "values": [value.detach() for value in bundle["values"]]} if "values" in bundle else bundle


def with_other_numbers(bundle: Any) -> Any:
    return {**bundle, "values": [value * 1.01 for value in bundle["values"]]} if "values" in bundle else bundle


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (without_gradient, r"lose the gradient of the parameter '\w+\.\w+' of the module"),
        (with_other_numbers, "in training mode the output 'logits' differs"),
    ],
)
def test_what_the_layers_lose_is_found(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any], Any], message: str
) -> None:
    forward = ModelSlice.forward
    monkeypatch.setattr(ModelSlice, "forward", lambda self, arriving: fault(forward(self, arriving)))
    model = Blocks()
    flags, attributes = [m.training for m in model.modules()], [dict(m.__dict__) for m in model.modules()]
    with pytest.raises(CaptureError, match=rf"the layers of Blocks.*{message}"):
        capture(model, X)
    assert [m.training for m in model.modules()] == flags
    assert [dict(m.__dict__) for m in model.modules()] == attributes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_buffer_that_the_layers_leave_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ModelSlice.forward

    def twice(self: ModelSlice, arriving: Any) -> Any:
        if not self.is_first or not self.is_last:
            self.model.norm.num_batches_tracked += 1
        return forward(self, arriving)

    monkeypatch.setattr(ModelSlice, "forward", twice)
    with pytest.raises(CaptureError, match=r"buffer 'norm[.]num_batches_tracked' differs"):
        capture(Blocks(), X)


def test_a_forward_that_fails_on_the_sample_says_so() -> None:
    class EvaluationFails(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                raise ValueError("no evaluation")
            return super().forward(x)["logits"]

    with pytest.raises(CaptureError, match=r"EvaluationFails should run .* in evaluation mode it raised ValueError"):
        capture(EvaluationFails(), X)
    with pytest.raises(CaptureError, match=r"Blocks should run .* in training mode it raised RuntimeError"):
        capture(Blocks(), torch.randn(3, 5))


def test_sums_of_float64_are_of_float64() -> None:
    x = torch.randn(1 << 17, dtype=torch.float64)
    assert fingerprint(x)[2] == pytest.approx(x.abs().sum().item(), rel=1e-12)
    assert fingerprint(x.float())[2] == pytest.approx(x.abs().sum().item(), rel=1e-4)
