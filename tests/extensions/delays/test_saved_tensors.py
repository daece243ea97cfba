"""The rule 'graph': old activations, newer weights, for every kind of layer; or a refusal by the parameter's name."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from built import Built, in_loop
from marks import needs_bfloat16_lstm
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import pipedream as pd
from pipedream.apps.testing import passes
from pipedream.core.seeds import layer_seed
from pipedream.extensions.delays import saved_tensors
from pipedream.runtime.stage import stage_module, versions as kept

Named = dict[str, Tensor]


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def attention() -> nn.Module:
    """Returns self-attention, as user code has it: four products and the fused kernel."""

    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.rows(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) @ self.out.T

    return Built(forward, rows=nn.Linear(8, 24), out=parameter(8, 8))


def first_of(inner: nn.Module, inputs: int = 1) -> nn.Module:
    """Returns what another module's output begins with: recurrent layers give two, attention too."""
    return Built(lambda self, x: self.inner(*(x,) * inputs)[0], inner=inner)


def tied() -> nn.Module:
    """Returns a table that is read from both sides, with a shift and a scale that are weights."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return F.linear(self.table(x) * self.scale + self.shift[: x.shape[1]], self.table.weight)

    return Built(forward, table=nn.Embedding(7, 8), shift=parameter(6, 8), scale=parameter(8))


def draw(shape: tuple[int, ...]) -> Tensor:
    """Returns numbers of this shape, or words."""
    return torch.randn(shape, dtype=torch.float64) if shape else torch.randint(7, (5, 4))


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(8, 3), (5, 8)),
    "linear of sequences": (lambda: nn.Linear(8, 3, bias=False), (5, 4, 8)),
    "bilinear": (lambda: Built(lambda self, x: self.pairs(x, x.flip(1)), pairs=nn.Bilinear(8, 8, 3)), (5, 8)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1), (2, 3, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, groups=2, stride=2), (2, 4, 7, 7)),
    "transposed conv": (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 5, 5)),
    "batch norm": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 5)),
    "layer norm": (lambda: nn.LayerNorm(8), (5, 8)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (5, 4, 3)),
    "rms norm": (lambda: nn.RMSNorm(8), (5, 8)),
    "prelu": (lambda: nn.PReLU(3), (5, 3)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 3)), ()),
    "bag": (lambda: nn.Sequential(nn.EmbeddingBag(7, 8), nn.Linear(8, 3)), ()),
    "tied": (tied, ()),
    "lstm": (lambda: first_of(nn.LSTM(8, 6, num_layers=2, batch_first=True, bidirectional=True)), (3, 4, 8)),
    "gru": (lambda: first_of(nn.GRU(8, 6, batch_first=True)), (3, 4, 8)),
    "rnn": (lambda: first_of(nn.RNN(8, 6, batch_first=True)), (3, 4, 8)),
    "lstm cell": (lambda: Built(in_loop, cell=nn.LSTMCell(8, 6)), (3, 4, 8)),
    "gru cell": (lambda: Built(in_loop, cell=nn.GRUCell(8, 6)), (3, 4, 8)),
    "attention": (attention, (3, 4, 8)),
    "multi-head attention": (lambda: first_of(nn.MultiheadAttention(8, 2, batch_first=True), 3), (3, 4, 8)),
    "transformer layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (3, 4, 8)),
    "rows of a larger tensor": (lambda: part(columns=False), (5, 8)),
    "not saved": (lambda: computed(saves=False), (5, 8)),
    "deep": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(True), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()),
        (5, 8),
    ),
}


def run_graph_rule(
    layer: nn.Module, x: Tensor, factor: float, autocast: torch.dtype | None = None, led: bool = False
) -> tuple[Tensor | None, dict[str, Tensor | None], Tensor]:
    """Returns the gradients of the input and the weights, which were multiplied in place between the two passes.

    Where the graph is led, in three updates and two storages: the newest is not in the one that the forward read.
    """
    handles = {f"layer.{name}": p for name, p in layer.named_parameters()}
    stage = stage_module.StageModule([("layer", layer)], handles, x.device, 0, autocast)
    versions = kept.Versions(handles, single=not led)
    weights, saved = versions.peek(), saved_tensors.SavedTensorHooks(autocast is not None, led)
    wants = x.is_floating_point()
    value, boxes = stage.enter("", (x.clone(),), (wants,))
    output = saved.run_layers(lambda: stage.forward(value, weights.leaves, 0, is_first=False), value, weights)
    slope = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    for number, share in enumerate([0.5, 4.0, factor / 2] if led else [factor]):
        versions.choose_storage({number} if led else ())
        versions.move_handles()
        with torch.no_grad():
            for handle in handles.values():
                handle.mul_(share)
        versions.after_step()
    with saved.redirected_to(versions.peek()):
        gradients, back = stage.backward(
            stage_module.SavedForward(weights, boxes, (output,), (wants,), 0), [slope], [None] * len(handles)
        )
    assert versions.storages == 1 + led
    return back[0] if back else None, dict(zip(handles, gradients, strict=True)), slope


def differentiate(layer: nn.Module, x: Tensor, old: Named, newer: Named, slope: Tensor, context: Any = None) -> Named:
    """Returns the gradients of the weights, and of the input as '': the serial rule's."""
    leaves = {name: w.clone().requires_grad_() for name, w in old.items()}
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    read = ({"": x} if x.requires_grad else {}) | leaves
    with passes.reading(leaves, newer):
        torch.default_generator.manual_seed(layer_seed(0, 0, "layer"))
        with context or nullcontext():
            tensors = {name.removeprefix("layer."): leaf for name, leaf in leaves.items()}
            output = torch.func.functional_call(layer, tensors, (x.clone(),))
        gradients = torch.autograd.grad(output, list(read.values()), slope, allow_unused=True)
    return {name: g for name, g in zip(read, gradients, strict=True) if g is not None}


