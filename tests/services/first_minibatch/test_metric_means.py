"""A metric is reported as the mean of its values for microbatches: if it is none, training is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from marks import thinned
from torch import Tensor, nn
from torch.nn import functional as F
from training import SGD, plan_of

import pipedream as pd

BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


def correct(output: Tensor, labels: Tensor) -> Tensor:
    return output.argmax(1) == labels


def f1(output: Tensor, labels: Tensor) -> Tensor:
    """Is 0 on the first minibatch, for the whole and for its parts."""
    positive, true = output.argmax(1) == 1, labels == 1
    return 2 * (positive & true).sum() / (positive.sum() + true.sum()).clamp(min=1)


MEANS: dict[str, Callable[[Any, Any], Any]] = {
    "accuracy": lambda output, labels: correct(output, labels).float().mean(),
    "in low precision": lambda output, labels: correct(output, labels).half().mean(),
    "pair": lambda output, labels: (correct(output, labels).sum(), len(labels)),
    "of some": lambda output, labels: (output[labels == 1].sum(), int((labels == 1).sum())),
    "number": lambda output, labels: 0.5,
    "cancels": lambda output, labels: (output.softmax(1) - 1 / 3).mean(),
    "random": lambda output, labels: torch.rand(()),
    "writes": lambda output, labels: output.square_().mean(),
    "of probabilities": lambda output, labels: output.softmax(1).log().mean(),
    "nan": lambda output, labels: float("nan"),
}
OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "root": lambda output, labels: (output[:, 0] - labels).square().mean().sqrt(),
    "f1": f1,
    "perplexity": lambda output, labels: F.cross_entropy(output, labels).exp(),
    "median": lambda output, labels: output.median(),
    "maximum": lambda output, labels: output.max(),
    "sum": lambda output, labels: correct(output, labels).sum(),
    "unlike amounts": lambda output, labels: output[labels == 1].mean(),
    "correlation": lambda output, labels: torch.corrcoef(torch.stack([output[:, 0], labels.float()]))[0, 1],
    "not for parts": lambda output, labels: 1.0 if len(labels) == 8 else float("nan"),
}


def values(metric: Callable[[Any, Any], Any], microbatches: int) -> list[float]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 3))
    model[3].bias.data[0] = 3.0
    options = {"loss": F.cross_entropy, "optimizer": SGD, "schedule": "1f1b", "microbatches": microbatches}
    with pd.Pipeline(model, plan_of(model, BATCH[0], ()), metrics={"it": metric}, **options) as pipeline:
        return [done.metrics["it"] for done in pipeline.train([BATCH])]


@pytest.mark.parametrize(("name", "microbatches"), thinned(product(MEANS, (2, 3)), 3))
def test_a_mean_over_samples_or_of_a_pair_is_accepted(name: str, microbatches: int) -> None:
    assert len(values(MEANS[name], microbatches)) == 1


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_mean_is_refused_for_parts(name: str) -> None:
    assert len(values(OTHERS[name], 1)) == 1
    with pytest.raises(pd.PipelineError, match=r"the metric 'it' of a minibatch is .* microbatches=1"):
        values(OTHERS[name], 2)


class Collects:
    """Keeps what it gets."""

    sizes: tuple[int, ...] = ()

    def __call__(self, output: Tensor, labels: Tensor) -> float:
        self.sizes += (len(labels),)
        return 0.5


def test_a_metric_that_keeps_something_is_not_called_twice() -> None:
    values(metric := Collects(), 2)
    assert metric.sizes == (4, 4)
