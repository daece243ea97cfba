"""The cluster of this machine's GPUs, which the default plan of a run on GPUs is made for."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pipedream as pd
from pipedream.services.probe import machine

H200, A100, OTHER = "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA RTX A2000"
GB = 10**9


def _fake_gpus(monkeypatch: pytest.MonkeyPatch, *names: str, free: int = 150 * GB, peers: bool = True) -> None:
    total = 150 * GB
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: names[gpu])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=total))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda gpu: GB)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda gpu, other: peers)

    def mem_get_info(gpu: int) -> tuple[int, int]:
        assert gpu == 0, "another GPU would be given a context"
        return free - GB, total

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)


@pytest.mark.parametrize(
    ("name", "peers", "rate", "free"),
    [(H200, True, 450e9, 150), (A100, False, 31.5e9, 100), (OTHER, True, 15.75e9, 100)],
)
def test_gpus(monkeypatch: pytest.MonkeyPatch, name: str, peers: bool, rate: float, free: int) -> None:
    """With NVLink or over PCIe. Memory that others use is not there, nor that of CUDA's context and NCCL's buffers."""
    _fake_gpus(monkeypatch, *[name] * 8, peers=peers, free=free * GB)
    cluster = machine.probe_gpus(4)
    assert (cluster.workers, cluster.is_flat, cluster.device) == (4, True, f"cuda: {name}")
    assert (cluster.bandwidth_bytes_per_s, cluster.latency_s) == (pytest.approx(0.8 * rate), 15e-6)
    assert cluster.memory_bytes == (free - 2) * GB
    assert (machine.probe_gpus().workers, machine.probe_gpus(4, 5 * GB).memory_bytes) == (8, 5 * GB)


def test_workers_share_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_gpus(monkeypatch, H200)
    cluster = machine.probe_gpus(4, device="cuda:0")
    assert (cluster.workers, cluster.latency_s, cluster.memory_bytes) == (4, 0.0, (150 * GB - 1_500_000_000) // 4)
    assert cluster.bandwidth_bytes_per_s > 1e12


@pytest.mark.parametrize(
    ("gpus", "workers", "local", "widths", "sizes"),
    [(4, 8, 4, [4, 2], ()), (4, 8, 2, [2, 4], ()), (4, 6, 4, [4, 2], (4, 2)), (1, 3, None, [3], ())],
)
def test_more_workers_than_gpus_are_on_machines_like_this(
    monkeypatch: pytest.MonkeyPatch, gpus: int, workers: int, local: int | None, widths: list[int], sizes: Any
) -> None:
    _fake_gpus(monkeypatch, *[H200] * gpus)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    cluster = machine.probe_gpus(workers)
    assert cluster.workers == workers
    assert [level.width for level in cluster.levels] == widths
    assert cluster.levels[0].sizes == sizes
    assert cluster.bandwidth_bytes_per_s == 1.25e9


def test_different_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_gpus(monkeypatch, H200, H200, A100)
    cluster = machine.probe_gpus(3)
    assert cluster.devices == ("cuda: NVIDIA H200",) * 2 + ("cuda: NVIDIA A100-SXM4-80GB",)
    assert cluster.speeds == pytest.approx((1.0, 1.0, 19.5 * 0.75 / 67 / 0.7))
    assert cluster.bandwidth_bytes_per_s == pytest.approx(0.8 * 300e9), "the slower one's"


def test_no_such_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_gpus(monkeypatch, H200)
    with pytest.raises(pd.PipelineError, match=r"cuda:1.*but 1 GPUs were found"):
        machine.probe_gpus(2, device="cuda:1")
    _fake_gpus(monkeypatch)
    with pytest.raises(pd.PipelineError, match=r"'cuda'.*but 0 GPUs were found; use the cpu"):
        machine.probe_gpus(2)


def test_the_memory_of_a_machine_is_that_of_its_control_groups(tmp_path: Path) -> None:
    (tmp_path / "self").write_text("12:cpu:/other\n0::/outer/inner\n")

    def limit(group: str, most: str, used: int, cached: int) -> None:
        folder = tmp_path / "cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")

    def free_bytes() -> list[int]:
        return list(machine._list_group_bytes(tmp_path / "cgroup", tmp_path / "self"))

    assert free_bytes() == []
    limit("outer", "1000", 700, 100)
    limit("outer/inner", "max", 650, 0)
    assert free_bytes() == [400]
    limit("outer/inner", "600", 650, 20)
    assert free_bytes() == [0, 400]
    assert 0 < machine.host_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_probe_leaves_room_for_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_gpus(monkeypatch, H200)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (100 * GB, 150 * GB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda gpu: GB // 4)
    assert machine.available_bytes(device, 1) == 100 * GB + 3 * GB // 4 - 500_000_000, "with what is cached"


def test_copies_to_the_host_are_as_fast_as_the_slower_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy returns at once, and is done when the GPU is waited for: 20 GB/s to the GPU, 10 GB/s from it."""
    clock = SimpleNamespace(now_s=0.0, coming_s=0.0)

    class Memory:
        def __init__(self, size: int, dtype: torch.dtype, device: Any = None, pin_memory: bool = False) -> None:
            assert (device is None) == pin_memory
            self.size, self.is_here = size, pin_memory

        def copy_(self, source: Memory, non_blocking: bool) -> None:
            assert (non_blocking, source.size) == (True, self.size)
            clock.coming_s += self.size / (10e9 if self.is_here else 20e9)

    def synchronize(device: torch.device) -> None:
        clock.now_s, clock.coming_s = clock.now_s + clock.coming_s, 0.0

    fake = SimpleNamespace(empty=Memory, uint8=torch.uint8, cuda=SimpleNamespace(synchronize=synchronize))
    monkeypatch.setattr(machine, "torch", fake)
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    assert machine.host_bytes_per_s(torch.device("cuda")) == pytest.approx(10e9)
    assert machine.host_bytes_per_s(torch.device("cpu")) is None


def test_limits_of_the_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ulimit -d`, of which the process uses something already."""
    most = 1 << 50
    monkeypatch.setattr(machine, "host_bytes", lambda: 1 << 60)
    monkeypatch.setattr(
        machine.resource, "getrlimit", lambda limit: (most if limit == resource.RLIMIT_DATA else -1, -1)
    )
    assert most - (1 << 40) < machine.available_bytes(torch.device("cpu"), 1) < most - (1 << 20)
    monkeypatch.setattr(machine.resource, "getrlimit", lambda limit: (1, 1))
    assert machine.available_bytes(torch.device("cpu"), 1) == 0
