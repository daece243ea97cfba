"""The Device: data-sheet figures of an accelerator, and the seconds of an operation by the roofline model.

An operation of F floating-point operations that reads and writes b bytes takes (Williams, Waterman and Patterson, CACM
2009, with the overhead of a launch added)

    launch_s + max(F / (flop_share x peak), b / (byte_share x bandwidth))

In Tflop/s, from NVIDIA's data sheets, without sparsity and at boost clocks:

    name        memory        bandwidth   float64  float32  tf32    float16  bfloat16  source
    V100-16GB   16 GB HBM2    900 GB/s    7.8      15.7     -       125      -         V100 (SXM2) data sheet, 2020
    V100-32GB   32 GB HBM2    900 GB/s    7.8      15.7     -       125      -         V100 (SXM2) data sheet, 2020
    A100-40GB   40 GB HBM2    1,555 GB/s  9.7      19.5     156     312      312       A100 (SXM) data sheet, 2021
    A100-80GB   80 GB HBM2e   2,039 GB/s  9.7      19.5     156     312      312       A100 (SXM) data sheet, 2021
    H100-SXM    80 GB HBM3    3.35 TB/s   34       67       494.7   989.4    989.4     H100 (SXM) data sheet, 2023
    H200        141 GB HBM3e  4.8 TB/s    34       67       494.7   989.4    989.4     H200 (SXM) data sheet, 2024
    RTX-4090    24 GB GDDR6X  1,008 GB/s  1.29     82.6     82.6    165.2    165.2     Ada architecture whitepaper, 2022

Matrix products of float16 and bfloat16 run on tensor cores and accumulate in float32. float32 runs outside them,
torch's default; tf32 is used on request (``torch.set_float32_matmul_precision``), but by default for convolutions
(``torch.backends.cudnn.allow_tf32``).

The shares are assumptions. The best matrix shape reaches 86.9% of the peak on an A100 SXM and 80.3% on an H100 SXM (S.
Bekman, Machine Learning Engineering, "maximum achievable matmul FLOPS", torch 2.6 and 2.7). A model's shapes are not
the best, so 75% and 70% are assumed, 75% for the other families, 85% of each bandwidth, and 5 us per launch. An H200
reached 84% with a product of side 8,192, and 88% of its bandwidth (benchmarks/gpu). The data sheet's memory is in
powers of ten; what a card has beyond that is left to its context.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from pipedream.core.artifact import Artifact
from pipedream.core.errors import ProfileError
from pipedream.core.hardware.cluster import Workers

Work = Sequence[tuple[float, float]]
"""(flops, bytes moved) of each layer."""


@dataclass(frozen=True)
class Device(Artifact):
    """An accelerator's peaks, and the shares of them that programs reach.

    Attributes:
        flops_per_s: dtype -> peak of matrix products; a missing dtype runs as float32.
        bytes_per_s: speed of the memory, reads and writes together.
        launch_s: the least seconds of an operation.
        flop_share, byte_share: the fractions of the peaks that are reached.
        small_bytes_per_s: (bytes, bandwidth), smallest first: operations that move at most this many bytes use caches
            with this bandwidth.
        draw_s: seconds per random number.
    """

    name: str
    memory_bytes: int
    flops_per_s: dict[str, float]
    bytes_per_s: float
    launch_s: float = 5e-6
    flop_share: float = 0.75
    byte_share: float = 0.85
    small_bytes_per_s: tuple[tuple[int, float], ...] = ()
    draw_s: float = 0.0

    def __post_init__(self) -> None:
        if "float32" not in self.flops_per_s:
            raise ValueError(f"device {self.name} needs a peak for float32, found {sorted(self.flops_per_s)}")
        if min(*self.flops_per_s.values(), self.bytes_per_s, self.memory_bytes) <= 0 or self.launch_s < 0:
            raise ValueError(f"peaks, bandwidth and memory of device {self.name} must be positive")
        if not (0 < self.flop_share <= 1 and 0 < self.byte_share <= 1):
            raise ValueError(f"shares must lie in (0, 1], found {self.flop_share} and {self.byte_share}")
        for (size, rate), (larger, slower) in pairwise((*self.small_bytes_per_s, (1 << 62, self.bytes_per_s))):
            if not (size < larger and rate >= slower):
                raise ValueError(f"the more bytes, the slower, but {rate} for {size} and {slower} for {larger}")

    def op_s(
        self,
        flops: float,
        moved_bytes: float,
        dtype: str = "float32",
        *,
        launches: int = 1,
        draws: int = 0,
        share: float = 1.0,
    ) -> float:
        """Returns the seconds of an operation, or of several identical ones.

        Args:
            flops: a multiply-add counts as two.
            moved_bytes: read and written.
            draws: random numbers.
            share: of the rates that programs reach, for an operation that reaches less.
        """
        peak = self.flops_per_s.get(dtype, self.flops_per_s["float32"])
        rate = next((rate for size, rate in self.small_bytes_per_s if moved_bytes <= size), self.bytes_per_s)
        busy_s = max(flops / (peak * self.flop_share), moved_bytes / (rate * self.byte_share))
        return launches * self.launch_s + draws * self.draw_s + busy_s / share

    @property
    def has_tensor_cores(self) -> bool:
        return self.flops_per_s.get("float16", 0.0) > self.flops_per_s["float32"]

    def speed_against(self, other: Device, dtype: str = "float32", work: Work = ((1.0, 0.0),)) -> float:
        """Returns how many times faster than another device it is, by default in matrix products."""
        own_s, other_s = (sum(device.op_s(*part, dtype, launches=0) for part in work) for device in (self, other))
        return other_s / own_s

    def __str__(self) -> str:
        peaks = ", ".join(f"{dtype} {peak * 1e-12:.4g}" for dtype, peak in self.flops_per_s.items())
        return (
            f"{self.name}: {peaks} Tflop/s ({self.flop_share:.0%} reached), {self.bytes_per_s * 1e-9:.4g} GB/s "
            f"({self.byte_share:.0%} reached), {self.launch_s * 1e6:.3g} us an operation"
        )


@dataclass(frozen=True)
class GpuLinks:
    """A GPU's links to the other GPUs of its machine, one way; `nvlink_bytes_per_s` is None without NVLink."""

    nvlink_bytes_per_s: float | None
    pcie_bytes_per_s: float
    share: float = 0.8
    latency_s: float = 15e-6


