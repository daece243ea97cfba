"""The first minibatch is compared with the model, run plainly on the same data."""

from __future__ import annotations

import copy
import logging
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import processes
import pytest
import torch
import torch.nn.functional as F
from first_minibatches import SGD, assert_equal, batches, piped, plain, plan_of
from torch import Tensor, nn

import pipedream as pd
import pipedream.pipeline
from pipedream import Pipeline
from pipedream.capture.compare import fingerprint
from pipedream.runtime.data.splitter import FirstMinibatch
from pipedream.runtime.session.comparer import Reference
from pipedream.runtime.session.comparison import LayersCheck
from pipedream.runtime.session.reference_run import ReferenceRun
from pipedream.runtime.stage.stage_module import StageModule
from tests.runtime.test_as_plain_pytorch import listed, reading, shares

DATA = batches()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def mse(output: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(output, batch[1])


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_a_module_may_say_that_it_mixes_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Centred(), nn.Linear(4, 4)).double()
    with pytest.raises(pd.PipelineError, match="it computes with several samples at once"):
        piped(model, mse, DATA, microbatches=2)
    model[1].mixes_samples = True
    warnings: list[str] = []
    monkeypatch.setattr(logging.getLogger("pipedream"), "warning", lambda text, *args: warnings.append(text % args))
    piped(model, mse, DATA, microbatches=2)
    assert any("'1' computes with several samples at once, as its mixes_samples says" in text for text in warnings)


class Products(nn.Module):
    """Has no modules inside that could be called."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.eye(4), torch.ones(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[0] @ self.weights[1]


def test_a_model_without_calls_of_modules_passes() -> None:
    model = nn.Sequential(Products()).double()
    assert_equal(piped(model, mse, DATA, cuts=(), schedule="1f1b"), plain(model, mse, DATA))


def test_a_loss_that_reads_the_model_is_refused() -> None:
    model = net()
    plan = plan_of(model, DATA[0][0], (1,))

    def loss(output: Tensor, batch: Any) -> Tensor:
        return mse(output, batch) + sum(parameter.square().sum() for parameter in model.parameters())

    with (
        pytest.raises(pd.PipelineError, match=r"another gradient of '2\.weight'"),
        Pipeline(model, plan, schedule="gpipe", microbatches=1, loss=loss, optimizer=SGD, check=True) as pipeline,
    ):
        list(pipeline.train(DATA))


class OwnLoss(nn.Module):
    """Returns its loss, made of its output and the targets by a function."""

    def __init__(self, combine: Callable[[Tensor, Tensor], Tensor], between: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(4, 4), between(), nn.Linear(4, 4)
        self.combine = combine

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.combine(self.last(self.between(self.first(x))), y)


class Applies(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def both_losses(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.mse_loss(output, y), output.square().mean()


def balanced(output: Tensor, y: Tensor, *, read: Callable[[Tensor], Any] = Tensor.detach) -> Tensor:
    a, b = both_losses(output, y)
    return a + b * read(a / b)


def balanced_without_graph(output: Tensor, y: Tensor) -> Tensor:
    a, b = both_losses(output, y)
    with torch.no_grad():
        ratio = a / b
    return a + b * ratio


def balanced_by_gradients(output: Tensor, y: Tensor) -> Tensor:
    """Counts two losses so that their gradients have one norm; its value is that of the first."""
    a, b = both_losses(output, y)
    norm_a, norm_b = (torch.autograd.grad(loss, output, retain_graph=True)[0].norm() for loss in (a, b))
    return a + (b - b.detach()) * (norm_a / norm_b)


def scale_of_batch(x: Tensor) -> Tensor:
    """Changes no value, but gradients by a statistic of the batch."""
    return x.detach() + (x - x.detach()) / x.detach().std()


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / ctx.saved_tensors[0].norm()


def with_hook(x: Tensor) -> Tensor:
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient / gradient.norm())
    return x


def own_mse(output: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(output, y)


def of_detached_samples(output: Tensor, y: Tensor) -> Tensor:
    """A weight of each sample that is detached, as in a focal loss."""
    losses = (output - y).square().mean(1)
    return (losses * (1 - torch.exp(-losses.detach()))).mean()


def penalised(output: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(pipedream.add_auxiliary_loss(output, output.mean().square()), y)


SCALED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[], nn.Module]]] = {
    "by another": (balanced, nn.Tanh),
    "by another's number": (partial(balanced, read=Tensor.item), nn.Tanh),
    "by another's data": (partial(balanced, read=lambda ratio: ratio.data), nn.Tanh),
    "by another without a graph": (balanced_without_graph, nn.Tanh),
    "by itself": (lambda output, y: own_mse(output, y) / own_mse(output, y).detach(), nn.Tanh),
    "by gradients": (balanced_by_gradients, nn.Tanh),
    "by a statistic": (lambda output, y: own_mse(scale_of_batch(output), y), nn.Tanh),
    "by a statistic of a layer": (own_mse, partial(Applies, scale_of_batch)),
    "by a function's backward": (own_mse, partial(Applies, ScaledGradient.apply)),  # type: ignore[arg-type]
    "by a hook": (own_mse, partial(Applies, with_hook)),
    "with dropout": (balanced, partial(nn.Dropout, 0.3)),
    "with BatchNorm": (balanced, partial(nn.BatchNorm1d, 4)),
}
UNSCALED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[], nn.Module]]] = {
    "a mean": (own_mse, nn.Tanh),
    "a sum": (lambda output, y: F.mse_loss(output, y, reduction="sum") * 0.01, nn.Tanh),
    "a number": (lambda output, y: own_mse(output, y) * 3 + output.abs().mean(), nn.Tanh),
    "samples, detached": (of_detached_samples, nn.Tanh),
    "straight through": (own_mse, partial(Applies, lambda x: x + (x.round() - x).detach())),
    "a detached target": (lambda output, y: own_mse(output, y) + own_mse(output, output.detach() * 2), nn.Tanh),
    "an auxiliary loss": (penalised, nn.Tanh),
}
NORMALISED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[], nn.Module]]] = {
    "dropout": (own_mse, partial(nn.Dropout, 0.3)),
    "BatchNorm": (own_mse, partial(nn.BatchNorm1d, 4)),
}


def train_with_own_loss(
    kind: tuple[Callable[[Tensor, Tensor], Tensor], Callable[[], nn.Module]], microbatches: int, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns what a pipeline and a plain loop train."""
    torch.manual_seed(0)
    model = OwnLoss(*kind).to(dtype)
    data = [(x.to(dtype), y.to(dtype)) for x, y in DATA]
    optimizer = SGD((other := copy.deepcopy(model)).parameters())
    actual = piped(model, None, data, sample=data[0], microbatches=microbatches, cuts=(2,))
    for x, y in data:
        optimizer.zero_grad()
        other(x, y).backward()
        optimizer.step()
    return actual, other.state_dict()


