"""A recipe, a plan and a checkpoint as version 0.1 wrote them at commit 862508f; losses.json has that run's losses."""

from functools import partial

import torch
from torch import nn

import pipedream


def recipe(seed: int = 0) -> pipedream.Recipe:
    """Two linear layers on noise."""
    generator = torch.Generator().manual_seed(seed)
    data = [(torch.randn(4, 3, generator=generator), torch.randint(2, (4,), generator=generator)) for _ in range(8)]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return pipedream.Recipe(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        train=data,
        metrics={"accuracy": lambda output, batch: (output.argmax(1) == batch[1]).float().mean()},
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5),
        ema=0.9,
        epochs=2,
    )
