"""Generators that a user's objects hold."""

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from pipedream.runtime.data.generators import find_generators


def test_own_generators_are_found_and_no_global_one() -> None:
    generators = {"python": random.Random(1), "numpy": np.random.default_rng(1), "torch": torch.Generator()}
    methods = {"draw": generators["python"].random, "normal": partial(generators["numpy"].normal, 0.0)}
    functions = [random.random, random.shuffle, partial(random.uniform, 0, 1), np.random.rand, np.random.shuffle]
    holder = SimpleNamespace(functions=functions, default=torch.default_generator)
    assert find_generators({"": holder}) == {}
    assert find_generators({"": holder, "own": generators, "methods": methods}) == {
        f"own.{name}": generator for name, generator in generators.items()
    }
    in_methods = find_generators({"own": methods, "global": holder})
    assert in_methods == {"own.draw.__self__": generators["python"], "own.normal.0.__self__": generators["numpy"]}
