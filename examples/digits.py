"""Handwritten digits: 1,797 images of 8 x 8 pixels (UCI, from scikit-learn), a small convolutional network.

Run it: pipedream train examples/digits.py --workers 2
"""

from functools import partial
from importlib.metadata import distribution

import numpy
import torch
import torch.nn.functional as F
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
    """Reads the file of scikit-learn, which itself takes a second to import; each row has 64 pixels and the digit."""
    torch.manual_seed(seed)
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = torch.from_numpy(numpy.loadtxt(str(file), dtype=numpy.float32, delimiter=","))
    rows = rows[rows[:, 64].argsort(stable=True)]
    is_test = torch.arange(len(rows)) % 5 == 0  # every fifth image of each digit
    images, labels = rows[:, :64].reshape(-1, 1, 8, 8) / 16, rows[:, 64].long()
    train, test = (TensorDataset(images[part], labels[part]) for part in (~is_test, is_test))
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
