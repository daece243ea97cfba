"""Runs a model without changing its state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["preserve_state", "seed_generators"]


@contextmanager
def preserve_state(modules: Iterable[nn.Module], devices: Iterable[int] = (), seed: int = 0) -> Iterator[None]:
    """A context in which the modules work on copies of their buffers, and after which they are as before.

    Training flags, plain attributes, and random generators, which `seed` seeds within the context, are restored too.
    """
    devices = list(devices)
    every = {id(module): module for root in modules for module in root.modules()}
    saved = [(module, dict(module.__dict__), dict(module._buffers)) for module in every.values()]
    copies: dict[int, torch.Tensor] = {}
    with torch.random.fork_rng(devices=devices):
        seed_generators(seed, devices)
        try:
            for module, _, buffers in saved:
                for name, buffer in buffers.items():
                    if buffer is not None:
                        # A buffer shared by two modules stays one tensor.
                        module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
            yield
        finally:
            for module, attributes, buffers in saved:
                for name in module.__dict__.keys() - attributes.keys():
                    del module.__dict__[name]
                module.__dict__.update(attributes)
                module._buffers.clear()
                module._buffers.update(buffers)


def seed_generators(seed: int, devices: Iterable[int]) -> None:
    """Seeds the generators of the CPU and of CUDA devices."""
    torch.default_generator.manual_seed(seed)
    for index in devices:
        torch.cuda.default_generators[index].manual_seed(seed)
