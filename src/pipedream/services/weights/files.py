"""Weights in files, read without running code: plain state dicts, and the safetensors of Hugging Face.

Loading a Hugging Face model renames, splits or joins tensors of its files: each expert of Mixtral has a tensor in the
file, and all share one in the model. Only transformers knows a model's conversions (`conversion_mapping` and
`core_model_loading`, version 5).
"""

import copy
import json
import os
import pickle
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from pipedream.core.artifact import check_regular, new_file, read_text, system_error
from pipedream.core.errors import ArtifactError, CaptureError


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors by name, each read by `__getitem__` only; the keys of `_entries` are the names."""

    _entries: Mapping[str, Any]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def save_weights(path: str | os.PathLike[str], state: Mapping[str, torch.Tensor]) -> None:
    """Writes a state dict atomically; raises an ArtifactError if it cannot be written."""
    with new_file(Path(path)) as scratch, open(scratch, "wb") as file:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:
            raise system_error(error) from None


def open_weights(path: str | os.PathLike[str]) -> Mapping[str, torch.Tensor]:
    """Opens a file of ``torch.save`` or safetensors, or a folder with the latter.

    A safetensors file is read tensor by tensor, on access. A folder has ``model.safetensors``, or several files and
    ``model.safetensors.index.json``.

    Raises:
        ArtifactError: it cannot be read as one of these.
    """
    path = Path(path)
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        if index.exists():
            try:
                places = json.loads(read_text(index))["weight_map"]
                # An index from elsewhere must not lead out of its folder.
                if outside := [file for file in places.values() if file in ("", "..") or Path(file).name != file]:
                    raise ValueError(f"{outside[0]!r} is no file in this folder")
                return _SafeTensors({name: path / file for name, file in places.items()})
            except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
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
        check_regular(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's advice would be to run what is in the file
        reason = "it holds more than tensors" if isinstance(error, pickle.UnpicklingError) else error
        raise ArtifactError(
            f"cannot read weights from {path}: {reason}; give a state dict saved by torch.save, or safetensors"
        ) from None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ArtifactError(f"{path} does not hold a state dict of tensors; give one saved from model.state_dict()")
    for name, value in state.items():
        if value.layout is not torch.strided or value.is_meta:
            kind = "no values" if value.is_meta else f"the layout {value.layout}"
            raise ArtifactError(f"{name!r} has {kind} in {path}; give dense tensors with values")
    return state


def _open_safetensors(path: Path) -> Any:
    try:
        safetensors = import_module("safetensors")
    except ImportError:
        raise ArtifactError(
            f"{path} is read by the package safetensors, which is not installed; pip install 'torch-pipedream[hf]'"
        ) from None
    try:
        check_regular(path)
        return safetensors.safe_open(path, framework="pt", device="cpu")
    except Exception as error:
        raise ArtifactError(
            f"cannot read weights from {path}: {error}; give a file in the safetensors format"
        ) from None


class _SafeTensors(LazyTensors):
    """Tensors of safetensors files; name -> file."""

    def __init__(self, places: Mapping[str, Path]) -> None:
        self._entries = places
        self._files: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        path = self._entries[name]
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
        self._entries = names

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._weights[self._entries[name]]


def fit_names(
    model: nn.Module,
    weights: Mapping[str, torch.Tensor],
    names: Iterable[str],
    shared: Mapping[str, Iterable[str]],
    where: str | os.PathLike[str],
) -> Mapping[str, torch.Tensor]:
    """Returns the tensors of a file under the model's names, without reading them; warns of those with other names.

    A Hugging Face file may hold only the inner model (without ``base_model_prefix``) or the model around it, and has
    shared parameters once.

    Args:
        names: parameters and buffers of all stages, so that all ranks raise the same error.
        shared: name -> all names of the same parameter.

    Raises:
        CaptureError: some are missing.
    """
    weights = _use_model_names(model, weights)
    prefix = getattr(model, "base_model_prefix", "")
    saved = model.state_dict(keep_vars=True)
    sources: dict[str, str] = {}
    missing: list[str] = []
    known_names = set(saved)
    for name in dict.fromkeys(names):
        candidates = [name, *shared.get(name, ())]
        if prefix:
            candidates += [f"{prefix}.{candidate}" for candidate in candidates]
            candidates += [candidate.removeprefix(f"{prefix}.") for candidate in candidates]
        known_names.update(candidates)
        source = next((candidate for candidate in candidates if candidate in weights), None)
        if source is not None:
            sources[name] = source
        elif name in saved:
            missing.append(name)
    if missing:
        examples = ", ".join(map(repr, sorted(weights)[:3]))
        raise CaptureError(
            f"the weights in {os.fspath(where)} lack {_list_some(missing)}, and have names such as "
            f"{examples}; give weights of this {type(model).__name__}"
        )
    unknown = [name for name in weights if name not in known_names]
    for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ():  # of older Hugging Face files
        unknown = [name for name in unknown if not re.search(pattern, name)]
    if unknown and os.environ.get("RANK", "0") == "0":
        text = f"not in this {type(model).__name__}, and left out: {_list_some(unknown)} of {os.fspath(where)}"
        warnings.warn(f"{text}; give weights of this model if they should be used", stacklevel=2)
    return _Renamed(weights, sources)


def _list_some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _use_model_names(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Returns a file's tensors, converted on access to those of a transformers model; for other models, as they are."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return weights
    try:
        conversions = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
        loading = import_module("transformers.core_model_loading")
    except (ImportError, AttributeError):  # another version
        return weights
    renamings = [conversion for conversion in conversions if isinstance(conversion, loading.WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, loading.WeightConverter)]
    converter_by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict(keep_vars=True)
    groups: dict[str, _Group] = {}
    for name in sorted(weights, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        converter = None if pattern is None else converter_by_pattern[pattern]
        groups.setdefault(target, _Group(target, converter, [])).sources.append((pattern or "", name))
    return _Converted(model, weights, list(groups.values()))


class _Group(NamedTuple):
    """Tensors of a file, as (pattern, name), that become one or several tensors of the model."""

    target: str
    converter: Any
    sources: list[tuple[str, str]]

    def targets(self) -> list[str]:
        if self.converter is None:
            return [self.target]
        first, *others = self.converter.target_patterns
        return [self.target, *(self.target.replace(first, other, 1) for other in others)]


class _Converted(LazyTensors):
    def __init__(self, model: Any, weights: Mapping[str, torch.Tensor], groups: list[_Group]) -> None:
        self._model = model
        self._weights = weights
        self._entries = {target: group for group in groups for target in group.targets()}
        self._cached: tuple[str, dict[str, Any]] = ("", {})  # the last group: its tensors are read in a row

    def __getitem__(self, name: str) -> torch.Tensor:
        group = self._entries[name]
        if group.converter is None:
            return self._weights[group.sources[0][1]]
        if self._cached[0] != group.target:
            converter = copy.deepcopy(group.converter)
            for pattern, source in group.sources:
                converter.add_tensor(group.target, source, pattern, self._weights[source])
            self._cached = group.target, converter.convert(group.target, model=self._model, config=self._model.config)
        tensor: Any = self._cached[1][name]
        return tensor[0] if isinstance(tensor, list) else tensor  # type: ignore[no-any-return]
