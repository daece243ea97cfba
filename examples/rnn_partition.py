"""Stacked LSTMs, unrolled in time as in Tofu's evaluation, that read scikit-learn's digits row by row; small here.

    pipedream train examples/rnn_partition.py --workers 2
    pipedream train examples/rnn_partition.py --workers 4 --mesh auto

Tofu (Wang et al., EuroSys 2019, section 7) trains 4 to 10 layers of 4096 to 10240 units over 20 time steps on 8 GPUs,
and publishes 66.6 s of search for 10 layers. What its methods find, for published sizes with these options:

    python examples/rnn_partition.py --layers 10 --steps 20 --width 4096 --batch 128 --ranks 8 --methods recursive data
"""

from dataclasses import replace

import partition_table
import resnet_digits
import torch
from torch import Tensor, nn

import pipedream
from pipedream.sharding import replicate


class Last(nn.Linear):
    def forward(self, states: tuple[Tensor, ...]) -> Tensor:
        return super().forward(states[-1])


class Unrolled(nn.Module):  # gives the next layer a tensor for each time step
    def __init__(self, width: int) -> None:
        super().__init__()
        self.of_x, self.of_h = (nn.Parameter(torch.randn(4, width, width) / width**0.5) for _ in range(2))
        self.of_1 = nn.Parameter(torch.zeros(4, 1, width))

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        steps, states = inputs.unbind(1) if isinstance(inputs, Tensor) else inputs, []
        h, c = torch.zeros_like(steps[0]), torch.zeros_like(steps[0])
        for x in steps:
            gates = x.expand(4, -1, -1) @ self.of_x + h.expand(4, -1, -1) @ self.of_h + self.of_1
            add, keep, new, give = gates.unbind()
            c = keep.sigmoid() * c + add.sigmoid() * new.tanh()
            states.append(h := replicate(give.sigmoid() * c.tanh()))  # ranks that cut the units need all of them
        return tuple(states)


def stacked(layers: int, width: int) -> nn.Sequential:
    unrolled = (Unrolled(width) for _ in range(layers))
    return nn.Sequential(nn.Flatten(1, 2), nn.Linear(8, width), *unrolled, Last(width, 10))


def recipe(seed: int = 0) -> pipedream.Recipe:
    layout = pipedream.Layout("batch:data, hidden:model", names={"*.of_*": "gates before hidden"})
    return replace(resnet_digits.recipe(seed), model=stacked(2, 64), layout=layout, epochs=8, target=("accuracy", 0.95))


if __name__ == "__main__":
    choices = partition_table.options(layers=2, steps=4, width=64, batch=32)
    with torch.device("meta"):
        images = torch.empty(choices.batch, 1, choices.steps, 8)
        partition_table.show(stacked(choices.layers, choices.width), images, choices)
