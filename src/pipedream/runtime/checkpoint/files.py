"""Weights in files, read without running code: plain state dicts, and the safetensors of Hugging Face."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipedream.core.artifact import new_file, system_error
from pipedream.core.errors import ArtifactError, CaptureError
from pipedream.runtime.checkpoint.hugging_face import LazyTensors, under_model_names


def save_weights(path: str | os.PathLike[str], state: Mapping[str, torch.Tensor]) -> None:
    """Writes a state dict atomically; raises an ArtifactError if it cannot be written."""
    with new_file(Path(path)) as scratch, open(scratch, "wb") as file:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:
            raise system_error(error) from None


def open_weights(path: str | os.PathLike[str]) -> Mapping[str, torch.Tensor]:
    """Opens a file of ``torch.save`` or safetensors, or a folder with the latter.

    Of safetensors only the tensors that are asked for are read; the folder has ``model.safetensors``, or several files
    and ``model.safetensors.index.json``.

    Raises:
        ArtifactError: it cannot be read as one of these.
    """
    path = Path(path)
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        if index.exists():
            try:
                places = json.loads(index.read_text())["weight_map"]
                return _SafeTensors({name: path / file for name, file in places.items()})
            except (ValueError, KeyError, AttributeError) as error:
                raise ArtifactError(f"cannot read {index}: {error!r}; give an index of safetensors files") from None
        if not (path / "model.safetensors").exists():
            raise ArtifactError(
                f"the folder {path} has neither model.safetensors nor model.safetensors.index.json; give one that a "
                "save_pretrained has written, or a file of weights"
            )
        path /= "model.safetensors"
    if path.suffix == ".safetensors":
        with _open_safetensors(path) as file:
            return _SafeTensors(dict.fromkeys(file.keys(), path))
    return _read_state_dict(path)


def _read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ArtifactError(
            f"cannot read weights from {path}: {error}; give a state dict saved by torch.save, or safetensors"
        ) from None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ArtifactError(f"{path} does not hold a state dict of tensors; give one saved from model.state_dict()")
    return state


def _open_safetensors(path: Path) -> Any:
    try:
        safetensors = import_module("safetensors")
    except ImportError:
        raise ArtifactError(
            f"{path} is read by the package safetensors, which is not installed; pip install 'torch-pipedream[hf]'"
        ) from None
    try:
        return safetensors.safe_open(path, framework="pt", device="cpu")
    except Exception as error:
        raise ArtifactError(
            f"cannot read weights from {path}: {error}; give a file in the safetensors format"
        ) from None


class _SafeTensors(LazyTensors):
    """Tensors by name, each read when it is asked for."""

    def __init__(self, places: Mapping[str, Path]) -> None:
        self._places = places
        self._files: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        path = self._places[name]
        if path not in self._files:
            self._files[path] = _open_safetensors(path)
        try:
            tensor: torch.Tensor = self._files[path].get_tensor(name)
        except Exception as error:
            raise ArtifactError(f"cannot read {name!r} from {path}: {error}; the folder is incomplete") from None
        return tensor


class _Renamed(LazyTensors):
    """Tensors under other names (name -> name in `weights`)."""

    def __init__(self, weights: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> None:
        self._weights = weights
        self._places = names

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._weights[self._places[name]]


def fit_names(
    model: nn.Module,
    weights: Mapping[str, torch.Tensor],
    names: Iterable[str],
    shared: Mapping[str, Iterable[str]],
    where: str | os.PathLike[str],
) -> Mapping[str, torch.Tensor]:
    """Returns the tensors of a file under the model's names, without reading them.

    A file of Hugging Face may hold the inner model alone (without ``base_model_prefix``) or the model around it, and
    shared parameters once.

    Args:
        names: parameters and buffers of all stages, so that every rank finds the same fault.
        shared: name -> all names of the same parameter.

    Raises:
        CaptureError: some are missing.
    """
    weights = under_model_names(model, weights)
    prefix = getattr(model, "base_model_prefix", "")
    saved = model.state_dict(keep_vars=True)
    sources: dict[str, str] = {}
    missing: list[str] = []
    for name in dict.fromkeys(names):
        candidates = [name, *shared.get(name, ())]
        if prefix:
            candidates += [f"{prefix}.{candidate}" for candidate in candidates]
            candidates += [candidate.removeprefix(f"{prefix}.") for candidate in candidates]
        source = next((candidate for candidate in candidates if candidate in weights), None)
        if source is not None:
            sources[name] = source
        elif name in saved:
            missing.append(name)
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        some = ", ".join(map(repr, sorted(weights)[:3]))
        raise CaptureError(
            f"the weights in {os.fspath(where)} lack {', '.join(map(repr, missing[:5]))}{more}, and have names such as "
            f"{some}; give weights of this {type(model).__name__}"
        )
    return _Renamed(weights, sources)
