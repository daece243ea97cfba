"""Settings as texts: equal for equal code, different for what changes a run, blind to what a rank has of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pipedream.services.failure.same_settings import describe_data, describe_model, describe_optimizer, describe_value

SGD, ADAM, STEP = torch.optim.SGD, torch.optim.Adam, torch.optim.lr_scheduler.StepLR
RATE = 0.1


def _factory(rate: float, device: str = "cpu", rank: int = 0) -> Callable[[Any], Any]:
    def make(parameters: Any) -> Any:
        return SGD(parameters, lr=rate * RATE) if device and rank >= 0 else None

    return make


class _Loss:
    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, output: Any, batch: Any) -> Any:
        return output.mean() * self.weight


DIFFERENT: list[tuple[Any, Any]] = [
    (partial(SGD, lr=0.1), partial(SGD, lr=0.2)),
    (partial(SGD, lr=0.1), partial(ADAM, lr=0.1)),
    (partial(STEP, step_size=3), partial(STEP, step_size=4)),
    (_factory(0.1), _factory(0.2)),
    (lambda output, batch: output.sum(), lambda output, batch: output.mean()),
    (_Loss(1.0), _Loss(2.0)),
    (nn.functional.cross_entropy, nn.functional.mse_loss),
    (nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(label_smoothing=0.2)),
    (nn.CrossEntropyLoss(torch.tensor([1.0, 2.0])), nn.CrossEntropyLoss(torch.tensor([2.0, 1.0]))),
    ({"accuracy": _Loss(1.0)}, {}),
    (torch.bfloat16, None),
]


@pytest.mark.parametrize(("value", "other"), DIFFERENT)
def test_other_settings_have_other_texts(value: Any, other: Any) -> None:
    assert describe_value(value) != describe_value(other)
    assert describe_value(value) == describe_value(value)


def test_what_a_rank_has_of_its_own_is_left_out() -> None:
    assert describe_value(_factory(0.1, "cuda:0", 0)) == describe_value(_factory(0.1, "cuda:1", 1))
    assert describe_value(partial(_factory, device="cuda:0")) == describe_value(partial(_factory, device="cuda:3"))


def chain(*, rate: float = 0.1, frozen: bool = False, **options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4, **options).requires_grad_(not frozen), nn.Dropout(rate))


def test_models_and_optimizers() -> None:
    text = describe_model(chain())
    assert text == describe_model(chain()) == describe_model(chain(device="meta")), "values are not compared"
    others = [chain(rate=0.2), chain(bias=False), chain(dtype=torch.float64), chain(frozen=True)]
    assert text not in map(describe_model, [*others, nn.Sequential(nn.Linear(4, 4), nn.AlphaDropout(0.1))])
    groups = [[{"params": list(chain().parameters()), "weight_decay": decay}] for decay in (0.0, 0.1)]
    assert len({describe_optimizer(SGD(group, lr=0.1)) for group in groups}) == 2


def test_an_optimizer_of_the_users_is_the_same_after_its_first_instance() -> None:
    """Rank 0 alone has measured an update before the ranks compare."""

    class Halved(SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["params"][0].data.mul_(0.5)

    text = describe_value(partial(Halved, lr=0.1))
    Halved([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert describe_value(partial(Halved, lr=0.1)) == text


def test_data() -> None:
    def loader(samples: int, batch: int = 4, shuffle: bool = False) -> Any:
        return DataLoader(TensorDataset(torch.zeros(samples, 2)), batch, shuffle=shuffle)

    text = "DataLoader, 2 batches, 8 samples, batch_size=4, drop_last=False, SequentialSampler"
    assert text == describe_data(loader(8))
    assert len({text, *map(describe_data, (loader(9), loader(8, 2), loader(8, shuffle=True), [1], None))}) == 6


@pytest.mark.slow
def test_texts_are_equal_in_another_process() -> None:
    program = "import test_same_settings as t; print([t.describe_value(each) for pair in t.DIFFERENT for each in pair])"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command, texts = [sys.executable, "-c", program], set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
        texts.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(texts) == 1
