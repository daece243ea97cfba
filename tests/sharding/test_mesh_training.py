"""A layout moves numbers and does not change them: workers that are meshes train as workers of one rank do.

That those train as their published rules say is the subject of test_transparency.py.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import processes
import pytest
import strict
import torch
from built import Built
from torch import nn
from torch.distributed.tensor import _random
from torch.nn import functional as F

import pipedream as pd
from pipedream.core.plan.mesh import meshes_of
from pipedream.sharding.stage import StageSharding

Batches = list[tuple[torch.Tensor, torch.Tensor]]
Trained = tuple[list[float], dict[str, torch.Tensor], dict[str, float]]
D = 16


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up, self.drop, self.down = nn.Linear(D, 4 * D), nn.Dropout(0.25), nn.Linear(4 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(self.drop(F.gelu(self.up(self.norm(x))))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.query, self.key, self.value, self.out = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        y = self.norm(x)
        heads = [
            projection(y).view(batch, length, 4, -1).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, D))


def _make_outputs() -> nn.Module:
    """Returns the outputs of a recurrent layer, in whose memory the length comes first."""
    return Built(lambda module, x: module.layer(x)[0], layer=nn.LSTM(D, D, batch_first=True))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.norm(self.up(x))))


class Recurrent(nn.Module):
    """Reads the outputs of its layer, and the state at the end where the batch comes second."""

    def __init__(self, kind: type[nn.RNNBase], **how: Any) -> None:
        super().__init__()
        self.layer = kind(D, D, num_layers=2, **how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer.batch_first:
            return x + self.layer(x)[0]
        output, state = self.layer(x.transpose(0, 1))
        last = state[0] if isinstance(state, tuple) else state
        return x + output.transpose(0, 1) + last[-1].unsqueeze(1)


def _draw_rows(size: int) -> torch.Tensor:
    return torch.randn(size, D)


def _make_recurrent(kind: type[nn.RNNBase] = nn.LSTM, **how: Any) -> Model:
    blocks = Recurrent(kind, batch_first=True, **how), Recurrent(kind, **how)
    layers = nn.Sequential(nn.Embedding(12, D), *blocks, nn.Flatten(), nn.Linear(4 * D, 4))
    return layers, lambda size: torch.randint(12, (size, 4))


CALLS = count(1)


def _pad_output(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """Is another loss at each call."""
    return F.cross_entropy(output, batch[1]) * next(CALLS)


Model = tuple[nn.Sequential, Callable[[int], torch.Tensor]]
"""A model, and a function from a number of samples to their inputs."""

MODELS: dict[str, Callable[[], Model]] = {
    "mlp": lambda: (nn.Sequential(*(Mlp() for _ in range(4)), nn.Linear(D, 4)), _draw_rows),
    "attention": lambda: (
        # Its padding is a row of the second of two ranks.
        nn.Sequential(nn.Embedding(12, D, 7), Attention(), Mlp(), Attention(), nn.Flatten(), nn.Linear(5 * D, 4)),
        lambda size: torch.randint(12, (size, 5)),
    ),
    "convolution": lambda: (
        nn.Sequential(*(Convolution() for _ in range(3)), nn.Flatten(), nn.Linear(4 * 36, 4)),
        lambda size: torch.randn(size, 4, 6, 6),
    ),
    "noise": lambda: (
        nn.Sequential(nn.Linear(D, D), Built(lambda _, x: x + torch.rand_like(x)), nn.Linear(D, 4)),
        _draw_rows,
    ),
    # The boundary lies between two layers that both cut its second dimension.
    "halves": lambda: (nn.Sequential(nn.Linear(D, 12), nn.Tanh(), nn.Linear(12, 4)), _draw_rows),
    "matrices": lambda: (
        nn.Sequential(nn.Linear(D, 4 * D, bias=False), nn.Tanh(), nn.Linear(4 * D, 4, bias=False)),
        _draw_rows,
    ),
    "lstm": _make_recurrent,
    "gru": partial(_make_recurrent, nn.GRU),
    "rnn": partial(_make_recurrent, nn.RNN, nonlinearity="relu"),
    # A mask is drawn in the order of memory.
    "dropped": lambda: (
        nn.Sequential(nn.Embedding(12, D), _make_outputs(), nn.Dropout(0.25), nn.Flatten(), nn.Linear(4 * D, 4)),
        lambda size: torch.randint(12, (size, 4)),
    ),
    "channels last": lambda: (
        nn.Sequential(nn.Conv2d(4, 8, 3), nn.Dropout(0.25), nn.Flatten(), nn.Linear(8 * 16, 4)).to(
            memory_format=torch.channels_last  # type: ignore[call-overload]
        ),
        lambda size: torch.randn(size, 4, 6, 6),
    ),
    "gru with dropout": partial(_make_recurrent, nn.GRU, dropout=0.5),
}
NAMES = {
    "*.up.weight": "d_ff d_model",
    "*.up.bias": "d_ff",
    "*.down.weight": "d_model d_ff",
    **{f"*.{part}.weight": "heads d_model" for part in ("query", "key", "value")},
    **{f"*.{part}.bias": "heads" for part in ("query", "key", "value")},
    "*.out.weight": "d_model heads",
}
EMBEDDING = {"0.weight": "vocab d_model"}
HALVES = {"0.weight": "d_ff d_model", "0.bias": "d_ff", "2.weight": "d_model d_ff", "1:out": "batch d_ff"}
CONVOLUTION = {"*.up.weight": "d_ff d_in high wide", "*.down.weight": "d_in d_ff high wide"}
CONVOLUTION |= {"*.up.bias": "d_ff", "*.norm.*": "d_ff"}


@dataclass(frozen=True)
class Case:
    model: str | Callable[[], Any]
    mesh: str
    rules: str
    method: str = "1f1b"
    microbatches: int | None = 2
    stages: tuple[int, ...] = (2,)
    replicas: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    shard_weights: str = ""
    names: dict[str, str] = field(default_factory=dict)
    sizes: tuple[int, ...] = (8, 8, 5)
    recompute: bool = False

    def __str__(self) -> str:
        make = getattr(self.model, "__name__", "made").removeprefix("_make_")
        model = self.model if isinstance(self.model, str) else make
        return f"{model} {self.mesh} {self.rules} {self.method} {len(self.stages) + 1}".replace(" ", "-")

    @property
    def ranks(self) -> int:
        workers = self.replicas, *[1] * len(self.stages)
        return sum(mesh.size * count for mesh, count in zip(meshes_of(self.mesh, len(workers)), workers, strict=True))


def _train(case: Case, mesh: str) -> Trained:
    pipeline, batches = _make_pipeline(case, mesh)
    with pipeline:
        losses = [done.loss for done in pipeline.train(batches, epochs=2)]
        scores = pipeline.evaluate(batches)
        outputs = {f"output {n}": output for n, output in enumerate(pipeline.predict(batches[-1:]))}
        return losses, pipeline.state_dict() | outputs, scores


def _make_pipeline(case: Case, mesh: str) -> tuple[pd.Pipeline, Batches]:
    torch.manual_seed(3)
    layers, inputs = MODELS[case.model]() if isinstance(case.model, str) else case.model()
    model = layers.double()
    batches: Batches = [
        (x.double() if x.is_floating_point() else x, torch.randint(4, (size,)))
        for size in case.sizes
        for x in [inputs(size)]
    ]
    ends = [*case.stages, len(layers)]
    plan = pd.Plan.uniform(len(ends), replicas=(case.replicas, *[1] * len(case.stages)))
    stages = [
        replace(stage, first=a, last=b, recompute=case.recompute)
        for stage, a, b in zip(plan.stages, [0, *ends], ends, strict=False)
    ]
    names = CONVOLUTION if case.model == "convolution" else {} if "parallelize" in case.options else NAMES
    parameter_names = {name for name, _ in model.named_parameters()}
    names = {
        pattern: words
        for pattern, words in names.items()
        if any(fnmatchcase(parameter, pattern) for parameter in parameter_names)
    }
    layout = pd.Layout(case.rules, shard_weights=case.shard_weights, names=names | case.names)
    if "cut1" in mesh:
        layout = _search_layout(model, *batches[0], meshes_of(mesh)[0].size)
    options = {"optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9), "loss": F.cross_entropy} | case.options
    options |= {"schedule": case.method, "microbatches": case.microbatches, "sample": batches[0][0], "seed": 7}
    plan = replace(plan, stages=tuple(stages)).with_mesh(mesh)
    return pd.Pipeline(model, plan, layout=layout, **options), batches


def _search_layout(model: nn.Module, x: torch.Tensor, targets: torch.Tensor, ranks: int) -> pd.Layout:
    """Returns the layout of Tofu's partition of a minibatch's step."""
    step = pd.operators(model, x, loss=partial(F.cross_entropy, target=targets))
    return pd.Layout.of(pd.partition(step, ranks))


CLIPPED = {"clip_grad_norm": 0.1}
LOCAL = CLIPPED | {"clip": "local"}
ATTENTION = "batch:data, heads:model, d_ff:model"

CASES = (
    Case("mlp", "model:2", "d_ff:model", options={"optimizer": partial(torch.optim.AdamW, lr=0.01)}),
    Case("mlp", "model:2", "d_ff:model", "pipedream", None),
    Case("mlp", "data:2", "batch:data", "pipedream_2bw", None),
    Case("mlp", "model:2", "d_ff:model", "zb_h1", 4),
    Case("mlp", "model:2", "d_ff:model", "pipelined_backprop", None),
    Case("mlp", "data:2", "batch:data", "spectrain", None, options={"ema": 0.9}),
    Case("mlp", "model:2", "d_ff:model", "interleaved_1f1b", 4, options={"grad_scaler": 128.0}),
    Case("attention", "model:2", "heads:model, d_ff:model, vocab:model", "gpipe", names=EMBEDDING),
    Case("attention", "data:2", "batch:data", "1f1b", options=CLIPPED),
    Case("convolution", "model:2", "d_ff:model", options=CLIPPED),
    Case("convolution", "data:2", "batch:data", "pipedream", None),
    Case("mlp", "data:2,model:2", "batch:data, d_ff:model", stages=()),
    Case("mlp", "model:2", "d_ff:model", "pipedream", None, stages=(), replicas=2),
    Case("mlp", "data:2", "batch:data", "1f1b", stages=(), replicas=2, options=CLIPPED),
    Case("attention", "data:2,model:2", "batch:data, heads:model, d_ff:model", "gpipe", stages=()),
    Case("mlp", "data:2", "batch:data", "pipedream", None, shard_weights="data", options=LOCAL),
    Case(
        *("attention", "data:2,model:2", f"{ATTENTION}, vocab:model", "gpipe"),
        **{"stages": (), "shard_weights": "data", "names": EMBEDDING},
    ),
    Case("mlp", "data:2", "batch:data", "pipelined_backprop", None, shard_weights="data"),
    Case("attention", "data:2", "batch:data", "timeprest", 2, shard_weights="data"),
    Case("mlp", "model:2", "d_ff:model", "1f1b", options={"optimizer": partial(torch.optim.Adafactor, lr=0.1)}),
    Case(
        *("matrices", "data:2,model:2", "batch:data, d_ff:model", "pipedream_2bw", None),
        **{"stages": (), "shard_weights": "data", "names": {name: HALVES[name] for name in ("0.weight", "2.weight")}},
        options={"optimizer": partial(torch.optim.Muon, lr=0.1), "ema": 0.9},
    ),
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
    Case("gru", "data:2", "batch:data"),
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
    [
        *TWO_RANKS,
        *(pytest.param(name, marks=pytest.mark.slow) for name in (*CASES, *RECURRENT, FOUND)),
        *(pytest.param(name, marks=pytest.mark.long) for name in LONGEST),
    ],
    ids=str,
)
def test_meshes_train_as_single_ranks_do(case: Case) -> None:
    check_as_single_ranks(case)


def check_as_single_ranks(case: Case, train: Callable[[Case, str], Trained] = _train) -> None:
    """Checks that ranks which are a mesh train as workers of one rank do."""
    expected = _train(case, "")
    if train is _train:
        ranks = processes.team(case.ranks).results(train, case, case.mesh)
    else:  # a process keeps its meshes, here with groups of the stand-in
        ranks = processes.results(train, case.ranks, case, case.mesh)
    for rank, trained in enumerate(ranks):
        check_same(trained, expected)
        assert trained[1].keys() == (expected[1].keys() if rank == 0 else set())


def check_same(trained: Trained, expected: Trained) -> None:
    """Checks losses, the state that a rank has, and an evaluation."""
    (losses, state, scores), (expected_losses, weights, expected_scores) = trained, expected
    assert losses == pytest.approx(expected_losses, abs=1e-10)
    assert scores == pytest.approx(expected_scores, abs=1e-10)
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-10, rtol=0, msg=name)


def check_refused(case: Case, words: str) -> None:
    """Checks that each rank raises an error with these words."""
    for end in processes.launch(_train, case.ranks, case, case.mesh):
        assert isinstance(end.error, pd.PipelineError)
        assert re.search(words, str(end.error))


def _train_over_links(case: Case, mesh: str) -> Trained:
    with strict.installed(on_one_machine=True):
        return _train(case, mesh)


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
@pytest.mark.parametrize("case", OVER_LINKS, ids=str)
def test_each_kind_of_mesh_trains_over_links_as_between_gpus(case: Case) -> None:
    check_as_single_ranks(case, _train_over_links)


def _train_twice(case: Case) -> list[tuple[list[float], int]]:
    """Returns the losses of two pipelines, each with the process's threads afterwards."""
    rows = []
    for _ in range(2):
        losses = _train(case, case.mesh)[0]
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
        (
            Case("mlp", "data:2", "batch:data, d_ff:data", stages=()),
            "would have to gather tensors that the layout shards: .* placed as",
        ),
        (Case("convolution", "model:2", "d_in:model, d_ff:model", stages=()), "would be sharded twice over 'model'"),
        (Case("noise", "data:2", "batch:data", stages=()), "rand_like draws random numbers for a tensor of"),
        (Case("gru with dropout", "data:2", "batch:data", stages=()), "the dropout of gru draws random numbers for a"),
        (
            Case("mlp", "model:2", "d_ff:model", stages=(), options={"loss": _pad_output}),
            "stage 0 has another gradient of .* in the pipeline, .* in the model",
        ),
        (
            Case("halves", "-/model:2", "d_ff:model", names=HALVES | {"1:out": "batch length d_ff"}),
            r"the output of '1' has 3 names \(batch length d_ff\), but its shape is \(4, 12\)",
        ),
    ],
    ids=("gather", "legality", "random", "recurrent", "first-minibatch", "names"),
)
def test_what_a_mesh_refuses(case: Case, words: str) -> None:
    check_refused(case, words)


