"""The states of the global random generators, as text: for checkpoints."""

from __future__ import annotations

import base64
import json
import random
import sys
from typing import Any

import torch

from ..core.errors import ArtifactError

__all__ = ["restore", "state"]


def state(device: torch.device) -> str:
    """Returns the states of torch's, Python's and (where it is in use) numpy's generator, and of the GPU's."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": _text(torch.default_generator.get_state()),
        "python": [version, _words(words), gauss],
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        found["numpy"] = [kind, _words(keys.tolist()), position, has_gauss, cached]
    if device.type == "cuda":
        found["cuda"] = _text(torch.cuda.get_rng_state(device))
    return json.dumps(found)


def restore(text: str, device: torch.device) -> None:
    """Sets the generators to a state from `state`.

    Raises:
        ArtifactError: it is not one.
    """
    try:
        found = json.loads(text)
        torch.default_generator.set_state(_tensor(found["torch"]))
        version, words, gauss = found["python"]
        random.setstate((version, tuple(_numbers(words)), gauss))
        numpy = sys.modules.get("numpy")
        if numpy is not None and "numpy" in found:
            kind, keys, position, has_gauss, cached = found["numpy"]
            numpy.random.set_state((kind, _numbers(keys), position, has_gauss, cached))
        if device.type == "cuda" and "cuda" in found:
            torch.cuda.set_rng_state(_tensor(found["cuda"]), device)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise ArtifactError(f"the checkpoint's random state is damaged: {error}; take another checkpoint") from None


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.cpu().tolist())).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)


def _words(words: Any) -> str:
    return base64.b64encode(b"".join(int(word).to_bytes(4, "little") for word in words)).decode()


def _numbers(text: str) -> list[int]:
    data = base64.b64decode(text)
    return [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
