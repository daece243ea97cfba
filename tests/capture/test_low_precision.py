"""Every tested model computes in bfloat16 and float16 as it does in a plain loop."""

import copy
import importlib.util
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import training
from built import Built
from marks import spread
from split_training import batches_of, check_same, pipelined, plain_loop
from torch import Tensor, nn
from zoo import CASES, Case

import pipedream as pd

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

# Dtypes of the weights and of autocast, scale of the loss, how far a pipeline may be from the plain loop: the gradients
# of what several stages read are added in another order, and small numbers of float16 are rounded otherwise.
KINDS: dict[str, tuple[torch.dtype, torch.dtype | None, float, float]] = {
    "bfloat16 autocast": (torch.float32, torch.bfloat16, 1.0, 1e-6),
    "bfloat16 weights": (torch.bfloat16, None, 1.0, 4e-2),
    "float16 autocast": (torch.float32, torch.float16, 1024.0, 2e-2),
}
DEFAULT = ("own_backward", "bfloat16 autocast")
PLAIN_FAILS = {("attention_lstm", "float16 autocast"): "no kernel of an LSTM on a CPU"}
"""What the model alone does not run."""
TOLERANCE = {"shared_layers": 1e-2}
"""A shared weight's gradients are added in float32."""


def _build_without_cache(case: Case) -> nn.Module:
    """A cache that is empty at first would join its float32 with what is cast."""
    model: Any = case.make()
    if case.needs_hf:
        model.config.use_cache = False
    return model


def _give_one(_: Any) -> float:
    return 1.0


def _list_cases() -> list[Any]:
    has_hf = importlib.util.find_spec("transformers") is not None
    parameters = []
    for name, kind in product(CASES, KINDS):
        marks = [] if (name, kind) == DEFAULT else [pytest.mark.slow]
        if CASES[name].needs_hf and not has_hf:
            marks.append(pytest.mark.skip(reason="transformers is not installed"))
        if (name, kind) not in PLAIN_FAILS:
            parameters.append(pytest.param(name, kind, marks=marks, id=f"{name}-{kind}"))
    return spread(parameters, every=48)


@pytest.mark.parametrize(("name", "kind"), _list_cases())
def test_training_equals_the_plain_loop(name: str, kind: str) -> None:
    """With one microbatch."""
    dtype, autocast, scale, tolerance = KINDS[kind]
    make = partial(_build_without_cache, CASES[name])
    case = replace(CASES[name], make=make, dtype=dtype, autocast=autocast, amount=_give_one)
    batches = batches_of(case)
    options: dict[str, Any] = {"weight": _give_one, "check": False, "grad_scaler": None if scale == 1.0 else scale}
    actual = pipelined(case, batches, stages=3, seed=34, **options)
    check_same(plain_loop(case, batches, scale=scale), actual, max(tolerance, TOLERANCE.get(name, 0.0)))


def _penalised(model: Any, x: Tensor) -> Tensor:
    """Reads a layer's weight outside of the layer, where autocast casts nothing."""
    return model.second(model.first(x).relu()) * model.first.weight.square().sum()


def _stack_norms() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("make", "kind", "shape"),
    [
        (lambda: Built(_penalised, first=nn.Linear(8, 8), second=nn.Linear(8, 4)), "bfloat16 autocast", (1,)),
        (_stack_norms, "bfloat16 autocast", (1, 1)),
        (_stack_norms, "bfloat16 weights", (1, 1)),
    ],
)
def test_one_microbatch_is_rounded_as_in_a_plain_loop(make: Any, kind: str, shape: tuple[int, ...]) -> None:
    """Bit for bit, also where the number of samples is no power of two: normalisation amplifies roundings."""
    dtype, autocast, _, _ = KINDS[kind]
    torch.manual_seed(0)
    model = make().to(dtype)
    data = [(torch.randn(6, 8).to(dtype), torch.randint(4, (6,))) for _ in range(3)]
    casting = partial(torch.autocast, "cpu", autocast, enabled=autocast is not None)
    plain = training.loop(copy.deepcopy(model), data, forward_context=casting).state
    profile = pd.profile(model, data[0][0], runs=1, autocast=autocast)
    plan = pd.plan(profile, pd.Cluster.flat(len(shape)), shape=shape, schedule="1f1b", microbatches=1)
    state = training.train(model, plan, data, autocast=autocast).state
    assert all(torch.equal(state[name], expected) for name, expected in plain.items())
