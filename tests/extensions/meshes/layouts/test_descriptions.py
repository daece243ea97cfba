"""Layers and functions of torch are described, and their parts make the whole."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from built import Built
from marks import slow, spread, thinned
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import pipedream as pd
from pipedream.extensions.meshes.layouts.tracing.registry import REGISTRY, find_contradiction
from pipedream.extensions.meshes.layouts.tracing.trace import trace
from tests.extensions.meshes.layouts.simulated_ranks import SimulatedRanks, check_step


def calls(function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Returns a function as a layer, of something that has a gradient."""
    return Built(lambda module, x: function(x * module.scale), scale=nn.Parameter(torch.tensor(1.5)))


def first(inner: nn.Module) -> nn.Module:
    """Returns a layer that gives the first result of one that has several."""
    return Built(lambda module, x: module.inner(x)[0], inner=inner)


_ROWS = torch.tensor([[0, 2, 1], [3, 0, 0]])
_COLUMNS = torch.tensor([1, 0, 2])
_WORDS = torch.arange(32).reshape(8, 4) % 12

PICTURES: dict[str, nn.Module] = {
    "conv": nn.Conv2d(4, 8, 3, padding=1),
    "conv, dilated": nn.Conv2d(4, 8, 3, dilation=2),
    "conv, strided, in groups": nn.Conv2d(4, 8, 3, 2, groups=2),
    "conv, depthwise": nn.Conv2d(4, 4, 3, padding=1, groups=4),
    "conv of the whole picture": nn.Conv2d(4, 8, 6),
    "conv of one place": nn.Conv2d(4, 8, 1, 6),
    "conv of the padding alone": nn.Conv2d(4, 8, 1, 8, padding=1),
    "transposed conv": nn.ConvTranspose2d(4, 6, 3, 2, padding=1, output_padding=1),
    "transposed conv, in groups": nn.ConvTranspose2d(4, 6, 3, 2, groups=2),
    "batch norm": nn.BatchNorm2d(4),
    "group norm": nn.GroupNorm(2, 4),
    "instance norm": nn.InstanceNorm2d(4, affine=True),
    "local response norm": nn.LocalResponseNorm(2),
    "max pool": nn.MaxPool2d(3, 2, 1),
    "average pool": nn.AvgPool2d(2),
    "adaptive max pool": nn.AdaptiveMaxPool2d(2),
    "adaptive average pool": nn.AdaptiveAvgPool2d(2),
    "nearest": nn.Upsample(scale_factor=2),
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "bicubic": nn.Upsample(size=(5, 7), mode="bicubic"),
    "zero padding": nn.ZeroPad2d(1),
    "reflected padding": nn.ReflectionPad2d((1, 0, 2, 1)),
    "replicated padding": nn.ReplicationPad2d(2),
    "circular padding": nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
    "pixel shuffle": nn.PixelShuffle(2),
    "channels shuffled": nn.ChannelShuffle(2),
    "prelu": nn.PReLU(4),
    "unfold": nn.Unfold(2, stride=2),
    "dropout of channels": nn.Dropout2d(0.5),
}
SEQUENCES: dict[str, nn.Module] = {
    "linear": nn.Linear(8, 6),
    "bilinear": calls(lambda x: F.bilinear(x, x.flip(-1), torch.ones(4, 8, 8, dtype=x.dtype))),
    "conv1d": nn.Conv1d(4, 6, 3, padding=1),
    "layer norm": nn.LayerNorm(8),
    "rms norm": nn.RMSNorm(8),
    "lstm": first(nn.LSTM(8, 4, batch_first=True)),
    "lstm, both ways": first(nn.LSTM(8, 4, bidirectional=True, batch_first=True)),
    "gru": first(nn.GRU(8, 4, batch_first=True)),
    "rnn": first(nn.RNN(8, 4, batch_first=True)),
    "encoder": nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "attention, causal": calls(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)),
    "glu": nn.GLU(),
    "activations": nn.Sequential(nn.GELU(), nn.SiLU(), nn.ELU(), nn.Mish(), nn.Softplus(), nn.Hardswish(), nn.SELU()),
    "more activations": nn.Sequential(nn.LeakyReLU(), nn.ReLU6(), nn.Softsign(), nn.LogSigmoid(), nn.Hardtanh()),
    "softmax": nn.Softmax(-1),
    "log softmax": nn.LogSoftmax(1),
    "tril": calls(lambda x: x.tril(1)),
    "triu": calls(lambda x: x.triu(-1)),
    "index": calls(lambda x: x[_ROWS]),
    "index, columns": calls(lambda x: x[:, :, _COLUMNS]),
    "index, apart": calls(lambda x: x[_COLUMNS, :, _COLUMNS]),
    "index, together": calls(lambda x: x[:, _COLUMNS, _ROWS]),
    "index put": calls(lambda x: torch.zeros_like(x).index_put((_COLUMNS,), x[:3])),
    "gather": calls(lambda x: x.gather(1, _WORDS[:, :3, None].expand(8, 3, 5) % 4)),
    "scatter": calls(lambda x: torch.zeros_like(x).scatter_add(1, _WORDS[:, :, None].expand(8, 4, 8) % 4, x)),
    "index select": calls(lambda x: x.index_select(1, _COLUMNS)),
    "roll": calls(lambda x: x.roll(1, 1) + x.flip(0, 2)),
    "cumulative sum": calls(lambda x: x.cumsum(1) + x.logcumsumexp(1)),
    "sorted": calls(lambda x: x.sort(-1).values),
    "largest": calls(lambda x: x.topk(3).values),
    "greatest": calls(lambda x: x.max(1).values + x.amin(1) + x.max()),
    "argmax": calls(lambda x: x * (x.argmax(-1, keepdim=True) + x.argmin())),
    "any": calls(lambda x: torch.where((x > 0).any(1, keepdim=True), x, x.abs())),
    "statistics": calls(lambda x: x.std(1) + x.var(1, correction=0) + x.norm(dim=1) + x.logsumexp(1)),
    "einsum": calls(lambda x: torch.einsum("btc,bsc->bts", x, x)),
    "outer": calls(lambda x: x[:, 0, :, None] @ x[:, 1, None]),
    "chunks": calls(lambda x: torch.cat(x.chunk(2, -1)[::-1], -1)),
    "joined with nothing": calls(lambda x: torch.cat([torch.tensor([]).to(x), x], 1)),
    "stacked": calls(lambda x: torch.stack(x.unbind(1), 0)),
    "repeated": calls(lambda x: x.repeat(1, 2, 1) + x.repeat_interleave(2, 1)),
    "parts replaced": calls(lambda x: x.masked_fill(x > 1, 0.0).clamp(-1, 1)),
    "diagonal": calls(lambda x: x.diagonal(0, 1, 2)),
    "cosine similarity": calls(lambda x: F.cosine_similarity(x, x.flip(0), -1)),
    "normalised": calls(lambda x: F.normalize(x, dim=-1)),
}
LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cross entropy": lambda y: F.cross_entropy(y, _WORDS[:, 0] % 6, label_smoothing=0.1),
    "cross entropy of pictures": lambda y: F.cross_entropy(y[:, :, None].expand(8, 6, 4), _WORDS % 6, ignore_index=1),
    "weighted cross entropy": lambda y: F.cross_entropy(y, _WORDS[:, 0] % 6, torch.arange(6, dtype=y.dtype) + 1),
    "binary": lambda y: F.binary_cross_entropy_with_logits(y, (_WORDS[:, :1] % 2).expand(8, 6).to(y.dtype)),
    "huber": lambda y: F.huber_loss(y, torch.zeros_like(y)),
    "smooth l1": lambda y: F.smooth_l1_loss(y, torch.zeros_like(y)),
    "kl": lambda y: F.kl_div(y.log_softmax(1), torch.full_like(y, 1 / 6), reduction="batchmean"),
    "l1": lambda y: F.l1_loss(y, torch.ones_like(y)),
}
CASES: dict[str, tuple[nn.Module, tuple[int, ...], Callable[[torch.Tensor], torch.Tensor] | None]] = {
    **{f"pictures: {name}": (layer, (8, 4, 6, 6), None) for name, layer in PICTURES.items()},
    **{f"sequences: {name}": (layer, (8, 4, 8), None) for name, layer in SEQUENCES.items()},
    **{f"losses: {name}": (nn.Linear(4, 6), (8, 4), loss) for name, loss in LOSSES.items()},
}