@pytest.mark.parametrize("name", SCALED)
def test_a_detached_scale_in_the_models_own_loss_is_refused(name: str) -> None:
    with pytest.raises(pd.PipelineError, match=r"its gradient is not, .* train with microbatches=1"):
        train_with_own_loss(SCALED[name], 4, torch.float64)
    if name != "with dropout":  # masks are the pipeline's own
        assert_equal(*train_with_own_loss(SCALED[name], 1, torch.float64))


@pytest.mark.parametrize("name", UNSCALED)
@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_a_loss_that_is_a_mean_over_samples_is_accepted(name: str, microbatches: int) -> None:
    actual, expected = train_with_own_loss(UNSCALED[name], microbatches, torch.float64)
    if name != "an auxiliary loss":  # which counts by microbatch
        assert_equal(actual, expected)


@pytest.mark.parametrize("name", [*UNSCALED, *NORMALISED])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rounding_is_no_detached_scale(name: str, dtype: torch.dtype) -> None:
    train_with_own_loss((UNSCALED | NORMALISED)[name], 3, dtype)


class Stateful(nn.Module):
    """Draws, counts, and keeps what it has seen, in each way that Python has; its outputs may depend on it."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.weight = nn.Parameter(torch.eye(4))
        self.generator = torch.Generator().manual_seed(5)
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0
        self.log: list[int] = []
        self.table = {"last": 0, "inner": {"sizes": [0]}}
        self.python, self.numpy = random.Random(3), np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(len(x))
        self.table["last"] = len(x)
        self.table["inner"]["sizes"].append(len(x))  # type: ignore[index]
        self.count = self.count + 1
        noise = torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
        calls, length = (self.calls, len(self.log)) if self.reads else (1, 1)
        x = F.dropout(x @ self.weight, 0.4) + noise + calls * self.python.random() * self.numpy.random()
        return x * float(length)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "pipedream_2bw"])
def test_it_leaves_no_trace(m: int, schedule: str) -> None:
    """Weights, buffers, generators, attributes and the order of the data are those of a run without it."""
    results: list[Any] = []
    for check in (True, False):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Stateful(m == 1), nn.Linear(4, 4)).double()
        plan = plan_of(model, DATA[0][0], (3,))
        loader = torch.utils.data.DataLoader([(x, y) for x, y in DATA], batch_size=None, shuffle=True)
        hooks = [dict(module._forward_pre_hooks) for module in model.modules()]
        with Pipeline(
            model,
            plan,
            schedule=schedule,
            microbatches=m,
            loss=mse,
            optimizer=lambda named: torch.optim.AdamW(named, lr=0.1),
            check=check,
        ) as pipeline:
            losses = [done.loss for done in pipeline.train(loader, epochs=2)]
            state = pipeline.state_dict()
        assert hooks == [dict(module._forward_pre_hooks) for module in model.modules()]
        inner = model[2]
        after = inner.calls, inner.log, inner.table, inner.python.random(), inner.numpy.random()
        draws = torch.rand(3, generator=inner.generator).tolist()
        rest = torch.rand(3).tolist(), random.random(), float(np.random.rand())
        grads = [parameter.grad is None for parameter in model.parameters()]
        results.append((losses, {name: value.tolist() for name, value in state.items()}, after, draws, rest, grads))
    assert results[0] == results[1]


def test_a_gpu_gets_its_memory_back_before_its_peak_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("give back"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(f"reset {device}"))
    monkeypatch.setattr(ReferenceRun, "_make_reference", lambda self, first: Reference())
    plain_model: Any = SimpleNamespace(fingerprint=fingerprint, model=nn.Module())
    with Pipeline(net(), plan_of(net(), DATA[0][0], (1,)), schedule="gpipe", loss=mse, optimizer=SGD) as pipeline:
        local = pipeline._session.workers_here
        local.blueprint = replace(local.blueprint, device=torch.device("cuda", 0))
        run = ReferenceRun(plain_model, local)
    run.read(FirstMinibatch([], [], [], []))
    module = StageModule([], {}, torch.device("cpu"), 0)
    LayersCheck(run, 0, [], module=module).before_update({})
    assert calls == ["give back", "reset cuda:0"] * 2, "after a comparison stage by stage too"


class Mixed(nn.Module):
    """Layers that draw and count, run by a forward of its own."""

    def __init__(self, rate: float = 0.4) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(rate), nn.Linear(4, 4)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


def test_random_numbers_that_the_profile_lacks_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    for rate in (0.0, 0.4):  # of the profiled model
        warnings: list[str] = []
        monkeypatch.setattr(
            logging.getLogger("pipedream"), "warning", lambda text, *args, at=warnings: at.append(text % args)
        )
        torch.manual_seed(0)
        model = Mixed(0.4).double()
        plan = plan_of(Mixed(rate).double(), DATA[0][0], (3,))
        with Pipeline(model, plan, schedule="gpipe", microbatches=1, loss=mse, optimizer=SGD) as pipeline:
            list(pipeline.train(DATA))
        assert ("profile it as it is trained" in "".join(warnings)) is (rate == 0.0)


_RUNS: tuple[tuple[str, str, int], ...] = (
    ("mixed", "1f1b", 2),
    ("mixed", "pipedream", 1),
    ("mixed", "pipedream_2bw", 2),
    ("chain", "zb_h1", 4),
)
"""Model, method and microbatches."""


def _train(kind: str, schedule: str, microbatches: int, check: bool, free_bytes: int | None = None) -> Any:
    """Trains in this process, or as one rank of a process group; returns all that a comparison might change."""
    torch.manual_seed(1)
    random.seed(1)
    if free_bytes is not None:
        pipedream.pipeline.available_bytes = lambda *_: free_bytes  # type: ignore[attr-defined]
    builders = {
        "list": listed,
        "mixed": Mixed,
        "chain": net,
        "another stage": partial(reading, False),
        "object": shares,
    }
    model = builders[kind]().double()
    plan = plan_of(model, DATA[0][0], (3 if kind == "mixed" else 1,))
    loader = torch.utils.data.DataLoader([(x, y) for x, y in DATA], batch_size=None, shuffle=True)
    with Pipeline(
        model,
        plan,
        schedule=schedule,
        microbatches=microbatches,
        loss=mse,
        optimizer=lambda named: torch.optim.AdamW(named, lr=0.1),
        check=check,
    ) as pipeline:
        once = reversed(DATA)
        losses = [done.loss for done in pipeline.train(once)]  # of one pass
        losses += [done.loss for done in pipeline.train(loader, epochs=2)]
        losses.append(pipeline.evaluate(DATA)["loss"])
        state = pipeline.state_dict()
    assert len(losses) == 3 * len(DATA) + 1
    grads = [parameter.grad is None for parameter in model.parameters()]
    trained = {name: value.tolist() for name, value in state.items()}
    return losses, trained, grads, torch.rand(3).tolist(), random.random()


def _train_all(check: bool, free_bytes: int | None = None) -> list[Any]:
    return [_train(*run, check, free_bytes) for run in _RUNS]


@pytest.mark.processes
@pytest.mark.slow
def test_processes_train_as_without_it() -> None:
    alone = processes.team(2).results(_train_all, False)
    for free_bytes in (None, 0):  # as a whole, and stage by stage
        compared = processes.team(2).results(_train_all, True, free_bytes)
        for rank in range(2):
            for run, actual, expected in zip(_RUNS, compared[rank], alone[rank], strict=True):
                assert actual == expected, (run, rank)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "free_bytes", "words"),
    [
        ("list", 0, "rank 1, the comparison of .* stage 1 has another gradient of '1.linear.weight'.*through a list"),
        ("another stage", None, "rank 1, stage 1, .*in the module '2'.*a weight or buffer of another stage"),
        ("object", None, "rank ., the comparison of the first minibatch .*through Python objects"),
    ],
)
def test_processes_refuse_what_they_do_not_see(kind: str, free_bytes: int | None, words: str) -> None:
    for end in processes.launch(_train, 2, kind, "1f1b", 1, True, free_bytes):
        assert re.search(words, str(end.error).replace(chr(10), " ")), end.error


class Hungry(nn.Linear):
    """Finds no memory, once."""

    fails_in = ""

    def forward(self, x: Tensor) -> Tensor:
        self.find_memory("forward")
        return _HungryBackward.apply(super().forward(x))  # type: ignore[no-any-return, no-untyped-call]

    @classmethod
    def find_memory(cls, where: str) -> None:
        if cls.fails_in == where:
            cls.fails_in = ""
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class _HungryBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        Hungry.find_memory("backward")
        return gradient


def _train_hungry(check: bool, fails_in: str) -> Any:
    """Trains as one rank of two, each of which compares its own layers."""
    warnings: list[str] = []
    logging.getLogger("pipedream").warning = lambda text, *args: warnings.append(text % args)  # type: ignore
    pipedream.pipeline.available_bytes = lambda *_: 0  # type: ignore[attr-defined]
    torch.manual_seed(1)
    model = nn.Sequential(Hungry(4, 4), nn.Dropout(0.3), Hungry(4, 4)).double()
    plan = plan_of(model, DATA[0][0], (1,))
    Hungry.fails_in = fails_in
    with Pipeline(model, plan, schedule="1f1b", microbatches=2, loss=mse, optimizer=SGD, check=check) as pipeline:
        losses = [done.loss for done in pipeline.train(DATA)]
        state = pipeline.state_dict()
    assert not Hungry.fails_in
    trained = {name: value.tolist() for name, value in state.items()}
    return (losses, trained), [text for text in warnings if "the memory does not suffice" in text]


@pytest.mark.processes
@pytest.mark.slow
def test_a_comparison_without_memory_ends_and_training_does_not() -> None:
    alone = processes.results(_train_hungry, 2, False, "")
    for fails_in in ("forward", "backward"):
        for rank, (actual, warnings) in enumerate(processes.results(_train_hungry, 2, True, fails_in)):
            assert actual == alone[rank][0]
            assert len(warnings) == 1
            assert warnings[0].startswith(f"the first microbatch of stage {rank} is not compared")