@pytest.mark.parametrize("led", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_old_activations_and_newer_weights(kind: str, led: bool) -> None:
    """The oracle swaps what autograd has saved of the weights, by storage, when the backward asks for it."""
    make, shape = LAYERS[kind]
    torch.manual_seed(0)
    layer, x = make().double(), draw(shape)
    weights = {f"layer.{name}": p.detach().clone() for name, p in layer.named_parameters()}
    back, gradients, slope = run_graph_rule(layer, x, 1.5, led=led)
    expected = differentiate(layer, x, weights, {name: 1.5 * w for name, w in weights.items()}, slope)
    if "" in expected:
        torch.testing.assert_close(back, expected.pop(""), rtol=1e-12, atol=1e-12)
    assert {name for name, g in gradients.items() if g is not None} == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-12, atol=1e-12)


def cast(writes: bool = False) -> nn.Module:
    """Returns a layer that casts its weight itself, or writes into what it has cast."""

    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.weight.to(torch.bfloat16)
        if writes:
            with torch.no_grad():
                weight.mul_(2.0)
        return F.linear(x, weight)

    return Built(forward, weight=parameter(3, 8))


CAST = (
    "cast", "linear", "linear of sequences", "conv1d", "conv2d", "transposed conv", "gru", "lstm cell",
    "multi-head attention", "transformer layer", "deep", pytest.param("lstm", marks=needs_bfloat16_lstm),
)  # fmt: skip


@pytest.mark.parametrize("led", [False, True])
@pytest.mark.parametrize("kind", CAST)
def test_an_old_graph_casts_the_newer_weights(kind: str, led: bool) -> None:
    """Under autocast. The oracle's weights are in bfloat16 from the start, so that autocast has nothing to cast."""
    make, shape = (LAYERS | {"cast": (cast, (5, 8))})[kind]
    torch.manual_seed(0)
    layer, x = make(), draw(shape).float()
    norms = [name for name, module in layer.named_modules() if isinstance(module, nn.LayerNorm)]

    def cast_weights(factor: float) -> dict[str, Tensor]:
        weights = {name: factor * p.detach() for name, p in layer.named_parameters()}
        return {f"layer.{name}": w if name.rpartition(".")[0] in norms else w.bfloat16() for name, w in weights.items()}

    old, newer, context = cast_weights(1.0), cast_weights(1.5), torch.autocast("cpu", torch.bfloat16)
    back, gradients, slope = run_graph_rule(layer, x, 1.5, torch.bfloat16, led)
    expected = differentiate(layer, x, old, newer, slope, context)
    assert torch.equal(back, expected.pop(""))
    for name, gradient in expected.items():
        assert torch.equal(gradients[name], gradient.float()), name


def computed(saves: bool = True) -> nn.Module:
    """Returns a layer of which two weights are added before they are read."""
    forward = lambda self, x: x * (self.a + self.b) if saves else x + (self.a + self.b)  # noqa: E731
    return Built(forward, a=parameter(8), b=parameter(8))


class Copies(torch.autograd.Function):
    """Saves a copy of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight.clone())
        return x * weight

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return slopes[0] * weight, (slopes[0] * x).sum(0)


class Keeps(torch.autograd.Function):
    """Puts the weight on its context, in a list."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.tensors = [weight]
        return x * weight

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor, None]:
        return slopes[0] * ctx.tensors[0], None


