"""This machine is measured within a few seconds, and what is measured predicts what it does, roughly."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from pipedream.core.errors import ArtifactError, ProfileError
from pipedream.core.hardware.devices import DEVICES, Device
from pipedream.profiler import device_of, dtype_of, measure_device


@pytest.fixture(scope="module")
def here() -> Device:
    return measure_device(seconds=0.5)


def least_s(work: object, times: int = 5) -> float:
    """Returns the least seconds of some calls."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()  # type: ignore[operator]
        found.append(time.perf_counter() - began)
    return min(found)


def test_measured_device_predicts_products_and_sums(here: Device) -> None:
    a = torch.ones(768, 768)
    assert 0.1 < here.op_s(2 * 768**3, 3 * a.nbytes) / least_s(lambda: a @ a) < 10
    long = torch.ones(1 << 24)
    assert 0.1 < here.op_s(0, 2 * long.nbytes) / least_s(lambda: long + 1.0) < 10
    assert 1e-7 < here.launch_s < 1e-3
    assert here.name.startswith("cpu: ")
    assert here.memory_bytes > 10**9
    assert (here.flop_share, here.byte_share) == (1.0, 1.0)
    rates = [rate for _, rate in here.small_bytes_per_s] + [here.bytes_per_s]
    assert rates == sorted(rates, reverse=True)
    assert len(rates) > 3


def test_measured_device_survives_a_file(here: Device, tmp_path: Path) -> None:
    here.save(tmp_path / "here.json")
    assert device_of(str(tmp_path / "here.json")) == here
    assert device_of("h200") is DEVICES["H200"]
    with pytest.raises(ArtifactError):
        device_of(str(tmp_path / "nowhere.json"))
    with pytest.raises(ProfileError, match="not known"):
        device_of("nowhere")


def test_dtypes_by_name() -> None:
    assert dtype_of("bfloat16") is torch.bfloat16
    assert dtype_of(torch.float64) is torch.float64
    assert dtype_of(None) is None
    for name in ("int8", "bfloat", "nn"):
        with pytest.raises(ProfileError, match="bfloat16"):
            dtype_of(name)


@pytest.mark.gpu
def test_measured_gpu_has_the_rates_of_one() -> None:
    found = measure_device("cuda")
    assert found.flops_per_s["bfloat16"] > 2 * found.flops_per_s["float32"] > 1e12
    assert found.bytes_per_s > 1e11
