"""Runs a model without changing its state."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["Attributes", "preserve_state", "python_generators", "python_generators_seeded", "seed_generators"]


class Attributes:
    """The plain attributes, training flags and hooks that modules have now, to be restored."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        every = list({id(module): module for root in modules for module in root.modules()}.values())
        self._saved = [(module, dict(module.__dict__)) for module in every]
        # Hugging Face's models install some in their first forward.
        slots = [slot for module in every for name, slot in module.__dict__.items() if "_hooks" in name]
        self._hooks = [(slot, dict(slot)) for slot in slots if isinstance(slot, dict)]

    def restore(self) -> None:
        for module, attributes in self._saved:
            for name in module.__dict__.keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)
        for slot, own in self._hooks:
            slot.clear()
            slot.update(own)


@contextmanager
def preserve_state(modules: Iterable[nn.Module], devices: Iterable[int] = (), seed: int = 0) -> Iterator[None]:
    """A context in which the modules work on copies of their buffers, and after which they are as before.

    Attributes and random generators, which `seed` seeds within the context, are restored too.
    """
    devices, modules = list(devices), list(modules)
    attributes = Attributes(modules)
    owners = {id(module): module for root in modules for module in root.modules()}.values()
    saved = [(module._buffers, dict(module._buffers)) for module in owners]
    copies: dict[int, torch.Tensor] = {}
    with torch.random.fork_rng(devices=devices), python_generators_seeded(seed):
        seed_generators(seed, devices)
        try:
            for slots, buffers in saved:
                for name, buffer in buffers.items():
                    if buffer is not None:
                        # A buffer shared by two modules stays one tensor.
                        slots[name] = copies.setdefault(id(buffer), buffer.detach().clone())
            yield
        finally:
            attributes.restore()
            for slots, buffers in saved:
                slots.clear()
                slots.update(buffers)


def seed_generators(seed: int, devices: Iterable[int]) -> None:
    """Seeds the generators of the CPU and of CUDA devices."""
    torch.default_generator.manual_seed(seed)
    for index in devices:
        torch.cuda.default_generators[index].manual_seed(seed)


def python_generators() -> tuple[Any, ...]:
    """Returns the states of the generators of Python and NumPy, which compare by value."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest


@contextmanager
def python_generators_seeded(seed: int) -> Iterator[None]:
    """A context in which the generators of Python and NumPy are seeded."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
