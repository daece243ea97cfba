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

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from pipedream.runtime.data import rng as generators

__all__ = ["DataOrder", "generators_of", "undisturbed"]

_PLACES = ("generator", "sampler.generator", "batch_sampler.generator", "batch_sampler.sampler.generator")


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
    states, own = generators.read(), [(g, g.get_state()) for g in generators_of(loader).values()]
    try:
        yield
    finally:
        generators.write(states)
        for generator, state in own:
            generator.set_state(state)


class DataOrder:
    """The state of the draws that decide the order of the data.

    Life: the first `drawing` or `snapshot` takes over the global generators' state, if no `restore` came before.
    """

    def __init__(self) -> None:
        self._states: generators.RngStates | None = None
        self._inside = False

    @contextmanager
    def drawing(self, only_torch: bool = False) -> Iterator[None]:
        """Lets the global generators be those of the order.

        Args:
            only_torch: what is drawn comes from torch alone.
        """
        if self._inside:
            yield
            return
        mine = self._begun()
        others = generators.read(only_torch)
        generators.write(generators.RngStates(mine.torch, None, None) if only_torch else mine)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            drawn = generators.read(only_torch)
            self._states = mine._replace(torch=drawn.torch) if only_torch else drawn
            generators.write(others)

    def snapshot(self, loader: Any) -> dict[str, Any]:
        """Returns the state as JSON has it, the loader's own generators included."""
        states = self._begun()
        own = {place: generators.text_of(g.get_state()) for place, g in generators_of(loader).items()}
        return generators.encoded(states) | {"generators": own}

    def restore(self, state: Mapping[str, Any], loader: Any) -> None:
        """Goes on from a snapshot; a generator of the loader that it does not know is left as it is."""
        self._states = generators.decoded(state)
        for place, generator in generators_of(loader).items():
            if place in state["generators"]:
                generator.set_state(generators.tensor_of(state["generators"][place]))

    def _begun(self) -> generators.RngStates:
        if self._states is None:
            self._states = generators.read()
        return self._states
