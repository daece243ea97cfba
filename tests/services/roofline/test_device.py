"""This machine is measured within a few seconds, with what the roofline model needs."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.core.hardware.devices import DEVICES, Device
from pipedream.services.roofline import device as device_module, device_of, measure_device


@pytest.fixture(scope="module")
def measured() -> Device:
    return measure_device(seconds=0.5)


@pytest.mark.slow
def test_measured_device_has_what_the_roofline_needs(measured: Device) -> None:
    assert measured.name.startswith("cpu: ")
    assert measured.memory_bytes > 10**9
    assert (measured.flop_share, measured.byte_share) == (1.0, 1.0)
    assert set(measured.flops_per_s) == {"float32", "float64", "bfloat16", "float16"}
    assert min(measured.flops_per_s.values()) > 1e6
    assert 0 < measured.launch_s < 1
    assert 0 < measured.draw_s < 1
    rates = [rate for _, rate in measured.small_bytes_per_s] + [measured.bytes_per_s]
    assert rates == sorted(rates, reverse=True)
    assert len(rates) > 3


@given(st.lists(st.floats(1e-6, 10.0), min_size=40, max_size=40))
def test_an_interruption_spoils_the_rate_of_no_other_size(seconds: list[float]) -> None:
    sums: list[float] = []

    def op_s(work: object, device: object, share_s: float) -> float:
        sums.append(seconds[len(sums)])
        return sums[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_module, "_time_op", op_s)
        patch.setattr(device_module, "_make_cold_tensors", lambda shape, dtype, place: [torch.ones(1)])
        device = measure_device()
    sizes = device_module._SUMS_BYTES
    measured = [2 * size / spent_s for size, spent_s in zip(sizes, seconds[4:], strict=False)]
    assert device.bytes_per_s == measured[-1]
    assert [rate for _, rate in device.small_bytes_per_s] == [max(measured[i:]) for i in range(len(sizes) - 1)]


def test_measured_device_survives_a_file(measured: Device, tmp_path: Path) -> None:
    measured.save(tmp_path / "here.json")
    assert device_of(str(tmp_path / "here.json")) == measured
    assert device_of("h200") is DEVICES["H200"]
    with pytest.raises(pd.errors.ArtifactError):
        device_of(str(tmp_path / "nowhere.json"))
    with pytest.raises(pd.PipelineError, match="not known"):
        device_of("nowhere")


@pytest.mark.gpu
def test_measured_gpu_has_the_rates_of_one() -> None:
    device = measure_device("cuda")
    assert device.flops_per_s["bfloat16"] > 2 * device.flops_per_s["float32"] > 1e12
    assert device.bytes_per_s > 1e11
