"""Random states: those of the process, and those that decide the order of the data.

What else draws from the global generators differs from rank to rank and from plan to plan. So a `DataOrder` keeps a
state of them that is in force only while a loader or sampler draws. If nothing else draws, the order is that of a
plain ``for batch in loader``.

A user's own generator, of torch, Python or NumPy, is drawn from in place; it has the same state on all ranks.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from pipedream.core.errors import ArtifactError
from pipedream.runtime.data.tensor_json import base64_of, bytes_of, from_json, to_json

_GENERATORS = ("generator", "sampler.generator", "batch_sampler.generator", "batch_sampler.sampler.generator")


class RngStates(NamedTuple):
    """States of the global CPU generators; None if not read, or without numpy."""

    torch: torch.Tensor
    python: Any
    numpy: Any

    @classmethod
    def read(cls, only_torch: bool = False) -> RngStates:
        """Reading only torch's is 100 us faster."""
        if only_torch:
            return cls(torch.get_rng_state(), None, None)
        numpy: Any = sys.modules.get("numpy")
        return cls(torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state())

    def apply(self) -> None:
        torch.set_rng_state(self.torch)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)

    def to_json(self) -> dict[str, Any]:
        """All states must have been read."""
        version, words, normal = self.python
        found: dict[str, Any] = {"torch": _text_of(self.torch), "python": [version, _packed(words), normal]}
        if self.numpy is not None:
            name, keys, *rest = self.numpy
            found["numpy"] = [name, _packed(keys), *rest]
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> RngStates:
        version, words, normal = found["python"]
        numpy = found.get("numpy") if "numpy" in sys.modules else None
        return cls(
            _tensor_of(found["torch"]),
            (version, tuple(_unpacked(words)), normal),
            None if numpy is None else (numpy[0], _unpacked(numpy[1]), *numpy[2:]),
        )


def saved_rng(device: torch.device) -> str:
    """Returns the states of all global generators, the GPU's included."""
    found = RngStates.read().to_json()
    if device.type == "cuda":
        found["cuda"] = _text_of(torch.cuda.get_rng_state(device))
    return json.dumps(found)


def restore_rng(text: str, device: torch.device) -> None:
    """Raises ArtifactError if `saved_rng` did not write the text."""
    try:
        found = json.loads(text)
        RngStates.from_json(found).apply()
        if device.type == "cuda" and "cuda" in found:
            torch.cuda.set_rng_state(_tensor_of(found["cuda"]), device)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise ArtifactError(f"the checkpoint's random state is damaged: {error}; use another checkpoint") from None


def generators_of(loader: Any) -> dict[str, torch.Generator]:
    """Returns attribute path -> generator of a loader and its samplers."""
    found = {}
    for path in _GENERATORS:
        value = loader
        for name in path.split("."):
            value = getattr(value, name, None)
        if isinstance(value, torch.Generator) and value is not torch.default_generator:
            found[path] = value
    return found


_READ = ("", "sampler", "batch_sampler", "batch_sampler.sampler")


def _own_generators(loader: Any) -> dict[str, Any]:
    """Returns attribute path -> generator of Python, NumPy or torch that a loader or one of its samplers holds."""
    numpy: Any = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    found: dict[str, Any] = generators_of(loader)
    known = {id(torch.default_generator), *map(id, found.values())}
    for path in _READ:
        holder = loader
        for name in path.split(".") if path else ():
            holder = getattr(holder, name, None)
        for name, value in getattr(holder, "__dict__", {}).items():
            if isinstance(value, kinds) and id(value) not in known:
                known.add(id(value))
                found[f"{path}.{name}".lstrip(".")] = value
    return found


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return _text_of(generator.get_state())
    if isinstance(generator, random.Random):
        return to_json(generator.getstate())
    if hasattr(generator, "bit_generator"):
        return _arrays_to_json(generator.bit_generator.state)
    return _arrays_to_json(generator.get_state(legacy=False))


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(_tensor_of(state))
    elif isinstance(generator, random.Random):
        generator.setstate(from_json(state))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = _arrays_from_json(state)
    else:
        generator.set_state(_arrays_from_json(state))


def _arrays_to_json(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _arrays_to_json(value) for key, value in state.items()}
    return {"values": state.tolist(), "dtype": str(state.dtype)} if hasattr(state, "tolist") else state


def _arrays_from_json(state: Any) -> Any:
    if not isinstance(state, Mapping):
        return state
    if set(state) == {"values", "dtype"}:
        return sys.modules["numpy"].array(state["values"], dtype=state["dtype"])
    return {key: _arrays_from_json(value) for key, value in state.items()}


@contextmanager
def preserved_rng(loader: Any) -> Iterator[None]:
    """Restores all generators at the end, the loader's included."""
    states = RngStates.read()
    own = [(generator, generator.get_state()) for generator in generators_of(loader).values()]
    try:
        yield
    finally:
        states.apply()
        for generator, state in own:
            generator.set_state(state)


class DataOrder:
    """The draws that decide the order of the data; the first state is that of the global generators."""

    def __init__(self) -> None:
        self._states: RngStates | None = None
        self._inside = False

    @contextmanager
    def drawing(self, only_torch: bool = False) -> Iterator[None]:
        """Puts the state in force; `only_torch` if nothing else draws inside."""
        if self._inside:
            yield
            return
        mine = self._current()
        others = RngStates.read(only_torch)
        (RngStates(mine.torch, None, None) if only_torch else mine).apply()
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            drawn = RngStates.read(only_torch)
            self._states = mine._replace(torch=drawn.torch) if only_torch else drawn
            others.apply()

    def snapshot(self, loader: Any) -> dict[str, Any]:
        states = self._current()
        own = {path: _state_of(generator) for path, generator in _own_generators(loader).items()}
        return states.to_json() | {"generators": own}

    def restore(self, state: Mapping[str, Any], loader: Any) -> None:
        self._states = RngStates.from_json(state)
        for path, generator in _own_generators(loader).items():
            if path in state["generators"]:
                _set_state(generator, state["generators"][path])

    def _current(self) -> RngStates:
        if self._states is None:
            self._states = RngStates.read()
        return self._states


def _text_of(state: torch.Tensor) -> str:
    return base64_of(state.cpu().numpy().tobytes())


def _tensor_of(text: str) -> torch.Tensor:
    return torch.frombuffer(bytes_of(text), dtype=torch.uint8)


def _packed(words: Iterable[int]) -> str:
    return base64_of(b"".join(int(word).to_bytes(4, "little") for word in words))


def _unpacked(text: str) -> list[int]:
    data = bytes_of(text)
    return [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
