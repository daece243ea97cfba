"""What is computed without running equals what is counted when it runs; flops and seconds have closed forms."""

from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from built import Built
from hypothesis import given, settings, strategies as st
from marks import slow
from torch import Tensor, nn
from torch.nn import functional as F

import pipedream as pd
from pipedream.core.hardware.devices import DEVICES, Device

TOY = Device("toy", 10**9, {"float32": 1e12, "float64": 1e11}, 1e11, launch_s=1e-6, flop_share=1.0, byte_share=1.0)


def estimated(model: nn.Module, *sample: Any, device: Device = TOY, **options: Any) -> pd.Profile:
    return pd.profile(model, sample, device="meta", as_device=device, **options)


def measured(model: nn.Module, *sample: Any, **options: Any) -> pd.Profile:
    return pd.profile(model, sample, warmup=0, runs=1, **options)


def sizes(profile: pd.Profile) -> list[tuple[int, ...]]:
    rows = [(c.output_bytes, c.parameter_bytes, c.activation_bytes) for c in profile.layers]
    return [*rows, (profile.optimizer_bytes, profile.batch), *profile.input_shapes]


def attend(_: nn.Module, x: Tensor) -> Tensor:
    q = x.unflatten(-1, (2, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


def convolutions() -> nn.Module:
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.3)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(128, 5))


def attention() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), Built(attend), nn.GELU(), nn.Linear(8, 11))


def transformer() -> nn.Module:
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 2))


SAMPLES: dict[Any, Tensor] = {convolutions: torch.randn(4, 3, 8, 8), transformer: torch.randn(3, 5, 8)}
SAMPLES |= {attention: torch.zeros(2, 6, dtype=torch.long)}
ADAMW, SGD = partial(torch.optim.AdamW, lr=0.1), partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SLOW = [case for case in product(SAMPLES, (ADAMW, SGD)) if case != (convolutions, ADAMW)]


@pytest.mark.parametrize(("make", "factory"), [(convolutions, ADAMW), *(slow(*case) for case in SLOW)])
def test_bytes_are_those_of_a_run(make: Any, factory: Any) -> None:
    model, sample = make(), SAMPLES[make]
    expected = sizes(measured(model, sample, optimizer=factory))
    assert sizes(estimated(model, sample, optimizer=factory)) == expected
    assert sizes(estimated(model.to("meta"), sample, optimizer=factory)) == expected


@settings(max_examples=8)
@given(batch=st.integers(1, 5), widths=st.lists(st.integers(1, 9), min_size=2, max_size=4), frozen=st.booleans())
def test_work_of_dense_layers_by_hand(batch: int, widths: list[int], frozen: bool) -> None:
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths)))
    model[0].requires_grad_(not frozen)
    profile = estimated(model, torch.randn(batch, widths[0]))
    for index, (a, b) in enumerate(pairwise(widths)):
        cost, product = profile.layers[index], 2 * batch * a * b
        # The gradient of the weight, and of the input where what came before took one.
        backwards = (index > 0 or not frozen) * (1 + (index > 1 or (index == 1 and not frozen)))
        assert (cost.forward_flops, cost.backward_flops) == (product, backwards * product)
        moved = 4 * (batch * a + a * b + batch * b)
        assert cost.forward_s == pytest.approx(1e-6 + max(product / 1e12, moved / 1e11))
        assert cost.backward_s == pytest.approx(backwards * cost.forward_s)
        assert cost.moved_bytes == (1 + backwards) * moved


def test_views_cost_nothing_and_gathers_read_what_they_give() -> None:
    view = Built(lambda _, x: x.transpose(1, 2)[:, :2].unsqueeze(1).flatten(0, 1).expand(4, -1, -1))
    table, views = estimated(nn.Sequential(nn.Embedding(1000, 8), view), torch.zeros(4, 5, dtype=torch.long)).layers
    assert views.forward_s == 0.0
    rows, tokens = 4 * 5 * 8 * 4, 4 * 5 * 8
    assert table.forward_s == pytest.approx(1e-6 + (2 * rows + tokens) / 1e11)
    assert table.forward_flops == 0


def test_attention_by_hand() -> None:
    batch, length, width = 3, 64, 32
    profile = estimated(nn.Sequential(nn.LayerNorm(width), Built(attend)), torch.randn(batch, length, width))
    product = 2 * batch * length * length * width  # of both heads
    # Two products forward, five backward, half of each above the diagonal.
    assert profile.layers[1].forward_flops == 2 * product // 2
    assert profile.layers[1].backward_flops == 5 * product // 2


CONVOLUTION = nn.Conv2d(64, 64, 3, bias=False), torch.randn(2, 64, 10, 10), 2 * 2 * 64 * 64 * 9 * 8 * 8
DENSE = {width: (nn.Linear(64, width, False), torch.randn(128, 64), 2 * 128 * 64 * width) for width in (57, 64, 72)}


