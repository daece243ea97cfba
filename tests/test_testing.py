"""`pipedream.testing` accepts what is right, and notices what is not: a wrong rule, sum, rounding or compensation."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import agreements
import compensated
import encoded
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pipedream import testing

ROOT = Path(__file__).parents[1]
PLAIN = {"lr": 0.05, "momentum": 0.9}


@pytest.mark.slow
def test_the_page_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    space: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "testing.md").read_text(), re.M | re.S):
        exec(compile(block, "testing.md", "exec"), space)
    assert capsys.readouterr().out.splitlines()[-1].endswith("[5, 10] {0: {0, 1}, 1: {0}}")


def spike(late: Any) -> testing.CompensationRule:
    return compensated.Spike(0.0, 0.9, lambda s: late[s])


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], **PLAIN)


CHECKS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "sums": (
        lambda: testing.check_sums("every:3", agreements.PUBLISHED["every:3"]),
        lambda: testing.check_sums("every:3", agreements.PUBLISHED["every:1"]),
    ),
    "encoding": (
        lambda: testing.check_encoding("int8,bfloat16", encoded.rounded),
        lambda: testing.check_encoding("int8", lambda tensor, encoding: encoded.rounded(tensor, "int4")),
    ),
    "compensation": (
        lambda: testing.check_compensation("spike", spike, sgd),
        lambda: testing.check_compensation("spike", lambda late: spike([n + 1 for n in late]), sgd),
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_checks_accept_what_is_published_and_nothing_else(name: str) -> None:
    right, wrong = CHECKS[name]
    right()
    with pytest.raises(AssertionError, match=r"is .*, not "):
        wrong()


def test_a_training_notices_each_difference() -> None:
    training = testing.tiny(plan=(1, 1, 1), schedule="pipedream", ema=0.9, clip_grad_norm=0.1, clip="local")
    trained = training.check()
    assert set(trained.optimizer) == set(dict(training.make_model().named_parameters()))
    for change in ({"seed": 4}, {"schedule": "pipedream_vertical_sync"}, {"clip_grad_norm": 0.2}, {"ema": 0.8}):
        with pytest.raises(AssertionError):
            replace(training, **change).assert_serial(trained)
    wrong = testing.Reads(lambda s, k: max(0, k - (3 - s)))
    with pytest.raises(AssertionError, match="the loss of minibatch"):
        training.assert_serial(trained, reads=wrong)
    with pytest.raises(AssertionError, match="drains at"):
        testing.assert_equal(replace(trained, drains=[3]), trained)
    other = {name: {key: value + 1 for key, value in state.items()} for name, state in trained.optimizer.items()}
    with pytest.raises(AssertionError, match=r"the optimizer's .*momentum_buffer is not the same"):
        testing.assert_equal(replace(trained, optimizer=other), trained)
    with pytest.raises(ValueError, match="give two"):
        training.resumed(Path(), (4,))


@pytest.mark.processes
def test_processes_give_the_bits_of_one() -> None:
    training = testing.tiny(plan=(1, 1), schedule="1f1b", microbatches=2)
    several, alone = training.pipeline(2), training.pipeline()
    testing.assert_equal(several, alone)
    assert set(several.optimizer) == set(alone.optimizer), "also those of the other process"


class Outside(torch.nn.Module):
    """A weight and a buffer that are in no layer's module, but in what the forward does between two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)
        self.factor = torch.nn.Parameter(torch.full((6,), 2.0))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.seen.add_(len(value))
        return self.last(torch.tanh(self.first(value)) * self.factor)


class Checkpointed(torch.nn.Module):
    """Runs its layers again in the backward, which is to read the weights of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, value, use_reentrant=False)


def test_a_backward_that_runs_layers_again_has_the_forwards_weights() -> None:
    model = torch.nn.Sequential(Checkpointed(), Checkpointed(), torch.nn.Linear(4, 3)).double()
    data = [(torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))) for _ in range(6)]
    loss = torch.nn.functional.cross_entropy
    testing.Training(model=model, data=data, loss=loss, optimizer=sgd, schedule="pipedream").check()


def test_weights_outside_of_layers_train_too() -> None:
    data, model = [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(6)], Outside()
    loss = torch.nn.functional.cross_entropy
    trained = testing.Training(model=model, data=data, loss=loss, optimizer=sgd, schedule="pipedream").check()
    assert not torch.equal(trained.state["factor"], model.factor)
    passes = testing.Passes(model, [("first",), ("last",)], lambda output, batch: (loss(output, batch[1]), 1.0))
    with pytest.raises(AssertionError, match="no stage has the weights factor: give their names"):
        testing.Loop(passes, data, sgd, {0: testing.MethodRules(testing.Reads(lambda s, k: k))}).run()
