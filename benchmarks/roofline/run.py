"""Seconds of each layer by the roofline of this machine, beside those that were measured. See README.md."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import pipedream
from pipedream.core.model.profile import Profile
from pipedream.core.units import format_seconds
from pipedream.services.roofline import measure_device

sys.path.append(str(Path(__file__).resolve().parents[1]))
from scaffold import Environment, format_head, format_row, make_parser

FOLDER = Path(__file__).resolve().parent

# -- four models, small enough for a CPU, and what they are run on ---------------------------------


class Causal(nn.TransformerEncoderLayer):
    """A block of a decoder."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        return super().forward(x, mask, is_causal=True)


class First(nn.Module):
    """Takes the first of a pair."""

    def forward(self, value: Any) -> Tensor:
        output: Tensor = value[0]
        return output


def cnn() -> tuple[nn.Module, Tensor]:
    """Convolutions like those of examples/digits.py, wider, on images of 32 by 32."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.BatchNorm2d(fan_out), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 10)), torch.randn(32, 3, 32, 32)


def mlp() -> tuple[nn.Module, Tensor]:
    """Dense layers and non-linearities."""
    layers: list[nn.Module] = [nn.Linear(784, 1024), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(1024, 1024), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(1024, 10)), torch.randn(256, 784)


def transformer() -> tuple[nn.Module, Tensor]:
    """Three blocks of a small GPT over 128 positions."""
    blocks = [Causal(256, 4, 1024, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(1000, 256), *blocks, nn.LayerNorm(256), nn.Linear(256, 1000))
    return model, torch.randint(1000, (8, 128))


def lstm() -> tuple[nn.Module, Tensor]:
    """Two recurrent layers of a language model over 64 steps."""
    layers = [nn.LSTM(256, 256, batch_first=True), First(), nn.LSTM(256, 256, batch_first=True), First()]
    return nn.Sequential(nn.Embedding(1000, 256), *layers, nn.Linear(256, 1000)), torch.randint(1000, (32, 64))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    make.__name__: make for make in (cnn, mlp, transformer, lstm)
}


# -- the table --------------------------------------------------------------------------------------


def errors(predicted: Profile, measured: Profile) -> list[tuple[str, float, float, float]]:
    """Returns (what, predicted, measured seconds, share of all that was measured) of each forward and backward."""
    rows = []
    for layer, *costs in zip(measured.graph.layers, predicted.layers, measured.layers, strict=True):
        for way in ("forward", "backward"):
            guess, seconds = (getattr(cost, f"{way}_s") for cost in costs)
            share = seconds / (measured.forward_s + measured.backward_s)
            rows.append((f"{layer.name} {layer.kind} {way}", guess, seconds, share))
    return rows


def compare_with_gpu() -> Iterator[str]:
    """Yields the rows of a table: the models of benchmarks/gpu, predicted for an H200 and measured on one."""
    sys.path.append(str(FOLDER.parent / "gpu"))
    import profiles

    yield format_head("model | pass | predicted | measured | predicted / measured", "llr")
    for name, (build, draw, samples, autocast) in profiles.MODELS.items():
        measured = Profile.load(FOLDER.parent / "gpu" / "h200" / f"{name}.json")
        with torch.device("meta"):
            model, (x, _) = build(), draw(samples)
        predicted = pipedream.profile(model, x, device="meta", as_device="H200", autocast=autocast)
        for way in ("forward_s", "backward_s"):
            guess, seconds = getattr(predicted, way), getattr(measured, way)
            cells = format_seconds(guess), format_seconds(seconds), f"{guess / seconds:.2f}"
            yield format_row((name, way.removesuffix("_s"), *cells))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--h200", action="store_true", help="compare with the profiles of benchmarks/gpu instead")
    parser.add_argument("--runs", type=int, default=15, help="runs of each median")
    parser.add_argument("--layers", action="store_true", help="print each layer too")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of the processor, where others work on it too")
    options = parser.parse_args()
    if options.h200:
        for row in compare_with_gpu():
            print(row)
        return
    if options.cpu_time:
        time.perf_counter = time.process_time
    torch.set_num_threads(1)
    environment = Environment()
    device = measure_device()
    print(f"{device}\n")
    titles = "model | predicted | measured | predicted / measured | layers of more than 2%: median factor, worst"
    print(format_head(titles, "lr"))
    details = []
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model, sample = make()
        measured = pipedream.profile(model, sample, runs=options.runs)
        predicted = pipedream.profile(model, sample, device="meta", as_device=device)
        rows = errors(predicted, measured)
        guess, seconds = (p.forward_s + p.backward_s for p in (predicted, measured))
        factors = [math.exp(abs(math.log(a / b))) for _, a, b, share in rows if share > 0.02 and a > 0]
        cells = f"{guess / seconds:.2f}", f"{median(factors):.2f}, {max(factors):.2f}"
        print(format_row((name, format_seconds(guess), format_seconds(seconds), *cells)))
        details.append((name, rows))
    for name, rows in details if options.layers else ():
        print(f"\n{name}\n")
        for what, guess, seconds, share in rows:
            if share > 0.005:
                factor = f"{guess / seconds:.2f}" if guess else "-"
                print(f"    {what:32} {format_seconds(guess):>9} {format_seconds(seconds):>9} {share:6.1%} {factor:>6}")
    print("\n" + environment.describe("1 thread"))


if __name__ == "__main__":
    main()
