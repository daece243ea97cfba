"""Generators that a user's objects hold."""

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from pipedream.runtime.data.generators import find_generators


def test_own_generators_are_found_and_no_global_one() -> None:
    own = {"python": random.Random(1), "numpy": np.random.default_rng(1), "torch": torch.Generator()}
    methods = {"draw": own["python"].random, "normal": partial(own["numpy"].normal, 0.0)}
    functions = [random.random, random.shuffle, partial(random.uniform, 0, 1), np.random.rand, np.random.shuffle]
    holder = SimpleNamespace(functions=functions, default=torch.default_generator)
    assert find_generators({"": holder}) == {}
    assert find_generators({"": holder, "own": own, "methods": methods}) == {
        f"own.{name}": generator for name, generator in own.items()
    }
    found = find_generators({"own": methods, "global": holder})
    assert found == {"own.draw.__self__": own["python"], "own.normal.0.__self__": own["numpy"]}
