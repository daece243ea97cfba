"""One forward is recorded: calls, tensors, and what they are computed from."""

from dataclasses import astuple
from typing import Any

import pytest
import torch
from built import Built, unchanged
from torch import Tensor, nn
from torch.nn import functional as F

from pipedream.capture.record import END, Recording, TensorRecord, record


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, 4), nn.BatchNorm1d(4)
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(4, 3)
        self.register_buffer("table", torch.arange(4.0))
        self.mask: Any = None

    def forward(self, tokens: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        self.mask = (tokens > 0).float() * scale
        x = self.embed(tokens) * self.mask.unsqueeze(2) + self.table
        x = self.norm(x.flatten(0, 1))
        return {"logits": self.head(self.dropout(x)), "mask": self.mask}


def record_model() -> tuple[Model, Recording]:
    model = Model()
    return model, record(model, (torch.randint(9, (2, 3)),), {"scale": 2.0})


def find_returned(recording: Recording, path: str = "") -> TensorRecord:
    """A tensor of the model's output."""
    return next(
        tensor for tensor in recording.tensors if any(s[:3] == ("", "out", path) for s in map(astuple, tensor.sites))
    )


def test_calls_are_in_order_and_inside_each_other() -> None:
    model, recording = record_model()
    assert recording.root.module is model
    assert [call.name for call in recording.root.inner] == ["embed", "norm", "dropout", "head"]
    moments = [moment for call in recording.root.inner for moment in (call.start, call.end)]
    assert moments == sorted(set(moments))
    assert not any(call.free or call.opaque or call.whole for call in recording.root.every())


def test_what_is_computed_from_the_inputs_alone_is_known() -> None:
    _, recording = record_model()
    mask = find_returned(recording, "mask")
    table = next(tensor for tensor in recording.tensors if tensor.state == "table")
    assert not mask.depends
    assert mask.sources == {"0"}
    assert mask.uses[-1] == END
    assert (table.state, table.depends, table.sources) == ("table", False, {":table"})
    assert table.uses, "the embedding depends, so does its sum with the table"
    logits = find_returned(recording, "logits")
    assert logits.depends
    assert [(site.call, site.end, site.path) for site in logits.sites][:2] == [
        ("head", "out", ""),
        ("", "out", "logits"),
    ]
    assert logits.last == END


def test_buffers_that_are_written_or_replaced_are_known() -> None:
    _, recording = record_model()
    assert recording.changed_by_forward == {"norm.num_batches_tracked"}

    def forward(model: Any, x: Tensor) -> Tensor:
        model.mean = model.mean * 0.9 + x.mean() * 0.1
        return x - model.mean

    model = Built(forward, mean=nn.Buffer(torch.zeros(())))
    assert record(model, (torch.ones(2),), {}).changed_by_forward == {"mean"}
    again = record(model, (torch.ones(2),), {}, frozenset({"mean"}))
    assert find_returned(again).depends, "what a moving buffer is used for belongs to its stage"


@pytest.mark.parametrize(
    ("draw", "depends"),
    [
        (lambda x: torch.rand(3), True),
        (lambda x: torch.randn_like(x), True),
        (lambda x: torch.empty(3).uniform_(), True),
        (lambda x: F.dropout(x, 0.5, training=True), True),
        (lambda x: F.dropout(x, 0.5, training=False) + 1, False),
        (lambda x: torch.zeros(3), False),
        (lambda x: x.clone().mul_(2), False),
    ],
)
def test_random_numbers_belong_to_one_stage(draw: Any, depends: bool) -> None:
    recording = record(Built(lambda _, x: draw(x)), (torch.ones(3),), {})
    assert find_returned(recording).depends is depends
    assert bool(recording.draws) is depends


def test_the_model_is_left_without_a_trace() -> None:
    model = Model()
    attributes = [dict(module.__dict__) for module in model.modules()]
    record(model, (torch.randint(9, (2, 3)),), {})
    model.mask = None
    assert [dict(module.__dict__) for module in model.modules()] == attributes
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4))
    with unchanged(model), pytest.raises(RuntimeError, match="shape"):
        record(model, (torch.ones(2, 4),), {})
