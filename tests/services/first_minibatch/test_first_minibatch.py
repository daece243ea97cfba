"""The first minibatch is compared with the model, run plainly on the same data."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import processes
import pytest
import torch
import torch.nn.functional as F
from built import Built
from loaders import seed_all
from marks import thinned
from torch import Tensor, nn
from training import SGD, assert_equal, batches, loop, mse, piped, plan_of

import pipedream as pd
from pipedream.runtime.activity import Activity
from pipedream.services.first_minibatch import comparison, plain_model, reference_run
from tests.runtime.test_as_plain_pytorch import listed, reading, shares

DATA = batches()
ADAMW = partial(torch.optim.AdamW, lr=0.1)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def pipeline(model: nn.Module, cut: int = 1, profiled: nn.Module | None = None, **options: Any) -> pd.Pipeline:
    options = {"schedule": "gpipe", "microbatches": 1, "loss": mse, "optimizer": SGD} | options
    return pd.Pipeline(model, plan_of(profiled or model, DATA[0][0], (cut,)), **options)


def test_a_module_may_say_that_it_mixes_samples(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Built(lambda _, x: x - x.mean(0)), nn.Linear(4, 4)).double()
    with pytest.raises(pd.PipelineError, match="it computes with several samples at once"):
        piped(model, mse, DATA, microbatches=2)
    model[1].mixes_samples = True
    piped(model, mse, DATA, microbatches=2)
    assert "'1' computes with several samples at once, as its mixes_samples says" in caplog.text


def applies(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Built(lambda _, x: function(x))


def balanced(read: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a sum of two losses, of which the second is scaled by what is read of both."""

    def combine(output: Tensor, y: Tensor) -> Tensor:
        a, b = F.mse_loss(output, y), output.square().mean()
        return a + b * read(a, b)

    return combine


def balanced_by_gradients(output: Tensor, y: Tensor) -> Tensor:
    """Counts two losses so that their gradients have one norm; its value is that of the first."""
    a, b = F.mse_loss(output, y), output.square().mean()
    norm_a, norm_b = (torch.autograd.grad(loss, output, retain_graph=True)[0].norm() for loss in (a, b))
    return a + (b - b.detach()) * (norm_a / norm_b)


def scale_of_batch(x: Tensor) -> Tensor:
    """Changes no value, but gradients by a statistic of the batch."""
    return x.detach() + (x - x.detach()) / x.detach().std()


def with_hook(x: Tensor) -> Tensor:
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient / gradient.norm())
    return x


def of_detached_samples(output: Tensor, y: Tensor) -> Tensor:
    """A weight of each sample that is detached, as in a focal loss."""
    losses = (output - y).square().mean(1)
    return (losses * (1 - torch.exp(-losses.detach()))).mean()


Kind = tuple[Callable[[Tensor, Tensor], Tensor], Callable[[], nn.Module]]
SCALED: dict[str, Kind] = {
    "by another": (balanced(lambda a, b: (a / b).detach()), nn.Tanh),
    "by another's number": (balanced(lambda a, b: (a / b).item()), nn.Tanh),
    "by itself": (lambda output, y: F.mse_loss(output, y) / F.mse_loss(output, y).detach(), nn.Tanh),
    "by gradients": (balanced_by_gradients, nn.Tanh),
    "by a statistic": (lambda output, y: F.mse_loss(scale_of_batch(output), y), nn.Tanh),
    "by a statistic of a layer": (F.mse_loss, applies(scale_of_batch)),
    "by a hook": (F.mse_loss, applies(with_hook)),
    "with dropout": (balanced(lambda a, b: (a / b).detach()), partial(nn.Dropout, 0.3)),
    "with BatchNorm": (balanced(lambda a, b: (a / b).detach()), partial(nn.BatchNorm1d, 4)),
}
UNSCALED: dict[str, Kind] = {
    "a mean": (F.mse_loss, nn.Tanh),
    "a sum": (lambda output, y: F.mse_loss(output, y, reduction="sum") * 0.01, nn.Tanh),
    "a number": (lambda output, y: F.mse_loss(output, y) * 3 + output.abs().mean(), nn.Tanh),
    "samples, detached": (of_detached_samples, nn.Tanh),
    "straight through": (F.mse_loss, applies(lambda x: x + (x.round() - x).detach())),
    "a detached target": (lambda output, y: F.mse_loss(output, y) + F.mse_loss(output, output.detach() * 2), nn.Tanh),
    "an auxiliary loss": (lambda z, y: F.mse_loss(pd.add_auxiliary_loss(z, z.mean().square()), y), nn.Tanh),
    "dropout": (F.mse_loss, partial(nn.Dropout, 0.3)),
    "BatchNorm": (F.mse_loss, partial(nn.BatchNorm1d, 4)),
}


