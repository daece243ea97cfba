"""Random states: of the process, and of the order of the data.

Other draws from the global generators differ between ranks and plans. So a `DataOrder` keeps a state for them that is
active only while a loader or sampler draws. If nothing else draws, the order is that of a plain ``for batch in
loader``.

A user's own generator, of torch, Python or NumPy, is drawn from in place; it has the same state on all ranks.

States are saved as JSON, as are other values that may contain tensors; nothing is pickled.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from pipedream.core.errors import ArtifactError, PipelineError
from pipedream.runtime.data.generators import find_in_loader


class RngStates(NamedTuple):
    """States of the global CPU generators; None if not read."""

    torch: torch.Tensor
    python: Any
    numpy: Any

    @classmethod
    def read(cls, only_torch: bool = False) -> RngStates:
        """Reading only torch's is 100 us faster."""
        if only_torch:
            return cls(torch.get_rng_state(), None, None)
        return cls(torch.get_rng_state(), random.getstate(), np.random.get_state())

    def apply(self) -> None:
        torch.set_rng_state(self.torch)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            np.random.set_state(self.numpy)

    def to_json(self) -> dict[str, Any]:
        """All states must have been read."""
        version, words, normal = self.python
        name, keys, *rest = self.numpy
        python, numpy = [version, _pack_words(words), normal], [name, _pack_words(keys), *rest]
        return {"torch": _encode_tensor(self.torch), "python": python, "numpy": numpy}

    @classmethod
    def from_json(cls, states: Mapping[str, Any]) -> RngStates:
        version, words, normal = states["python"]
        name, keys, *rest = states["numpy"]
        return cls(
            _decode_tensor(states["torch"]),
            (version, tuple(_unpack_words(words).tolist()), normal),
            (name, _unpack_words(keys), *rest),
        )


def save_rng(device: torch.device) -> str:
    """Returns the states of all global generators, the GPU's included."""
    states = RngStates.read().to_json()
    if device.type == "cuda":
        states["cuda"] = _encode_tensor(torch.cuda.get_rng_state(device))
    return json.dumps(states)


def restore_rng(text: str, device: torch.device) -> None:
    """Raises ArtifactError if `save_rng` did not write the text."""
    try:
        states = json.loads(text)
        RngStates.from_json(states).apply()
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(_decode_tensor(states["cuda"]), device)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise ArtifactError(f"the checkpoint's random state is damaged: {error}; use another checkpoint") from None


def read_state(generator: Any) -> Any:
    """Returns a generator's state, for JSON."""
    if isinstance(generator, torch.Generator):
        return _encode_tensor(generator.get_state())
    if isinstance(generator, random.Random):
        return to_json(generator.getstate())
    if hasattr(generator, "bit_generator"):  # NumPy's Generator; below, its RandomState
        return _encode_arrays(generator.bit_generator.state)
    return _encode_arrays(generator.get_state(legacy=False))


def set_state(generator: Any, state: Any) -> None:
    """Inverse of `read_state`."""
    if isinstance(generator, torch.Generator):
        generator.set_state(_decode_tensor(state))
    elif isinstance(generator, random.Random):
        generator.setstate(from_json(state))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = _decode_arrays(state)
    else:
        generator.set_state(_decode_arrays(state))


def seed_generator(generator: Any, seed: int) -> None:
    """Seeds a generator of torch, Python or NumPy."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state  # it has no method to seed it
    else:
        generator.seed(seed if isinstance(generator, random.Random) else seed % 2**32)  # NumPy takes 32 bits


@contextmanager
def _preserved(generators: Iterable[Any]) -> Iterator[None]:
    """Restores the global CPU generators, and these, at the end."""
    global_states, states = RngStates.read(), [(generator, read_state(generator)) for generator in generators]
    try:
        yield
    finally:
        for generator, state in states:
            set_state(generator, state)
        global_states.apply()


def _encode_arrays(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _encode_arrays(value) for key, value in state.items()}
    return {"values": state.tolist(), "dtype": str(state.dtype)} if hasattr(state, "tolist") else state


def _decode_arrays(state: Any) -> Any:
    if not isinstance(state, Mapping):
        return state
    if set(state) == {"values", "dtype"}:
        return np.array(state["values"], dtype=state["dtype"])
    return {key: _decode_arrays(value) for key, value in state.items()}


def preserved_rng(loader: Any) -> AbstractContextManager[None]:
    """Context that restores all generators at the end, the loader's included."""
    return _preserved(find_in_loader(loader).values())