class _Gpu(NamedTuple):
    """A row of the table above, with what CUDA calls it: a regular expression."""

    memory_gb: int
    gb_per_s: float
    flop_share: float
    tflops_per_s: dict[str, float]
    links: GpuLinks
    cuda_name: str


_VOLTA = {"float64": 7.8, "float32": 15.7, "float16": 125.0}
_AMPERE = {"float64": 9.7, "float32": 19.5, "tf32": 156.0, "float16": 312.0, "bfloat16": 312.0}
_HOPPER = {"float64": 34.0, "float32": 67.0, "tf32": 494.7, "float16": 989.4, "bfloat16": 989.4}
_ADA = {"float64": 1.29, "float32": 82.6, "tf32": 82.6, "float16": 165.2, "bfloat16": 165.2}
_GPUS = {
    "V100-16GB": _Gpu(16, 900, 0.75, _VOLTA, GpuLinks(150e9, 15.75e9), r"V100-SXM2-16GB"),
    "V100-32GB": _Gpu(32, 900, 0.75, _VOLTA, GpuLinks(150e9, 15.75e9), r"V100-SXM2-32GB"),
    "A100-40GB": _Gpu(40, 1555, 0.75, _AMPERE, GpuLinks(300e9, 31.5e9), r"A100-SXM\d?-40GB"),
    "A100-80GB": _Gpu(80, 2039, 0.75, _AMPERE, GpuLinks(300e9, 31.5e9), r"A100-SXM\d?-80GB"),
    "H100-SXM": _Gpu(80, 3350, 0.70, _HOPPER, GpuLinks(450e9, 63e9), r"H100 80GB HBM3"),
    "H200": _Gpu(141, 4800, 0.70, _HOPPER, GpuLinks(450e9, 63e9), r"H200$"),
    "RTX-4090": _Gpu(24, 1008, 0.75, _ADA, GpuLinks(None, 31.5e9), r"RTX 4090$"),
}

DEVICES = {
    name: Device(
        name,
        gpu.memory_gb * 10**9,
        {dtype: peak * 1e12 for dtype, peak in gpu.tflops_per_s.items()},
        gpu.gb_per_s * 1e9,
        flop_share=gpu.flop_share,
    )
    for name, gpu in _GPUS.items()
}
"""Name -> device, from the table above."""

GPU_LINKS = {name: gpu.links for name, gpu in _GPUS.items()}
"""Name -> links, for the devices above."""

OTHER_LINKS = GpuLinks(None, 15.75e9)
"""Links of other GPUs: PCIe 3.0 x16."""

_FAMILIES = {"v100": "V100-16GB", "a100": "A100-40GB", "h100": "H100-SXM"}


def device_named(name: str) -> Device:
    """Returns a device by its name, in any spelling: ``A100-80GB``, ``a100_80gb``, ``rtx4090``.

    The name of a family means its smallest device: V100 the V100-16GB. CUDA's names have the form of a profile:
    ``cuda: NVIDIA A100-SXM4-80GB``.

    Raises:
        ProfileError: an unknown name.
    """
    simple_name = _simplify(name)
    simple_name = _simplify(_FAMILIES.get(simple_name, simple_name))
    devices = [device for device_name, device in DEVICES.items() if _simplify(device_name) == simple_name]
    if name.startswith("cuda: "):
        devices = [DEVICES[gpu_name] for gpu_name, gpu in _GPUS.items() if re.search(gpu.cuda_name, name)]
    if not devices:
        raise ProfileError(f"device {name!r} is not known; choose one of {', '.join(DEVICES)}, or give a device's file")
    return devices[0]


def pcie_bytes_per_s(names: Iterable[str]) -> float:
    """Returns the rate between a machine's memory and the slowest of some devices; unknown ones count as slowest."""
    links = []
    for name in set(names):
        with suppress(ProfileError):
            links.append(GPU_LINKS.get(device_named(name).name, OTHER_LINKS))
            continue
        links.append(OTHER_LINKS)
    return min(link.pcie_bytes_per_s * link.share for link in links)


def workers_of(text: str, other: Device, dtype: str = "float32", work: Work = ((1.0, 0.0),)) -> tuple[Workers, ...]:
    """Returns the workers of a text such as ``4xV100,2xRTX-4090``, with speeds relative to `other`.

    Raises:
        ProfileError: an unknown device, or a malformed count.
    """
    kinds = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*[xX*]\s*(\S.*?)\s*", part)
        if match is None or not int(match[1]):
            raise ProfileError(f"devices {text!r} are not known; write COUNTxNAME, as in 4xV100,2xRTX-4090")
        device = device_named(match[2])
        speed = device.speed_against(other, dtype, work)
        kinds.append(Workers(int(match[1]), device.name, speed, device.memory_bytes))
    return tuple(kinds)


def _simplify(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
