"""Every legal layout of a random model trains as one process does; another one is refused with the reason."""

import re
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import hypothesis
import processes
import pytest
import torch
from built import Built
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from marks import long
from torch import nn

import pipedream as pd
from tests.extensions.meshes.sharding import meshes
from tests.extensions.meshes.sharding.meshes import CLASSES, Case, D

LENGTH = 4
# A gradient that is zero but for rounding must not be scaled up: a large eps.
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-3),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, eps=1e-3),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01, eps=1e-3),
}


def encoder(heads: int, drop: float, first: bool) -> nn.Module:
    """Returns torch's own block."""
    inner = nn.TransformerEncoderLayer(D, heads, 16, drop, batch_first=True, norm_first=first)
    return Built(lambda module, x: module.inner(x), inner=inner)


def experts(groups: int, top: int, factor: float, second: str, form: str, z_loss: float) -> nn.Module:
    how: Any = {"groups": groups, "top": top, "second": second, "form": form, "z_loss": z_loss}
    mixture = pd.experts.MixtureOfExperts(D, 8, 4, capacity_factor=factor, **how)
    return Built(lambda module, x: x + module.experts(module.norm(x)), norm=nn.LayerNorm(D), experts=mixture)


def build(kind: str, blocks: tuple[tuple[Any, ...], ...]) -> meshes.Model:
    """Returns a model of blocks, each a class and its arguments, of inputs: "rows", "words", "points" or "images"."""
    layers = [make_layer(*arguments) for make_layer, *arguments in blocks]
    first, last, inputs = {
        "words": (
            [nn.Embedding(meshes.WORDS, D)],
            [Built(lambda _, x: x.mean(1)), nn.Linear(D, CLASSES)],
            partial(meshes.draw_words, LENGTH),
        ),
        "points": ([], [nn.Flatten(), nn.Linear(LENGTH * D, CLASSES)], lambda n: torch.randn(n, LENGTH, D)),
        "rows": ([], [nn.Linear(D, CLASSES)], meshes.draw_rows),
        "images": (
            [nn.Conv2d(3, 4, 1)],
            [nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4 * (meshes.SIDE // 2) ** 2, CLASSES)],
            lambda n: torch.randn(n, 3, meshes.SIDE, meshes.SIDE),
        ),
    }[kind]
    return nn.Sequential(*first, *layers, *last), inputs


def of(make: Any, *arguments: Any) -> st.SearchStrategy[Any]:
    """Returns a strategy for a class and its arguments, each drawn from a list."""
    return st.tuples(st.just(make), *map(st.sampled_from, arguments))


P, YES_OR_NO = [0.0, 0.0, 0.3], [False, True]
ACTS = ["relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "softplus"]
FEED = of(meshes.Mlp, [*meshes.NORMS], ACTS, P, YES_OR_NO, YES_OR_NO, YES_OR_NO, [8, 12])
ATTEND = of(meshes.Attention, [*meshes.NORMS], [2, 4], YES_OR_NO, P, YES_OR_NO, YES_OR_NO, [0.0, 0.0, 0.0, 0.2])
ENCODE = of(encoder, [2, 4], P, YES_OR_NO)
ROUTE = of(experts, [1, 2, 4], [1, 2], [0.5, 1.0, 2.0], ["random", "all"], ["sorted", "dense"], [0.0, 0.1])
CONVOLVE = of(meshes.Convolution, ["batch", "batch", "group", "none"], ACTS, P, P, YES_OR_NO, YES_OR_NO, [1, 3])
OF_WORDS = st.one_of(FEED, ATTEND, ATTEND, ENCODE, ROUTE)
KINDS = {"rows": FEED, "words": OF_WORDS, "points": OF_WORDS, "images": CONVOLVE}
METHODS: dict[str, tuple[int | None, ...]] = {
    **{"1f1b": (2, 4), "gpipe": (2, 3), "zb_h1": (4, 2), "zb_h2": (4,), "interleaved_1f1b": (4,), "zbv": (4,)},
    **{"pipedream": (None,), "pipedream_vertical_sync": (None,), "pipedream_2bw": (None, 2, 3)},
    **dict.fromkeys(("pipelined_backprop", "pb_lwp", "spectrain", "spectrain_v2", "pipeoptim"), (None,)),
    **{"pipemare": (2, 4), "xpipe": (2,), "timeprest": (2,)},
}
# They predict by the optimizer's velocity.
PREDICTING = {
    **{"pb_lwp": ["sgd"], "pipeoptim": ["adamw"], "xpipe": ["adamw"]},
    **{"spectrain": ["adamw", "sgd"], "spectrain_v2": ["adamw", "sgd"]},
}
NEWER = {"pipelined_backprop", "pb_lwp", "spectrain", "spectrain_v2", "pipemare", "xpipe", "timeprest"}
# With the number of workers.
MESHES = {
    2: [("model:2", 1), ("data:2", 1)],
    4: [("model:2", 2), ("data:2", 2), ("model:4", 1), ("data:4", 1), ("data:2,model:2", 1)],
}


@st.composite
def laid_out(draw: st.DrawFn, count: int) -> Case:
    """Draws a case for 2 or 4 processes; most are legal."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    mesh, rest = draw(st.sampled_from(MESHES[count]))
    method = draw(st.sampled_from(sorted(METHODS)))
    chunked = method in ("interleaved_1f1b", "zbv")
    if chunked and rest == 1:
        method, chunked = "1f1b", False
    least = 3 if chunked else 2  # blocks; with the head, a layer for each of four stages
    blocks = tuple(draw(st.lists(KINDS[kind], min_size=least, max_size=4)))
    model, _ = build(kind, blocks)
    replicas = rest if not chunked and rest == 2 and draw(st.integers(0, 3)) == 0 else 1
    cut_count = 3 if chunked else rest - replicas
    cuts = sorted(draw(st.sets(st.integers(1, len(model) - 1), min_size=cut_count, max_size=cut_count)))
    rules, shard_weights = draw(_rules(kind, pd.Mesh(mesh).dimensions))
    optimizer = draw(st.sampled_from(PREDICTING.get(method, sorted(OPTIMIZERS))))
    options = {"check": False, "optimizer": OPTIMIZERS[optimizer]}
    if draw(st.integers(0, 2)) == 0:
        options["clip_grad_norm"] = 0.1
        if method not in ("1f1b", "gpipe", "zb_h1", "zb_h2", "interleaved_1f1b", "zbv"):
            options["clip"] = "local"
    if draw(st.integers(0, 3)) == 0:
        options["ema"] = 0.9
    if draw(st.integers(0, 4)) == 0:
        options["grad_scaler"] = 128.0
    return Case(
        partial(build, kind, blocks),
        mesh,
        rules,
        method,
        draw(st.sampled_from(METHODS[method])),
        tuple(cuts),
        replicas,
        options,
        shard_weights,
        draw(_names(kind, model)),
        draw(st.sampled_from([(8, 8, 8, 5), (8, 4, 8), (6, 6, 6, 3)])),
        recompute=method not in NEWER and draw(st.integers(0, 4)) == 0,
        is_named=True,
    )


@st.composite
def _names(draw: st.DrawFn, kind: str, model: nn.Sequential) -> dict[str, str]:
    """Draws names of the dimensions of most weights."""
    parameters = [name for name, _ in model.named_parameters()]
    modules = sorted({name.rpartition(".")[0] for name in parameters})
    unnamed = {module for module in modules if not draw(st.integers(0, 11))}
    names = {
        name: words
        for name in parameters
        for key, words in (meshes.PICTURES if kind == "images" else meshes.NAMES).items()
        if fnmatchcase(name, key)
        and name.rpartition(".")[0] not in unnamed
        and len(words.split()) == model.get_parameter(name).dim()
    }
    if draw(st.booleans()):
        names |= {parameters[-2]: "classes d_last", parameters[-1]: "classes"}
    if kind == "words" and draw(st.booleans()):
        names["0.weight"] = draw(st.sampled_from(["vocab d_model", "words d_model"]))
    return names


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


# Each example trains a model: a failing one is shown as it was drawn.
FEW = settings(deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate], max_examples=5)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [2, long(4)])
@FEW
@given(data=st.data())
def test_some_layouts(count: int, data: st.DataObject) -> None:
    case = data.draw(laid_out(count))
    assert case.ranks == count
    ends = processes.team(count).launch(meshes.train, case, case.mesh)
    errors = [end.error for end in ends if end.error is not None]
    if errors:
        hypothesis.event("refused")
        refusal = next((error for error in errors if isinstance(error, pd.PipelineError)), None)
        assert refusal is not None, errors
        assert not re.search(r"(Runtime|Type|Value|Assertion|NotImplemented)Error", str(refusal)), refusal
        return
    hypothesis.event(f"trained on {case.mesh}")
    expected = meshes.train(case, "")
    for end in ends:
        meshes.check_same(end.value, expected)
