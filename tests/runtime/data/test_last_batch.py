"""A last batch that leaves one sample to a microbatch, over which a model cannot normalise."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from training import SGD, plan_of

import pipedream as pd

SIZE = 8
BEFORE = r"comparison of the first minibatch.*a microbatch has one sample.*drop_last=True.*fewer microbatches"
LATE = r"stage 1.*a microbatch has one sample.*drop_last=True.*fewer microbatches"


def model_of(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 3))


def batches(last: int) -> list[Any]:
    return [(torch.randn(size, 4), torch.randint(0, 3, (size,))) for size in (SIZE, SIZE, last)]


class Unknown:
    """A loader whose last batch is not known before it comes."""

    def __iter__(self) -> Iterator[Any]:
        yield from batches(5)


MODELS = {
    "batch norm": lambda: model_of(nn.BatchNorm1d(6)),
    "group norm": lambda: model_of(nn.GroupNorm(6, 6)),
    "frozen": lambda: model_of(nn.BatchNorm1d(6).eval()),
    "layer norm": lambda: model_of(nn.LayerNorm(6)),
    "several values": lambda: model_of(nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2), nn.Flatten()),
}


def data_loader(last: int, **options: Any) -> DataLoader[Any]:
    samples = [sample for batch in batches(last) for sample in zip(*batch, strict=True)]
    return DataLoader(samples, SIZE, **options)


@pytest.mark.parametrize(
    ("name", "loader", "parts", "reason", "trained"),
    [
        ("batch norm", batches(5), 4, BEFORE, 0),
        ("batch norm", data_loader(5), 4, BEFORE, 0),
        ("batch norm", data_loader(6), 4, BEFORE, 0),
        ("group norm", data_loader(5, shuffle=True), 4, BEFORE, 0),
        ("batch norm", Unknown(), 4, LATE, 2),
        ("batch norm", data_loader(SIZE), SIZE, BEFORE, 0),
        ("batch norm", data_loader(5, drop_last=True), 4, "", 2),
        ("batch norm", data_loader(SIZE), 4, "", 3),
        ("batch norm", data_loader(5), 2, "", 3),
        *((name, data_loader(5), 4, "", 3) for name in ("frozen", "layer norm", "several values")),
    ],
)
def test_one_sample_is_refused_before_the_epoch(name: str, loader: Any, parts: int, reason: str, trained: int) -> None:
    model, done = MODELS[name](), list[pd.Done]()
    options = {"schedule": "gpipe", "microbatches": parts, "loss": F.cross_entropy, "optimizer": SGD}
    with (
        pytest.raises(pd.PipelineError, match="(?s)" + reason) if reason else nullcontext(),
        pd.Pipeline(model, plan_of(model, torch.randn(SIZE, 4), (1,)), **options) as pipeline,
    ):
        done.extend(pipeline.train(loader))
    assert len(done) == trained