QUICK = (
    "conv", "conv, strided, in groups", "conv of the padding alone", "transposed conv", "batch norm", "group norm",
    "max pool", "adaptive average pool", "bilinear", "reflected padding", "pixel shuffle", "unfold",
    "dropout of channels", "linear", "layer norm", "attention, causal", "activations", "softmax", "triu",
    "index", "index, apart", "index put", "gather", "scatter", "roll", "cumulative sum", "sorted", "greatest",
    "argmax", "statistics", "einsum", "chunks", "repeated", "parts replaced", "diagonal", "cross entropy", "kl",
)  # fmt: skip
"""One of each kind of description: the default run has every second one."""


@pytest.mark.parametrize(
    "name", spread(thinned((name if name.partition(": ")[2] in QUICK else slow(name) for name in CASES), 4))
)
def test_layers_are_described_and_compute_the_same(name: str) -> None:
    layer, shape, loss = CASES[name]
    torch.manual_seed(1)
    model, sample = copy.deepcopy(layer).double(), torch.randn(shape).double()
    step = trace(model, sample, loss=loss)
    for described in step.calls:
        assert find_contradiction(described.call, described.description) == "", described
    check_step(step, model, sample, loss, pd.partition(step.operators, 2, replicate=False), SimulatedRanks(2))


