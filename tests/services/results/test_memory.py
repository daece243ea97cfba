"""The measured peak is of the same thing as the predicted one: tensors, and not libraries or other ranks' models."""

import copy
import os
import resource
from functools import partial
from types import SimpleNamespace
from typing import Any

import processes
import pytest
import torch
from fake_cuda import FakeCuda
from torch import nn
from training import SGD, plan_of, train

import pipedream as pd
from pipedream.core import malloc
from pipedream.services.results import memory

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MB = 1 << 20
X, PAIR = torch.ones(2, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
PLAN = plan_of(PAIR, X, (1,))


def test_tensors_count_once_with_their_gradients_and_state() -> None:
    layer = nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    assert memory.tensor_bytes(layer) == 2 * 40_000
    assert memory.tensor_bytes({"a": [layer, layer.weight[:2]]}, (optimizer,)) == 3 * 40_000
    assert memory.tensor_bytes(None, "text", 3.5) == 0
    assert memory.tensor_bytes(layer, nn.Linear(50, 50, device="meta")) == 2 * 40_000, "numbers that are not here"


def test_heap_rises_with_tensors_and_not_with_what_stays_or_an_evaluation() -> None:
    meter = memory.MemoryMeter(CPU)
    stays = [torch.ones(MB)]

    def rise_after(evaluates: bool, size: int) -> int:
        """Takes memory while a sample is taken, which is of an evaluation or not; returns the rise by then."""
        block = torch.ones(size)
        meter.sample(evaluates)
        del block
        return meter.measure_peak().rise_bytes or 0

    assert 16 * MB <= (rise := rise_after(False, 4 * MB)) < 17 * MB, "not the numbers that stay"
    stays.append(torch.ones(5 * MB))
    assert rise <= rise_after(False, 0) < 17 * MB, f"what an evaluation leaves hides no rise: {len(stays)} tensors"
    meter.reset()
    assert 0 <= rise_after(False, 0) < MB, "of a new phase"
    assert rise_after(True, 0) < MB
    rise_after(True, 4 * MB)
    assert rise_after(False, 0) < MB, "an evaluation after a drain does not count"


def test_reading_the_heap_takes_a_bounded_share_of_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes in nothing else."""
    heap = SimpleNamespace(now_s=0.0, reads=0)

    def read() -> int:
        heap.now_s, heap.reads = heap.now_s + 0.0003, heap.reads + 1
        return 100

    monkeypatch.setattr(memory, "_read_heap_bytes", read)
    monkeypatch.setattr(memory, "_heap_has_tensors", lambda: True)
    monkeypatch.setattr(memory, "time", SimpleNamespace(process_time=lambda: heap.now_s))
    meter = memory.MemoryMeter(CPU)
    # The first ops of a phase are all read, some of the next ones, too, then 0.3% of its time.
    for ops, phase_s in ((40, 0.0), (100_000, 100.0)):
        heap.reads = 0
        meter.reset()
        for _ in range(ops):
            heap.now_s += phase_s / ops
            meter.sample(False)
        allowed_s = 2 * 0.01 + 0.003 * phase_s
        assert min(ops, 0.9 * allowed_s / 0.0003) <= heap.reads <= allowed_s * 1.01 / 0.0003 + 1


def test_a_gpus_peak_is_not_that_of_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda().install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 60)
    meter = memory.MemoryMeter(GPU)
    assert cuda.resets == 1, "in the first phase too"
    meter.sample(False)
    assert meter.measure_peak() == (40, 200), "100 at most, 60 now; 200 reserved"
    meter.reset()
    assert cuda.resets == 2


def test_a_profile_on_a_gpu_leaves_no_cached_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    profiled = pd.profile(PAIR, X, runs=1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("released"))
    monkeypatch.setattr("pipedream.services.joining.joining.process_device", lambda name: torch.device(name))
    monkeypatch.setattr("pipedream.workflows.profile.to_device", lambda inputs, place: inputs)
    monkeypatch.setattr(nn.Module, "to", lambda module, place: module)

    def measure(*args: Any, **options: Any) -> pd.Profile:
        done.append(f"measured on {options['device']}")
        return profiled

    monkeypatch.setattr("pipedream.workflows.profile.profiler.measure", measure)
    assert pd.profile(PAIR, X, device="cuda:0").layers == profiled.layers
    assert done == ["measured on cuda:0", "released"]


def _train(width: int) -> tuple[pd.Timeline, tuple[int, ...], int]:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())))
    x, y = torch.randn(64, width), torch.randn(64, width)
    optimizer: Any = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    plan = pd.plan(pd.profile(model, x, runs=2, optimizer=optimizer), pd.Cluster.flat(2), cuts=(4,))
    with pd.Pipeline(model, plan, schedule="gpipe", microbatches=4, loss=nn.MSELoss(), optimizer=optimizer) as pipeline:
        list(pipeline.train([(x, y)] * 10))
        return pipeline.timeline(), tuple(stage.parameter_bytes for stage in plan.stages), pipeline.rank


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("count", [1, 2])
def test_peaks_are_of_the_stages_of_a_process(count: int) -> None:
    """Workers of one process share a figure. It has weights, momentum, gradients twice, and small activations."""
    timeline, weights, _ = processes.results(_train, count, 512)[0]
    assert timeline.shares_memory is (count == 1)
    stages = [sum(weights)] * 2 if count == 1 else weights
    for rank, weight_bytes in enumerate(stages):
        assert 2 * weight_bytes <= timeline.peak_bytes[rank] < 6 * weight_bytes
        assert timeline.reserved_bytes[rank] > 1e8
    assert pd.metrics.run_metrics(timeline).per_rank[0].peak_bytes == (None if count == 1 else timeline.peak_bytes[0])


def test_out_of_memory_says_what_to_set() -> None:
    def fill(module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if module.training and not inputs[0].is_meta:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    model = copy.deepcopy(PAIR)
    model[1].register_forward_pre_hook(fill)
    words = r"rank 1, stage 1, 1F0: .*CUDA out of memory(.|\n)*expandable_segments:True"
    with pytest.raises(pd.PipelineError, match=words):
        train(model, PLAN, [(X, X)], loss=nn.MSELoss(), check=False)


def _count_new_pages() -> int:
    """Takes 30 MiB and frees them, fifteen times; returns how many pages were new in the last ten."""
    malloc.keep_freed_memory()
    pages = []
    for _ in range(15):
        pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        tensors = [torch.ones(1 << 18) for _ in range(30)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - pages[5]


@pytest.mark.processes
def test_freed_memory_is_kept() -> None:
    """30 MiB that are freed and taken again are 7,680 pages."""
    (pages,) = processes.results(_count_new_pages, 1)
    assert pages < 1000


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """What malloc is told."""
    settings: dict[int, int] = {}
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda path: SimpleNamespace(mallopt=settings.__setitem__))
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    return settings


@pytest.mark.parametrize(("free_bytes", "mapped_bytes"), [(399, 4 << 20), (401, 32 << 20)])
def test_scarce_memory_is_given_back(free_bytes: int, mapped_bytes: int, settings: dict[int, int]) -> None:
    malloc.keep_freed_memory(300, free_bytes)
    assert settings[-3] == mapped_bytes
    assert len(settings) == 2


def test_a_session_says_what_its_workers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr("pipedream.services.weights.memory.keep_freed_memory", lambda *sizes: calls.append(sizes))
    monkeypatch.setattr("pipedream.services.weights.memory.available_bytes", lambda device, sharing: 7000)
    with pd.Pipeline(PAIR, PLAN, loss=nn.MSELoss(), optimizer=SGD):
        assert calls == [(sum(stage.peak_bytes for stage in PLAN.stages), 7000)]


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_ARENA_MAX", "2"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=0")]
)
def test_the_users_settings_of_malloc_count(
    name: str, value: str, settings: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    malloc.keep_freed_memory()
    assert not settings