class KeepsCopy(Keeps):
    """Puts a copy there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.tensors = [weight.clone()]
        return x * weight


def layer_with(function: Any) -> nn.Module:
    """Returns a layer with a function of the user's own of its weight."""
    return Built(lambda self, x: function.apply(x, self.weight).tanh(), weight=parameter(8))


def pruned() -> nn.Module:
    layer = nn.Linear(8, 3)
    prune.random_unstructured(layer, "weight", 0.5)
    return layer


def part(columns: bool) -> nn.Module:
    """Returns a layer whose weight is a part of a larger tensor: columns, or rows."""
    whole = torch.randn(8, 8, dtype=torch.float64)
    return Built(lambda self, x: x @ self.weight, weight=nn.Parameter(whole[:, 2:5] if columns else whole[2:5].T))


def offloaded(self: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return self.layer(x).tanh()


def again(reentrant: bool) -> Any:
    return lambda self, x: checkpoint(self.layer, x, use_reentrant=reentrant).tanh()


NO_CAST = r"'layer.weight' \(by _to_copy\)"
ELSEWHERE = r"Backward0? recomputes what it has saved, or takes it from elsewhere"
BOTH = (False, True)
REFUSED: dict[str, tuple[Callable[[], nn.Module], str, tuple[bool, ...]]] = {
    # Computed from weights alone:
    "cast": (cast, NO_CAST, (False,)),
    "normed": (lambda: parametrizations.weight_norm(nn.Linear(8, 3)), r"original0' .*original1' \(by _weight_n", BOTH),
    "pruned": (pruned, r"rule 'graph'.*weight_orig' \(by mul\)", BOTH),
    "added": (computed, r"layer.a' \(by add\).*layer.b' \(by add\)", BOTH),
    "copied": (lambda: layer_with(Copies), r"layer.weight' \(by clone\)", BOTH),
    # On a context, where hooks do not see it:
    "copy on a context": (lambda: layer_with(KeepsCopy), r"Backward keeps what was computed from 'layer\.w", BOTH),
    "on a context": (lambda: layer_with(Keeps), r"KeepsBackward keeps 'layer\.weight' on its context", (True,)),
    "with holes": (lambda: part(columns=True), r"'layer\.weight' that lies across parameters, in one with h", (True,)),
    # Not where autograd has put it:
    "reentrant": (lambda: Built(again(True), layer=nn.Linear(8, 8)), ELSEWHERE, BOTH),
    "not reentrant": (lambda: Built(again(False), layer=nn.Linear(8, 8)), ELSEWHERE, BOTH),
    "offloaded": (lambda: Built(offloaded, layer=nn.Linear(8, 8)), ELSEWHERE, BOTH),
}


@pytest.mark.parametrize(("name", "led"), [(name, led) for name, (*_, leds) in REFUSED.items() for led in leds])
def test_what_an_old_graph_cannot_give_is_refused(name: str, led: bool) -> None:
    make, words, _ = REFUSED[name]
    x = torch.randn(5, 8, dtype={"cast": torch.bfloat16, "with holes": torch.float64}.get(name))
    with pytest.raises(pd.PipelineError, match=f"(?s){words}"):
        run_graph_rule(make(), x, 1.5, led=led)


@pytest.mark.parametrize(
    ("layer", "words"), [(cast(writes=True), NO_CAST), (attention(), r"'layer.out' \(by _to_copy")]
)
def test_what_is_no_plain_cast_of_a_weight_is_refused(layer: nn.Module, words: str) -> None:
    """What is written, or cast from a view."""
    with pytest.raises(pd.PipelineError, match=words):
        run_graph_rule(layer, torch.randn(3, 4, 8), 1.5, torch.bfloat16)


@pytest.mark.parametrize("led", BOTH)
def test_an_activation_that_was_written_is_found_out(led: bool) -> None:
    """Autograd itself does not look where hooks have packed what it saves."""
    layer = Built(lambda self, x: (x * self.weight).exp().add_(1), weight=parameter(8))
    with pytest.raises(RuntimeError, match=r"shape \(5, 8\) that the backward needs was written in place"):
        run_graph_rule(layer, torch.randn(5, 8), 1.5, led=led)


def test_with_one_set_a_weight_on_a_context_is_the_newest() -> None:
    torch.manual_seed(0)
    layer, x = layer_with(Keeps).double(), torch.randn(5, 8, dtype=torch.float64)
    weight = layer.weight.detach().clone()
    back, _, slope = run_graph_rule(layer, x, 1.5)
    torch.testing.assert_close(back, slope * (1 - (x * weight).tanh() ** 2) * 1.5 * weight)
