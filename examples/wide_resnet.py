"""A wide residual network with bottlenecks (Zagoruyko & Komodakis 2016), small here, on the data of resnet_digits.py.

    pipedream train examples/wide_resnet.py --workers 2
    pipedream train examples/wide_resnet.py --workers 4 --mesh auto

Tofu (Wang et al., EuroSys 2019, section 7) trains 50 to 152 layers, whose channels are multiplied by 4 to 10, on 8
GPUs, and publishes 8.3 s of search for 152 layers. What its methods find for such a model, which needs no memory:

    python examples/wide_resnet.py --layers 152 --widen 10 --batch 32 --ranks 8
"""

from dataclasses import replace

import partition_table
import resnet_digits
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipedream

BLOCKS = {14: (1, 1, 1, 1), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}  # layers -> blocks of each size
NAMES = {"*.conv2.weight": "channels in y x", "*.norm2.*": "channels", "*.conv3.weight": "out channels y x"}


class Bottleneck(nn.Module):
    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.norm2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.norm3 = nn.Conv2d(inner, 4 * inner, 1, bias=False), nn.BatchNorm2d(4 * inner)
        self.short = nn.Conv2d(width, 4 * inner, 1, stride, bias=False) if width != 4 * inner else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))
        return F.relu(self.norm3(self.conv3(y)) + self.short(x))


def wide_resnet(layers: int, width: int, classes: int, *stem: nn.Module) -> nn.Sequential:
    sizes = [(width << size, 1 + (size > 0 and not at)) for size, n in enumerate(BLOCKS[layers]) for at in range(n)]
    widths = [width, *(4 * inner for inner, _ in sizes)]
    blocks = (Bottleneck(before, *size) for before, size in zip(widths, sizes, strict=False))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


def recipe(seed: int = 0) -> pipedream.Recipe:
    plain = resnet_digits.recipe(seed)
    stem = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    layout = pipedream.Layout("batch:data, channels:model", names=NAMES)
    return replace(plain, model=wide_resnet(14, 16, 10, *stem), layout=layout)


if __name__ == "__main__":
    choices = partition_table.options(layers=152, widen=10, batch=32)
    width = 64 * choices.widen
    with torch.device("meta"):
        stem = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        model, images = wide_resnet(choices.layers, width, 1000, *stem), torch.empty(choices.batch, 3, 224, 224)
    partition_table.show(model, images, choices)
