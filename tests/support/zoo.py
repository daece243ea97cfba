"""The zoo: all models that tests train, with their data and losses.

Animals are chains of layers with places to cut. Each gives what a pipeline can get wrong: dropout, statistics and work
in place, tuples of which a part has no gradient, padding, sequences of changing length, and a last minibatch with fewer
samples than microbatches.

Cases run by a forward of their own, as users write it; none is made for a pipeline. Some are transformers from tiny
configurations, with the caches, dropout, tied weights and kind of attention that each has by default; nothing is
downloaded. Each trains in a plain loop in float64 and takes a few milliseconds per step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from built import Built
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import pipedream as pd
from pipedream.planner import manual_plan

WIDTH = 16
WORDS = 23
CLASSES = 5
PAD = 0
IGNORED = -100

# -- animals ----------------------------------------------------------------------------------------------------------

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Animal:
    """A model and all that its training takes.

    Attributes:
        model: fresh, the same each time.
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


_GRAPHS: dict[Any, pd.LayerGraph] = {}  # of each model that was captured: all animals of a kind have the same layers


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
        _GRAPHS[key] = pd.capture(animal.model, (animal.batches[0][0],)).graph
    graph = _GRAPHS[key]
    costs = tuple(pd.LayerProfile(1.0, 2.0, 8, 8) for _ in graph.layers)
    profile = pd.Profile(type(animal.model).__name__, graph, costs, 1).without_tied_groups()
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


