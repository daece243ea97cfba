"""The order of the data: the random numbers that decide it, kept apart from all others.

A DataLoader without a generator draws from torch's global one, a sampler of the user's own perhaps from
`random` or numpy. So does everything else in a process, and what else there is differs from rank to rank and
from plan to plan. Therefore these draws are made with the global generators at a state of their own: it begins as
they are at the first use, goes on from epoch to epoch, and is put aside in between. The order of the data
then depends on nothing but this state, which can be saved; in a script where nothing else draws it is that
of a plain ``for batch in loader``.

A `torch.Generator` that the user gave to the loader or a sampler is drawn from where it is; it is set alike on
all ranks and is part of the state.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .jsonable import base64_of, bytes_of

__all__ = ["Order", "generators_of", "undisturbed"]

_PLACES = ("generator", "sampler.generator", "batch_sampler.generator", "batch_sampler.sampler.generator")


class _Globals(NamedTuple):
    """States of the process's global generators on the CPU; None for numpy where it is not loaded."""

    torch: torch.Tensor
    python: Any
    numpy: Any


def _read(only_torch: bool = False) -> _Globals:
    if only_torch:
        return _Globals(torch.get_rng_state(), None, None)
    numpy: Any = sys.modules.get("numpy")
    return _Globals(torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state())


def _write(states: _Globals) -> None:
    torch.set_rng_state(states.torch)
    if states.python is not None:
        random.setstate(states.python)
    if states.numpy is not None:
        sys.modules["numpy"].random.set_state(states.numpy)


def generators_of(loader: Any) -> dict[str, torch.Generator]:
    """Returns the generators that the user gave to a loader and its samplers, by the place where they are."""
    found = {}
    for place in _PLACES:
        value = loader
        for name in place.split("."):
            value = getattr(value, name, None)
        if isinstance(value, torch.Generator) and value is not torch.default_generator:
            found[place] = value
    return found


@contextmanager
def undisturbed(loader: Any) -> Iterator[None]:
    """Puts all generators back to where they were: the global ones and those of a loader."""
    states, own = _read(), [(g, g.get_state()) for g in generators_of(loader).values()]
    try:
        yield
    finally:
        _write(states)
        for generator, state in own:
            generator.set_state(state)


class Order:
    """The state of the draws that decide the order of the data.

    Life: the first `drawing` or `snapshot` takes over the global generators' state, if no `restore` came before.
    """

    def __init__(self) -> None:
        self._states: _Globals | None = None
        self._inside = False

    @contextmanager
    def drawing(self, only_torch: bool = False) -> Iterator[None]:
        """Lets the global generators be those of the order.

        Args:
            only_torch: what is drawn comes from torch; python's and numpy's are 100 us slower and left alone.
        """
        if self._inside:
            yield
            return
        mine = self._begun()
        others = _read(only_torch)
        _write(_Globals(mine.torch, None, None) if only_torch else mine)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            drawn = _read(only_torch)
            self._states = mine._replace(torch=drawn.torch) if only_torch else drawn
            _write(others)

    def snapshot(self, loader: Any) -> dict[str, Any]:
        """Returns the state as JSON has it, the loader's own generators included."""
        states = self._begun()
        version, words, normal = states.python
        found: dict[str, Any] = {
            "torch": base64_of(states.torch.numpy().tobytes()),
            "python": [version, list(words), normal],
            "generators": {
                place: base64_of(g.get_state().numpy().tobytes()) for place, g in generators_of(loader).items()
            },
        }
        if states.numpy is not None:
            name, keys, *rest = states.numpy
            found["numpy"] = [name, [int(key) for key in keys], *rest]
        return found

    def restore(self, state: Mapping[str, Any], loader: Any) -> None:
        """Goes on from a snapshot; a generator of the loader that it does not know is left as it is."""
        version, words, normal = state["python"]
        numpy = state.get("numpy")
        self._states = _Globals(
            torch.frombuffer(bytes_of(state["torch"]), dtype=torch.uint8),
            (version, tuple(words), normal),
            None if numpy is None or "numpy" not in sys.modules else tuple(numpy),
        )
        for place, generator in generators_of(loader).items():
            if place in state["generators"]:
                generator.set_state(torch.frombuffer(bytes_of(state["generators"][place]), dtype=torch.uint8))

    def _begun(self) -> _Globals:
        if self._states is None:
            self._states = _read()
        return self._states
