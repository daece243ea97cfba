"""Models that keep parts of their forward in full precision under autocast train as in a plain loop, bit for bit."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from built import Built
from marks import slow, thinned
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from training import loop

import pipedream as pd

SGD = partial(torch.optim.SGD, lr=0.5)


def autocast(dtype: torch.dtype | None = torch.bfloat16, **options: Any) -> torch.autocast:
    return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None, **options)


class InFull(torch.autograd.Function):
    """A linear layer that computes in float32, also under autocast."""

    @staticmethod
    @partial(torch.amp.custom_fwd, device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    @partial(torch.amp.custom_bwd, device_type="cpu")
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return slopes[0] @ weight, slopes[0].T @ x


def make(read: Callable[[nn.Linear, Tensor], Tensor], change: Callable[[Any], Any] = id) -> nn.Sequential:
    """Returns a model whose last part reads its layer in its own way."""
    layers = nn.Linear(8, 8), nn.Tanh(), Built(lambda self, h: read(self.layer, h).float(), layer=nn.Linear(8, 8))
    change(layers[-1].layer)
    return nn.Sequential(*layers)


def in_region(dtype: torch.dtype | None, **options: Any) -> Callable[[nn.Linear, Tensor], Tensor]:
    def read(layer: nn.Linear, h: Tensor) -> Tensor:
        with autocast(dtype, **options):
            return layer(h.float())

    return read


def nested(layer: nn.Linear, h: Tensor) -> Tensor:
    with autocast(None):
        inner = layer(h.float())
        with autocast():
            return inner + layer(h)


def without_grad(layer: nn.Linear, h: Tensor) -> Tensor:
    with torch.no_grad(), autocast(None):
        teacher = layer(h.float())
    return F.linear(h, layer.weight) - teacher


def by_data(layer: nn.Linear, h: Tensor) -> Tensor:
    """The second minibatch takes another branch than the first."""
    return layer(h) if h.abs().mean() < 0.8 else F.linear(h, F.normalize(layer.weight.float(), dim=1))


READS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "region without autocast": in_region(None),
    "region of float16": in_region(torch.float16),
    "region without cache": in_region(torch.bfloat16, cache_enabled=False),
    "nested regions": nested,
    "float": lambda layer, h: F.linear(h, F.normalize(layer.weight.float(), dim=1)),
    "double": lambda layer, h: h.double() @ layer.weight.double().T,
    "normalised": lambda layer, h: F.linear(h, F.normalize(layer.weight), layer.bias),
    "own function": lambda layer, h: InFull.apply(h, layer.weight),
    "in two ways": lambda layer, h: layer(h) + InFull.apply(h, layer.weight),
    "twice": lambda layer, h: layer(torch.relu(layer(h))),
    "type": lambda layer, h: torch.sin(100 * h.float().to(layer.weight.dtype)) + layer(h),
    "without a gradient": without_grad,
    "penalty": lambda layer, h: layer(h) + layer.weight.norm(),
    "by the mode": lambda layer, h: layer(h) if layer.training else in_region(None)(layer, h),
    "by the data": by_data,
    "checkpointed": lambda layer, h: checkpoint(in_region(None), layer, h, use_reentrant=False),
}


def check(
    model: nn.Module, *, stages: int = 2, parts: int = 1, dtype: torch.dtype = torch.bfloat16, **planning: Any
) -> None:
    """Trains the model in a pipeline, and a copy of it in a plain loop; compares losses, weights and outputs."""
    how = {"generator": torch.Generator().manual_seed(3)}
    batches = [(size * torch.randn(8, 8, **how), torch.randint(8, (8,), **how)) for size in (1, 32, 1)]
    plain = deepcopy(model)
    losses = loop(plain, batches, optimizer=SGD, parts=parts, forward_context=partial(autocast, dtype)).losses
    profile = pd.profile(model, batches[0][0], autocast=dtype, warmup=0, runs=1)
    planning = {"schedule": "1f1b", "microbatches": parts, "shape": (1,) * stages, "recompute": "never"} | planning
    plan = pd.plan(profile, pd.Cluster.flat(stages), **planning)
    with pd.Pipeline(model, plan, loss=F.cross_entropy, optimizer=SGD, autocast=dtype) as pipeline:
        assert [done.loss for done in pipeline.train(batches)] == pytest.approx(losses, rel=1e-6)
        state = pipeline.state_dict()
        predicted = list(pipeline.predict(x for x, _ in batches))
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(state[name], weight, rtol=1e-6, atol=1e-7)
    with torch.no_grad(), autocast(dtype):
        assert all(torch.equal(got, plain.eval()(x)) for got, (x, _) in zip(predicted, batches, strict=True))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1)


@pytest.mark.parametrize("name", thinned(READS))
def test_weights_read_in_full_precision(name: str) -> None:
    check(make(READS[name]))


@pytest.mark.parametrize("name", ["region without autocast", *map(slow, ("in two ways", "by the mode", "by the data"))])
@pytest.mark.parametrize(
    "options",
    [
        {"stages": 1, "parts": 4, "dtype": torch.float16},
        {"recompute": "always"},
        {"schedule": "zb_h1", "parts": 2},
        {"schedule": "gpipe", "parts": 2, "recompute": "always"},
    ],
    ids=str,
)
def test_in_other_pipelines(name: str, options: dict[str, Any]) -> None:
    check(make(READS[name]), **options)


def test_a_parametrised_weight_and_a_model_of_one_layer() -> None:
    check(make(READS["region without autocast"], weight_norm))
    check(Built(lambda self, x: READS["float"](self.layer, F.normalize(x)), layer=nn.Linear(8, 8)), stages=1)


def test_tied_weights_of_two_precisions() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with autocast(None):
            return self.head(torch.tanh(self.first(x).float()))

    model = Built(forward, first=nn.Linear(8, 8), head=nn.Linear(8, 8))
    model.head.weight = model.first.weight
    check(model, stages=1)


@pytest.mark.parametrize(
    "convert",
    [lambda h: h.float(), lambda h: h.type_as(torch.ones(1)), lambda h: torch.sin(50 * h) if is_low(h) else h],
)
def test_conversions_between_layers(convert: Callable[[Tensor], Tensor]) -> None:
    """Without autocast they do nothing, so that the module seems to do nothing but call its layers."""
    forward = lambda self, h: self.norm(convert(self.inner(h)))  # noqa: E731
    converts = Built(forward, inner=nn.Linear(8, 8), norm=nn.Softmax(1))
    triples = Built(lambda self, h: h if is_low(h) else h * 3)
    check(nn.Sequential(nn.Linear(8, 8), converts, triples, nn.Linear(8, 8), nn.Softplus()))


def is_low(h: Tensor) -> bool:
    return h.dtype == torch.bfloat16


def test_a_region_between_layers_that_converts_nothing() -> None:
    region = Built(lambda self, h: autocast(None)(self.inner)(h), inner=nn.Linear(8, 8))
    check(nn.Sequential(region, nn.Linear(8, 8), nn.Softplus()))