def _embed(self: Any, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mask = tokens != PAD
    return self.table(tokens), mask, mask.sum(1)


def _recur(self: Any, value: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    x, mask, lengths = value
    out, (hidden, cell) = self.lstm(x * mask.unsqueeze(2))
    # The lengths are whole numbers; nobody reads the cell, so no gradient comes back for it.
    return out, hidden[-1], lengths, {"mask": mask, "cell": [cell], "scale": 0.5}


def _decode(self: Any, value: tuple[Tensor, Tensor, Tensor, dict[str, Any]]) -> Tensor:
    out, hidden, lengths, rest = value
    share = lengths.to(out.dtype).reshape(-1, 1, 1) / out.shape[1]
    mixed = out + rest["scale"] * hidden.unsqueeze(1) * share * rest["mask"].unsqueeze(2)
    return self.head(self.drop(mixed)).transpose(1, 2)


def lstm(dtype: torch.dtype) -> Animal:
    """A recurrent language model: tokens, padding, and sequences whose length changes between minibatches."""
    words, width = 11, 8
    model = nn.Sequential(
        Built(_embed, table=nn.Embedding(words, width, padding_idx=PAD)),
        Built(lambda _, value: (torch.tanh(value[0]), *value[1:])),
        Built(_recur, lstm=nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True)),
        Built(_decode, drop=nn.Dropout(0.2), head=nn.Linear(width, words)),
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
    return Animal(model, batches, F.cross_entropy, _sum_of_words, cuts)


def matrices(dtype: torch.dtype) -> Animal:
    """A multilayer perceptron whose parameters are matrices, for optimizers that take nothing else."""
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            layer.register_parameter("bias", None)
    data = torch.randn(50, 6, dtype=dtype), torch.randint(3, (50,))
    cuts = {1: (), 2: (4,), 3: (2, 4), 4: (2, 4, 6)}
    return Animal(nn.Sequential(*layers).to(dtype), _dealt(*data, 12), F.cross_entropy, sum_of_classes, cuts)


def _regularise(self: Any, x: Tensor) -> Tensor:
    """Has two auxiliary losses, one of a weight alone. With `carries` they travel to the loss as a column."""
    x, before = x[:, : self.linear.in_features], x[:, self.linear.in_features :].sum(1, keepdim=True)
    output = self.linear(x)
    losses = output.logsumexp(1).square().mean(), 0.3 * self.linear.bias.square().sum()
    output = self.drop(output).tanh()
    if self.carries:
        return torch.cat([output, before + sum(losses)], 1)
    for loss in losses:
        output = pd.add_auxiliary_loss(output, loss)
    return output


def auxiliary(dtype: torch.dtype) -> Animal:
    """A multilayer perceptron with auxiliary losses in each layer, and targets that do not count."""

    def model(carries: bool) -> nn.Module:
        torch.manual_seed(5)
        linears = [nn.Linear(*sizes) for sizes in ((6, 8), (8, 8), (8, 8), (8, 3))]
        layers = (Built(_regularise, linear=linear, drop=nn.Dropout(0.2), carries=carries) for linear in linears)
        return nn.Sequential(*layers).to(dtype)

    x, y = torch.randn(50, 6, dtype=dtype), torch.randint(PAD, 3, (50,))
    y[12:16] = PAD  # a microbatch in which nothing counts
    loss, cuts = partial(F.cross_entropy, ignore_index=PAD), {1: (), 2: (2,), 3: (1, 3), 4: (1, 2, 3)}
    return Animal(model(False), _dealt(x, y, 12), loss, _classes_and_losses, cuts, model(True))


def _mask(self: Any, value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x, mask, count = value if isinstance(value, tuple) else (value, value.new_ones(len(value), 160), None)
    x = self.drop(torch.tanh(self.linear(x))) * mask[:, : self.linear.out_features]
    return x.t().contiguous().t(), mask, torch.arange(200) if count is None else count


def wide(dtype: torch.dtype) -> Animal:
    """A multilayer perceptron with values of more than a kilobyte at each cut, beside a mask and whole numbers.

    Blocks of 64 values do not fill its values, which lie in memory by columns; the last minibatch has small ones.
    """
    linears = [nn.Linear(*sizes) for sizes in ((6, 81), (81, 97), (97, 70))]
    model = nn.Sequential(
        *(Built(_mask, linear=linear, drop=nn.Dropout(0.2)) for linear in linears),
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
    return -_full(output).log_softmax(1)[torch.arange(len(targets)), targets].sum(), float(len(targets))


def _tokens(output: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    picked = _full(output).log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)
    counts = targets != PAD
    return -(picked * counts).sum(), float(counts.sum())


def _sum_of_words(output: Tensor, targets: Tensor) -> tuple[Tensor, float]:
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


def alike_layers(layers: int) -> pd.Profile:
    rows = pd.LayerGraph.chain(tuple(pd.Layer(str(i), "Linear") for i in range(layers)))
    costs = tuple(pd.LayerProfile(1e-3, 2e-3, 400, 100) for _ in range(layers))
    return pd.Profile("Sequential", rows, costs, 12, input_shapes=((12, 6),))


# -- cases ------------------------------------------------------------------------------------------------------------


def samples_of(batch: Any) -> int:
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return len(batch)


def targets_of(batch: Any) -> int:
    """Returns the number of targets of a batch, or of samples if its targets are not one tensor."""
    is_pair = isinstance(batch, tuple) and isinstance(batch[1], Tensor)
    return batch[1].numel() if is_pair else samples_of(batch)


@dataclass(frozen=True)
class Case:
    """A model, its batches and its loss.

    Attributes:
        make: returns a new model; `build` gives it the same weights each time.
        batch: (seed, samples, length) -> what a loader yields: (inputs, targets) if there is a loss, otherwise the
            inputs; these are a tensor, a tuple of positional or a dict of keyword arguments.
        loss: as a user gives it to a pipeline; None: the model's output has a ``.loss``.
        amount: batch -> what the loss is a mean over, written independently of the loss.
        varies_length: takes batches of different lengths.
        needs_hf: the model is one of transformers.
        float32_inside: computes in float32 in some places, whatever its weights are.
        dtype: of the weights and batches.
        autocast: dtype of the forwards; None computes in the dtype of the weights.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Any]
    loss: Callable[..., Any] | None = None
    amount: Callable[[Any], float] = targets_of
    varies_length: bool = True
    needs_hf: bool = False
    float32_inside: bool = False
    dtype: torch.dtype = torch.float64
    autocast: torch.dtype | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def tolerance(self) -> float:
        """How far two runs may differ, relative to the size of a tensor."""
        return 1e-5 if self.float32_inside else 1e-9

    def casting(self) -> torch.autocast:
        return torch.autocast("cpu", self.autocast, enabled=self.autocast is not None)

    def build(self) -> nn.Module:
        """Returns the model in training mode; the global generator is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            return self.make().train()

    def inputs(self, batch: Any) -> Any:
        return batch if self.loss is None else batch[0]

    def mean_loss(self, output: Any, batch: Any) -> Tensor:
        if self.loss is None:
            return output.loss
        is_torchs = getattr(self.loss, "func", self.loss).__module__ == "torch.nn.functional"
        return self.loss(output, batch[1] if is_torchs else batch)

    def total(self, output: Any, batch: Any) -> tuple[Tensor, float]:
        """Returns the sum of the losses, which is the mean times the amount, and the amount."""
        return self.mean_loss(output, batch) * self.amount(batch), self.amount(batch)


# -- data of cases: (seed, samples, length) -> batch ------------------------------------------------------------------


def draw(seed: int, *shape: int, below: int = 0, least: int = 0) -> Tensor:
    """Returns normal numbers, or whole numbers below a limit."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(least, below, shape, generator=g) if below else torch.randn(shape, generator=g)


def words(seed: int, samples: int, length: int) -> Tensor:
    """Returns sequences with padding at the end, of which all but each third row have some."""
    x = draw(seed, samples, length, below=WORDS, least=4)  # others have a meaning in some models
    for row in range(samples):
        x[row, max(2, length - row % 3) :] = PAD
    return x


def classes(seed: int, samples: int) -> Tensor:
    return draw(seed + 100, samples, below=CLASSES)


def images(seed: int, samples: int, length: int) -> tuple[Tensor, Tensor]:
    """Square images, whose side follows from the length, and their classes."""
    side = 8 + 4 * (length % 4)
    return draw(seed, samples, 3, side, side), classes(seed, samples)


def masks(seed: int, samples: int, length: int) -> tuple[Tensor, Tensor]:
    side = 16 + 8 * (length % 2)
    x = draw(seed, samples, 3, side, side)
    return x, (x.sum(1, keepdim=True) > 0).to(x.dtype)


def points(seed: int, samples: int, length: int) -> tuple[Tensor, Tensor]:
    return draw(seed, samples, WIDTH), classes(seed, samples)


def next_tokens(seed: int, samples: int, length: int) -> tuple[Tensor, Tensor]:
    x = draw(seed, samples, length + 1, below=WORDS, least=1)
    return x[:, :-1], x[:, 1:]


def tokens(seed: int, samples: int, length: int) -> tuple[Tensor, Tensor]:
    return next_tokens(seed, samples, length)[0], classes(seed, samples)


def padded_tokens(seed: int, samples: int, length: int) -> tuple[Tensor, Tensor]:
    return words(seed, samples, length), classes(seed, samples)


def tokens_and_lengths(seed: int, samples: int, length: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    x, y = padded_tokens(seed, samples, length)
    return (x, (x != PAD).sum(1)), y


def translations(seed: int, samples: int, length: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Padded source, shifted target, and the target itself, of which padding does not count."""
    target = words(seed + 1, samples, length + 2)
    return (words(seed, samples, length), target[:, :-1]), target[:, 1:]


def labelled_tokens(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    """Words and labels by name; some labels do not count."""
    x, y = next_tokens(seed, samples, length)
    labels = y.clone()
    labels[1:, : length // 3] = IGNORED
    return {"tokens": x, "labels": labels}


# -- losses of cases --------------------------------------------------------------------------------------------------

cross_entropy = F.cross_entropy
sequence_loss = partial(F.cross_entropy, ignore_index=PAD)


def words_counted(batch: Any) -> float:
    return float((batch[1] != PAD).sum())


def labels_counted(batch: Any) -> float:
    return float((batch["labels"] != IGNORED).sum())


def sum_of_exits(output: list[Tensor], batch: Any) -> Tensor:
    return torch.stack([F.cross_entropy(logits, batch[1]) for logits in output]).sum()


# -- cases of our own, each a function that makes the model -----------------------------------------------------------

OWN: dict[str, Case] = {}
Make = Callable[[], nn.Module]


def _with(batch: Any, loss: Any = F.cross_entropy, amount: Any = targets_of, name: str = "") -> Callable[[Make], Make]:
    def add(make: Make) -> Make:
        case = Case(name or make.__name__, make, batch, loss, amount)
        OWN[case.name] = case
        return make

    return add


def _several(make: Callable[[], nn.Module], count: int = 3) -> nn.ModuleList:
    return nn.ModuleList(make() for _ in range(count))


def _linears(count: int = 3) -> nn.ModuleList:
    return _several(lambda: nn.Linear(WIDTH, WIDTH), count)


def _classifier() -> nn.Linear:
    return nn.Linear(WIDTH, CLASSES)


def _conv(inputs: int, outputs: int, stride: int = 1, size: int = 3) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)]


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, outputs, stride)
        self.conv2, self.bn2 = _conv(outputs, outputs)
        is_same = stride == 1 and inputs == outputs
        self.downsample = None if is_same else nn.Sequential(*_conv(inputs, outputs, stride, size=1))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return F.relu(out)


@_with(images, name="resnet")
class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(3, 8)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = _classifier()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


@_with(masks, F.binary_cross_entropy_with_logits)
def unet() -> nn.Module:
    """With skip connections over most of the model: the last stages read what the first ones made."""

    def double(inputs: int, outputs: int) -> nn.Module:
        relus = [nn.ReLU(inplace=True), nn.ReLU(inplace=True)]
        return nn.Sequential(*_conv(inputs, outputs), relus[0], *_conv(outputs, outputs), relus[1])

    def forward(self: Any, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, conv, skip in zip(self.ups, self.convs, reversed(skips), strict=True):
            x = up(x)
            if x.shape != skip.shape:
                x = F.interpolate(x, size=skip.shape[2:])
            x = conv(torch.cat([skip, x], dim=1))
        return self.out(x)

    return Built(
        forward,
        downs=nn.ModuleList(double(*sizes) for sizes in ((3, 4), (4, 8), (8, 16))),
        middle=double(16, 16),
        ups=nn.ModuleList(nn.ConvTranspose2d(*sizes, 2, 2) for sizes in ((16, 16), (16, 8), (8, 4))),
        convs=nn.ModuleList(double(2 * width, width) for width in (16, 8, 4)),
        out=nn.Conv2d(4, 1, 1),
    )


@_with(translations, sequence_loss, words_counted)
def attention_lstm() -> nn.Module:
    """Translation with attention: the decoder is taught by the target, one word after the other."""

    def forward(self: Any, source: Tensor, target: Tensor) -> Tensor:
        memory, (h, c) = self.encoder(self.dropout(self.source(source)))
        memory = self.bridge(memory)
        h, c = h.mean(0), c.mean(0)
        hidden = source == PAD
        context = torch.zeros_like(h)
        logits = []
        for t in range(target.shape[1]):
            h, c = self.cell(torch.cat([self.target(target[:, t]), context], 1), (h, c))
            scores = torch.bmm(memory, self.query(h).unsqueeze(2)).squeeze(2)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(1)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            logits.append(self.out(torch.cat([self.dropout(h), context], 1)))
        return torch.stack(logits, 2)

    return Built(
        forward,
        source=nn.Embedding(WORDS, WIDTH, padding_idx=PAD),
        encoder=nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True),
        bridge=nn.Linear(2 * WIDTH, WIDTH),
        target=nn.Embedding(WORDS, WIDTH, padding_idx=PAD),
        cell=nn.LSTMCell(2 * WIDTH, WIDTH),
        query=nn.Linear(WIDTH, WIDTH),
        dropout=nn.Dropout(0.1),
        out=nn.Linear(2 * WIDTH, WORDS),
    )


@_with(tokens_and_lengths)
def packed_lstm() -> nn.Module:
    def forward(self: Any, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        packed, _ = self.first(packed)
        packed, hidden = self.second(packed)
        out, _ = pad_packed_sequence(packed, batch_first=True)
        mean = out.sum(1) / lengths.to(out.dtype).unsqueeze(1)
        return self.head(torch.cat([hidden[-1], mean], 1))

    return Built(
        forward,
        embed=nn.Embedding(WORDS, WIDTH, padding_idx=PAD),
        first=nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True),
        second=nn.GRU(2 * WIDTH, WIDTH, batch_first=True),
        head=nn.Linear(2 * WIDTH, CLASSES),
    )


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class GPTBlock(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


@dataclass
class LanguageOutput:
    logits: Tensor
    loss: Tensor | None = None


@_with(labelled_tokens, None, labels_counted, name="tied_gpt")
class GPT(nn.Module):
    """Tied weights, positions from `arange`, and a loss of its own, whose ignored labels do not count."""

    def __init__(self) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(WORDS, WIDTH), "wpe": nn.Embedding(64, WIDTH), "drop": nn.Dropout(0.1)}
        self.transformer = nn.ModuleDict(parts | {"h": _several(GPTBlock), "ln_f": nn.LayerNorm(WIDTH)})
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> LanguageOutput:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.transformer["drop"](self.transformer["wte"](tokens) + self.transformer["wpe"](positions))
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        if labels is None:
            return LanguageOutput(logits)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.reshape(-1), ignore_index=IGNORED)
        return LanguageOutput(logits, loss)


@_with(points)
def value_branch() -> nn.Module:
    """Looks at numbers: another formula where the mean is positive."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = torch.tanh(x) if x.mean() > 0 else F.relu(x) + 0.1 * x
        return self.head(x)

    return Built(forward, layers=_linears(4), head=_classifier())


@_with(next_tokens)
def checkpointed() -> nn.Module:
    """Blocks that are computed again in the backward."""

    def forward(self: Any, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.head(x).transpose(1, 2)

    return Built(forward, embed=nn.Embedding(WORDS, WIDTH), blocks=_several(GPTBlock), head=nn.Linear(WIDTH, WORDS))


@_with(points, sum_of_exits)
def early_exits() -> nn.Module:
    """A list of outputs, one from each depth; with hooks."""

    def forward(self: Any, x: Tensor) -> list[Tensor]:
        outputs = []
        for layer, out in zip(self.layers, self.exits, strict=True):
            x = torch.tanh(layer(x))
            outputs.append(out(x))
        return outputs

    layers = _linears()
    layers[0].register_forward_hook(lambda module, inputs, output: output * 1.5)
    layers[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.1,))
    return Built(forward, layers=layers, exits=_several(_classifier))


class Recomputed(torch.autograd.Function):
    """Runs a module without a graph, and again in the backward."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weights = tuple(ctx.module.parameters())
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            grads = torch.autograd.grad(ctx.module(x), (x, *weights), grad)
        return (None, *grads)


@_with(points)
def own_backward() -> nn.Module:
    """Modules called inside an autograd function of the user's own, as reversible networks do."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + Recomputed.apply(block, x, *block.parameters())
        return self.head(x)

    blocks = _several(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return Built(forward, blocks=blocks, head=_classifier())


@_with(points)
def shared_layers() -> nn.Module:
    """The same weights in two modules, and one module called for two purposes."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.norm(F.relu(self.first(x)))
        x = x + self.norm(F.relu(self.middle(x)))
        return self.head(self.norm(self.last(x)))

    first, middle, last = _linears()
    last.weight = first.weight
    return Built(forward, first=first, middle=middle, last=last, norm=nn.LayerNorm(WIDTH), head=_classifier())


@_with(tokens)
def glue_dropout() -> nn.Module:
    """Draws random numbers outside of modules: dropout, and noise."""

    def forward(self: Any, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embed(tokens), self.dropout, self.training)
        for layer in self.layers:
            x = x + F.dropout(F.relu(layer(x)), p=self.dropout, training=self.training)
            if self.training:
                x = x + self.noise_dropout * torch.randn_like(x)
        return self.head(x.mean(1))

    parts = {"embed": nn.Embedding(WORDS, WIDTH), "layers": _linears(), "head": _classifier()}
    return Built(forward, **parts, dropout=0.2, noise_dropout=0.1)


# -- cases of transformers --------------------------------------------------------------------------------------------

SIDE, FRAMES, MELS = 16, 40, 8


def shifted(batch: dict[str, Tensor]) -> float:
    """Returns the number of labels that count if the first is not predicted."""
    return float((batch["labels"][:, 1:] != IGNORED).sum())


def _words(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    x = words(seed, samples, length)
    return {"input_ids": x, "attention_mask": (x != PAD).long()}


def _pictures(seed: int, samples: int, side: int) -> dict[str, Tensor]:
    return {"pixel_values": draw(seed, samples, 3, side, side), "labels": classes(seed, samples)}


def causal(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    """For a language model: labels are the words, padding does not count."""
    batch = _words(seed, samples, length)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)}


def masked(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    """For a masked language model: every third word counts."""
    batch = causal(seed, samples, length)
    return {**batch, "labels": batch["labels"].where(torch.arange(length) % 3 == 0, IGNORED)}


def classified(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    return {**_words(seed, samples, length), "labels": classes(seed, samples)}


def translated(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    """Source and target; the model shifts the labels itself."""
    return {**_words(seed, samples, length), "labels": causal(seed + 1, samples, length + 1)["labels"]}


def pictures(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    return _pictures(seed, samples, SIDE)


def large_pictures(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    return _pictures(seed, samples, 40 + 8 * (length % 2))


def spoken(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    labels = causal(seed + 1, samples, length + 1)["labels"]
    return {"input_features": draw(seed, samples, MELS, FRAMES), "labels": labels}


def waves(seed: int, samples: int, length: int) -> dict[str, Tensor]:
    return {"input_values": draw(seed, samples, 400 + 20 * length), "labels": classes(seed, samples)}


def targeted(batch: Callable[[int, int, int], dict[str, Tensor]]) -> Callable[[int, int, int], Any]:
    def pairs(seed: int, samples: int, length: int) -> tuple[dict[str, Tensor], Tensor]:
        inputs = dict(batch(seed, samples, length))
        return inputs, inputs.pop("labels")

    return pairs


def pooled(output: Any, batch: Any) -> Tensor:
    return F.cross_entropy(output.pooler_output[:, :CLASSES], batch[1])


TASKS: dict[Any, tuple[str, Callable[[Any], float]]] = {
    causal: ("CausalLM", shifted),
    masked: ("MaskedLM", labels_counted),
    classified: ("SequenceClassification", targets_of),
    translated: ("Seq2SeqLM", labels_counted),
    pictures: ("ImageClassification", targets_of),
    large_pictures: ("ImageClassification", targets_of),
    spoken: ("SpeechSeq2Seq", labels_counted),
    waves: ("AudioClassification", targets_of),
}
"""Batches -> the class of transformers that takes them, after "AutoModelFor", and what their loss is a mean over."""


def _make(kind: str, batch: Callable[..., Any], settings: dict[str, Any]) -> nn.Module:
    transformers = import_module("transformers")
    config = transformers.AutoConfig.for_model(kind, **settings)
    config.architectures = []  # the first class that takes such batches
    for name in ("initializer_range", "init_std"):  # with 0.02 the gradients of so narrow a model vanish
        if hasattr(config, name):
            setattr(config, name, 0.2)
    auto = f"AutoModelFor{TASKS[batch][0]}" if batch in TASKS else "AutoModel"
    return getattr(transformers, auto).from_config(config)


def _case(name: str, batch: Callable[..., Any], settings: dict[str, Any], kind: str = "") -> Case:
    case = Case(f"hf_{name}", partial(_make, kind or name, batch, settings), batch, needs_hf=True)
    # Losses of language models are computed in float32, and T5's norms.
    single = batch is causal or name in ("modernbert", "t5")
    fixed = batch is pictures or name == "clip_vision"
    return replace(case, amount=TASKS.get(batch, ("", targets_of))[1], float32_inside=single, varies_length=not fixed)


TEXT = {"vocab_size": WORDS, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}
SIZE = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
PLACES = {"max_position_embeddings": 64}
LLAMA = TEXT | SIZE | PLACES | {"num_key_value_heads": 1}
BERT = TEXT | SIZE | PLACES
LABELS = {"num_labels": CLASSES}
PICTURE = SIZE | LABELS | {"image_size": SIDE, "patch_size": 4}
SEQ2SEQ = TEXT | {"decoder_start_token_id": 1, "forced_eos_token_id": 2}
BART = SEQ2SEQ | PLACES | {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
T5 = SEQ2SEQ | {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
GPT2 = TEXT | {"n_positions": 64, "n_embd": 16, "n_layer": 3, "n_head": 2}
EAGER = {"experts_implementation": "eager"}  # the default multiplies no matrices of float64
EXPERTS = EAGER | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = TEXT | {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 3, "time_step_rank": 2}
GPT_OSS = LLAMA | EAGER | {"head_dim": 8, "num_local_experts": 4, "sliding_window": 4}
GPT_OSS |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
WAVES = SIZE | LABELS | {"conv_dim": (8, 8), "conv_kernel": (10, 4), "conv_stride": (5, 4)}
WAVES |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8}
WAVES |= {"num_feat_extract_layers": 2, "layerdrop": 0.0, "mask_time_prob": 0.0, "vocab_size": WORDS}

RESNET = LABELS | {"embedding_size": 8, "hidden_sizes": [8, 16, 16], "depths": [1, 2, 1], "layer_type": "basic"}
WHISPER = {key: value for key, value in BART.items() if key not in PLACES} | {"num_mel_bins": MELS}
WHISPER |= {"max_source_positions": FRAMES // 2, "max_target_positions": 64, "suppress_tokens": None}
WHISPER |= {"begin_suppress_tokens": None}
DISTILBERT = TEXT | LABELS | PLACES | {"dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 24}
DEBERTA = BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
GPT_NEO = TEXT | PLACES | {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24}
GPT_NEO |= {"attention_types": [[["global", "local"], 1]], "window_size": 4}
OPT = TEXT | PLACES | {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "ffn_dim": 24}
OPT |= {"word_embed_proj_dim": 16}
DEEPSEEK = LLAMA | EAGER | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2}
DEEPSEEK |= {"topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
DEEPSEEK |= {"v_head_dim": 8, "first_k_dense_replace": 1, "num_key_value_heads": 2}
SWIN = LABELS | {"image_size": SIDE, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2]}
SWIN |= {"window_size": 2}

MODELS = (  # name, batches, settings
    _case("gpt2", causal, GPT2),
    _case("llama", causal, LLAMA),
    _case("qwen3", causal, LLAMA | {"head_dim": 8}),
    _case("bert", masked, BERT),
    _case("t5", translated, T5),
    _case("vit", pictures, PICTURE),
    _case("resnet", large_pictures, RESNET),
    _case("mixtral", causal, LLAMA | EAGER | {"num_local_experts": 4}),
    _case("whisper", spoken, WHISPER),
    _case("mamba", causal, MAMBA),
    _case("bert_classes", classified, BERT | LABELS, "bert"),
    _case("roberta", masked, BERT),
    _case("distilbert", classified, DISTILBERT),
    _case("albert", masked, BERT | {"embedding_size": 12}),
    _case("deberta_v2", masked, DEBERTA, "deberta-v2"),
    _case("modernbert", masked, BERT),
    _case("gpt_neox", causal, BERT),
    _case("gpt_neo", causal, GPT_NEO),
    _case("gptj", causal, GPT2 | {"rotary_dim": 4}),
    _case("opt", causal, OPT),
    _case("bloom", causal, TEXT | {"hidden_size": 16, "n_layer": 3, "n_head": 2}),
    _case("mpt", causal, TEXT | {"d_model": 16, "n_layers": 3, "n_heads": 2, "expansion_ratio": 2, "max_seq_len": 64}),
    _case("falcon", causal, BERT),
    _case("gemma", causal, LLAMA | {"head_dim": 8}),
    _case("gemma2", causal, LLAMA | {"head_dim": 8, "sliding_window": 4}),
    _case("gemma3", causal, LLAMA | {"head_dim": 8, "sliding_window": 4}, "gemma3_text"),
    _case("phi", causal, LLAMA),
    _case("phi3", causal, LLAMA),
    _case("mistral", causal, LLAMA | {"sliding_window": 4}),
    _case("qwen2", causal, LLAMA),
    _case("qwen3_moe", causal, LLAMA | EXPERTS | {"head_dim": 8}),
    _case("olmo2", causal, LLAMA),
    _case("olmoe", causal, LLAMA | EXPERTS),
    _case("stablelm", causal, LLAMA),
    _case("cohere", causal, LLAMA),
    _case("granite", causal, LLAMA),
    _case("gpt_oss", causal, GPT_OSS),
    _case("deepseek_v3", causal, DEEPSEEK),
    _case("mamba2", causal, MAMBA | {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}),
    _case("bart", translated, BART),
    _case("mbart", translated, BART),
    _case("pegasus", translated, BART),
    _case("marian", translated, BART),
    _case("xlnet", classified, TEXT | LABELS | {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}),
    _case("swin", pictures, SWIN),
    _case("convnext", large_pictures, LABELS | {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 2, 1]}),
    _case("deit", pictures, PICTURE),
    _case("beit", pictures, PICTURE),
    _case("dinov2", pictures, PICTURE),
    _case("wav2vec2", waves, WAVES),
    _case("hubert", waves, WAVES),
    replace(_case("clip_text", targeted(classified), BERT, "clip_text_model"), loss=pooled),
    replace(_case("clip_vision", targeted(pictures), PICTURE, "clip_vision_model"), loss=pooled),
)

HF: dict[str, Case] = {case.name: case for case in MODELS}
CASES: dict[str, Case] = OWN | HF
