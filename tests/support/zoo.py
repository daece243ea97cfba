"""The zoo: four small models with their data, losses and places to cut.

Each gives what a pipeline can get wrong: dropout, statistics and work in place, tuples of which a part has no
gradient, padding, sequences of changing length, and a last minibatch with fewer samples than microbatches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from built import Built
from torch import Tensor, nn

import pipedream
import pipedream as pd
from pipedream.capture import capture
from pipedream.core.model.graph import Layer, LayerGraph
from pipedream.core.model.profile import LayerProfile, Profile
from pipedream.planner import manual_plan

Batch = tuple[Tensor, Tensor]
PAD = 0


@dataclass(frozen=True)
class Animal:
    """A model and all that its training takes.

    Attributes:
        model: fresh, the same each time.
        batches: one epoch.
        loss: as a user gives it to a pipeline.
        total: (output, targets) -> (sum, weight), written independently of the loss above.
        cuts: number of stages -> layer indices.
        reference: what plain PyTorch trains; the model itself unless given.
    """

    model: nn.Module
    batches: list[Batch]
    loss: Callable[..., Any]
    total: Callable[[Any, Tensor], tuple[Tensor, float]]
    cuts: dict[int, tuple[int, ...]]
    reference: nn.Module | None = None


_GRAPHS: dict[Any, LayerGraph] = {}  # of each model that was captured: all animals of a kind have the same layers


def plan_of(
    animal: Animal,
    stages: int,
    replicas: tuple[int, ...] | None = None,
    depth: Any = "noam",
    cuts: tuple[int, ...] | None = None,
) -> pd.Plan:
    """Returns a plan, by default cut at the animal's own places, which may part tied layers; nothing is timed."""
    parameters = ((name, p.dtype, p.requires_grad) for name, p in animal.model.named_parameters())
    key = repr(animal.model), *parameters
    if key not in _GRAPHS:
        _GRAPHS[key] = capture(animal.model, (animal.batches[0][0],)).graph
    graph = _GRAPHS[key]
    costs = tuple(LayerProfile(1.0, 2.0, 8, 8) for _ in graph.layers)
    profile = Profile(type(animal.model).__name__, graph, costs, 1).without_tied_groups()
    counts, cuts = replicas or (1,) * stages, animal.cuts[stages] if cuts is None else cuts
    return manual_plan(profile, pd.Cluster.flat(sum(counts)), cuts, counts, in_flight=depth)


