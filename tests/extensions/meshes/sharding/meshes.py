"""Models with their layouts, and how they are trained: by workers that are meshes, or of one rank each."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import cycle, pairwise
from typing import Any

import processes
import pytest
import torch
from built import Built
from torch import nn
from torch.nn import functional as F

import pipedream as pd

Batches = list[tuple[torch.Tensor, torch.Tensor]]
Trained = tuple[list[float], dict[str, torch.Tensor], dict[str, float]]
Model = tuple[nn.Sequential, Callable[[int], torch.Tensor]]
"""A model, and a function from a number of samples to their inputs."""
D, WORDS, SIDE, CLASSES = 16, 12, 6, 4
NORMS: dict[str, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "none": nn.Identity}


def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return getattr(torch, name, None) or getattr(F, name)


class Mlp(nn.Module):
    """A feed-forward block: "up", perhaps a "gate", and "down"."""

    def __init__(self, norm="layer", act="gelu", drop=0.25, bias=True, gated=False, skip=True, inner=4 * D) -> None:
        super().__init__()
        self.norm, self.act, self.skip = NORMS[norm](D), _activation(act), skip
        self.up, self.down = nn.Linear(D, inner, bias), nn.Linear(inner, D, bias)
        self.gate = nn.Linear(D, inner, bias) if gated else None
        self.drop = nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        z = self.act(self.up(y))
        z = z if self.gate is None else z * self.gate(y)
        output = self.drop(self.down(self.drop(z)))
        return x + output if self.skip else output


class Attention(nn.Module):
    def __init__(self, norm="layer", heads=4, causal=True, drop=0.0, bias=True, by_hand=False, inside=0.0) -> None:
        super().__init__()
        self.norm, self.heads, self.causal, self.by_hand, self.inside = NORMS[norm](D), heads, causal, by_hand, inside
        self.query, self.key, self.value, self.out = (nn.Linear(D, D, bias) for _ in range(4))
        self.drop = nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        y = self.norm(x)
        q, k, v = (
            projection(y).view(batch, length, self.heads, -1).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        if self.by_hand:
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            if self.causal:
                scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
            mixed = self.drop(scores.softmax(-1)) @ v
        else:
            dropped = self.inside if self.training else 0.0
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=dropped)
        return x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, D)))


class Convolution(nn.Module):
    def __init__(self, norm="batch", act="relu", drop=0.0, whole=0.0, bias=True, skip=True, kernel=3) -> None:
        super().__init__()
        self.up = nn.Conv2d(4, 8, kernel, padding=kernel // 2, bias=bias)
        norms = {"batch": nn.BatchNorm2d(8), "group": nn.GroupNorm(2, 8), "none": nn.Identity()}
        self.norm, self.act, self.skip = norms[norm], _activation(act), skip
        self.down = nn.Conv2d(8, 4, kernel, padding=kernel // 2, bias=bias)
        self.drop, self.whole = nn.Dropout(drop), nn.Dropout2d(whole)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.whole(self.drop(self.down(self.act(self.norm(self.up(x))))))
        return x + y if self.skip else y


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


def draw_rows(size: int) -> torch.Tensor:
    return torch.randn(size, D)


def draw_words(length: int, size: int) -> torch.Tensor:
    return torch.randint(WORDS, (size, length))


def draw_pictures(size: int) -> torch.Tensor:
    return torch.randn(size, 4, SIDE, SIDE)


def of_words(length: int, *blocks: nn.Module, padding: int | None = None) -> Model:
    """Returns a model of so many words, whose outputs are classes."""
    ends = nn.Flatten(), nn.Linear(length * D, CLASSES)
    return nn.Sequential(nn.Embedding(WORDS, D, padding), *blocks, *ends), partial(draw_words, length)


def of_pictures(*blocks: nn.Module) -> Model:
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(4 * SIDE**2, CLASSES)), draw_pictures


def _make_recurrent(kind: type[nn.RNNBase] = nn.LSTM, **how: Any) -> Model:
    return of_words(4, Recurrent(kind, batch_first=True, **how), Recurrent(kind, **how))


def _make_channels_last() -> Model:
    layers = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Dropout(0.25), nn.Flatten(), nn.Linear(8 * 16, CLASSES))
    return layers.to(memory_format=torch.channels_last), draw_pictures


MODELS: dict[str, Callable[[], Model]] = {
    "mlp": lambda: (nn.Sequential(*(Mlp() for _ in range(4)), nn.Linear(D, 4)), draw_rows),
    # Its padding is a row of the second of two ranks.
    "attention": lambda: of_words(5, Attention(), Mlp(), Attention(), padding=7),
    "convolution": lambda: of_pictures(*(Convolution() for _ in range(3))),
    "noise": lambda: (
        nn.Sequential(nn.Linear(D, D), Built(lambda _, x: x + torch.rand_like(x)), nn.Linear(D, 4)),
        draw_rows,
    ),
    # The boundary lies between two layers that both cut its second dimension.
    "halves": lambda: (nn.Sequential(nn.Linear(D, 12), nn.Tanh(), nn.Linear(12, 4)), draw_rows),
    "matrices": lambda: (nn.Sequential(nn.Linear(D, 4 * D, False), nn.Tanh(), nn.Linear(4 * D, 4, False)), draw_rows),
    "lstm": _make_recurrent,
    "gru": partial(_make_recurrent, nn.GRU),
    "rnn": partial(_make_recurrent, nn.RNN, nonlinearity="relu"),
    # A mask is drawn in the order of memory, where the length comes first in the outputs of a recurrent layer.
    "dropped": lambda: of_words(
        4, Built(lambda module, x: module.layer(x)[0], layer=nn.LSTM(D, D, batch_first=True)), nn.Dropout(0.25)
    ),
    "channels last": _make_channels_last,
    "gru with dropout": partial(_make_recurrent, nn.GRU, dropout=0.5),
}
NAMES = {
    **{"*.up.weight": "d_ff d_model", "*.up.bias": "d_ff", "*.gate.weight": "d_ff d_model", "*.gate.bias": "d_ff"},
    **{"*.down.weight": "d_model d_ff", "*.down.bias": "d_model"},
    **{f"*.{part}.weight": "heads d_model" for part in ("query", "key", "value")},
    **{f"*.{part}.bias": "heads" for part in ("query", "key", "value")},
    **{"*.out.weight": "d_model heads", "*.out.bias": "d_model"},
    **{"*.linear1.weight": "d_ff d_model", "*.linear1.bias": "d_ff", "*.linear2.weight": "d_model d_ff"},
    **{"*.norm.weight": "d_model", "*.norm.bias": "d_model"},
}
PICTURES = {
    **{"*.up.weight": "d_ff d_in high wide", "*.up.bias": "d_ff", "*.norm.*": "d_ff"},
    **{"*.down.weight": "d_in d_ff high wide", "*.down.bias": "d_in"},
}
EMBEDDING = {"0.weight": "vocab d_model"}
HALVES = {"0.weight": "d_ff d_model", "0.bias": "d_ff", "2.weight": "d_model d_ff", "1:out": "batch d_ff"}


@dataclass(frozen=True)
class Case:
    """What is trained; `stages`: where they begin, but for the first; `names` are added unless `is_named`."""

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
    is_named: bool = False

    def __str__(self) -> str:
        make = getattr(self.model, "__name__", "made").removeprefix("_make_")
        model = self.model if isinstance(self.model, str) else make
        return f"{model} {self.mesh} {self.rules} {self.method} {len(self.stages) + 1}".replace(" ", "-")

    @property
    def is_chunked(self) -> bool:
        return self.method in ("interleaved_1f1b", "zbv") and len(self.stages) == 3

    @property
    def ranks(self) -> int:
        workers = (1, 1) if self.is_chunked else (self.replicas, *[1] * len(self.stages))
        sizes = [pd.Mesh(mesh).size for mesh in self.mesh.split("/")]
        return sum(size * count for size, count in zip(cycle(sizes), workers, strict=False))


def make_pipeline(case: Case, mesh: str) -> tuple[pd.Pipeline, Batches]:
    torch.manual_seed(3)
    layers, inputs = MODELS[case.model]() if isinstance(case.model, str) else case.model()
    model = layers.double()
    batches: Batches = [
        (x.double() if x.is_floating_point() else x, torch.randint(CLASSES, (size,)))
        for size in case.sizes
        for x in [inputs(size)]
    ]
    plan = pd.Plan.uniform(len(case.stages) + 1, replicas=(case.replicas, *[1] * len(case.stages)))
    if case.is_chunked:
        plan = pd.schedules.uniform(case.method, 2, chunks=2 if case.method == "interleaved_1f1b" else None)
    stages = [
        replace(stage, first=a, last=b, recompute=case.recompute)
        for stage, (a, b) in zip(plan.stages, pairwise([0, *case.stages, len(layers)]), strict=True)
    ]
    names = dict(case.names)
    if not case.is_named and "parallelize" not in case.options:
        usual = PICTURES if case.model == "convolution" else NAMES
        parameters = [name for name, _ in model.named_parameters()]
        names = {
            key: words for key, words in usual.items() if any(fnmatchcase(name, key) for name in parameters)
        } | names
    layout = pd.Layout(case.rules, shard_weights=case.shard_weights, names=names)
    if "cut1" in mesh:  # of Tofu's partition of a minibatch's step
        operators = pd.operators(model, batches[0][0], loss=partial(F.cross_entropy, target=batches[0][1]))
        layout = pd.Layout.of(pd.partition(operators, pd.Mesh(mesh).size))
    options = {"optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9), "loss": F.cross_entropy} | case.options
    options |= {"schedule": case.method, "microbatches": case.microbatches, "sample": batches[0][0], "seed": 7}
    plan = replace(plan, stages=tuple(stages)).with_mesh(mesh)
    return pd.Pipeline(model, plan, layout=layout, **options), batches


def train(case: Case, mesh: str) -> Trained:
    """Returns the losses, the state with some outputs, and an evaluation."""
    pipeline, batches = make_pipeline(case, mesh)
    with pipeline:
        losses = [done.loss for done in pipeline.train(batches, epochs=2)]
        scores = pipeline.evaluate(batches)
        state = pipeline.state_dict()
        if "ema" in case.options:
            state |= {f"ema {name}": tensor for name, tensor in pipeline.state_dict(ema=True).items()}
        return losses, state | {f"output {n}": out for n, out in enumerate(pipeline.predict(batches[-1:]))}, scores


def check_as_single_ranks(case: Case, train_case: Callable[[Case, str], Trained] = train) -> None:
    """Checks that ranks which are a mesh train as workers of one rank do."""
    expected = train(case, "")
    if train_case is train:
        ranks = processes.team(case.ranks).results(train, case, case.mesh)
    else:  # a process keeps its meshes, here with groups of the stand-in
        ranks = processes.results(train_case, case.ranks, case, case.mesh)
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
    for end in processes.launch(train, case.ranks, case, case.mesh):
        assert isinstance(end.error, pd.PipelineError)
        assert re.search(words, str(end.error))
