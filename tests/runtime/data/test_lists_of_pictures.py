"""Lists of pictures of several sizes, as detection models take them, in a pipeline and in a plain loop."""

from typing import Any

import pytest
import torch
from built import Built
from torch import Tensor, nn
from torch.nn import functional as F
from training import plan_of

import pipedream as pd

COUNTS = 4, 3, 5


def make_model() -> nn.Module:
    torch.manual_seed(0)

    def forward(model: Any, pictures: list[Tensor]) -> Tensor:
        features = torch.stack([picture.mean((1, 2)) for picture in pictures])
        return model.b(torch.tanh(model.a(features)))

    return Built(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))


def make_batch(count: int, kind: str) -> tuple[Any, Any]:
    torch.manual_seed(count)
    pictures = [torch.randn(3, 4 + i % 2, 5 + i) for i in range(count)]
    labels = [i % 2 for i in range(count)]
    targets = {"tensor": torch.tensor(labels), "dicts": [{"label": torch.tensor(i)} for i in labels]}
    return pictures, targets.get(kind, [[i] for i in labels])


def compute_loss(output: Tensor, targets: Any) -> Tensor:
    if isinstance(targets, list):
        labels = [target["label"].item() if isinstance(target, dict) else target[0] for target in targets]
        targets = torch.tensor(labels)
    assert len(targets) == len(output)
    return F.cross_entropy(output, targets)


@pytest.mark.parametrize("kind", ["tensor", "dicts", "lists"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_pipeline_trains_as_a_plain_loop(kind: str, microbatches: int) -> None:
    data = [make_batch(count, kind) for count in COUNTS]
    batch_dim: Any = {0: "items"}
    model, plain = make_model(), make_model()
    profile = pd.profile(make_model(), data[0][0], batch_dim=batch_dim, warmup=0, runs=1)
    assert profile.batch == COUNTS[0]
    plan = plan_of(make_model(), data[0][0], (1,))
    losses = []
    with pd.Pipeline(
        model, plan, loss=compute_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), targets=lambda batch: batch[1],
        schedule="gpipe", microbatches=microbatches, batch_dim=batch_dim if kind == "lists" else 0,
    ) as pipeline:  # fmt: skip
        for done in pipeline.train(data, epochs=1):
            assert done.samples == COUNTS[done.number]
            losses.append(done.loss)
        state = pipeline.state_dict()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for (pictures, targets), trained in zip(data, losses, strict=True):
        optimizer.zero_grad()
        loss = compute_loss(plain(pictures), targets)
        loss.backward()
        optimizer.step()
        assert trained == pytest.approx(loss.item(), abs=1e-6)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)
