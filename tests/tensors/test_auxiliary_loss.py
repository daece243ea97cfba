"""Auxiliary losses count in a pipeline as in plain PyTorch, and in a plain loop as if they were written out."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import delayed
import pytest
import torch
import torch.nn.functional as F
from built import Built
from cases import ASYNCHRONOUS, FLUSHING, Case, check, run
from marks import slow, thinned
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import assert_equal, batches, loop, mse, piped

import pipedream as pd

DATA = batches()
PARTS = {"gpipe": 3, "zb_h2": 5, "pipedream_2bw": 3, "paci": 2, "pipemare": 2, "xpipe": 2, "chimera_doubled": 8}
QUICK = ("pipedream", "paci")


def make_case(schedule: str, **more: Any) -> Case:
    parts = PARTS.get(schedule, 4 if schedule in FLUSHING else 3 if "timeprest" in schedule else None)
    settings = {"stages": 4 if schedule in FLUSHING else 3, "microbatches": parts, "evaluate_at": (4,)} | more
    return Case("auxiliary", schedule, **settings)


OTHERS = [
    make_case("1f1b", recompute=True, scheduled=True, clip_grad_norm=0.1),
    slow(make_case("zb_h1", recompute=True)),
    slow(make_case("spectrain", options=(("backward_rule", "recompute"),))),
    make_case("1f1b", stages=2, replicas=(2, 1)),
    slow(make_case("pipedream", stages=2, replicas=(2, 1))),
    make_case("zb_h1", stages=1),
]


def penalise(self: nn.Module, x: Tensor) -> Tensor:
    """A layer whose outputs are to be small; outside of a pipeline the loss may be kept for a sum written out."""
    output = self.linear(x)
    return self.adds(output, output.square().mean()).tanh()


def add_between(self: nn.Module, x: Tensor) -> Tensor:
    """Adds a loss in its own code, between the calls of its modules."""
    x = self.a(x)
    output = self.b(x)
    x = x + self.adds(output, (output * x).mean().square()).tanh()
    return x + self.c(x)


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def penalised() -> nn.Module:
    torch.manual_seed(0)
    penalises = lambda: Built(penalise, linear=linear(), adds=pd.add_auxiliary_loss)  # noqa: E731
    return nn.Sequential(penalises(), linear(), penalises(), linear()).double()


def residual() -> nn.Module:
    torch.manual_seed(0)
    return Built(add_between, a=linear(), b=linear(), c=linear(), adds=pd.add_auxiliary_loss).double()


def written_out(model: nn.Module) -> dict[str, Tensor]:
    """Trains in a plain loop with the sum of all losses; returns the state."""
    losses: list[Tensor] = []
    for module in model.modules():
        if hasattr(module, "adds"):
            module.adds = lambda value, loss: (losses.append(loss), value)[1]

    def whole(output: Tensor, targets: Tensor) -> Tensor:
        terms = [F.mse_loss(output, targets), *losses]
        losses.clear()
        return sum(terms)

    return loop(model, DATA, loss=whole).state


@pytest.mark.parametrize(
    ("kind", "schedule", "m", "fits"),
    [(penalised, "1f1b", 2, True), (residual, "1f1b", 1, True), (penalised, "zb_h1", 4, False)],
)
def test_a_pipeline_equals_the_sum_written_out(
    kind: Callable[[], nn.Module], schedule: str, m: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the model does not fit, each stage compares its first microbatch."""
    monkeypatch.setattr("pipedream.services.first_minibatch.comparison.Comparison._fits", lambda self, reader: fits)
    actual = piped(kind(), mse, DATA, cuts=(1, 2), microbatches=m, schedule=schedule, grad_scaler=256.0)
    assert_equal(actual, written_out(kind()))


def test_a_plain_loop_that_accumulates_scales_them() -> None:
    whole, other = penalised(), penalised()
    x, y = DATA[0]
    mse(whole(x), (x, y)).backward()
    for xs, ys, share in ((x[:2], y[:2], 0.25), (x[2:], y[2:], 0.75)):
        with pd.auxiliary_loss_scale(share):
            (mse(other(xs), (xs, ys)) * share).backward()
    for a, b in zip(whole.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_the_scale_is_that_of_the_backward_and_is_restored() -> None:
    w = torch.ones(2, requires_grad=True)
    value = pd.add_auxiliary_loss(w * 2, w.sum())

    def differentiate() -> list[float]:
        return torch.autograd.grad(value.sum(), w, retain_graph=True)[0].tolist()

    for scale in (0.5, 0.0, 1.0):
        with pd.auxiliary_loss_scale(3.0), pd.auxiliary_loss_scale(scale):
            assert differentiate() == [2.0 + scale] * 2
    with pytest.raises(ZeroDivisionError), pd.auxiliary_loss_scale(2.0):
        1 / 0  # noqa: B018
    assert differentiate() == [3.0] * 2
    with ThreadPoolExecutor(1) as threads, pd.auxiliary_loss_scale(0.5):  # as autograd's for the backwards of a GPU
        assert threads.submit(differentiate).result() == [2.5] * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(reentrant: bool) -> None:
    model, x = penalised(), DATA[0][0].clone().requires_grad_()
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_the_value_is_unchanged_and_may_be_written_in_place() -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    product = x * w
    value = pd.add_auxiliary_loss(product, w.square().sum())
    assert torch.equal(value, product)
    value.add_(1).relu_().sum().backward()
    (expected,) = torch.autograd.grad((x * w + 1).relu().sum() + w.square().sum(), w)
    torch.testing.assert_close(w.grad, expected)
    saved = (x * w).tanh()
    pd.add_auxiliary_loss(saved, w.sum()).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_what_is_not_read_does_not_count_and_a_loss_alone_may_require_a_gradient() -> None:
    w = torch.ones(2, requires_grad=True)
    pd.add_auxiliary_loss(w * 2, w.sum())
    assert torch.autograd.grad((w * 3).sum(), w)[0].tolist() == [3.0, 3.0]
    with torch.no_grad():
        assert not pd.add_auxiliary_loss(w * 2, w.sum()).requires_grad
    pd.add_auxiliary_loss(torch.zeros(2), w.double().sum() * 4).sum().backward()
    assert w.grad.tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    ("value", "loss", "what"),
    [
        (torch.ones(2, dtype=torch.long), torch.ones(()), r"a tensor of torch.int64 of shape \(2,\) as its value"),
        ((torch.ones(2),), torch.ones(()), "a tuple as its value"),
        (torch.ones(2), torch.ones(2), r"a tensor of torch.float32 of shape \(2,\) as its loss"),
        (torch.ones(2), 0.5, "a float as its loss"),
    ],
)
def test_other_arguments_are_refused(value: Any, loss: Any, what: str) -> None:
    with pytest.raises(TypeError, match=what):
        pd.add_auxiliary_loss(value, loss)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch._dynamo causes some
def test_a_compiled_backward_reads_the_scale_each_time() -> None:
    compiled = piped(penalised(), mse, DATA, cuts=(1, 2), microbatches=2, compile="aot_eager", check=False)
    assert_equal(compiled, written_out(penalised()))


@pytest.mark.parametrize(
    "case",
    [
        *(make_case(n) if n in QUICK else slow(make_case(n)) for n in (*FLUSHING, *ASYNCHRONOUS, *delayed.PAPERS)),
        *thinned(OTHERS),
    ],
    ids=str,
)
def test_every_method_trains_them_as_plain_pytorch(case: Case) -> None:
    """There the model carries them to the loss, as a column of its output."""
    check(case, run(case), 1e-9 if case.schedule in delayed.PAPERS else None)
