"""A residual network with running statistics, written as everybody writes it, on scikit-learn's digits.

Run it: pipedream train examples/resnet_digits.py --workers 2
"""

from functools import partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pipedream


class Block(nn.Module):
    def __init__(self, narrow: int, wide: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(narrow, wide, 3, stride, padding=1), nn.BatchNorm2d(wide)
        self.conv2, self.norm2 = nn.Conv2d(wide, wide, 3, padding=1), nn.BatchNorm2d(wide)
        self.shortcut = nn.Conv2d(narrow, wide, 1, stride) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.shortcut is None else self.shortcut(x)
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + skip)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(Block(16, 16), Block(16, 32, 2), Block(32, 32), Block(32, 64, 2))
        self.classify = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.blocks(F.relu(self.norm(self.stem(images)))).mean((2, 3)))


def recipe(seed: int = 0) -> pipedream.Recipe:
    torch.manual_seed(seed)
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    data, order = TensorDataset(images.float().view(-1, 1, 8, 8) / 16, labels), torch.Generator().manual_seed(seed)
    train, test = train_test_split(data, test_size=0.2, stratify=labels, random_state=0)
    return pipedream.Recipe(
        model=ResNet(),
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=2e-3),
        train=DataLoader(train, batch_size=32, shuffle=True, generator=order),
        test=DataLoader(test, batch_size=128),
        metrics={"accuracy": lambda output, labels: (output.argmax(1) == labels).float().mean()},
        epochs=6,
        target=("accuracy", 0.97),
    )


if __name__ == "__main__":
    pipedream.run(recipe)
