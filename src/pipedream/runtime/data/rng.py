"""The states of the process's global random generators: read, set, and as JSON."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from pipedream.core.errors import ArtifactError
from pipedream.runtime.data.jsonable import base64_of, bytes_of

__all__ = ["RngStates", "decoded", "encoded", "read", "restore", "state", "tensor_of", "text_of", "write"]


class RngStates(NamedTuple):
    """States on the CPU; None for what was not read, and for numpy where it is not loaded."""

    torch: torch.Tensor
    python: Any
    numpy: Any


def read(only_torch: bool = False) -> RngStates:
    """Returns the states now; only torch's where the others cannot matter, which is 100 us faster."""
    if only_torch:
        return RngStates(torch.get_rng_state(), None, None)
    numpy: Any = sys.modules.get("numpy")
    return RngStates(torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state())


def write(states: RngStates) -> None:
    """Sets the generators; what is None is left alone."""
    torch.set_rng_state(states.torch)
    if states.python is not None:
        random.setstate(states.python)
    if states.numpy is not None:
        sys.modules["numpy"].random.set_state(states.numpy)


def encoded(states: RngStates) -> dict[str, Any]:
    """Returns states, read as a whole, as JSON has them."""
    version, words, normal = states.python
    found: dict[str, Any] = {"torch": text_of(states.torch), "python": [version, _packed(words), normal]}
    if states.numpy is not None:
        name, keys, *rest = states.numpy
        found["numpy"] = [name, _packed(keys), *rest]
    return found


def decoded(found: Mapping[str, Any]) -> RngStates:
    """Returns the states that `encoded` wrote. Raises KeyError, ValueError or TypeError where they are none."""
    version, words, normal = found["python"]
    numpy = found.get("numpy") if "numpy" in sys.modules else None
    return RngStates(
        tensor_of(found["torch"]),
        (version, tuple(_unpacked(words)), normal),
        None if numpy is None else (numpy[0], _unpacked(numpy[1]), *numpy[2:]),
    )


def state(device: torch.device) -> str:
    """Returns the states as text, and that of the GPU's generator: for checkpoints."""
    found = encoded(read())
    if device.type == "cuda":
        found["cuda"] = text_of(torch.cuda.get_rng_state(device))
    return json.dumps(found)


def restore(text: str, device: torch.device) -> None:
    """Sets the generators to a state from `state`.

    Raises:
        ArtifactError: it is not one.
    """
    try:
        found = json.loads(text)
        write(decoded(found))
        if device.type == "cuda" and "cuda" in found:
            torch.cuda.set_rng_state(tensor_of(found["cuda"]), device)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise ArtifactError(f"the checkpoint's random state is damaged: {error}; take another checkpoint") from None


def text_of(state: torch.Tensor) -> str:
    """Returns a generator's state, uint8[n], as text."""
    return base64_of(state.cpu().numpy().tobytes())


def tensor_of(text: str) -> torch.Tensor:
    """Returns the state that `text_of` wrote."""
    return torch.frombuffer(bytes_of(text), dtype=torch.uint8)


def _packed(words: Any) -> str:
    return base64_of(b"".join(int(word).to_bytes(4, "little") for word in words))


def _unpacked(text: str) -> list[int]:
    data = bytes_of(text)
    return [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
