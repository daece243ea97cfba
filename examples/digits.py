"""Handwritten digits: 1,797 images of 8 x 8 pixels (UCI, from scikit-learn), a small convolutional network.

Run it: pipedream train examples/digits.py --workers 2
"""

from functools import partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pipedream


class DigitNet(nn.Module):
    """An ordinary module whose forward calls its children one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1, self.relu1 = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
        self.conv2, self.norm2, self.relu2 = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()
        self.pool, self.flatten, self.dropout = nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25)
        self.hidden, self.relu3, self.classify = nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.relu1(self.norm1(self.conv1(images)))
        x = self.relu2(self.norm2(self.conv2(x)))
        x = self.dropout(self.flatten(self.pool(x)))
        return self.classify(self.relu3(self.hidden(x)))


def recipe(seed: int = 0) -> pipedream.Recipe:
    """The test split is fixed: stratified, 20%."""
    torch.manual_seed(seed)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    split = train_test_split(images, torch.tensor(digits.target), test_size=0.2, stratify=digits.target, random_state=0)
    train, test = TensorDataset(split[0], split[2]), TensorDataset(split[1], split[3])
    order = torch.Generator().manual_seed(seed)
    return pipedream.Recipe(
        model=DigitNet(),
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        train=DataLoader(train, batch_size=32, shuffle=True, generator=order),
        test=DataLoader(test, batch_size=128),
        metrics={"accuracy": lambda output, labels: (output.argmax(1) == labels).float().mean()},
        scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=12 * 45),  # one step an update
        epochs=12,
        target=("accuracy", 0.97),
    )


if __name__ == "__main__":
    pipedream.run(recipe)
