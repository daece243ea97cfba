"""Files of Hugging Face, whose tensors are renamed, split or joined while a model is loaded.

For example the experts of Mixtral are one tensor each in a file, and one for all in the model. Which conversions a
model needs only transformers knows (its modules `conversion_mapping` and `core_model_loading`, version 5).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors by name, each read when it is asked for; `_places` has the names. Looking for a name reads nothing."""

    _places: Mapping[str, Any]

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def under_model_names(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Returns a file's tensors as a model of transformers has them; for other models as they are.

    A tensor is read and converted when it is asked for.
    """
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
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict(keep_vars=True)
    groups: dict[str, _Group] = {}
    for name in sorted(weights, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        converter = None if pattern is None else of_pattern[pattern]
        groups.setdefault(target, _Group(target, converter, [])).sources.append((pattern or "", name))
    return _Converted(model, weights, list(groups.values()))


class _Group(NamedTuple):
    """Tensors of a file, as (pattern, name), that become one or several of the model."""

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
        self._places = {target: group for group in groups for target in group.targets()}
        self._newest: tuple[str, dict[str, Any]] = ("", {})  # the parts of one tensor are read one after the other

    def __getitem__(self, name: str) -> torch.Tensor:
        group = self._places[name]
        if group.converter is None:
            return self._weights[group.sources[0][1]]
        if self._newest[0] != group.target:
            converter = copy.deepcopy(group.converter)
            for pattern, source in group.sources:
                converter.add_tensor(group.target, source, pattern, self._weights[source])
            self._newest = group.target, converter.convert(group.target, model=self._model, config=self._model.config)
        tensor: Any = self._newest[1][name]
        return tensor[0] if isinstance(tensor, list) else tensor  # type: ignore[no-any-return]
