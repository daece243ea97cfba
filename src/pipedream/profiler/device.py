"""The device that layers run on: its kind, name and cache; and the versions of what runs there."""

import platform
from pathlib import Path

import torch

from pipedream._version import __version__
from pipedream.core.errors import ProfileError


def choose_device_type() -> str:
    """Returns 'cuda' if it is available, else 'cpu'."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def count_threads() -> int:
    """Returns the threads that run a layer together on a CPU."""
    return torch.get_num_threads()


def dtype_of(name: str | torch.dtype | None) -> torch.dtype | None:
    """Returns a floating-point dtype by its name, such as ``bfloat16``. Raises ProfileError."""
    if name is None or isinstance(name, torch.dtype):
        return name
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ProfileError(f"dtype {name!r} is not known; write bfloat16, float16, float32 or float64")
    return dtype


def name_device(device: torch.device) -> str:
    """Returns the device and its model: ``cpu: AMD EPYC 7B13``, ``cuda: NVIDIA A100-SXM4-40GB``."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return f"{device.type}: {name_processor()}"


def name_processor() -> str:
    """Returns the model of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def release_cache(device: torch.device) -> None:
    """Returns the memory that torch has cached to the GPU: after a measurement, before anything else runs there."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def versions() -> dict[str, str]:
    """Returns the versions of python, torch and this library."""
    return {"python": platform.python_version(), "torch": torch.__version__, "pipedream": __version__}
