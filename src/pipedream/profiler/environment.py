"""The device and the software versions that a profile was measured with."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from pipedream._version import __version__


def name_device(device: torch.device) -> str:
    """Returns the device and its model: ``cpu: AMD EPYC 7B13``, ``cuda: NVIDIA A100-SXM4-40GB``."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return f"{device.type}: {_name_processor()}"


def release_cache(device: torch.device) -> None:
    """Returns the memory that torch has cached to the GPU: after a measurement, before anything else runs there."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def versions() -> dict[str, str]:
    """Returns the versions of python, torch and this library."""
    return {"python": platform.python_version(), "torch": torch.__version__, "pipedream": __version__}


def _name_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()