@pytest.mark.usefixtures("_forget_added_operators")
def test_a_description_of_ones_own_goes_before_a_decomposition() -> None:
    layer, sample = calls(lambda x: x.index_select(1, _COLUMNS)), torch.randn(4, 4)
    assert "index_select" not in pd.operators(layer, sample).text
    pd.register_operator(torch.ops.aten.index_select, "out[a, :] = self[a, :] + index[:]")
    assert "index_select" in pd.operators(layer, sample).text


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda x: x[x > 0], r"the model's own forward calls aten\.index.*, whose result"),
        (lambda x: x if x.sum() > 0 else -x, "a branch"),
        (lambda x: x * x.sum().item(), r"calls aten\._local_scalar_dense.*, whose result"),
        (lambda x: x.nonzero() * x.sum(), r"calls aten\.nonzero.*, whose result"),
    ],
)
def test_what_depends_on_numbers_is_refused(function: Callable[[torch.Tensor], torch.Tensor], what: str) -> None:
    with pytest.raises(pd.PipelineError, match=rf"{what}.* depends on the numbers of a tensor"):
        pd.operators(calls(function), torch.randn(4, 4))


@torch.library.custom_op("house::scaled", mutates_args=())
def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A sum over the middle dimension goes into each element."""
    return x * w + x.sum(1, keepdim=True)


@scaled.register_fake
def _(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("house::halved_sum", mutates_args=())
def halved_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1) / 2


@halved_sum.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0])


halved_sum.register_autograd(lambda ctx, grad: (grad[:, None] / 2).expand(-1, 4))


@torch.library.custom_op("house::rotated", mutates_args=())
def rotated(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x, x.cumsum(1))


@rotated.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.complex64)


@pytest.fixture
def _forget_added_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(REGISTRY, "_descriptions", dict(REGISTRY._descriptions))
    monkeypatch.setattr(REGISTRY, "_added", set())


@pytest.mark.usefixtures("_forget_added_operators")
def test_an_operator_of_ones_own_is_checked_in_each_trace() -> None:
    weight, x = nn.Parameter(torch.ones(8), requires_grad=False), torch.randn(4, 6, 8)
    layer = Built(lambda module, x: scaled(x.detach(), module.w), w=weight)
    with pytest.raises(pd.PipelineError, match=r"the model's own forward calls house\.scaled.*has no description"):
        pd.operators(layer, x)
    pd.register_operator(scaled, "out[a, :, c] = f(x[a, :, c], w[c])")
    text = pd.operators(layer, x).text
    assert "scaled(x0[a, :, c], p_w[c])" in text
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():  # as a layer of a stage is traced
        assert trace(layer, mode.from_tensor(x)).operators.text == text
    pd.register_operator(scaled, "out[a, b, c] = f(x[a, b, c], w[c])")
    with pytest.raises(pd.PipelineError, match=r"its parts along 'b' do not make the whole"):
        pd.operators(layer, x)
    pd.register_operator(scaled, "out[a, :, c] = f(x[a, :, c], y[c])")
    with pytest.raises(pd.PipelineError, match=r"it does not name w; it names y, not among its tensors; write .* x, w"):
        pd.operators(layer, x)


@pytest.mark.usefixtures("_forget_added_operators")
@pytest.mark.parametrize(
    ("operator", "text", "message"),
    [
        (halved_sum, "out[i] = x[i, j]", "only on the right"),
        (halved_sum, "out[i] max= x[i, j]", "its parts along 'j' do not make the whole; write :"),
        (halved_sum, "out[i] += x[i, j]", ""),
        (lambda x: rotated(x.detach()).real, "out[a, b] = f(x[a, b])", "its parts along 'b' do not make the whole"),
    ],
)
def test_a_reduction_and_an_imaginary_part_of_ones_own_are_checked(operator: Any, text: str, message: str) -> None:
    pd.register_operator(halved_sum if operator is halved_sum else rotated, text)
    with nullcontext() if not message else pytest.raises(pd.PipelineError, match=message):
        assert "halved_sum[i] += mul" in pd.operators(calls(operator), torch.randn(8, 4)).text


@pytest.mark.parametrize(
    ("operator", "text", "message"),
    [
        (scaled, "", r"give one line, whose result is out"),
        (scaled, "out[a] = x[a]\nout[b] = x[b]", r"give one line, whose result is out"),
        (scaled, "y[a] = x[a]", r"give one line, whose result is out"),
        ("scaled", "out[a] = x[a]", r"'scaled' was described, but is not a torch operator; give one such as"),
        (torch.fft.fft, "out[a] = x[a]", r"is not a torch operator"),
        (torch.ops.aten.native_layer_norm, "out[a] = x[a]", r"has 3 results, and only operators with one can be"),
    ],
)
def test_what_is_no_description(operator: Any, text: str, message: str) -> None:
    with pytest.raises(pd.PipelineError, match=message):
        pd.register_operator(operator, text)
