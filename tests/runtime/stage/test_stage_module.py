"""A stage's backward: autograd adds to the sums that it is given."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from built import Built
from torch import nn

import pipedream as pd
from pipedream.core.seeds import layer_seed
from pipedream.extensions.split_backward import split
from pipedream.runtime.stage import generators, stage_module, versions as kept
from pipedream.runtime.update.gradients import Gradients


def stage_of(
    layer: nn.Module, seed: int = 0, device: str = "cpu"
) -> tuple[stage_module.StageModule, dict[str, nn.Parameter]]:
    handles = dict(layer.named_parameters())
    return stage_module.StageModule([("layer", layer)], handles, torch.device(device), seed=seed), handles


@pytest.mark.parametrize("splits", [False, True])
def test_sums_grow_in_place_and_share_nothing(splits: bool) -> None:
    """Of two weights whose gradients autograd hands out as one tensor."""
    layer = Built(lambda self, x: x * (self.a + self.b), **{name: nn.Parameter(torch.randn(3)) for name in "ab"})
    stage, handles = stage_of(layer)
    versions, gradients = kept.Versions(handles), Gradients(2)
    expected, sums = torch.zeros(3), []
    for k in range(3):
        arrived, scale = torch.randn(2, 2, 3)
        weights, accumulators = versions.acquire(0), gradients.accumulators
        value, boxes = stage.enter("", (arrived.clone(),), (True,))
        output = stage.forward(value, weights.leaves, k, is_first=False)
        saved = stage_module.SavedForward(weights, boxes, (output,), (True,), k)
        if splits:
            back = split.backward_inputs(stage, saved, [scale])
            weight_gradients = split.backward_weights(stage, saved, accumulators)
        else:
            weight_gradients, back = stage.backward(saved, [scale], accumulators)
        assert k == 0 or all(new is old for new, old in zip(weight_gradients, accumulators, strict=True))
        gradients.add(weight_gradients, 1.0)
        expected += (arrived * scale).sum(0)
        torch.testing.assert_close(back[0], scale * (layer.a + layer.b).detach())
        assert all(leaf.grad is None for leaf in weights.leaves.values())
        assert layer.a.grad is None
        sums.append(gradients.accumulators)
    (a, b), weight, count = gradients.take()
    assert (weight, count) == (3.0, 3)
    assert sums[0][0] is sums[2][0] is a
    assert a is not b
    torch.testing.assert_close(a, expected)
    torch.testing.assert_close(b, expected)


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("Conv", "ConvTranspose"), (4, 4, 2)),
    **dict.fromkeys(("Linear", "Embedding", "EmbeddingBag"), (4, 4)),
    **dict.fromkeys(("Softmax", "LogSoftmax", "ZeroPad", "ReflectionPad"), (1,)),
    **dict.fromkeys(("LayerNorm", "RMSNorm", "BatchNorm", "InstanceNorm"), (4,)),
    **dict.fromkeys(("MaxPool", "AvgPool", "AdaptiveMaxPool", "AdaptiveAvgPool", "LocalResponseNorm"), (2,)),
    "Unflatten": (1, (2, 2)),
    "Upsample": (8,),
    "GroupNorm": (2, 4),
    "ConstantPad": (1, 0.0),
}


@pytest.mark.parametrize("kind", sorted(generators._NEVER_DRAW - {nn.Bilinear}, key=lambda kind: kind.__name__))
def test_layers_that_are_not_seeded_draw_nothing(kind: type[nn.Module]) -> None:
    name, dimensions = re.fullmatch(r"(.*?)(?:([123])d)?", kind.__name__).groups()
    more = int(dimensions) if dimensions else name in ("Upsample", "LocalResponseNorm", "GroupNorm")
    layer, shape = kind(*ARGUMENTS.get(name, ())), (2, 4, *[4] * more)
    inputs = torch.randint(4, shape) if name.startswith("Embedding") else torch.randn(shape)
    assert generators.never_draws(layer)
    before = torch.default_generator.get_state()
    output = layer(inputs)
    if output.requires_grad:
        output.sum().backward()
    assert torch.equal(before, torch.default_generator.get_state())


def test_layers_that_may_draw_are_known() -> None:
    class OfUser(nn.Linear):
        pass

    hooked, replaced = nn.Linear(2, 2), nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: torch.rand(()) * 0)
    replaced.forward = lambda x: x + torch.rand(())
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
    for layer in (OfUser(2, 2), normed, nn.Dropout(0.0), nn.RReLU(), nn.LSTM(2, 2), nn.LazyLinear(2)):
        assert not generators.never_draws(layer)
    for layer in (hooked, replaced):
        stage, handles = stage_of(layer, seed=5)
        before = torch.default_generator.get_state()
        stage.forward(torch.ones(2, 2), handles, 0, is_first=True)
        assert torch.equal(before, torch.default_generator.get_state()), "seeded, and restored"


def test_the_generator_of_the_stage_s_own_gpu_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    of_gpus = tuple(torch.Generator() for _ in range(3))
    monkeypatch.setattr(torch.cuda, "default_generators", of_gpus)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    seeds = []
    before = [generator.get_state() for generator in of_gpus]
    for device, index in (("cuda:1", 1), ("cuda", 2)):
        layer = nn.Dropout()
        stage, _ = stage_of(layer, 5, device)
        layer.register_forward_hook(lambda *_: seeds.append([g.initial_seed() for g in of_gpus]))
        stage.forward(torch.ones(2), {}, 7, is_first=True)
        expected = layer_seed(5, 7, "layer")
        assert [seed == expected for seed in seeds.pop()] == [number == index for number in range(3)]
        assert all(map(torch.equal, before, [generator.get_state() for generator in of_gpus]))


def _flatten_as_cudnn_does(module: nn.RNNBase) -> None:
    """Makes the weights views of one new buffer."""
    with torch.no_grad():
        buffer, offset = torch.cat([weight.reshape(-1) for weight in module._flat_weights]), 0
        for weight in module._flat_weights:
            weight.data = buffer[offset : offset + weight.numel()].view_as(weight)
            offset += weight.numel()


def _recur(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    self.lstm.flatten_parameters()
    return self.lstm(x)[0]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_layer_that_flattens_its_weights_trains(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Built(_recur, lstm=nn.LSTM(2, 3)), nn.Linear(3, 1)).double()

    data = [(torch.randn(4, 2, 2).double(), torch.randn(4, 2, 1).double()) for _ in range(6)]
    how = {"loss": nn.functional.mse_loss, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    training = pd.testing.Training(model=make, data=data, plan=(1, 1), schedule=schedule, **how)
    with monkeypatch.context() as patch:
        patch.setattr(nn.RNNBase, "flatten_parameters", _flatten_as_cudnn_does)
        trained = training.pipeline()
    training.assert_serial(trained)


def test_a_forward_that_moves_a_weight_is_refused() -> None:
    class Moving(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data = self.weight.data.clone()
            return super().forward(x)

    stage, handles = stage_of(Moving(2, 2))
    with pytest.raises(pd.PipelineError, match=r"moves the weight 'weight' to other memory"):
        stage.forward(torch.ones(1, 2), kept.Versions(handles).acquire(0).leaves, 0, is_first=True)
