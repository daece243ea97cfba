"""Comparing ways to train: what torch offers trains as a plain loop does, and bad input is refused at once."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import commands
import processes
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import pipedream
from pipedream.core.cold import count_warm_up
from pipedream.core.errors import RecipeError
from pipedream.core.model.profile import LayerProfile
from pipedream.core.variants import ONE_WORKER, TORCH, Variant
from pipedream.options import TrainingOptions
from pipedream.runtime import torch_baselines
from pipedream.runtime.torch_baselines import Baseline, Task, collect_batches, data_parallel, one_f_one_b, plain_loop
from pipedream.training import compare as comparing
from pipedream.training.compare_variants import (
    LinkVariants,
    accumulate_minibatches,
    add_bucket_copies,
    count_batches,
    predict_samples_per_s,
)

CPU = torch.device("cpu")
RECIPE = """
from functools import partial
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
import pipedream

def recipe(seed: int = 0) -> pipedream.Recipe:
    torch.manual_seed(seed)
    inputs = torch.randn(160, 8)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    hidden = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return pipedream.Recipe(
        model=nn.Sequential(*hidden, nn.Linear(8, 2)),
        loss=functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        train=DataLoader(data, batch_size=8),
        test=DataLoader(data, batch_size=32),
        metrics={"accuracy": lambda output, labels: (output.argmax(1) == labels).float().mean()},
        target=("loss", 0.69),
    )