def mlp(dtype: torch.dtype) -> Animal:
    """A multilayer perceptron with dropout."""
    model = nn.Sequential(
        nn.Linear(6, 16),
        nn.Tanh(),
        nn.Dropout(0.3),
        nn.Linear(16, 16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Linear(16, 3),
    )
    data = torch.randn(50, 6, dtype=dtype), torch.randint(3, (50,))
    cuts = {1: (), 2: (3,), 3: (2, 4), 4: (1, 3, 5)}
    return Animal(model.to(dtype), _dealt(*data, 12), F.cross_entropy, sum_of_classes, cuts)


def cnn(dtype: torch.dtype) -> Animal:
    """A convolutional network with statistics, work in place and dropped channels."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),  # a bias before a norm has no gradient but rounding
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout2d(0.3),
        nn.Conv2d(4, 4, 3, stride=2, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    data = torch.randn(50, 1, 6, 6, dtype=dtype), torch.randint(3, (50,))
    # Cuts before the ReLUs: what arrives is written in place.
    cuts = {1: (), 2: (2,), 3: (2, 6), 4: (1, 2, 6)}
    return Animal(model.to(dtype), _dealt(*data, 12), nn.CrossEntropyLoss(), sum_of_classes, cuts)


class _Embed(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width, padding_idx=PAD)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mask = tokens != PAD
        return self.table(tokens), mask, mask.sum(1)


class _Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        x, mask, lengths = value
        out, (hidden, cell) = self.lstm(x * mask.unsqueeze(2))
        # The lengths are whole numbers; nobody reads the cell, so no gradient comes back for it.
        return out, hidden[-1], lengths, {"mask": mask, "cell": [cell], "scale": 0.5}


class _Decode(nn.Module):
    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, words)

    def forward(self, value: tuple[Tensor, Tensor, Tensor, dict[str, Any]]) -> Tensor:
        out, hidden, lengths, rest = value
        share = lengths.to(out.dtype).reshape(-1, 1, 1) / out.shape[1]
        mixed = out + rest["scale"] * hidden.unsqueeze(1) * share * rest["mask"].unsqueeze(2)
        return self.head(self.drop(mixed)).transpose(1, 2)


def lstm(dtype: torch.dtype) -> Animal:
    """A recurrent language model: tokens, padding, and sequences whose length changes between minibatches."""
    words, width = 11, 8
    model = nn.Sequential(
        _Embed(words, width),
        Built(lambda _, value: (torch.tanh(value[0]), *value[1:])),
        _Recurrent(width),
        _Decode(width, words),
    ).to(dtype)
    batches = []
    for length, count in ((5, 8), (7, 8), (3, 8), (6, 8), (4, 2)):
        x, y = torch.randint(1, words, (count, length)), torch.randint(1, words, (count, length))
        for row in range(count):
            valid = length - row % 3
            x[row, valid:], y[row, valid:] = PAD, PAD
        batches.append((x, y))
    batches[2][1][0] = batches[2][1][1] = PAD  # a microbatch in which nothing counts
    cuts = {1: (), 2: (2,), 3: (2, 3), 4: (1, 2, 3)}
    return Animal(model, batches, partial(F.cross_entropy, ignore_index=PAD), _tokens, cuts)


class Positions(nn.Module):
    """Words and their places."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(8, width) / 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens) + self.places[: tokens.shape[1]]

    def reset_parameters(self) -> None:
        """Gives the places their values; the words have their own."""
        nn.init.normal_(self.places, std=0.5)


def transformer(dtype: torch.dtype) -> Animal:
    """A small transformer with dropout, with a loss over elements."""
    width = 8
    layers = [nn.TransformerEncoderLayer(width, 2, 16, dropout=0.1, batch_first=True) for _ in range(2)]
    model = nn.Sequential(Positions(9, width), *layers, Built(lambda _, x: x.mean(1)), nn.Linear(width, 4)).to(dtype)
    data = torch.randint(9, (50, 6)), torch.randn(50, 4, dtype=dtype)
    return Animal(model, _dealt(*data, 12), F.mse_loss, _elements, {1: (), 2: (2,), 3: (1, 2), 4: (1, 2, 3)})


def _residual(width: int) -> nn.Module:
    forward = lambda self, x: x + self.drop(torch.tanh(self.linear(x)))  # noqa: E731
    return Built(forward, linear=nn.Linear(width, width), drop=nn.Dropout(0.1))


def _head(words: nn.Embedding) -> nn.Module:
    """Returns an output layer, as a loss over classes wants it, with the matrix of the words."""
    head = nn.Linear(words.embedding_dim, words.num_embeddings)
    head.weight = words.weight
    return Built(lambda self, x: self.head(x).transpose(1, 2), head=head)


def tied(dtype: torch.dtype) -> Animal:
    """A language model whose embedding and output layer are one matrix."""
    first, tokens = Positions(9, 8), torch.randint(9, (27, 6))
    model = nn.Sequential(first, _residual(8), _residual(8), _head(first.table)).to(dtype)
    batches, cuts = _dealt(tokens, tokens.roll(-1, 1), 8), {1: (), 2: (2,), 3: (1, 3), 4: (1, 2, 3)}
    return Animal(model, batches, F.cross_entropy, _words, cuts)


def matrices(dtype: torch.dtype) -> Animal:
    """A multilayer perceptron whose parameters are matrices, for optimizers that take nothing else."""
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            layer.register_parameter("bias", None)
    data = torch.randn(50, 6, dtype=dtype), torch.randint(3, (50,))
    cuts = {1: (), 2: (4,), 3: (2, 4), 4: (2, 4, 6)}
    return Animal(nn.Sequential(*layers).to(dtype), _dealt(*data, 12), F.cross_entropy, sum_of_classes, cuts)


class _Regularised(nn.Module):
    """A layer with two auxiliary losses, one of a weight alone. With `carries` they travel to the loss as a column."""

    def __init__(self, inputs: int, outputs: int, carries: bool) -> None:
        super().__init__()
        self.linear, self.drop, self.carries = nn.Linear(inputs, outputs), nn.Dropout(0.2), carries

    def forward(self, x: Tensor) -> Tensor:
        x, before = x[:, : self.linear.in_features], x[:, self.linear.in_features :].sum(1, keepdim=True)
        output = self.linear(x)
        losses = output.logsumexp(1).square().mean(), 0.3 * self.linear.bias.square().sum()
        output = self.drop(output).tanh()
        if self.carries:
            return torch.cat([output, before + sum(losses)], 1)
        for loss in losses:
            output = pipedream.add_auxiliary_loss(output, loss)
        return output


def auxiliary(dtype: torch.dtype) -> Animal:
    """A multilayer perceptron with auxiliary losses in each layer, and targets that do not count."""

    def model(carries: bool) -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(*(_Regularised(*sizes, carries) for sizes in ((6, 8), (8, 8), (8, 8), (8, 3)))).to(dtype)

    x, y = torch.randn(50, 6, dtype=dtype), torch.randint(PAD, 3, (50,))
    y[12:16] = PAD  # a microbatch in which nothing counts
    loss, cuts = partial(F.cross_entropy, ignore_index=PAD), {1: (), 2: (2,), 3: (1, 3), 4: (1, 2, 3)}
    return Animal(model(False), _dealt(x, y, 12), loss, _classes_and_losses, cuts, model(True))


class _Masked(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(inputs, outputs), nn.Dropout(0.2)

    def forward(self, value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, mask, count = value if isinstance(value, tuple) else (value, value.new_ones(len(value), 160), None)
        x = self.drop(torch.tanh(self.linear(x))) * mask[:, : self.linear.out_features]
        return x.t().contiguous().t(), mask, torch.arange(200) if count is None else count


def wide(dtype: torch.dtype) -> Animal:
    """A multilayer perceptron with values of more than a kilobyte at each cut, beside a mask and whole numbers.

    Blocks of 64 values do not fill its values, which lie in memory by columns; the last minibatch has small ones.
    """
    sizes = ((6, 81), (81, 97), (97, 70))
    model = nn.Sequential(
        *(_Masked(*size) for size in sizes),
        Built(lambda _, value: value[0] * (1 + 0 * value[2].sum())),
        nn.Linear(70, 3),
    ).to(dtype)
    data = torch.randn(50, 6, dtype=dtype), torch.randint(3, (50,))
    return Animal(model, _dealt(*data, 12), F.cross_entropy, sum_of_classes, {1: (), 2: (2,), 3: (1, 2), 4: (1, 2, 3)})


NAMES = ("mlp", "cnn", "lstm", "transformer")
_SPECIES = {"mlp": mlp, "cnn": cnn, "lstm": lstm, "transformer": transformer, "matrices": matrices}
_SPECIES |= {"auxiliary": auxiliary, "wide": wide, "tied": tied}


def make(name: str, dtype: torch.dtype = torch.float64) -> Animal:
    """Returns an animal by name: the same weights and data each time; the global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return _SPECIES[name](dtype)


def _dealt(x: Tensor, y: Tensor, size: int) -> list[Batch]:
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


def sum_of_classes(output: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    """Returns the sum of the cross-entropies, and their number."""
    picked = _full(output).log_softmax(1)[torch.arange(len(targets)), targets]
    return -picked.sum(), float(len(targets))


def _tokens(output: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    picked = _full(output).log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)
    counts = targets != PAD
    return -(picked * counts).sum(), float(counts.sum())


def _words(output: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    return -output.log_softmax(1).gather(1, targets.unsqueeze(1)).sum(), float(targets.numel())


def _elements(output: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    return ((_full(output) - targets) ** 2).sum(), float(targets.numel())


def _classes_and_losses(output: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    """The last column is the sum of the auxiliary losses, which a reported loss does not include."""
    total, weight = _tokens(output[:, :3], targets)
    losses = output[:, 3:].sum(1).mean()
    return total + weight * (losses - losses.detach()), weight


def _full(output: Tensor) -> Tensor:
    # As autocast does for losses.
    return output.float() if output.dtype == torch.bfloat16 else output


def alike_layers(layers: int) -> Profile:
    """Returns a profile whose layers are alike."""
    rows = LayerGraph.chain(tuple(Layer(str(i), "Linear") for i in range(layers)))
    costs = tuple(LayerProfile(1e-3, 2e-3, 400, 100) for _ in range(layers))
    return Profile("Sequential", rows, costs, 12, input_shapes=((12, 6),))
