"""Measures a device, as a row for the table of `pipedream.core.hardware.devices`."""

import os
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from statistics import median

import torch

from pipedream.core.hardware.devices import Device, device_named
from pipedream.profiler.device import choose_device_type, name_device

_PRODUCT = 512  # side of the square matrices
_CUDA_PRODUCT = 8192
_SUMS_BYTES = (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)  # the largest exceeds the caches
_CUDA_SUMS_BYTES = (1 << 30,)
_COLD_BYTES = 1 << 26
_CHAIN = 20


def device_of(name: str) -> Device:
    """Returns a device of the table or a file, or 'here', which is measured. Raises ProfileError, ArtifactError."""
    if name == "here":
        return measure_device(choose_device_type())
    return Device.load(name) if name.endswith(".json") or Path(name).is_file() else device_named(name)


def measure_device(device: str | torch.device = "cpu", *, seconds: float = 1.5) -> Device:
    """Measures what the roofline model needs, in about `seconds`.

    Peaks come from products of large matrices, bandwidths from additions, both as cold in the caches as a model's.
    """
    device = torch.device(device)
    cuda = device.type == "cuda"
    sums_bytes = _CUDA_SUMS_BYTES if cuda else _SUMS_BYTES
    share_s = seconds / (6 + len(sums_bytes))
    peaks = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        size = _CUDA_PRODUCT if cuda else _PRODUCT // (1 if dtype in (torch.float32, torch.float64) else 4)
        factors = _make_cold_tensors((size, size), dtype, device)
        product_s = _time_op(
            _alternate(factors, lambda matrix: torch.addmm(matrix[0], matrix, matrix.t())), device, share_s
        )
        peaks[str(dtype).removeprefix("torch.")] = 2 * size**3 / product_s
    rates: list[tuple[int, float]] = []
    for size in sums_bytes:
        terms = _make_cold_tensors((size // 4,), torch.float32, device)
        rates.append((2 * size, 2 * size / _time_op(_alternate(terms, lambda term: term + 1.0), device, share_s)))
    # Small tensors are no slower than large ones; another program may only have interrupted their measurement.
    rates = [(size, max(rate for _, rate in rates[index:])) for index, (size, _) in enumerate(rates)]
    memory = (
        torch.cuda.get_device_properties(device).total_memory
        if cuda
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    few = torch.ones(8, device=device, requires_grad=True)
    drawn = torch.empty(1 << 16, device=device)
    return Device(
        f"{name_device(device)} (roofline)",
        memory,
        peaks,
        rates[-1][1],
        launch_s=_time_op(lambda: _run_chain(few), device, share_s) / (2 * _CHAIN),
        flop_share=1.0,
        byte_share=1.0,
        small_bytes_per_s=tuple(rates[:-1]),
        draw_s=_time_op(lambda: drawn.bernoulli_(0.5), device, share_s) / drawn.numel(),
    )


def _make_cold_tensors(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Together they exceed the caches: a layer's tensors are cold when it runs again."""
    tensor = torch.ones(shape, dtype=dtype, device=device)
    return [tensor, *(tensor.clone() for _ in range(_COLD_BYTES // tensor.nbytes))]


def _alternate(tensors: list[torch.Tensor], work: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
    """Each result is kept for one cycle, like activations."""
    results: list[torch.Tensor | None] = [None] * len(tensors)
    turn = cycle(range(len(tensors)))

    def one_turn() -> None:
        index = next(turn)
        results[index] = work(tensors[index])

    return one_turn


def _run_chain(few: torch.Tensor) -> None:
    value = few
    for _ in range(_CHAIN):
        value = value.relu()
    torch.autograd.grad(value, few, few.detach())


def _time_op(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    def batch_s(count: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(count):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / count

    first_s = min(batch_s(1), batch_s(1))  # the first may load a library
    if first_s > seconds:
        return first_s  # a dtype that this device only emulates
    count = max(1, int(seconds / 6 / max(batch_s(2), 1e-9)))
    return median(batch_s(count) for _ in range(5))
