"""What the runtime costs is measured by its own run: in one process, over several, and for a profile."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loaders import seed_all
from marks import slow
from processes import results
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pipedream as pd
from pipedream.apps.training import job
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.services.probe import calibration
from pipedream.services.probe.probe import measure_runtime


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_a_single_process_measures_itself_once() -> None:
    seed_all(0)
    expected = drawn()
    seed_all(0)
    measured = measure_runtime()
    assert drawn() == expected, "the user's generators were drawn from"
    assert measure_runtime() is measured
    assert measured.costs.op_s + measured.costs.message_s + measured.costs.update_s > 0
    assert measured.costs.load_s == 0
    cluster = measured.on_links(pd.Cluster.local(2))
    assert cluster.link(0)[1] == 0.0
    assert cluster.memory_bytes == pd.Cluster.local(2).memory_bytes


def test_other_costs_are_processor_time_of_all_threads_outside_of_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that waits for its link takes none; one of another thread does."""
    now = SimpleNamespace(perf_counter=0.0, thread_time=0.0, process_time=0.0)
    clocks = {clock: partial(getattr, now, clock) for clock in vars(now)}
    monkeypatch.setattr(calibration, "time", SimpleNamespace(**clocks))

    def spend(seconds: float, *clocks: str) -> None:
        for clock in ("perf_counter", *clocks):
            setattr(now, clock, getattr(now, clock) + seconds)

    meter = calibration._Meter()
    recorders = [meter.make_recorder(rank, torch.device("cpu")) for rank in range(2)]
    for index in range(6):
        for rank, recorder in enumerate(recorders):
            start = recorder.mark()
            spend(2e-3, "thread_time", "process_time")
            recorder.note("F", rank, index, start)
        spend(4e-3, "process_time")  # another thread
        spend(5e-3)
    assert meter.measure_other_s(range(6)) == pytest.approx(4e-3)


def measured() -> tuple[RuntimeCosts, tuple[float, float]]:
    runtime = measure_runtime()
    return runtime.costs, runtime.on_links(pd.Cluster.flat(2)).link(0)


@pytest.mark.parametrize("workers", [2, slow(3)])
def test_processes_measure_their_messages_and_agree(workers: int) -> None:
    first, *others = results(measured, workers)
    assert others == [first] * (workers - 1)
    costs, (bandwidth, latency_s) = first
    assert costs.op_s + costs.message_s + costs.update_s > 0, "differences of times; a busy machine may make one 0"
    assert bandwidth > 0
    assert latency_s >= 0


@pytest.mark.slow
def test_a_profile_has_the_runtimes_costs_unless_nothing_was_run() -> None:
    model, sample = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.rand(8, 4)
    assert pd.profile(model, sample, runs=1).runtime == measure_runtime().costs
    assert pd.profile(model, sample, device="meta").runtime == RuntimeCosts()


class Draws(TensorDataset):
    """Draws for each sample."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        image, label = super().__getitem__(index)
        return image + torch.rand(4), label


def recipe_of(last: nn.Module, data: Any) -> pd.Recipe:
    model = nn.Sequential(nn.Linear(4, 4), last)
    return pd.Recipe(model, nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1), data)


@pytest.mark.parametrize("processes", [0, 1])
def test_a_recipe_adds_the_time_of_its_loader(processes: int) -> None:
    data = Draws(torch.rand(16, 4), torch.rand(16, 4))
    recipe = recipe_of(nn.ReLU(), DataLoader(data, batch_size=8, num_workers=processes))
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    load_s = recipe.load_s()
    assert torch.equal(torch.rand(()), expected)
    assert (load_s > 0) == (processes == 0), "processes of its own load ahead"
    if processes == 0:
        assert job.profile_recipe(recipe, runs=1).runtime.load_s > 0


def test_what_was_measured_with_a_plan_is_not_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor twice in a run: one made eleven batches before the first that it trained with."""
    measured, timed = RuntimeCosts(op_s=1e-5), []
    monkeypatch.setattr(job, "_measure_runtime_costs", lambda recipe, device: timed.append(recipe) or measured)
    recipe = recipe_of(nn.Linear(4, 4), [(torch.rand(8, 4), torch.rand(8, 4))])
    planned = pd.plan(pd.profile(recipe.model, torch.rand(8, 4), runs=1), pd.Cluster.flat(2))
    plans_costs = RuntimeCosts(load_s=2e-5)
    plans = None, replace(planned, runtime=RuntimeCosts()), replace(planned, runtime=plans_costs)
    for number, (plan, expected) in enumerate(zip(plans, (measured, measured, plans_costs), strict=True)):
        out = tmp_path / str(number)
        pd.run(lambda: recipe, plan=plan, minibatches=1, checkpoint_every=0, check=False, quiet=True, out=out)
        assert pd.Plan.load(out / "plan.json").runtime == expected
    assert len(timed) == 2


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_a_recipes_targets_are_where_its_model_is_profiled(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """On a GPU the loss got the model's output from there and the targets from the CPU."""
    places: list[str] = []

    def score(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        places.extend(tensor.device.type for tensor in batch)
        return nn.functional.mse_loss(output, output)

    def profile_model(*model: Any, loss: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> pd.Profile:
        loss(torch.rand(8, 4))
        return pd.Profile.of_chain((pd.LayerProfile(1.0, 1.0, 8, 8),))

    monkeypatch.setattr(job, "profile_model", profile_model)
    monkeypatch.setattr(job, "_measure_runtime_costs", lambda recipe, device: RuntimeCosts())
    monkeypatch.setattr("pipedream.services.joining.joining.process_device", lambda device: torch.device("meta"))
    data = [(torch.rand(8, 4), torch.rand(8, 4))]
    job.profile_recipe(pd.Recipe(nn.Linear(4, 4), score, partial(torch.optim.SGD, lr=0.1), data), device=device)
    assert places == (["meta"] * 2 if device == "cuda" else ["cpu"] * 2)


CALLS: list[int] = []


class CountsCalls(nn.Linear):
    """A layer that counts its forwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append(1)
        return super().forward(x)


def count_calls(on_all_ranks: bool) -> tuple[int, str]:
    profile = pd.profile(CountsCalls(2, 2), torch.randn(4, 2), runs=1, on_all_ranks=on_all_ranks)
    return len(CALLS), profile.to_json()


@pytest.mark.processes
def test_all_ranks_run_the_layers_only_if_asked() -> None:
    """Else a model whose activations fit one process of a machine might not fit as many as there are ranks."""
    for on_all_ranks in (False, True):
        (calls, text), (other_calls, other_text) = results(count_calls, 2, on_all_ranks)
        assert (calls > 0, other_calls) == (True, calls if on_all_ranks else 0)
        assert text == other_text
