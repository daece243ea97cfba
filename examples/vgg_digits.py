"""A network after VGG (convolutions, then heavy dense layers) on scikit-learn's digits, enlarged to 16 x 16 pixels.

Run it: pipedream train examples/vgg_digits.py --workers 2
Its weights are large beside what crosses a cut, as PipeDream likes it; `make demo` compares it with DDP on slow links.
"""

from functools import partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pipedream

CHANNELS, DENSE, EPOCHS = (32, 32, "pool", 64, 64, "pool", 128, 128, "pool"), 1024, 5


def vgg() -> nn.Sequential:
    layers, channels = [], 1
    for wide in CHANNELS:
        if wide == "pool":
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide), nn.ReLU()]
            channels = wide
    layers += [nn.Flatten(), nn.Linear(4 * channels, DENSE), nn.ReLU(), nn.Linear(DENSE, DENSE), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(DENSE, 10))


def recipe(seed: int = 0) -> pipedream.Recipe:
    torch.manual_seed(seed)
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = F.interpolate(images.float().view(-1, 1, 8, 8) / 16, scale_factor=2, mode="bilinear")
    data, order = TensorDataset(images, labels), torch.Generator().manual_seed(seed)
    split, test = train_test_split(data, test_size=0.2, stratify=labels, random_state=0)
    train = DataLoader(split, batch_size=32, shuffle=True, generator=order)
    return pipedream.Recipe(
        model=vgg(),
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=EPOCHS * len(train)),  # one step an update
        train=train,
        test=DataLoader(test, batch_size=128),
        metrics={"accuracy": lambda output, labels: (output.argmax(1) == labels).float().mean()},
        epochs=EPOCHS,
        target=("accuracy", 0.98),
    )


if __name__ == "__main__":
    pipedream.run(recipe)