"""


def recipe(seed: int = 0, **changed: Any) -> pipedream.Recipe:
    torch.manual_seed(seed)
    inputs = torch.randn(44, 8)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    hidden = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())]
    options: dict[str, Any] = {
        "model": nn.Sequential(*hidden, nn.Linear(8, 2)),
        "loss": functional.cross_entropy,
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.5),
        "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.7),
        "train": DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1)),
        "test": DataLoader(data, batch_size=20),
        "metrics": {"accuracy": lambda output, labels: (output.argmax(1) == labels).float().mean()},
        "target": ("loss", 10.0),
    }
    return pipedream.Recipe(**options | changed)


def test_plain_loop_trains_as_the_pipeline_does(tmp_path: Path) -> None:
    digits = recipe()
    figures = plain_loop(Task(digits, 0, 1, CPU)).train(2, None)
    summary = pipedream.run(
        lambda seed: recipe(), workers=1, schedule="1f1b", microbatches=1, epochs=2, out=tmp_path / "run", quiet=True
    )
    assert figures["metrics"] == pytest.approx(summary["metrics"], rel=1e-6)
    for actual, expected in zip(figures["evaluations"], summary["evaluations"], strict=True):
        assert actual == pytest.approx(expected | {"seconds": actual["seconds"]}, rel=1e-6)
    assert (figures["minibatches"], figures["samples_per_update"]) == (12, 8)
    assert figures["samples_per_s"] > 0
    assert figures["seconds_to_target"] > 0


class _Penalised(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = super().forward(x)
        return pipedream.add_auxiliary_loss(value, value.square().mean())


def test_auxiliary_losses_count_alike_in_parts() -> None:
    whole, parts = (
        plain_loop(Task(recipe(model=nn.Sequential(_Penalised(8, 8), nn.Linear(8, 2))), 0, 1, CPU, parts))
        for parts in (1, 3)
    )
    first = list(zip(whole.module.parameters(), parts.module.parameters(), strict=True))
    for a, b in first:
        b.data.copy_(a.data)
    assert parts.train(1, None)["metrics"] == pytest.approx(whole.train(1, None)["metrics"], rel=1e-5)
    for a, b in first:
        torch.testing.assert_close(a, b)


def test_minibatches_end_the_run() -> None:
    figures = plain_loop(Task(recipe(target=None), 0, 1, CPU)).train(5, 8)
    assert figures["minibatches"] == 8
    assert figures["seconds_to_target"] is None


def _make_recipe() -> pipedream.Recipe:
    # Schedule1F1B takes minibatches of one size only.
    return recipe(train=DataLoader(recipe().train.dataset, batch_size=8, drop_last=True))  # type: ignore[attr-defined]


def _train_each_way() -> dict[str, dict[str, Any]]:
    rank = torch.distributed.get_rank()

    def task(*microbatches: int) -> Task:
        return Task(_make_recipe(), rank, 2, CPU, *microbatches)

    of_stages = task(4)
    layers = [(str(number), layer) for number, layer in enumerate(of_stages.recipe.model)]
    ways: dict[str, Baseline] = {
        "shared": data_parallel(task(4)),
        "own": data_parallel(task()),
        "fp16": data_parallel(task(), sums="float16"),
        "every:1": data_parallel(task(), sums="every:1"),
        "accumulated": data_parallel(task(), 2),
        "1f1b": one_f_one_b(of_stages, [layers[:3], layers[3:]]),
    }
    return {way: baseline.train(2, None) for way, baseline in ways.items()}


@cache
def _figures() -> list[dict[str, dict[str, Any]]]:
    return processes.team(2).results(_train_each_way)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("way", "samples", "bound"),
    [
        ("shared", 8, 1e-5),
        ("1f1b", 8, 1e-5),
        ("own", 16, 1e-5),
        ("fp16", 16, 1e-2),
        ("every:1", 16, 1e-5),
        ("accumulated", 32, 1e-5),
    ],
)
def test_torchs_ways_give_the_plain_loops_weights(way: str, samples: int, bound: float) -> None:
    """What is left of an epoch of 5 minibatches of 8 is left out. SGD of averaged gradients averages SGD's steps."""
    data = recipe().train.dataset  # type: ignore[attr-defined]
    used = torch.utils.data.Subset(data, range(40 // samples * samples))
    alone = plain_loop(Task(recipe(train=DataLoader(used, batch_size=samples)), 0, 1, CPU)).train(2, None)
    for ways in _figures():
        figures = ways[way]
        assert figures["metrics"] == pytest.approx(alone["metrics"], rel=bound)
        assert (figures["minibatches"], figures["samples_per_update"]) == (10 if samples == 8 else 8, samples)
        assert figures["samples_per_s"] > 0


def test_the_throughput_of_rare_sums_is_that_of_whole_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update takes 1 s, and each fourth one, from the first on, 10 s for an average of the weights."""
    baseline = plain_loop(Task(recipe(target=None, scheduler=None), 0, 1, CPU))
    now_s, updates = 0.0, 0
    baseline.period = 4

    def step(batch: Any) -> int:
        nonlocal now_s, updates
        now_s += 1.0 if updates % 4 else 11.0
        updates += 1
        return 8

    monkeypatch.setattr(baseline, "step", step)
    monkeypatch.setattr(torch_baselines, "time", SimpleNamespace(perf_counter=lambda: now_s))
    for minibatches in (1, 5):
        updates = 0
        figures = baseline.train(5, minibatches)
        assert figures["minibatches"] == 5, "one average after the first"
        assert figures["samples_per_s"] == pytest.approx(4 * 8 / 14)


def test_the_throughput_leaves_out_the_warm_up_and_smaller_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker accumulates 4 minibatches, and at the end of an epoch 2. Those and the first three updates are slow."""
    baseline = plain_loop(Task(recipe(target=None, scheduler=None), 0, 1, CPU))
    baseline.accumulated, now_s, updates = 4, 0.0, 0
    baseline.read_epoch = lambda epoch, order: iter([[None] * 4, [None] * 4, [None] * 2])

    def step(batch: Any) -> int:
        nonlocal now_s, updates
        now_s += 100.0 if updates < 3 or len(batch) < 4 else 8.0
        updates += 1
        return 8 * len(batch)

    monkeypatch.setattr(baseline, "step", step)
    monkeypatch.setattr(torch_baselines, "time", SimpleNamespace(perf_counter=lambda: now_s))
    figures = baseline.train(5, 20)
    assert figures["minibatches"] == 20
    assert figures["samples_per_s"] == pytest.approx(32 / 8.0)


def test_an_accumulating_run_makes_two_updates_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--minibatches 1`; the second update is what the epoch still has, and is summed once, too."""
    summed: list[bool] = []

    class OneProcess(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module, self.syncs = module, True

        @contextmanager
        def no_sync(self) -> Iterator[None]:
            self.syncs = False
            yield
            self.syncs = True

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            summed.append(self.syncs)
            return self.module(inputs)

    monkeypatch.setattr(torch_baselines, "DistributedDataParallel", OneProcess)
    figures = data_parallel(Task(recipe(), 0, 1, CPU), 4).train(3, 1)
    assert (figures["minibatches"], figures["samples_per_update"]) == (6 + 4, 32)
    assert summed == [False, False, False, True, False, True, False, False, False, True]


class _Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)


def test_ddp_refuses_unused_parameters() -> None:
    with pytest.raises(RecipeError, match=r"does not depend on unused\.weight, unused\.bias; remove them, or freeze"):
        data_parallel(Task(recipe(model=_Branched()), 0, 2, CPU))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: plain_loop(Task(recipe(ema=0.9), 0, 1, CPU)), "has ema, which"),
        (
            lambda: plain_loop(Task(recipe(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau), 0, 1, CPU)),
            "ReduceLROnPlateau follows evaluations",
        ),
        (lambda: one_f_one_b(Task(recipe(clip_grad_norm=1.0), 0, 2, CPU, 2), [[], []]), "clips the norm"),
        (
            lambda: one_f_one_b(Task(recipe(), 0, 2, CPU, 3), [[("0", nn.Linear(8, 2))], []]),
            "needs equal microbatches, but 8 samples are split into 3",
        ),
    ],
)
def test_what_torchs_ways_do_not_train(make: Callable[[], Baseline], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        make()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--link", "400"), "--link 400: 400 is 400 B/s; did you mean 400mbit/s?"),
        (("--link", "100kbit/s,80bit/s"), "80bit/s is 10.0 B/s; did you mean 80mbit/s?"),
        (("--link", "400 Mbps"), "did you mean 400Mbit/s?"),
        (("--link", "0"), "--link 0: '0' is not a bandwidth; write for example"),
        (("--link", "5 parsec"), "--link 5 parsec: '5 parsec' is not a bandwidth"),
        (("--link", "1tbit/s"), "a link of 1000 Gbit/s was asked for, but this machine's loopback carries"),
        (("--link", "400mbit/s", "--hosts", "2x"), "--hosts 2x was asked for; write hosts and the workers on each"),
        (("--hosts", "2x2"), "--hosts was given without --link"),
        (("--link", "400mbit/s", "--hosts", "2x2"), "a link of 1 rates was asked for on a network of 2 levels"),
        (("--link", "1gbit/s,1mbit/s", "--hosts", "2x2", "--workers", "3"), "3 workers on 2x2 hosts were asked for"),
        (("--schedule", "1f1b+spike"), "a compensation changes losses, and speeds are compared; add --emulate-delay"),
        (("--seconds", "2", "--minibatches", "8"), "--seconds 2 was given with --minibatches 8; leave one out"),
        (("--seconds", "2", "--emulate-delay"), "--seconds 2 was given with --emulate-delay; leave one out"),
        (("--out", "."), "is not empty; name a new folder"),
        (("--out", "s3://bucket/run"), "--out s3://bucket/run was asked for, but comparisons are written on this mach"),
    ],
)
def test_bad_input(
    options: tuple[str, ...], words: str, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(RECIPE, encoding="utf-8")
    assert words in refused("compare", "small.py", *options)
    assert os.listdir() == ["small.py"]


def test_batches_are_collected_for_one_update() -> None:
    data = TensorDataset(torch.arange(20.0))
    loader = DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(0))
    (first, second) = collect_batches(recipe(train=loader), 8).train
    assert (len(first[0]), len(second[0])) == (16, 4)
    assert sorted(torch.cat([first[0], second[0]]).tolist()) == data.tensors[0].tolist()
    with pytest.raises(RecipeError, match=r"accumulating needs a DataLoader that makes the batches itself"):
        collect_batches(recipe(train=DataLoader(data, batch_size=None)), 8)


def test_accumulating_is_predicted_with_one_sum_for_all_minibatches() -> None:
    """8 minibatches of 1.2 s on each worker, and a sum of 4 s, of which the last backward hides 0.8 s."""
    layers = tuple(LayerProfile(0.1, 0.2, output_bytes=4, parameter_bytes=10_000_000) for _ in range(4))
    cluster = pipedream.Cluster.flat(2, bandwidth_bytes_per_s=1e7)
    plan = pipedream.plan(pipedream.Profile.of_chain(layers, batch=16), cluster, shape="data-parallel")
    accumulating = accumulate_minibatches(plan, 8)
    assert (accumulating.batch, accumulating.microbatches) == (256, 16)
    samples_per_s = predict_samples_per_s(accumulating)
    assert samples_per_s == pytest.approx(256 / (8 * 1.2 + 4.0 - 0.8), rel=0.02)
    assert samples_per_s > 2.5 * predict_samples_per_s(plan)


def test_profile_with_a_large_spread_is_measured_for_longer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    layer = SimpleNamespace(forward_spread_s=0.2, backward_spread_s=0.2)
    profile = SimpleNamespace(forward_s=0.4, backward_s=0.4, layers=[layer], save=lambda path: None)
    counts = []

    def run_worker(kind: str, workers: int, name: str, *, runs: int, microbatches: int) -> tuple[Path, None]:
        assert microbatches == 4
        counts.append(runs)
        return tmp_path, None

    monkeypatch.setattr(comparing.Profile, "load", lambda path: profile)
    runs: Any = SimpleNamespace(run_worker=run_worker, folder=tmp_path)
    _, notes = comparing.profile_together(runs, 2, 4)
    assert counts == [10, 40]
    assert notes[0].startswith("the profile's seconds vary by 50% (also with 40 runs)")
    layer.forward_spread_s = layer.backward_spread_s = 0.05
    assert comparing.profile_together(runs, 2, 4)[1] == ()
    assert counts == [10, 40, 10]


def test_what_torch_offers_runs_if_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    profile = pipedream.profile(recipe().model, torch.randn(8, 8), runs=1)
    runs: Any = SimpleNamespace(options=TrainingOptions(), folder=tmp_path)
    monkeypatch.setattr(LinkVariants, "_measure", lambda self, way, alone: Variant(way.name, 2))

    def list_rows(*methods: str) -> list[str]:
        link = LinkVariants(runs, profile, pipedream.Cluster.flat(2), 4, methods, lambda line: None)
        return [row.name for row in link.measure_all(Variant(ONE_WORKER, 1))]

    assert list_rows("1f1b+diloco:30") == [ONE_WORKER, "1F1B, diloco:30"]
    assert list_rows("torch", "1f1b") == [ONE_WORKER, *TORCH, "1F1B"]
    assert set(list_rows(*comparing.COMPARED)) > set(TORCH)


def test_predictions_include_what_messages_take_from_compute(tmp_path: Path) -> None:
    cost_file = tmp_path / "messages.json"
    cost_file.write_text('{"costs": {"message_s_per_byte": 1e-6}, "sum_bytes_per_s": 1e8}')
    runs: Any = SimpleNamespace(run_worker=lambda *names, **how: (cost_file, None))
    profile = pipedream.profile(recipe().model, torch.randn(8, 8), runs=1)
    cluster = pipedream.Cluster.flat(2, 1e9)
    rates = []
    measured, summing = comparing.add_link_costs(runs, profile, cluster)
    assert summing.sum_link(0) == (1e8, cluster.latency_s)
    assert summing.link(0) == cluster.link(0), "messages have the whole rate"
    for costs in (profile, measured):
        plan = pipedream.plan(costs, cluster, shape="straight", schedule="pipedream")
        rates.append(predict_samples_per_s(plan))
    (message_bytes,) = (stage.output_bytes for stage in plan.stages[:-1])
    assert 8 / rates[1] - 8 / rates[0] == pytest.approx(2e-6 * message_bytes, rel=0.2)


def test_what_a_byte_takes_from_compute_is_what_it_adds_to_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update takes 10 ms and each byte 3 us: 1.5 us at each of its two ends."""
    clock, sizes = [0.0], []

    def wait_for(size: int) -> None:
        sizes.append(size)
        clock[0] += 3e-6 * (size - 1)

    fake = SimpleNamespace(
        irecv=lambda received, sender: SimpleNamespace(wait=lambda: None),
        isend=lambda sent, receiver: SimpleNamespace(wait=lambda: wait_for(sent.numel())),
        all_reduce=lambda seconds: seconds.mul_(2),
    )
    monkeypatch.setattr(torch_baselines, "dist", fake)
    monkeypatch.setattr(torch_baselines, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    loop: Any = SimpleNamespace(
        step=lambda batch: clock.__setitem__(0, clock[0] + 0.01), task=SimpleNamespace(rank=0, workers=2)
    )
    seconds = torch_baselines.measure_message_s_per_byte(loop, None, 1e6)
    assert seconds == pytest.approx(1.5e-6, rel=1e-3)
    assert set(sizes) == {1, 4000}  # 0.4 of what the link carries in 10 ms


@given(
    update_s=st.floats(0.001, 1.0), sum_s=st.floats(0.001, 1.0), delay_s=st.floats(0.0, 1.0), workers=st.integers(2, 9)
)
def test_an_all_reduce_beside_an_update_delays_the_longer_of_the_two(
    update_s: float, sum_s: float, delay_s: float, workers: int
) -> None:
    """Predicted again for the same update and the same all-reduce, the two take as long as they did."""
    clock, begun = [0.0], []

    def all_reduce(values: torch.Tensor, async_op: bool = False) -> Any:
        if values.dtype is torch.float64:
            return values.mul_(workers)
        if async_op:
            begun.append(clock[0])
            return SimpleNamespace(wait=lambda: wait(begun.pop()))
        clock[0] += sum_s
        return None

    def wait(begin_s: float) -> None:
        clock[0] = begin_s + max(update_s, sum_s) + delay_s

    weights = nn.Parameter(torch.zeros(1000))
    loop: Any = SimpleNamespace(
        step=lambda batch: clock.__setitem__(0, clock[0] + update_s),
        task=SimpleNamespace(rank=0, workers=workers),
        named_parameters=[("weight", weights)],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_baselines, "dist", SimpleNamespace(all_reduce=all_reduce))
        patch.setattr(torch_baselines, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
        sum_bytes_per_s, sum_s_per_byte = torch_baselines.measure_sum(loop, None, 1e6)
    port_bytes = 2 * (workers - 1) / workers * 20_000  # of 20 ms, more than the weights have
    predicted_s = max(port_bytes / sum_bytes_per_s, update_s + port_bytes * sum_s_per_byte)
    assert predicted_s == pytest.approx(max(update_s, sum_s) + delay_s, abs=1e-6)


@given(st.integers(0, 1000))
def test_a_warm_up_is_at_most_half_of_a_run(minibatches: int) -> None:
    assert count_warm_up(minibatches) == min(count_warm_up(None), minibatches // 2)


@given(
    seconds=st.floats(0.0, 10.0),
    bytes_per_s=st.floats(1e5, 1e9),
    accumulated=st.sampled_from([1, 2, 8]),
    sums=st.sampled_from(["full", "every:4", "every:30"]),
    shared=st.booleans(),
)
def test_a_run_of_some_seconds_has_them_after_its_warm_up(
    seconds: float, bytes_per_s: float, accumulated: int, sums: str, shared: bool
) -> None:
    """In the part that `Baseline.train` counts, at the predicted rate: at least two updates, and whole periods."""
    layers = tuple(LayerProfile(0.1, 0.2, output_bytes=4, parameter_bytes=100_000) for _ in range(2))
    profile, cluster = pipedream.Profile.of_chain(layers, batch=16), pipedream.Cluster.flat(2, bytes_per_s)
    request: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2} if shared else {}
    if accumulated > 1:
        request, sums = {}, "full"
    plan = pipedream.plan(profile, cluster, shape="data-parallel", sums=sums, **request)
    plan = accumulate_minibatches(plan, accumulated) if accumulated > 1 else plan
    of_update = 16 * (1 if shared and accumulated == 1 else 2 * accumulated)
    count = count_batches(plan, 16, seconds)
    updates, rest = divmod(count * 16, of_update)
    period = plan.choices.sums.period
    warm_up = count_warm_up(accumulated * updates) // accumulated
    warm_up -= warm_up % period
    counted = updates - max(warm_up, 1) if period == 1 else updates - 1 - warm_up
    assert rest == 0
    assert counted >= 2
    assert counted // period * period * of_update >= seconds * predict_samples_per_s(plan) - 1e-6
    assert counted <= 2 * (period + count_warm_up(None)) + seconds * predict_samples_per_s(plan) / of_update


def test_ddp_copies_its_gradients_into_buckets() -> None:
    layers = tuple(LayerProfile(0.1, 0.2, output_bytes=4, parameter_bytes=10_000_000) for _ in range(2))
    cluster = pipedream.Cluster.flat(2, 1e9)
    plan = pipedream.plan(pipedream.Profile.of_chain(layers, batch=16), cluster, shape="data-parallel")
    longer_s = 32 / predict_samples_per_s(add_bucket_copies(plan)) - 32 / predict_samples_per_s(plan)
    assert longer_s == pytest.approx(0.4e-9 * 20_000_000)


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.processes
def test_compares_over_links_of_two_levels(tmp_path: Path) -> None:
    """All rows, with the bytes that crossed the links; then again, into a new folder."""
    (tmp_path / "small.py").write_text(RECIPE, encoding="utf-8")
    command = ("-m", "pipedream", "compare", "small.py", "--hosts", "1x2", "--link", "80mbit/s,40mbit/s",
               "--schedule", "torch", "--schedule", "data-parallel", "--schedule", "data-parallel+powersgd:1",
               "--schedule", "1f1b", "--schedule", "1f1b+int8", "--schedule", "auto",
               "--microbatches", "4", "--json")  # fmt: skip
    ended = commands.run(*command, folder=tmp_path, timeout_s=400.0)
    assert ended.status == 0, ended.err
    assert ended.orphans == []
    comparison = json.loads(ended.out)
    (link,) = comparison["links"]
    rows = {row["name"]: row for row in link["variants"]}
    assert list(rows) == [
        *("one worker", *TORCH),
        *("data parallel", "data parallel, powersgd:1", "data parallel, powersgd:1, accumulating 8"),
        *("1F1B", "1F1B, int8", "planner's choice"),
    ]
    assert [row["why"] for row in rows.values()] == [""] * 14
    assert rows["1F1B, int8"]["approximation"] == "messages=int8"
    assert rows["DDP, fp16"]["approximation"] == "sums=float16"
    assert rows["DDP"]["samples_per_update"] == 16
    assert rows["DDP, minibatch shared"]["samples_per_update"] == rows["1F1B"]["samples_per_update"] == 8
    assert rows["DDP, accumulating 8"]["samples_per_update"] == 2 * 8 * 8
    accumulating = rows["data parallel, powersgd:1, accumulating 8"]
    assert accumulating["samples_per_update"] == 2 * 8 * 8
    weights_bytes = 4 * (3 * 72 + 18)
    for name, samples in (("DDP", 16), ("DDP, minibatch shared", 8)):  # two workers send the weights' gradients once
        assert rows[name]["bytes_per_sample"] > 2 * weights_bytes / samples
    loss = rows["one worker"]["metrics"]["loss"]
    for name in ("DDP, minibatch shared", "torch Schedule1F1B", "1F1B"):
        assert rows[name]["metrics"]["loss"] == pytest.approx(loss, rel=1e-5), name
    (folder,) = (tmp_path / "runs").iterdir()
    (losses,) = folder.glob("*accumulating_8*/losses.json")
    assert len(json.loads(losses.read_text())) == 2, "160 samples are a minibatch of 128 and one of 32"
    (messages,) = folder.glob("messages*/messages.json")
    measured = json.loads(messages.read_text())
    assert all(0 <= cost < 1e-3 for cost in measured["costs"].values())
    assert 1e5 < measured["sum_bytes_per_s"] < 1e7, "bytes/s of an all-reduce over 40 Mbit/s"
    assert json.loads((folder / "compare.json").read_text()) == comparison
    assert (folder / "compare.svg").is_file()
    assert comparison["verdict"] in (folder / "compare.html").read_text().replace("&#x27;", "'")


@pytest.mark.parametrize(
    ("seconds", "rates", "scales"),
    [
        (0.8, (1e6,), (1.0, 1.0)),
        (0.004, (1e6,), (50.0, 50.0)),
        (0.004, (1e9, 1e6), (50.0, 50.0)),
        (80.0, (1e9, 1e8), (1.0, 0.25)),
        (0.1, (1e8,), (2.0, 0.5)),
    ],
)
def test_short_passes_and_many_bytes_are_scaled(
    seconds: float, rates: tuple[float, ...], scales: tuple[float, float]
) -> None:
    profile: Any = SimpleNamespace(forward_s=seconds / 4, backward_s=seconds * 3 / 4)
    assert comparing.choose_scales(profile, 4, rates) == pytest.approx(scales)


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.processes
def test_more_workers_than_cores_are_emulated(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(RECIPE, encoding="utf-8")
    command = ("-m", "pipedream", "compare", "small.py", "--workers", "2", "--link", "80mbit/s", "--schedule", "torch",
               "--schedule", "1f1b", "--microbatches", "2", "--json")  # fmt: skip
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        ended = commands.run(*command, folder=tmp_path, timeout_s=400.0)
    finally:
        os.sched_setaffinity(0, before)
    assert ended.status == 0, ended.err
    assert ended.orphans == []
    comparison = json.loads(ended.out)
    rows = {row["name"]: row for row in comparison["links"][0]["variants"]}
    assert comparison["emulated"]
    assert comparison["verdict"].startswith("With emulated workers over 80 Mbit/s")
    assert comparison["notes"][0].startswith("2 workers are more than 1 cores, so they are emulated")
    assert rows["one worker"]["seconds_to_target"] is not None
    assert "emulated workers do not have" in rows["torch Schedule1F1B"]["why"]
    for name in ("DDP", "DDP, minibatch shared", "DDP, accumulating 8", "1F1B"):
        row = rows[name]
        # Waits are never shorter than asked, and were scaled by more than a hundred.
        assert 0.01 < row["samples_per_s"] / row["predicted_per_s"] < 1.5, name
        assert row["seconds_to_target"] is None
        assert row["bytes_per_sample"] > 0


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("profile", signal.SIGKILL),
        pytest.param("DDP_over_80_Mbit_s", signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_nothing_is_left_after_a_signal(moment: str, number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(RECIPE, encoding="utf-8")
    command = ("compare", "small.py", "--link", "80mbit/s", "--schedule", "torch", "--epochs", "500", "--out", "run")
    started = commands.start("-m", "pipedream", *command, folder=tmp_path)
    try:
        started.wait_for_file(f"run/{moment}", timeout_s=300.0)
        time.sleep(0.3)
    finally:
        started.signal(number, group=number == signal.SIGINT)  # as Ctrl-C does
    ended = started.end()
    assert ended.orphans == []
    assert ended.status == (130 if number == signal.SIGINT else -number)
