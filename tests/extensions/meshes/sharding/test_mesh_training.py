"""A layout moves numbers and does not change them: workers that are meshes train as workers of one rank do.

That those train as their published rules say is the subject of test_transparency.py.
"""

import gc
import os
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import processes
import pytest
import strict
import torch
from built import Built
from marks import long, slow, spread
from torch import nn
from torch.distributed.tensor import _random
from torch.nn import functional as F

import pipedream as pd
from pipedream.extensions.meshes.sharding.stage import StageSharding
from tests.extensions.meshes.sharding import meshes
from tests.extensions.meshes.sharding.meshes import (
    EMBEDDING,
    HALVES,
    Case,
    D,
    check_as_single_ranks,
    make_pipeline,
    train,
)

CALLS = count(1)


def _pad_output(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """Is another loss at each call."""
    return F.cross_entropy(output, batch[1]) * next(CALLS)


CLIPPED = {"clip_grad_norm": 0.1}
LOCAL = CLIPPED | {"clip": "local"}
ATTENTION = "batch:data, heads:model, d_ff:model"
ATTENTION_ON_BOTH = ("attention", "data:2,model:2", f"{ATTENTION}, vocab:model", "gpipe")
MUON = {"optimizer": partial(torch.optim.Muon, lr=0.1), "ema": 0.9}
MATRICES = {name: HALVES[name] for name in ("0.weight", "2.weight")}
TWO_DIMENSIONS = ("data:2,model:2", "batch:data, d_ff:model")

CASES = (
    Case("attention", "model:2", "heads:model, d_ff:model, vocab:model", "gpipe", names=EMBEDDING),
    Case("convolution", "model:2", "d_ff:model", options=CLIPPED),
    Case("mlp", "data:2,model:2", "batch:data, d_ff:model", stages=()),
    Case("mlp", "model:2", "d_ff:model", "pipedream", None, stages=(), replicas=2),
    Case("mlp", "data:2", "batch:data", "1f1b", stages=(), replicas=2, options=CLIPPED),
    Case("attention", "data:2,model:2", "batch:data, heads:model, d_ff:model", "gpipe", stages=()),
    Case("mlp", "data:2", "batch:data", "pipedream", None, shard_weights="data", options=LOCAL),
    Case(*ATTENTION_ON_BOTH, stages=(), shard_weights="data", names=EMBEDDING),
    Case("attention", "data:2", "batch:data", "timeprest", 2, shard_weights="data"),
    Case("mlp", "model:2", "d_ff:model", "1f1b", options={"optimizer": partial(torch.optim.Adafactor, lr=0.1)}),
    Case("matrices", *TWO_DIMENSIONS, "pipedream_2bw", None, (), options=MUON, shard_weights="data", names=MATRICES),
    Case("mlp", "model:2/-", "d_ff:model", options=CLIPPED),
    Case("mlp", "-/data:2", "batch:data", "pipedream", None),
    Case("attention", "data:2/model:2", "batch:data, heads:model, d_ff:model", "gpipe"),
    Case("halves", "model:2/-", "d_ff:model", "1f1b", options=CLIPPED, names=HALVES),
    Case("halves", "data:2/model:2", "batch:data, d_ff:model", "pipedream", None, names=HALVES),
    Case("mlp", "data:2/-", "batch:data", "pipedream_2bw", None, replicas=2),
    # The first microbatches of one replica are sharded, and those of the other are not.
    Case("mlp", "data:2", "batch:data", "1f1b", stages=(), replicas=2, sizes=(5, 8, 7)),
)

RECURRENT = (
    Case("lstm", "data:2", "batch:data", "pipedream", None),
    Case("rnn", "data:2", "batch:data"),
    Case("lstm", "data:2", "batch:data", "pipedream", None, shard_weights="data"),
    Case("dropped", "data:2", "batch:data", sizes=(4, 4)),  # each rank has one sample
    Case("dropped", "-/data:2", "batch:data"),
    Case("dropped", "data:2/-", "batch:data"),
    Case("channels last", "data:2", "batch:data", stages=(), shard_weights="data"),
)
# On meshes that a partition was found for; those that are left out of continuous integration.
FOUND = Case("convolution", "cut1:2", "", "1f1b", options=CLIPPED)
LONGEST = (
    Case("mlp", "cut1:2", "", "pipedream", None, stages=(), options=CLIPPED),  # also trained over links
    Case("attention", "cut1:2", "", "pipedream_2bw", None),
)
# In every run of the tests; the others, on four ranks, take longer.
TWO_RANKS = (
    Case("mlp", "model:2", "d_ff:model", "pipedream", None, stages=(), options=LOCAL),
    Case("mlp", "data:2", "batch:data", stages=(), shard_weights="data", options=CLIPPED),
    Case("mlp", "data:2", "batch:data", "gpipe", stages=(), options=CLIPPED),
    Case("mlp", "cut1:2", "", "pipelined_backprop", None, options={"ema": 0.9}),
)


@pytest.mark.processes
@pytest.mark.parametrize(
    "case",
    [*TWO_RANKS, *spread(map(slow, (*CASES, *RECURRENT, FOUND)), every=4), *map(long, LONGEST)],
    ids=str,
)
def test_meshes_train_as_single_ranks_do(case: Case) -> None:
    check_as_single_ranks(case)


def _train_over_links(case: Case, mesh: str) -> meshes.Trained:
    with strict.installed(on_one_machine=True):
        return train(case, mesh)


OVER_LINKS = (
    Case("mlp", "model:2", "d_ff:model", "pipedream", None, stages=()),
    Case("mlp", "data:2", "batch:data", stages=(), shard_weights="data", options=CLIPPED),
    Case("mlp", "data:2,model:2", "batch:data, d_ff:model", stages=()),
    Case("mlp", "data:2", "batch:data", "1f1b", stages=(), replicas=2, options=CLIPPED),
    Case("mlp", "model:2/-", "d_ff:model", options=CLIPPED),
    Case("halves", "data:2/model:2", "batch:data, d_ff:model", "pipedream", None, names=HALVES),
    Case("mlp", "cut1:2", "", "pipedream", None, stages=(), options=CLIPPED),
)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("case", spread(map(slow, OVER_LINKS)), ids=str)
def test_each_kind_of_mesh_trains_over_links_as_between_gpus(case: Case) -> None:
    check_as_single_ranks(case, _train_over_links)


def _train_twice(case: Case) -> list[tuple[list[float], int]]:
    """Returns the losses of two pipelines, each with the process's threads afterwards."""
    rows = []
    for _ in range(2):
        losses = train(case, case.mesh)[0]
        gc.collect()
        rows.append((losses, len(os.listdir("/proc/self/task"))))
    return rows


@pytest.mark.slow
@pytest.mark.processes
def test_a_second_pipeline_may_have_the_same_mesh() -> None:
    for first, second in processes.team(4).results(_train_twice, Case("mlp", "model:2", "d_ff:model")):
        assert first == second, "other losses, or more threads of gloo"


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case("mlp", "data:2", "batch:data, d_ff:data", stages=()), "gather tensors that the layout shards: .* placed"),
        (Case("convolution", "model:2", "d_in:model, d_ff:model", stages=()), "would be sharded twice over 'model'"),
        (Case("noise", "data:2", "batch:data", stages=()), "rand_like draws random numbers for a tensor of"),
        (Case("gru with dropout", "data:2", "batch:data", stages=()), "the dropout of gru draws random numbers for a"),
        (Case("mlp", "model:2", "d_ff:model", stages=(), options={"loss": _pad_output}), "has another gradient of"),
        (
            Case("halves", "-/model:2", "d_ff:model", names=HALVES | {"1:out": "batch length d_ff"}),
            r"the output of '1' has 3 names \(batch length d_ff\), but its shape is \(4, 12\)",
        ),
    ],
    ids=("gather", "legality", "random", "recurrent", "first-minibatch", "names"),
)
def test_what_a_mesh_refuses(case: Case, words: str) -> None:
    meshes.check_refused(case, words)


