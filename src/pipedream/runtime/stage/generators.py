"""The random generators of a stage's layers, and which layers never draw.

Seeding the CPU's generator takes 1.2 us. Comparing its states around a stage, to see whether any layer drew, takes 4
us, and a layer that drew unseeded could not be run again cleanly. So every layer is seeded, except torch's own types
that are known not to draw.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import has_torch_function

from pipedream.core.seeds import layer_seed
from pipedream.runtime.data.generators import find_generators
from pipedream.runtime.data.rng import RngStates, seeded_rng

_NEVER_DRAW = frozenset(
    [
        *(nn.Linear, nn.Bilinear, nn.Identity, nn.Flatten, nn.Unflatten, nn.Embedding, nn.EmbeddingBag),
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
        *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm),
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
        *(nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish),
        *(nn.Softmax, nn.LogSoftmax, nn.Upsample, nn.ZeroPad2d, nn.ReflectionPad2d, nn.ConstantPad2d),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
        *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
    ]
)


def never_draws(layer: nn.Module) -> bool:
    """Returns whether a call certainly draws no random numbers, as long as the layer has no hooks."""
    return type(layer) in _NEVER_DRAW and not has_torch_function(tuple(layer._parameters.values()))


class LayerGenerators:
    """torch's default generator and, for a stage on a GPU, that of this GPU, even if another one is current.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])

    def seed(self, microbatch: int, layer: str) -> None:
        """Seeds for a layer; `microbatch` counts since the start of training."""
        seed = layer_seed(self._seed, microbatch, layer)
        for generator in self._generators:
            generator.manual_seed(seed)

    def states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def restore(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def list_own_generators(modules: Iterable[nn.Module]) -> list[Any]:
    """Returns the generators that modules hold in their attributes."""
    return list(find_generators({str(number): vars(module) for number, module in enumerate(modules)}).values())


@dataclass(eq=False)
class OtherGenerators:
    """The generators of Python and NumPy, and those that layers hold, at a stage with replicas.

    Replicas have copies in the same state, so they are seeded for each microbatch, like torch's own.

    Attributes:
        seed: of the run.
        may_draw: whether the stage has other replicas, without which nothing is seeded; False once a forward in
            training mode has drawn nothing.
    """

    seed: int
    layers: Sequence[tuple[str, nn.Module]]
    own_generators: Sequence[Any]
    may_draw: bool

    @contextmanager
    def seeding(self, microbatch: int) -> Iterator[None]:
        """Context of a forward."""
        if not self.may_draw:
            yield
            return
        name, layer = self.layers[0]
        with seeded_rng(layer_seed(self.seed, microbatch, name), self.own_generators):
            old = RngStates.read().to_json()
            yield
            if layer.training and not self.own_generators:
                new = RngStates.read().to_json()
                self.may_draw = any(old[kind] != new[kind] for kind in ("python", "numpy"))
