"""Recurrent layers whose batch is sharded compute as in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import processes
import pytest
import torch
from torch import nn

from pipedream.core.errors import PipelineError
from tests.sharding.test_mesh_training import Case, D, _train


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **how: Any) -> None:
        super().__init__()
        self.layer = kind(D, D, num_layers=2, **how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer.batch_first:
            return x + self.layer(x)[0]
        output, state = self.layer(x.transpose(0, 1))
        last = state[0] if isinstance(state, tuple) else state
        joined: torch.Tensor = x + output.transpose(0, 1) + last[-1].unsqueeze(1)
        return joined


def _make_model(kind: type[nn.RNNBase], **how: Any) -> tuple[nn.Sequential, Callable[[int], torch.Tensor]]:
    blocks = Recurrent(kind, batch_first=True, **how), Recurrent(kind, **how)
    return nn.Sequential(nn.Embedding(12, D), *blocks, nn.Flatten(), nn.Linear(4 * D, 4)), lambda size: torch.randint(
        12, (size, 4)
    )


def _make_case(kind: type[nn.RNNBase], *args: Any, **how: Any) -> Case:
    return Case(partial(_make_model, kind, **how), "data:2", "batch:data", *args)


CASES = {
    "lstm": _make_case(nn.LSTM, "pipedream", None),
    "gru": _make_case(nn.GRU),
    "rnn": _make_case(nn.RNN, nonlinearity="relu"),
    "sharded-weights": replace(_make_case(nn.LSTM, "pipedream", None), shard_weights="data"),
}


def _train_all() -> list[Any]:
    return [_train(case, case.mesh) for case in CASES.values()]


@pytest.mark.processes
@pytest.mark.slow
def test_recurrent_layers_cut_by_batch_train_as_in_one_process() -> None:
    outcomes = processes.kept(4).results(_train_all, timeout_s=120.0)[0]
    for (name, case), (losses, state, scores) in zip(CASES.items(), outcomes, strict=True):
        expected, weights, seen = _train(case, "")
        assert losses == pytest.approx(expected, abs=1e-10), name
        assert scores == pytest.approx(seen, abs=1e-10), name
        for weight, tensor in state.items():
            assert torch.allclose(tensor, weights[weight], atol=1e-10, rtol=0), (name, weight)


@pytest.mark.processes
@pytest.mark.slow
def test_dropout_inside_of_a_recurrent_layer_is_refused() -> None:
    case = replace(_make_case(nn.GRU, dropout=0.5), stages=())
    for end in processes.launch(_train, case.ranks, case, case.mesh):
        assert isinstance(end.error, PipelineError)
        assert "the dropout of gru draws random numbers for a tensor of" in str(end.error)
