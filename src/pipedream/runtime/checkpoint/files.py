"""Weights in files: plain state dicts, written atomically, read without running code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from pipedream.core.errors import ArtifactError

__all__ = ["load_weights", "save_weights"]


def save_weights(path: str | os.PathLike[str], state: Mapping[str, torch.Tensor]) -> None:
    """Writes a state dict atomically."""
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    torch.save(dict(state), scratch)
    scratch.replace(path)


def load_weights(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Reads a state dict: tensors only, no code (``weights_only``). Raises an `ArtifactError` for any other file."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ArtifactError(
            f"cannot read weights from {path}: {error}; give a state dict saved by torch.save"
        ) from None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ArtifactError(f"{path} does not hold a state dict of tensors; give one saved from model.state_dict()")
    return state