@contextmanager
def seeded_rng(seed: int, generators: Sequence[Any] = ()) -> Iterator[None]:
    """Seeds the global CPU generators, and `generators`, and restores them at the end."""
    with _preserved(generators):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPU's too
        random.seed(seed)
        np.random.seed(seed % 2**32)
        for generator in generators:
            seed_generator(generator, seed)
        yield


class DataOrder:
    """The draws that decide the order of the data; the first state is that of the global generators."""

    def __init__(self) -> None:
        self._states: RngStates | None = None

    @contextmanager
    def drawing(self, only_torch: bool = False) -> Iterator[None]:
        """Activates the state, never twice at a time; `only_torch` if nothing else draws inside."""
        mine = self._read_states()
        others = RngStates.read(only_torch)
        (RngStates(mine.torch, None, None) if only_torch else mine).apply()
        try:
            yield
        finally:
            drawn = RngStates.read(only_torch)
            self._states = mine._replace(torch=drawn.torch) if only_torch else drawn
            others.apply()

    def snapshot(self, loader: Any) -> dict[str, Any]:
        states = self._read_states()
        generator_states = {path: read_state(generator) for path, generator in find_in_loader(loader).items()}
        return states.to_json() | {"generators": generator_states}

    def restore(self, state: Mapping[str, Any], loader: Any) -> None:
        self._states = RngStates.from_json(state)
        for path, generator in find_in_loader(loader).items():
            if path in state["generators"]:  # a loader may have one now that it did not have then
                set_state(generator, state["generators"][path])

    def _read_states(self) -> RngStates:
        if self._states is None:
            self._states = RngStates.read()
        return self._states


def _encode_tensor(state: torch.Tensor) -> str:
    return base64_of(state.cpu().numpy().tobytes())


def _decode_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytes_of(text), dtype=torch.uint8)


def _pack_words(words: Any) -> str:
    return base64_of(np.asarray(words, "<u4").tobytes())


def _unpack_words(text: str) -> Any:
    return np.frombuffer(bytes_of(text), "<u4")


_TENSOR, _TUPLE, _BYTES = "__tensor__", "__tuple__", "__bytes__"


def to_json(value: Any, where: str = "the loader's state_dict()") -> Any:
    """Marks tensors, tuples and bytes as dicts; raises PipelineError for other objects, or keys that are no strings."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        return {_TENSOR: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), base64_of(content)]}
    if isinstance(value, bytes):
        return {_BYTES: base64_of(value)}
    if isinstance(value, list):
        return [to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):  # a named one would come back as a plain one
        return {_TUPLE: [to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: to_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise PipelineError(
        f"{where} is a {type(value).__name__}"
        + (" with keys that are not strings" if isinstance(value, Mapping) else "")
        + ", which JSON cannot hold; use numbers, strings, tensors, bytes, lists, tuples and dicts with string keys"
    )


def from_json(value: Any) -> Any:
    """Inverse of `to_json`."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, Mapping):
        if set(value) == {_TENSOR}:
            dtype, shape, content = value[_TENSOR]
            empty = torch.empty(shape, dtype=getattr(torch, dtype))
            if empty.numel():
                empty.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytes_of(content), dtype=torch.uint8))
            return empty
        if set(value) == {_TUPLE}:
            return tuple(from_json(item) for item in value[_TUPLE])
        if set(value) == {_BYTES}:
            return bytes(bytes_of(value[_BYTES]))
        return {key: from_json(item) for key, item in value.items()}
    return value


def base64_of(content: bytes) -> str:
    """Bytes as text."""
    return base64.b64encode(content).decode("ascii")


def bytes_of(text: str) -> bytearray:
    """Inverse of `base64_of`; torch.frombuffer warns if it cannot write to them."""
    return bytearray(base64.b64decode(text))
