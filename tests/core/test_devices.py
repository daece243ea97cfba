"""Devices: their table is its own docstring, the roofline has two slopes and a floor. Clusters of the papers."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.apps.cli import presets
from pipedream.core.hardware import devices

DEVICES, Device = devices.DEVICES, devices.Device

TOY = Device("toy", 10**9, {"float32": 1e12, "bfloat16": 4e12}, 1e11, launch_s=1e-5, flop_share=0.5, byte_share=0.8)
SMALL = ((1000, 4e11), (10**6, 2e11))
A100, V100 = DEVICES["A100-80GB"], DEVICES["V100-16GB"]


def rows() -> list[list[str]]:
    """Returns the cells of the table in the module's docstring."""
    text = devices.__doc__ or ""
    return [re.split(r" {2,}", line.strip()) for line in text.splitlines() if re.match(r" {4}(?!name|launch)\S", line)]


def test_table_says_what_the_code_says() -> None:
    assert [row[0] for row in rows()] == list(DEVICES)
    for name, memory, rate, *peaks, source in rows():
        device = DEVICES[name]
        assert Device.from_json(device.to_json()) == device
        number, unit = rate.replace(",", "").split()
        assert device.memory_bytes == float(memory.split()[0]) * 1e9
        assert device.bytes_per_s == pytest.approx(float(number) * {"GB/s": 1e9, "TB/s": 1e12}[unit])
        told = dict(zip(("float64", "float32", "tf32", "float16", "bfloat16"), peaks, strict=True))
        expected = {dtype: float(peak) * 1e12 for dtype, peak in told.items() if peak != "-"}
        assert device.flops_per_s == pytest.approx(expected)
        assert "sheet" in source or "whitepaper" in source


def test_roofline_by_hand() -> None:
    assert TOY.op_s(0, 0) == 1e-5
    assert TOY.op_s(1e12, 0) == pytest.approx(1e-5 + 2.0)
    assert TOY.op_s(1e12, 0, "bfloat16") == pytest.approx(1e-5 + 0.5)
    assert TOY.op_s(1e12, 0, "float16") == TOY.op_s(1e12, 0), "a dtype without a peak runs as float32"
    assert TOY.op_s(0, 8e10) == pytest.approx(1e-5 + 1.0)
    assert TOY.op_s(1e12, 8e10) == TOY.op_s(1e12, 0), "the slower of the two hides the other"
    assert TOY.op_s(0, 0, launches=3) == pytest.approx(3e-5)
    cached = replace(TOY, small_bytes_per_s=SMALL, draw_s=1e-9)
    assert cached.op_s(0, 1000) == pytest.approx(1e-5 + 1000 / 3.2e11)
    assert cached.op_s(0, 1001) == pytest.approx(1e-5 + 1001 / 1.6e11)
    assert cached.op_s(0, 10**7) == TOY.op_s(0, 10**7)
    assert cached.op_s(0, 0, draws=10**6) == pytest.approx(1e-5 + 1e-3)


@given(flops=st.floats(0, 1e18), moved=st.floats(0, 1e15), factor=st.floats(1, 100))
def test_more_work_is_never_faster(flops: float, moved: float, factor: float) -> None:
    for device in DEVICES.values():
        first = device.op_s(flops, moved, "bfloat16")
        assert device.launch_s <= first <= device.op_s(flops * factor, moved, "bfloat16")
        assert first <= device.op_s(flops, moved * factor, "bfloat16")


SPELLINGS = {name: name for name in DEVICES} | {"h100": "H100-SXM", "a100_80gb": "A100-80GB", "A100": "A100-40GB"}
SPELLINGS |= {"rtx4090": "RTX-4090", "V100": "V100-16GB", "cuda: NVIDIA A100-SXM4-80GB": "A100-80GB"}
SPELLINGS |= {"cuda: Tesla V100-SXM2-16GB": "V100-16GB", "cuda: NVIDIA H100 80GB HBM3": "H100-SXM"}
SPELLINGS |= {"cuda: NVIDIA GeForce RTX 4090": "RTX-4090"}


@pytest.mark.parametrize(("text", "name"), SPELLINGS.items())
def test_names_are_read_kindly(text: str, name: str) -> None:
    assert devices.device_named(text) is DEVICES[name]


def test_workers_of_several_kinds() -> None:
    kinds = devices.workers_of("4xV100, 2 x RTX-4090", V100, "float16")
    rows = [(kind.count, kind.device, kind.speed, kind.memory_bytes) for kind in kinds]
    assert rows == [(4, "V100-16GB", 1.0, 16 * 10**9), (2, "RTX-4090", pytest.approx(165.2 / 125), 24 * 10**9)]


KINDS = ("", "V100", "0xV100", "4xP100", "4xV100,,2xV100", "1xcuda: NVIDIA H100 PCIe")
COUNTS = "machines of cluster 'pipedream-a' were asked for; give a number"
REFUSED = [
    *((partial(devices.workers_of, text, V100), "not known") for text in KINDS),
    (partial(replace, TOY, flops_per_s={"float32": -1.0}), "peaks, bandwidth and memory"),
    (partial(replace, TOY, bytes_per_s=-1.0), "peaks, bandwidth and memory"),
    (partial(replace, TOY, flop_share=-1.0), "shares must lie in"),
    (partial(replace, TOY, small_bytes_per_s=SMALL[::-1]), "the slower"),
    (partial(replace, TOY, small_bytes_per_s=((1000, 1e10),)), "the slower"),
    (partial(Device, "x", 1, {"float16": 1.0}, 1.0), "float32"),
    (partial(presets.cluster, "pipedream-z"), "(?s)" + ".*".join(map(re.escape, presets.PRESETS))),
    *((partial(presets.cluster, "pipedream-a", count), f"{count} {COUNTS}") for count in (0, -1, 10**9)),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_devices_and_clusters_that_there_are_not(call: Callable[[], object], words: str) -> None:
    with pytest.raises((ValueError, pd.PipelineError), match=words):
        call()


@pytest.mark.parametrize("name", presets.PRESETS)
def test_as_many_machines_as_in_the_paper_or_as_wanted(name: str) -> None:
    preset = presets.PRESETS[name]
    default, three = presets.cluster(name), presets.cluster(name, 3)
    assert (default.workers, three.workers) == (preset.machines * preset.workers, 3 * preset.workers)
    assert set(default.memories) == {preset.memory_bytes}
    assert three.levels[-1].bandwidth_bytes_per_s == preset.between_bytes_per_s
    assert three.reach(0, three.workers - 1) == len(three.levels) - 1
    assert name in str(presets.__doc__)
    assert preset.device in str(default)