@pytest.mark.parametrize(
    ("case", "autocast", "peak", "share"),
    [
        (CONVOLUTION, None, "tf32", 0.5),  # unless told otherwise
        (DENSE[64], None, "float32", 1.0),
        (DENSE[64], torch.bfloat16, "bfloat16", 1.0),
        (DENSE[72], torch.bfloat16, "bfloat16", 1.0),
        (DENSE[57], torch.bfloat16, "bfloat16", 0.15),  # whose rows are not aligned
    ],
)
def test_products_on_a_gpu_take_the_kernels_rate(case: Any, autocast: Any, peak: str, share: float) -> None:
    layer, x, flops = case
    card = replace(DEVICES["H200"], bytes_per_s=1e30, launch_s=0.0, flop_share=1.0)  # only multiplies
    profile = estimated(nn.Sequential(layer), x, device=card, autocast=autocast)
    assert profile.forward_s == pytest.approx(flops / card.flops_per_s[peak] / share)
    with torch.backends.cudnn.flags(allow_tf32=False):
        slower = estimated(nn.Sequential(layer), x, device=card, autocast=autocast).forward_s
    assert slower == (pytest.approx(flops / card.flops_per_s["float32"]) if peak == "tf32" else profile.forward_s)


def test_recurrent_kernels_are_told_and_counted_by_rule() -> None:
    lstm, first = nn.LSTM(32, 64, 2, batch_first=True), Built(lambda _, value: value[0])
    model = nn.Sequential(nn.Embedding(50, 32), lstm, first, nn.Linear(64, 50))
    tokens, steps = torch.zeros(4, 16, dtype=torch.long), 4 * 16
    profile = estimated(model, tokens)
    weights = 4 * 64 * (32 + 64) + 4 * 64 * (64 + 64)
    assert profile.layers[1].forward_flops == 2 * steps * weights
    assert profile.layers[1].backward_flops == 2 * profile.layers[1].forward_flops
    assert any("mkldnn_rnn_layer" in note and " 1:" in note for note in profile.notes)
    run = measured(model, tokens).layers[1].activation_bytes
    assert 0.8 < profile.layers[1].activation_bytes / run < 1.2, "near to what is kept, and not a tenth of it"
    assert not any("mkldnn" in note for note in estimated(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)).notes)


def test_alike_layers_are_looked_at_once_and_cost_the_same() -> None:
    calls: list[int] = []

    class Repeats(nn.Linear):
        def __init__(self, times: int) -> None:
            super().__init__(8, 8)
            self.times = times

        def forward(self, x: Tensor) -> Tensor:
            calls.append(self.times)
            for _ in range(self.times):
                x = super().forward(x)
            return x

    layers = estimated(nn.Sequential(nn.Linear(8, 8), *map(Repeats, (1, 3) * 5)), torch.randn(2, 8)).layers[1:]
    costs = [(c.forward_s, c.backward_s, c.moved_bytes, c.activation_bytes) for c in layers]
    assert costs == costs[:2] * 5
    assert costs[1][0] == pytest.approx(3 * costs[0][0]), "another setting, another layer"
    assert len(calls) == 3 * 10 + 2, "twice to capture, for what they keep, and one of each kind to estimate"


def test_loss_and_update_are_seconds_of_the_roofline() -> None:
    profile = estimated(
        nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 3)),
        torch.randn(2, 4),
        loss=lambda output: F.cross_entropy(output, torch.tensor([0, 2])),
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    assert profile.loss_s >= 4e-6
    # In place, three weights and biases: two reads and a write each, and a launch.
    assert profile.update_s == pytest.approx(6e-6 + 3 * 4 * (12 + 3 + 2 * (9 + 3)) / 1e11)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": torch.optim.Adafactor}, "optimizer step over 2 parameters.*DataDependent"),
        ({"loss": lambda output: output}, "the loss.*one number"),
    ],
)
def test_failures_name_their_place(options: dict[str, Any], words: str) -> None:
    with pytest.raises(pd.PipelineError, match=words):
        estimated(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), **options)


def test_door() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(10**5, 10**5), nn.ReLU())
    x = torch.randn(8, 10**5)
    profile = pd.profile(model, x, device="meta", as_device="a100-80gb", dtype="bfloat16")
    assert (profile.device, profile.dtype, profile.runs) == ("A100-80GB", "bfloat16", 0)
    assert profile.parameter_bytes == 2 * (10**10 + 10**5)
    assert profile.flops == 2 * 2 * 8 * 10**10
    assert "not measured" in str(profile)
    assert pd.Profile.from_json(profile.to_json()) == profile
    device = Device("own", 10**9, {"float32": 1e9}, 1e9)
    assert pd.profile(model, x, device="meta", as_device=device).forward_s > 100
    assert DEVICES["A100-80GB"].name in profile.notes[0]
    assert profile.runtime.overlap_device, "else plans would keep optimizers of GPUs beside their weights"
    for options, words in (
        ({"as_device": "A100"}, "only on the device meta"),
        ({"device": "meta", "as_device": "P100"}, "P100"),
        ({"device": "meta", "as_device": device, "dtype": "float13"}, "float13"),
    ):
        with pytest.raises(pd.PipelineError, match=words):
            pd.profile(model, x, **options)