def _train_residual(mesh: str, p: float, shape: str) -> list[float]:
    torch.manual_seed(3)
    parts = {"up": nn.Linear(D, 8), "drop": nn.Dropout(p), "down": nn.Linear(8, D)}
    model = Built(lambda model, x: x + model.down(model.drop(torch.tanh(model.up(x)))), **parts).double()
    x = torch.randn(8, D).double()
    plan = pd.plan(pd.profile(model, x), pd.Cluster.flat(len(shape.split("-"))), shape=shape)
    layout = pd.Layout.of(pd.partition(pd.operators(model, x, loss=torch.sum), 2))
    options = {"optimizer": partial(torch.optim.SGD, lr=0.05), "loss": F.mse_loss, "sample": x}
    with pd.Pipeline(model, plan.with_mesh(mesh), layout=layout, **options) as pipeline:
        return [done.loss for done in pipeline.train([(x, x.tanh())] * 3)]


@pytest.mark.processes
@pytest.mark.slow
def test_a_model_that_is_no_chain_may_be_one_stage() -> None:
    losses = _train_residual("", 0.0, "1")
    for trained in processes.team(2).results(_train_residual, "cut1:2", 0.0, "1"):
        assert trained == pytest.approx(losses, abs=1e-10)
    for p, shape, words in ((0.5, "1", "draws random numbers"), (0.0, "1-1", "a stage of several has a mesh")):
        for end in processes.launch(_train_residual, 2 * len(shape.split("-")), "cut1:2", p, shape):
            assert isinstance(end.error, pd.PipelineError)
            assert words in str(end.error)


