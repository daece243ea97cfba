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

from pipedream import testing

ROOT = Path(__file__).parents[1]
PLAIN = {"lr": 0.05, "momentum": 0.9}


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


@pytest.mark.processes
def test_processes_give_the_bits_of_one() -> None:
    training = testing.tiny(plan=(1, 1), schedule="1f1b", microbatches=2)
    several, alone = training.pipeline(2), training.pipeline()
    testing.assert_equal(several, alone)
    assert set(several.optimizer) == set(alone.optimizer), "also those of the other process"