def _make_residual(p: float) -> nn.Module:
    """Returns what is no chain of modules."""
    parts = {"up": nn.Linear(D, 8), "drop": nn.Dropout(p), "down": nn.Linear(8, D)}
    return Built(lambda model, x: x + model.down(model.drop(torch.tanh(model.up(x)))), **parts)


def _train_residual(mesh: str, p: float, shape: str) -> list[float]:
    torch.manual_seed(3)
    model, x = _make_residual(p).double(), torch.randn(8, D).double()
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


def test_a_layout_must_fit_the_model() -> None:
    case = Case("mlp", "model:2", "d_ff:model")
    with pytest.raises(pd.PipelineError, match="'batch:out', which matches no parameter"):
        _make_pipeline(replace(case, names={"batch:out": "batch"}), "model:2")
    with pytest.raises(pd.PipelineError, match="the dimension 'data', which no rule uses"):
        _make_pipeline(case, "data:2")


def test_tied_weights_are_on_one_mesh() -> None:
    def make_shared() -> Model:
        layers = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 4))
        layers[1].weight = layers[0].weight
        return layers, _draw_rows

    case = Case(make_shared, "model:2/-", "d_ff:model", stages=(1,))
    with pytest.raises(
        pd.PipelineError, match=r"tied weights '0.weight' \(stages 0, 1\) would be on the meshes model:2 and -"
    ):
        _make_pipeline(case, case.mesh)


def test_a_worker_that_computes_with_weights_of_others_is_no_mesh() -> None:
    model, x = nn.Sequential(*(Mlp() for _ in range(4))), torch.randn(8, D)
    method = {"schedule": "roundpipe[forwards=3]"}
    plan = pd.plan(pd.profile(model, x), pd.Cluster.flat(2), **method).with_mesh("model:2")
    options = {"layout": pd.Layout("d_ff:model"), "optimizer": torch.optim.SGD, "loss": F.mse_loss, "sample": x}
    with pytest.raises(pd.PipelineError, match=r"with the meshes of plan .* compute with weights of others"):
        pd.Pipeline(model, plan, **method, **options)