def test_random_operators_on_gpus_draw_from_the_stages_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """DTensor's own tracker would be made by a broadcast to all ranks of the job, to which only this stage's come."""
    broadcasts: list[bool] = []
    note = lambda self, mesh, run_state_sync=True: broadcasts.append(run_state_sync)  # noqa: E731
    monkeypatch.setattr(_random.OffsetBasedRNGTracker, "__init__", note)
    monkeypatch.setattr(_random, "_rng_tracker", None)
    mesh: Any = SimpleNamespace(
        device_type="cuda", mesh_dim_names=("model",), size=lambda at: 2, get_coordinate=lambda: [0], ndim=1
    )
    StageSharding(pd.Layout("d_ff:model"), mesh)
    tracker: Any = _random._rng_tracker
    assert broadcasts == [False]
    torch.manual_seed(1)
    draws = []
    for _ in range(2):
        with tracker._distribute_region(None):
            draws.append(torch.rand(2))
    torch.manual_seed(1)
    assert torch.equal(torch.stack(draws), torch.stack([torch.rand(2), torch.rand(2)]))
    assert not tracker.distribute_region_enabled


def _make_shared() -> Any:
    layers = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 4))
    layers[1].weight = layers[0].weight
    return layers, meshes.draw_rows


def _make_roundpipe() -> pd.Pipeline:
    model, x = nn.Sequential(*(meshes.Mlp() for _ in range(4))), torch.randn(8, D)
    method = {"schedule": "roundpipe[forwards=3]"}
    plan = pd.plan(pd.profile(model, x), pd.Cluster.flat(2), **method).with_mesh("model:2")
    options = {"layout": pd.Layout("d_ff:model"), "optimizer": torch.optim.SGD, "loss": F.mse_loss, "sample": x}
    return pd.Pipeline(model, plan, **method, **options)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case("mlp", "model:2", "d_ff:model", names={"batch:out": "batch"}), "'batch:out', which matches no parameter"),
        (Case("mlp", "data:2", "d_ff:model"), "the dimension 'data', which no rule uses"),
        (Case(_make_shared, "model:2/-", "d_ff:model", stages=(1,)), "would be on the meshes model:2 and -"),
        (None, "with the meshes of plan .* compute with weights of others"),
    ],
)
def test_what_is_no_mesh(case: Case | None, words: str) -> None:
    with pytest.raises(pd.PipelineError, match=words):
        _make_roundpipe() if case is None else make_pipeline(case, case.mesh)
