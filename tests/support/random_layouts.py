"""Random models, their layouts and how they are trained: alone, or in processes that are meshes."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import pipedream as pd

WIDTH, LENGTH, WORDS, SIDE, CLASSES = 8, 4, 12, 6, 4

ACTIVATIONS: dict[str, Any] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky": F.leaky_relu,
    "softplus": F.softplus,
}
# A gradient that is zero but for rounding must not be scaled up: a large eps.
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-3),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, eps=1e-3),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01, eps=1e-3),
}


def _norm(kind: str) -> nn.Module:
    return {"layer": nn.LayerNorm(WIDTH), "rms": nn.RMSNorm(WIDTH), "none": nn.Identity()}[kind]


class Feed(nn.Module):
    """A feed-forward block: "up", perhaps a "gate", and "down"."""

    def __init__(self, norm: str, act: str, drop: float, bias: bool, gated: bool, skip: bool, inner: int) -> None:
        super().__init__()
        self.norm, self.act, self.skip = _norm(norm), ACTIVATIONS[act], skip
        self.up, self.down = nn.Linear(WIDTH, inner, bias), nn.Linear(inner, WIDTH, bias)
        self.gate = nn.Linear(WIDTH, inner, bias) if gated else None
        self.drop = nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        z = self.act(self.up(y))
        z = z if self.gate is None else z * self.gate(y)
        output: torch.Tensor = self.drop(self.down(self.drop(z)))
        return x + output if self.skip else output


class Attend(nn.Module):
    def __init__(
        self, norm: str, heads: int, causal: bool, drop: float, bias: bool, by_hand: bool, inside: float
    ) -> None:
        super().__init__()
        self.norm, self.heads, self.causal, self.by_hand, self.inside = _norm(norm), heads, causal, by_hand, inside
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias) for _ in range(4))
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
            mixed = F.scaled_dot_product_attention(
                q, k, v, is_causal=self.causal, dropout_p=self.inside if self.training else 0.0
            )
        output: torch.Tensor = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
        return output


class Encoder(nn.Module):
    """torch's own block."""

    def __init__(self, heads: int, drop: float, first: bool) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(WIDTH, heads, 16, drop, batch_first=True, norm_first=first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(x)
        return output


class Convolve(nn.Module):
    def __init__(self, norm: str, act: str, drop: float, whole: float, bias: bool, skip: bool, kernel: int) -> None:
        super().__init__()
        self.up = nn.Conv2d(4, 8, kernel, padding=kernel // 2, bias=bias)
        norms = {"batch": nn.BatchNorm2d(8), "group": nn.GroupNorm(2, 8), "none": nn.Identity()}
        self.norm, self.act, self.skip = norms[norm], ACTIVATIONS[act], skip
        self.down = nn.Conv2d(8, 4, kernel, padding=kernel // 2, bias=bias)
        self.drop, self.whole = nn.Dropout(drop), nn.Dropout2d(whole)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.whole(self.drop(self.down(self.act(self.norm(self.up(x))))))
        return x + y if self.skip else y


class Route(nn.Module):
    """A mixture of experts."""

    def __init__(self, groups: int, top: int, factor: float, second: str, form: str, z_loss: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = pd.experts.MixtureOfExperts(
            WIDTH, 8, 4, groups=groups, top=top, capacity_factor=factor, second=second, form=form, z_loss=z_loss
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + self.experts(self.norm(x))
        return output


class Mean(nn.Module):
    """The mean over positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


Block = tuple[Any, ...]
"""A class and its arguments."""


@dataclass(frozen=True)
class LaidOut:
    """A model with its layout, and how it is trained.

    Attributes:
        kind: kind of inputs: "rows", "words", "points" or "images".
        ends: where the stages end.
    """

    kind: str
    blocks: tuple[Block, ...]
    mesh: str
    rules: str
    names: dict[str, str]
    shard_weights: str
    method: str
    microbatches: int | None
    ends: tuple[int, ...]
    replicas: int
    optimizer: str
    sizes: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    recompute: bool = False
    hard: tuple[str, ...] = ()

    @property
    def processes(self) -> int:
        return pd.Mesh(self.mesh).size * self.workers

    @property
    def workers(self) -> int:
        return {"interleaved_1f1b": 2, "zbv": 2}.get(self.method, len(self.ends) - 1 + self.replicas)


def model_of(case: LaidOut) -> nn.Sequential:
    layers = [make_layer(*arguments) for make_layer, *arguments in case.blocks]
    first = {"words": [nn.Embedding(WORDS, WIDTH)], "rows": [], "points": [], "images": [nn.Conv2d(3, 4, 1)]}[case.kind]
    last = {
        "words": [Mean(), nn.Linear(WIDTH, CLASSES)],
        "points": [nn.Flatten(), nn.Linear(LENGTH * WIDTH, CLASSES)],
        "rows": [nn.Linear(WIDTH, CLASSES)],
        "images": [nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4 * (SIDE // 2) ** 2, CLASSES)],
    }[case.kind]
    return nn.Sequential(*first, *layers, *last).double()


def batches_of(case: LaidOut) -> list[tuple[torch.Tensor, torch.Tensor]]:
    batches = []
    for size in case.sizes:
        x = {
            "words": lambda n: torch.randint(WORDS, (n, LENGTH)),
            "points": lambda n: torch.randn(n, LENGTH, WIDTH, dtype=torch.float64),
            "rows": lambda n: torch.randn(n, WIDTH, dtype=torch.float64),
            "images": lambda n: torch.randn(n, 3, SIDE, SIDE, dtype=torch.float64),
        }[case.kind](size)
        batches.append((x, torch.randint(CLASSES, (size,))))
    return batches


def trained(case: LaidOut, mesh: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, float]]:
    """Returns the losses, the state and an evaluation."""
    torch.manual_seed(3)
    model, batches = model_of(case), batches_of(case)
    starts = (0, *case.ends)
    if case.method in ("interleaved_1f1b", "zbv"):
        from pd.schedules import uniform

        plan = uniform(case.method, 2, chunks=2 if case.method == "interleaved_1f1b" else None)
    else:
        plan = pd.Plan.uniform(len(case.ends), replicas=(case.replicas, *[1] * (len(case.ends) - 1)))
    stages = [
        replace(stage, first=a, last=b, recompute=case.recompute)
        for stage, a, b in zip(plan.stages, starts, case.ends, strict=False)
    ]
    pipeline = pd.Pipeline(
        model,
        replace(plan, stages=tuple(stages)).with_mesh(mesh),
        schedule=case.method,
        microbatches=case.microbatches,
        loss=F.cross_entropy,
        optimizer=OPTIMIZERS[case.optimizer],
        sample=batches[0][0],
        seed=7,
        check=False,
        layout=pd.Layout(case.rules, names=case.names, shard_weights=case.shard_weights),
        **case.options,
    )
    with pipeline:
        losses = [done.loss for done in pipeline.train(batches, epochs=2)]
        state = pipeline.state_dict()
        if "ema" in case.options:
            state |= {f"ema {name}": tensor for name, tensor in pipeline.state_dict(ema=True).items()}
        return losses, state, pipeline.evaluate(batches)


P = st.sampled_from([0.0, 0.0, 0.3])
BLOCKS = {
    "feed": st.builds(
        lambda *a: (Feed, *a), st.sampled_from(["layer", "rms", "none"]), st.sampled_from(sorted(ACTIVATIONS)), P,
        st.booleans(), st.booleans(), st.booleans(), st.sampled_from([8, 12]),
    ),
    "attend": st.builds(
        lambda *a: (Attend, *a), st.sampled_from(["layer", "rms", "none"]), st.sampled_from([2, 4]), st.booleans(), P,
        st.booleans(), st.booleans(), st.sampled_from([0.0, 0.0, 0.0, 0.2]),
    ),
    "encode": st.builds(lambda *a: (Encoder, *a), st.sampled_from([2, 4]), P, st.booleans()),
    "route": st.builds(
        lambda *a: (Route, *a), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([0.5, 1.0, 2.0]),
        st.sampled_from(["random", "all"]), st.sampled_from(["sorted", "dense"]), st.sampled_from([0.0, 0.1]),
    ),
    "convolve": st.builds(
        lambda *a: (Convolve, *a), st.sampled_from(["batch", "batch", "group", "none"]),
        st.sampled_from(sorted(ACTIVATIONS)), P, st.sampled_from([0.0, 0.0, 0.2]), st.booleans(), st.booleans(),
        st.sampled_from([1, 3]),
    ),
}  # fmt: skip
KINDS = {
    "rows": ("feed",),
    "words": ("feed", "attend", "attend", "encode", "route"),
    "points": ("feed", "attend", "attend", "encode", "route"),
    "images": ("convolve",),
}

# The dimensions of weights, by the end of their name; a word with "|" is one of several.
DIMENSIONS = {
    "up.weight": "d_ff d_model",
    "up.bias": "d_ff",
    "gate.weight": "d_ff d_model",
    "gate.bias": "d_ff",
    "down.weight": "d_model d_ff",
    "down.bias": "d_model",
    "query.weight": "heads d_model",
    "query.bias": "heads",
    "key.weight": "heads d_model",
    "key.bias": "heads",
    "value.weight": "heads d_model",
    "value.bias": "heads",
    "out.weight": "d_model heads",
    "out.bias": "d_model",
    "linear1.weight": "d_ff d_model",
    "linear1.bias": "d_ff",
    "linear2.weight": "d_model d_ff",
    "norm.weight": "d_model",
    "norm.bias": "d_model",
}
IMAGES = {
    "up.weight": "d_ff d_in high wide",
    "up.bias": "d_ff",
    "norm.weight": "d_ff",
    "norm.bias": "d_ff",
    "down.weight": "d_in d_ff high wide",
    "down.bias": "d_in",
}
METHODS: dict[str, tuple[int | None, ...]] = {
    "1f1b": (2, 4),
    "gpipe": (2, 3),
    "zb_h1": (4, 2),
    "pipedream": (None,),
    "pipedream_vertical_sync": (None,),
    "pipedream_2bw": (None, 2, 3),
    "pipelined_backprop": (None,),
    "pb_lwp": (None,),
    "spectrain": (None,),
    "spectrain_v2": (None,),
    "pipeoptim": (None,),
    "pipemare": (2, 4),
    "xpipe": (2,),
    "timeprest": (2,),
    "zb_h2": (4,),
    "interleaved_1f1b": (4,),
    "zbv": (4,),
}
# They predict by the optimizer's velocity.
PREDICTING = {
    "pb_lwp": ["sgd"],
    "pipeoptim": ["adamw"],
    "spectrain": ["adamw", "sgd"],
    "spectrain_v2": ["adamw", "sgd"],
    "xpipe": ["adamw"],
}
NEWER = {"pipelined_backprop", "pb_lwp", "spectrain", "spectrain_v2", "pipemare", "xpipe", "timeprest"}


@st.composite
def laid_out(draw: st.DrawFn, processes: int) -> LaidOut:
    """Draws a case for 2 or 4 processes; most are legal."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    mesh, rest = draw(st.sampled_from(_meshes(processes)))
    dimensions = pd.Mesh(mesh).dimensions
    method = draw(st.sampled_from(sorted(METHODS)))
    chunked = method in ("interleaved_1f1b", "zbv")
    if chunked and rest == 1:
        method, chunked = "1f1b", False
    least = 3 if chunked else 2  # blocks; with the head, a layer for each of four stages
    blocks = tuple(draw(st.lists(st.sampled_from(KINDS[kind]).flatmap(BLOCKS.__getitem__), min_size=least, max_size=4)))
    probe = LaidOut(kind, blocks, mesh, "", {}, "", "1f1b", 2, (1,), 1, "sgd", (8,))
    model = model_of(probe)
    replicas = rest if not chunked and rest == 2 and draw(st.integers(0, 3)) == 0 else 1
    count = 4 if chunked else rest - replicas + 1
    cuts = sorted(draw(st.sets(st.integers(1, len(model) - 1), min_size=count - 1, max_size=count - 1)))
    rules, shard_weights = draw(_rules(kind, dimensions))
    parameters = [name for name, _ in model.named_parameters()]
    table = IMAGES if kind == "images" else DIMENSIONS
    modules = sorted({name.rpartition(".")[0] for name in parameters})
    unnamed = {module for module in modules if not draw(st.integers(0, 11))}
    names = {
        name: words
        for name in parameters
        for end, words in table.items()
        if name.endswith(end)
        and name.rpartition(".")[0] not in unnamed
        and len(words.split()) == model.get_parameter(name).dim()
    }
    head = parameters[-2]
    if draw(st.booleans()):
        names |= {head: "classes d_last", parameters[-1]: "classes"}
    if kind == "words" and draw(st.booleans()):
        names["0.weight"] = draw(st.sampled_from(["vocab d_model", "words d_model"]))
    options: dict[str, Any] = {}
    if draw(st.integers(0, 2)) == 0:
        options["clip_grad_norm"] = 0.1
    if draw(st.integers(0, 3)) == 0:
        options["ema"] = 0.9
    if draw(st.integers(0, 4)) == 0:
        options["grad_scaler"] = 128.0
    if options.get("clip_grad_norm") and method not in ("1f1b", "gpipe", "zb_h1", "zb_h2", "interleaved_1f1b", "zbv"):
        options["clip"] = "local"
    return LaidOut(
        kind,
        blocks,
        mesh,
        rules,
        names,
        shard_weights,
        method,
        draw(st.sampled_from(METHODS[method])),
        (*cuts, len(model)),
        replicas,
        draw(st.sampled_from(PREDICTING.get(method, sorted(OPTIMIZERS)))),
        draw(st.sampled_from([(8, 8, 8, 5), (8, 4, 8), (6, 6, 6, 3)])),
        options,
        recompute=method not in NEWER and draw(st.integers(0, 4)) == 0,
    )


def _meshes(processes: int) -> list[tuple[str, int]]:
    """Meshes, each with the number of workers."""
    if processes == 2:
        return [("model:2", 1), ("data:2", 1)]
    return [("model:2", 2), ("data:2", 2), ("model:4", 1), ("data:4", 1), ("data:2,model:2", 1)]


@st.composite
def _rules(draw: st.DrawFn, kind: str, dimensions: dict[str, int]) -> tuple[str, str]:
    """Draws rules that use every dimension of the mesh, and which of them shards weights."""
    rules, shard_weights = [], ""
    for over in dimensions:
        if over == "data":
            cut = draw(st.sampled_from(["batch", "batch", "batch", "rest", "both"]))
            rules += [f"batch:{over}"] if cut != "rest" else []
            rules += [f"experts:{over}"] if kind in ("words", "points") and draw(st.booleans()) else []
            shard_weights = over if cut != "batch" else shard_weights
        else:
            pool = {"images": ["d_ff"], "rows": ["d_ff"]}.get(kind, ["d_ff", "heads", "vocab"])
            cut = draw(st.sets(st.sampled_from([*pool, "classes"]), min_size=1, max_size=3))
            if not draw(st.integers(0, 5)):  # dimensions of the same tensors
                cut = {"images": {"d_in"}, "rows": {"d_model"}}.get(kind) or {
                    draw(st.sampled_from(["d_model", "experts"]))
                }
            rules += [f"{dimension}:{over}" for dimension in sorted(cut)]
            if draw(st.integers(0, 7)) == 0:
                shard_weights = over
    return ",".join(rules), shard_weights
