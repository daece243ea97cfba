"""Each error names the module, what it did, the user's file and line, and what to do."""

import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from built import Built
from torch import Tensor, nn
from training import SGD, loop, train as train_model

import pipedream as pd
from pipedream.capture.slice import ModelSlice

Make = Callable[[], nn.Module]
slow = partial(pytest.param, marks=pytest.mark.slow)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return x + self.b(torch.relu(self.a(x)))


class Net(nn.Module):
    """Three blocks and, so that it is no chain, two heads; `function` is its forward."""

    def __init__(self, function: Any = None, kinds: Sequence[Make] = (Block,) * 3, **parts: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind() for kind in kinds)
        self.head, self.out = nn.Linear(4, 2), nn.Linear(4, 2)
        self.function = function or Net.plain
        for name, part in parts.items():
            setattr(self, name, part)

    def through(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x

    def plain(self, x: Any) -> Any:
        return self.ends(self.through(x))

    def ends(self, x: Tensor) -> Tensor:
        return self.head(x) + self.out(x)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.function(self, *inputs, **options)


def make_plan(model: nn.Module, sample: Any, cuts: Sequence[str]) -> pd.Plan:
    profile = pd.profile(model, sample, warmup=0, runs=1)
    return pd.plan(profile, pd.Cluster.local(len(cuts) + 1), schedule="gpipe", microbatches=2, cuts=tuple(cuts))


CUTS = ("blocks.1.a", "blocks.2.b")


def train(
    make: Make, batches: Any, cuts: Sequence[str] = CUTS, *, loss: Any = F.mse_loss, sample: Any = None, **options: Any
) -> list[float]:
    model = make()
    plan = make_plan(model, batches[0][0] if sample is None else sample, cuts)
    return train_model(model, plan, batches, loss=loss, **options).losses


torch.manual_seed(1)
X = torch.linspace(-1, 1, 16).view(4, 4)
BATCHES = [(torch.randn(4, 4), torch.randn(4, 2)) for _ in range(3)]
ENDING_ALONE = [BATCHES[0], (BATCHES[1][0][:2], BATCHES[1][1][:2])]
"""The microbatches of the second minibatch are single samples."""


# -- faults in training ------------------------------------------------------------------------------


def bug(net: Net, x: Tensor) -> Tensor:
    x = net.blocks[1](net.blocks[0](x))
    if len(x) == 1:
        x = x.view(5, 77)  # a mistake
    return net.ends(net.blocks[2](x))


def bug_in_loss(output: Tensor, batch: Any) -> Tensor:
    return output.mean() + batch[1].view(77)


def skips(net: Net, x: Tensor, *, unless: Callable[[Net, Tensor], bool]) -> Tensor:
    x = net.blocks[0](x)
    if unless(net, x):
        x = net.blocks[1](x)
    return net.ends(net.blocks[2](x))


def needs_numbers(net: Net, x: Tensor) -> Tensor:
    x = net.blocks[0](x)
    if len(x) == 1 and x.sum() > 0:
        x = -x
    return net.ends(net.blocks[2](net.blocks[1](x)))


def scaled(net: Any, x: Tensor) -> Tensor:
    """Changes a buffer in place that a backward reads."""
    x = net.through(x)
    net.steps += 1
    return net.ends(x) * net.steps


STEPS = {"batches": BATCHES, "parts": {"steps": nn.Buffer(torch.zeros(()))}}


def masked(net: Net, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    for block in net.blocks:
        x = block(x)
        if mask is not None:
            x = x * mask
    return net.ends(x) * scale


def of_two(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {"batches": [first, second], "loss": lambda output, batch: output.mean(), "sample": first}


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


def hides(net: Net, x: Tensor) -> Any:
    """Returns the states of its blocks where nothing can find them."""
    states = [x := block(x) for block in net.blocks]
    return {"out": net.ends(x), "box": Box(states[0])}


def sometimes_more(net: Net, x: Tensor) -> Any:
    states = [x := block(x) for block in net.blocks]
    return {"out": net.ends(x)} | ({"first": states[0]} if len(x) == 1 else {})


def reading_unsent(output: Any, batch: Any) -> Tensor:
    """A loss that reads an output which no stage sends."""
    if "first" in output:
        output["first"].mean()
    return output["out"].mean()


MASK, BARE = {"x": X, "mask": X}, {"x": X}
ANOTHER_PATH = r"the forward of .*\(test_errors\.py:.*took another path.*without calling 'blocks\.1\.a'.*one module"
ANOTHER_TENSOR = r"the call of 'blocks\.1' has another tensor than 'blocks\.0 output'.*sample lacked the input 'mask'"
UNSENT = r"the field 'first' of the output of Net \(test_errors\.py:.*Capture with a sample.*used at"
OF_BOX = {"batches": BATCHES[:1], "loss": lambda output, batch: output["box"].value.mean()}


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (bug, {}, r"rank 1, stage 1, 1F2: RuntimeError: shape.*the model Net, at test_errors\.py:.*x\.view\(5, 77\)"),
        (None, {"loss": bug_in_loss}, r"stage 2.*in bug_in_loss: return output\.mean\(\) \+ batch\[1\]\.view\(77\)"),
        slow(partial(skips, unless=lambda _, x: len(x) > 1), {"cuts": ["blocks.1.a"]}, ANOTHER_PATH),
        (needs_numbers, {}, r"rank 1, stage 1.*: if len\(x\) == 1 and x\.sum\(\) > 0.*needs the numbers.*one module"),
        (hides, OF_BOX, "stage 2.*the loss or a metric needs the numbers of a tensor.*let the model return it in its"),
        (sometimes_more, {"loss": reading_unsent}, UNSENT),
        slow(scaled, STEPS, r"the forward reads what the one before left in 'steps'.*microbatches=1"),
        (masked, of_two(MASK, BARE), r"Net \(test_errors\.py:.*input 'mask'.*missing in this batch.*in each batch"),
        slow(masked, of_two(BARE, MASK), ANOTHER_TENSOR),
        (masked, of_two(BARE, BARE | {"y": X}), r"unexpected keyword argument 'y'.*the model Net, at test_errors\.py:"),
    ],
)
def test_an_error_in_training_names_its_place(function: Any, options: dict[str, Any], words: str) -> None:
    options = {"batches": ENDING_ALONE} | options
    make = partial(Net, function, options.pop("kinds", (Block,) * 3), **options.pop("parts", {}))
    with pytest.raises(pd.PipelineError, match=f"(?s){words}"):
        train(make, **options)


# -- what capture refuses ----------------------------------------------------------------------------


def evaluation_fails(net: Net, x: Tensor) -> Tensor:
    if not net.training:
        raise ValueError("no evaluation")
    return net.plain(x)


def sharded() -> nn.Module:
    model = Net()
    model.blocks[1].__class__ = type("FSDPBlock", (type("FSDPModule", (), {}), Block), {})
    return model


class _Reversible(torch.autograd.Function):
    """Its backward reads what the forward has set on a module, as Reformer's does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module, module.factor = module, 2.0
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * float(ctx.module.factor), None


def reversible() -> nn.Module:
    parts = {"factor": None, "first": nn.Linear(4, 4), "last": nn.Linear(4, 4)}
    return Built(lambda model, x: torch.tanh(model.last(_Reversible.apply(model.first(x), model))), **parts)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    ("make", "sample", "words"),
    [
        (partial(Net, bug), X[:1], r"the forward of Net should run.*x = x\.view\(5, 77\).*give a sample"),
        (lambda: nn.Sequential(nn.Linear(5, 4)), X, "in training mode it raised RuntimeError.*shape"),
        (partial(Net, evaluation_fails), X, "Net should run .* in evaluation mode it raised ValueError"),
        (lambda: nn.Sequential(nn.LazyLinear(4)), X, "lazy"),
        (lambda: torch.jit.script(nn.Linear(4, 2)), X, "the model .* is a TorchScript module .*; pass the eager"),
        (lambda: nn.DataParallel(Net()), X, "DataParallel.*pass the plain module"),
        (lambda: nn.Linear, X, r"should be a torch.nn.Module, but the class Linear was given; write Linear\(\.\.\.\)"),
        (lambda: nn.Sequential(Block()), (X, X), "Sequential takes 1 input, but the sample has 2; if the last is"),
        (sharded, X, r"the module 'blocks\.1' is sharded by fully_shard.*pass the plain"),
        (reversible, X, "the backward of Built raised TypeError.*read what the forward has set on a module.*context"),
    ],
)
def test_a_model_is_refused(make: Make, sample: Any, words: str) -> None:
    for look in (pd.capture, pd.profile):
        with pytest.raises(pd.PipelineError, match=f"(?s){words}"):
            look(make(), sample)


BY_MODE = partial(skips, unless=lambda net, _: net.training)


def bare(net: Net, x: Tensor) -> Tensor:
    try:
        x = net.plain(x)
    except:  # noqa: E722
        x = x[:, :2]
    return x


def in_thread(net: Net, x: Tensor) -> Tensor:
    states = [x]

    def run() -> None:
        for block in net.blocks:
            states.append(block(states[-1]))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return net.ends(states[-1])


def long_memory(net: Any, x: Tensor) -> Tensor:
    """Reads what it has kept before it keeps the next, and uses it at the end."""
    before = net.memory
    x = net.blocks[0](x)
    net.memory = x.detach()
    x = net.blocks[2](net.blocks[1](x))
    return net.ends(x if before is None else x + before.mean())


def of_box() -> nn.Module:
    leaf = Built(lambda leaf, x: Box(x * leaf.weight), weight=nn.Parameter(torch.ones(4)))
    return Net(lambda net, x: net.plain(net.leaf(x).value), leaf=leaf)


@pytest.mark.parametrize(
    ("make", "cut", "words", "layers"),
    [
        (partial(Net, BY_MODE), "blocks.1.a", r"Net.*took another path.*on the mode \(training or evaluation\)", None),
        (partial(Net, bare), "blocks.1.b", "bare `except:`.*Write `except Exception:` there", ["blocks.0.a"]),
        (of_box, "blocks.0.a", r"the module 'leaf' \(Built, built\.py:.*class Box, which cannot be sent.*tuple", None),
        (partial(Net, in_thread), "blocks.1", "thread", ["blocks.0", "head", "out"]),
        (partial(Net, long_memory, memory=None), "blocks.1.b", "keeps a tensor of an earlier batch.*into one", None),
    ],
)
def test_a_cut_is_refused(make: Make, cut: str, words: str, layers: list[str] | None) -> None:
    captured = pd.capture(make(), torch.randn(4, 4))
    names = [layer.name for layer in captured.graph.layers]
    assert names == layers or (layers is None and cut not in names)
    assert re.search(f"(?s){words}", captured.refused[cut])


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "vmap": lambda layer, x: torch.func.vmap(lambda row: layer(row).tanh())(x),
    "jvp": lambda layer, x: torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1],
    "grad": lambda layer, x: torch.func.grad(lambda y: layer(y).square().sum())(x),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch.func.jvp calls it
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_torch_func_in_the_models_own_forward_is_named(transform: Callable[..., Tensor]) -> None:
    parts = {name: nn.Linear(4, 4) for name in ("before", "inner", "after")}
    model = Built(lambda model, x: model.after(transform(model.inner, model.before(x).tanh())), **parts)
    refused = pd.capture(model, (torch.randn(8, 4),)).refused["after"]
    assert re.match(r"test_errors\.py:\d+ in .*torch\.func\..* is inside a torch\.func transform", refused)
    assert re.search("a stage that begins with 'after' would run again.*cut elsewhere than before 'after'", refused)
    parts["inner"] = Built(lambda module, x: transform(module.layer, x), layer=nn.Linear(4, 4))
    model = Built(lambda model, x: model.after(model.inner(model.before(x).tanh())), **parts)
    layers = pd.capture(model, (torch.randn(8, 4),)).graph.layers
    assert [layer.name for layer in layers] == ["before", "inner", "after"], "the advice helps"


def test_a_plan_of_another_model() -> None:
    other = partial(Net, lambda net, x: net.plain(net.extra(x)), extra=nn.Linear(4, 4))
    for planned, model, words in (
        (Net, other, r"another model: Net has 'extra\.(bias|weight)', .*plan again"),
        (other, Net, r"another model: it has a module 'extra', which Net lacks; plan again"),
    ):
        plan = make_plan(planned(), X, ["blocks.1.a"])
        with pytest.raises(pd.PipelineError, match=words):
            pd.Pipeline(model(), plan, loss=F.mse_loss, optimizer=SGD)


# -- slices of a model -------------------------------------------------------------------------------


def scores(net: Net, x: Tensor) -> Tensor:
    y = net.head(x)
    x = x * F.scaled_dot_product_attention(y.float(), y.float(), y).sum(-1, keepdim=True)
    return net.out(net.blocks[1](net.blocks[0](x)))


def test_what_fails_without_needing_numbers_is_no_fault_of_the_model() -> None:
    """Here because the second stage runs without autocast."""
    model, batch = Net(scores), torch.randn(2, 4)
    graph = pd.capture(model, batch).graph
    with torch.autocast("cpu", torch.bfloat16):
        value = ModelSlice(model, graph, 0, 1)(batch)
    words = r"y\.float\(\), y\).*begins with 'blocks\.0.*same dtype.*that line is right.*cut elsewhere"
    with pytest.raises(pd.PipelineError, match=f"(?s){words}") as caught:
        ModelSlice(model, graph, 1, 2)(value)
    assert "one module" not in str(caught.value)


def test_what_the_last_stage_sets_is_there_for_the_loss() -> None:
    def keeps(net: Any, x: Tensor) -> Tensor:
        net.state = net.through(x)
        return net.ends(net.state)

    def penalised(model: Any) -> Callable[[Tensor, Any], Tensor]:
        return lambda output, batch: F.mse_loss(output, batch[1]) + model.state.square().mean()

    model, alone = Net(keeps), Net(keeps)
    losses = train_model(model, make_plan(model, X, CUTS), BATCHES, loss=penalised(model)).losses
    loss = penalised(alone)
    expected = loop(alone, BATCHES, loss=lambda output, y: loss(output, (None, y)), parts=2).losses
    assert losses == pytest.approx(expected)


# -- unusual forwards train as in one process --------------------------------------------------------


def catches(net: Net, x: Tensor) -> Tensor:
    """Has another way for tensors without numbers."""
    x = net.blocks[0](x)
    try:
        scale = float(x.detach().mean())
    except Exception:
        scale = 1.0
    return net.ends(net.blocks[2](net.blocks[1](x * scale)))


class Boxing(Block):
    def forward(self, x: Any) -> Any:
        return Box(super().forward(x.value if isinstance(x, Box) else x))


def yields(net: Net, x: Tensor) -> Tensor:
    def states(x: Tensor) -> Iterator[Tensor]:
        for block in net.blocks:
            x = block(x)
            yield x

    for state in states(x):
        x = state
    return net.ends(x)


class OwnCall(Block):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x * 2) + 1


class WithoutForward(Block):
    def __call__(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.a(x)))


class OwnCalls(Net):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x * 2)


@pytest.mark.parametrize(
    ("make", "cuts", "options"),
    [
        # It takes another path for a part than for the whole.
        (partial(Net, catches), CUTS, {"check": False}),
        slow(lambda: Net(lambda net, x: net.ends(net.through(x).value), (Boxing,) * 3), CUTS, {}),
        slow(partial(Net, yields), None, {}),
        (lambda: OwnCalls(None, (OwnCall, WithoutForward, OwnCall)), None, {}),
        slow(partial(Net, in_thread), None, {}),
    ],
)
def test_unusual_forwards_train_as_one_process(make: Make, cuts: Sequence[str] | None, options: dict[str, Any]) -> None:
    cuts = cuts or [layer.name for layer in pd.capture(make(), torch.randn(4, 4)).graph.layers[1:]][-2:]
    expected = loop(make(), BATCHES, loss=F.mse_loss, parts=2).losses
    assert train(make, BATCHES, cuts, **options) == pytest.approx(expected)


def casts_back(model: Any, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
    """Undoes what autocast has done between two layers, as the experts of T5's kin; computes its loss from labels."""
    x = torch.tanh(model.first(x))
    x = model.last(x.to(model.last.weight.dtype))
    return {"loss": None if labels is None else (x - labels).square().mean(), "x": x}


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("without", [{"x": X}, {"x": X, "labels": None}], ids=["missing", "None"])
def test_a_model_predicts_without_labels(without: dict[str, Any], autocast: torch.dtype | None) -> None:
    model, sample = Built(casts_back, first=nn.Linear(4, 4), last=nn.Linear(4, 4)), {"x": X, "labels": X}
    profile = pd.profile(model, sample, runs=1, autocast=autocast)
    plan = pd.plan(profile, pd.Cluster.flat(2), cuts=("last",), schedule="1f1b")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
        expected = model(X)["x"].detach()
    with pd.Pipeline(model, plan, loss=None, optimizer=SGD, autocast=autocast) as pipeline:
        (output,) = pipeline.predict([without])
        assert output["loss"] is None
        torch.testing.assert_close(output["x"], expected, rtol=0, atol=0)
        list(pipeline.train([sample]))
        assert list(pipeline.evaluate([sample])) == ["loss"]


def extra(model: Any, x: Tensor, more: bool = False) -> Tensor:
    """Uses a module only where it is asked to."""
    x = model.b(model.a(x).tanh())
    x = model.extra(x.relu()) if more else x
    return model.head(x.tanh())


def test_a_module_that_the_sample_did_not_call_is_not_left_untrained() -> None:
    def make() -> Any:
        return Built(extra, **{name: nn.Linear(4, 4) for name in ("a", "b", "extra", "head")})

    x, y = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    profile = pd.profile(make(), {"x": x}, runs=1)

    def is_moved(cut: str) -> bool:
        model = make()
        plan = pd.plan(profile, pd.Cluster.local(2), schedule="1f1b", microbatches=1, cuts=(cut,))
        with pd.Pipeline(model, plan, loss=lambda out, batch: F.cross_entropy(out, y), optimizer=SGD) as pipeline:
            before = model.extra.weight.detach().clone()
            list(pipeline.train([{"x": x, "more": True}]))
            return not torch.equal(pipeline.state_dict()["extra.weight"], before)

    assert is_moved("head"), "its parameters belong to the first stage, which calls it"
    with pytest.raises(pd.PipelineError, match="depends on a tensor that another stage has and does not send"):
        is_moved("b")


def test_python_and_numpy_numbers_are_the_same_on_all_stages() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        share = random.random() + float(np.random.rand()) + torch.rand(1).item()
        return model.head(model.extra(model.a(x) * share)) * share

    mixes = Built(forward, **{name: nn.Linear(4, 4) for name in ("a", "extra", "head")})
    state = random.getstate()
    graph = pd.capture(mixes, torch.randn(2, 4)).graph
    assert graph.draws_in_python
    assert [layer.name for layer in graph.layers] == ["a", "extra", "head"]
    assert random.getstate() == state, "the user's generator is left as it was"