def train_with_own_loss(kind: Kind, microbatches: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Returns what a pipeline and a plain loop train, of a model that makes its loss of its output and the targets."""
    torch.manual_seed(0)
    combine, between = kind
    parts = {"first": nn.Linear(4, 4), "between": between(), "last": nn.Linear(4, 4)}
    model = Built(lambda self, x, y: combine(self.last(self.between(self.first(x))), y), **parts).to(dtype)
    data = [(x.to(dtype), y.to(dtype)) for x, y in DATA]
    actual = piped(model, None, data, sample=data[0], microbatches=microbatches, cuts=(2,))
    return [actual, loop(model, [(batch, None) for batch in data], loss=lambda output, _: output).state]


@pytest.mark.parametrize("name", thinned(SCALED))
def test_a_detached_scale_in_the_models_own_loss_is_refused(name: str) -> None:
    with pytest.raises(pd.PipelineError, match=r"its gradient is not, .* train with microbatches=1"):
        train_with_own_loss(SCALED[name], 4, torch.float64)
    if name != "with dropout":  # masks are the pipeline's own
        assert_equal(*train_with_own_loss(SCALED[name], 1, torch.float64))


@pytest.mark.parametrize(
    ("name", "split"),
    thinned(product(UNSCALED, ((2, torch.float64), (4, torch.float64), (3, torch.float32), (3, torch.bfloat16))), 5),
)
def test_a_mean_over_samples_is_accepted_however_it_is_rounded(name: str, split: tuple[int, torch.dtype]) -> None:
    actual, expected = train_with_own_loss(UNSCALED[name], *split)
    if split[1] == torch.float64 and name not in ("an auxiliary loss", "dropout", "BatchNorm"):
        assert_equal(actual, expected)


def run_stateful(self: Any, x: Tensor) -> Tensor:
    """Draws, counts, and keeps what it has seen, in each way that Python has; its outputs may depend on it."""
    self.calls += 1
    self.log.append(len(x))
    self.table["last"] = len(x)
    self.table["inner"]["sizes"].append(len(x))
    self.count = self.count + 1
    noise = torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
    calls, length = (self.calls, len(self.log)) if self.reads else (1, 1)
    x = F.dropout(x @ self.weight, 0.4) + noise + calls * self.python.random() * self.numpy.random()
    return x * float(length)


def stateful(reads: bool) -> nn.Sequential:
    kept = {"calls": 0, "log": [], "table": {"last": 0, "inner": {"sizes": [0]}}}
    drawn = {"python": random.Random(3), "numpy": np.random.default_rng(3), "generator": torch.Generator()}
    tensors = {"weight": nn.Parameter(torch.eye(4)), "count": nn.Buffer(torch.zeros(()))}
    layers = nn.Linear(4, 4), nn.BatchNorm1d(4), Built(run_stateful, reads=reads, **kept, **drawn, **tensors)
    return nn.Sequential(*layers, nn.Linear(4, 4)).double()


def mixed(rate: float = 0.4) -> nn.Module:
    """Returns layers that draw and count, run by a forward of its own."""
    parts = {"first": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4), "drop": nn.Dropout(rate), "last": nn.Linear(4, 4)}
    return Built(lambda self, x: x + self.last(self.drop(torch.tanh(self.norm(self.first(x))))), **parts).double()


def _train(kind: str, schedule: str, microbatches: int, check: bool, free_bytes: int | None = None) -> Any:
    """Trains in this process, or as one rank of a process group; returns all that a comparison might change."""
    seed_all(1)
    available = plain_model.available_bytes if free_bytes is None else lambda *_: free_bytes
    parts = {"list": listed, "mixed": mixed, "chain": net, "another stage": partial(reading, False), "object": shares}
    model = (parts | {"stateful": partial(stateful, microbatches == 1)})[kind]()
    hooks = [dict(module._forward_pre_hooks) for module in model.modules()]
    how = {"schedule": schedule, "microbatches": microbatches, "check": check, "optimizer": ADAMW}
    with (
        mock.patch.object(plain_model, "available_bytes", available),
        pipeline(model, 3 if kind in ("mixed", "stateful") else 1, **how) as trained,
    ):
        losses = [done.loss for done in trained.train(reversed(DATA))]  # of one pass
        shuffled = torch.utils.data.DataLoader([*DATA], batch_size=None, shuffle=True)
        losses += [done.loss for done in trained.train(shuffled, epochs=2)]
        losses.append(trained.evaluate(DATA)["loss"])
        state = {name: value.tolist() for name, value in trained.state_dict().items()}
    assert len(losses) == 3 * len(DATA) + 1
    assert hooks == [dict(module._forward_pre_hooks) for module in model.modules()]
    grads = [parameter.grad is None for parameter in model.parameters()]
    inner = [module for module in model.modules() if hasattr(module, "calls")]
    kept = [(each.calls, each.log, each.table, each.python.random(), each.numpy.random()) for each in inner]
    draws = [torch.rand(3, generator=generator).tolist() for generator in (None, *(m.generator for m in inner))]
    return losses, state, grads, kept, draws, random.random(), float(np.random.rand())


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "pipedream_2bw"])
def test_it_leaves_no_trace(m: int, schedule: str) -> None:
    """Weights, buffers, generators, attributes and the order of the data are those of a run without it."""
    assert _train("stateful", schedule, m, True) == _train("stateful", schedule, m, False)


_RUNS = (("mixed", "1f1b", 2), ("mixed", "pipedream", 1), ("mixed", "pipedream_2bw", 2), ("chain", "zb_h1", 4))


def _train_all(check: bool, free_bytes: int | None = None) -> list[Any]:
    return [_train(*run, check, free_bytes) for run in _RUNS]


@pytest.mark.processes
@pytest.mark.slow
def test_processes_train_as_without_it() -> None:
    alone = processes.team(2).results(_train_all, False)
    for free_bytes in (None, 0):  # as a whole, and stage by stage
        assert processes.team(2).results(_train_all, True, free_bytes) == alone


def _count_waits() -> int:
    with mock.patch.object(Activity, "waiting", autospec=True, side_effect=Activity.waiting) as waiting:
        model = net()
        options = {"schedule": "gpipe", "microbatches": 2, "loss": mse, "optimizer": SGD}
        with pd.Pipeline(model, plan_of(model, DATA[0][0], (), (2,)), **options) as replicas:
            list(replicas.train(DATA[:1]))
    return waiting.call_count


@pytest.mark.processes
def test_who_waits_for_the_reference_is_not_judged() -> None:
    assert processes.team(2).results(_count_waits) == [0, 1], "rank 0 reads, and runs the model"


def test_a_gpu_gets_its_memory_back_before_its_peak_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("give back"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(f"reset {device}"))
    run: Any = reference_run.ReferenceRun.__new__(reference_run.ReferenceRun)
    vars(run).update(runner=SimpleNamespace(device=torch.device("cuda", 0)), comparer=SimpleNamespace(), _publish=None)
    run._make_reference = lambda first: SimpleNamespace()
    run.read(SimpleNamespace(single=()))
    comparison.LayersCheck(run, 0, [], module=nn.Module()).before_update({})
    assert calls == ["give back", "reset cuda:0"] * 2, "after a comparison stage by stage too"


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_random_numbers_that_the_profile_lacks_are_not_compared(rate: float, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    with pipeline(mixed(), 3, profiled=mixed(rate)) as trained:
        list(trained.train(DATA))
    assert ("profile it as it is trained" in caplog.text) is (rate == 0.0)


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
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(lambda _: self.find_memory("backward"))
        return output

    @classmethod
    def find_memory(cls, where: str) -> None:
        if cls.fails_in == where:
            cls.fails_in = ""
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _train_hungry(check: bool, fails_in: str) -> Any:
    """Trains as one rank of two, each of which compares its own layers."""
    warnings: list[str] = []
    logging.getLogger("pipedream").warning = lambda text, *args: warnings.append(text % args)
    plain_model.available_bytes = lambda *_: 0
    torch.manual_seed(1)
    model = nn.Sequential(Hungry(4, 4), nn.Dropout(0.3), Hungry(4, 4)).double()
    with pipeline(model, schedule="1f1b", microbatches=2, check=check) as trained:
        Hungry.fails_in = fails_in
        losses = [done.loss for done in trained.train(DATA)]
        state = {name: value.tolist() for name, value in trained.state_dict().items()}
    assert not Hungry.fails_in
    return (losses, state), [text for text in warnings if "the memory does not suffice" in text]


@pytest.mark.processes
@pytest.mark.slow
def test_a_comparison_without_memory_ends_and_training_does_not() -> None:
    alone = processes.results(_train_hungry, 2, False, "")
    for fails_in in ("forward", "backward"):
        for rank, (actual, warnings) in enumerate(processes.results(_train_hungry, 2, True, fails_in)):
            assert actual == alone[rank][0]
            assert len(warnings) == 1
            assert warnings[0].startswith(f"the first microbatch of stage {rank} is not compared")


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_without_memory_for_the_model_beside_the_stages_training_continues(
    fails_in: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(Hungry(4, 4), nn.Dropout(0.3), Hungry(4, 4)).double()
    with pipeline(model, schedule="1f1b", microbatches=2) as trained:
        monkeypatch.setattr(Hungry, "fails_in", fails_in)
        assert len(list(trained.train(DATA))) == len(DATA)
    assert "not compared with the model's own: the memory does not suffice" in caplog.text
