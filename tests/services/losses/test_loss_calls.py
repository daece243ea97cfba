"""Weights of a model's own loss: the weighted mean of the parts is the loss of the whole, or the split is refused."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from built import Built
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as by_its_own_name
from torch.nn.utils.rnn import pack_sequence
from training import plan_of

import pipedream as pd
from pipedream.runtime.data.splitter import known_samples, split_batch
from pipedream.services.losses import loss_calls, loss_probe, losses

N, L, C = 7, 5, 4
CLASSES = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)
HELD = F.cross_entropy

Batch = dict[str, Any]


def _batch(seed: int = 0) -> Batch:
    """Scores and targets with random padding; one sample has none that counts."""
    torch.manual_seed(seed)
    labels = torch.randint(C, (N, L))
    labels[torch.rand(N, L) < 0.4] = -100
    labels[0] = -100
    labels[1, 0] = 2
    scores = torch.randn(N, L, C, dtype=torch.float64, requires_grad=True)
    values = torch.randn(N, L, C, dtype=torch.float64)
    return {"x": scores, "labels": labels, "y": values, "count": (labels != -100).sum()}


def _flat(b: Batch) -> tuple[Tensor, Tensor]:
    return b["x"].flatten(0, 1), b["labels"].flatten()


def _count(b: Batch) -> Tensor:
    return (b["labels"] != -100).sum()


def _under_a_device(b: Batch) -> Tensor:
    with torch.device("cpu"):
        loss = F.cross_entropy(*_flat(b))
    return loss * 2


def _masked(b: Batch) -> Tensor:
    mask = b["labels"] != -100
    return (F.mse_loss(b["x"], b["y"], reduction="none").mean(-1) * mask).sum() / mask.sum()


RECOGNISED: dict[str, Callable[[Batch], Tensor]] = {
    "padding": lambda b: F.cross_entropy(*_flat(b)),
    "a module": lambda b: nn.CrossEntropyLoss(label_smoothing=0.1, weight=CLASSES)(*_flat(b)),
    "imported by name": lambda b: by_its_own_name(*_flat(b)),
    "held by the model": lambda b: HELD(*_flat(b)).double().view(1) * 0.5,
    "negative log likelihood": lambda b: F.nll_loss(b["x"].log_softmax(-1).transpose(1, 2), b["labels"]),
    "several": lambda b: sum(F.cross_entropy(_flat(b)[0] * scale, _flat(b)[1]) for scale in (1.0, 2.0)) / 2,
    "a sum": lambda b: F.cross_entropy(*_flat(b), reduction="sum"),
    "a sum by a count": lambda b: F.cross_entropy(*_flat(b), reduction="sum") / _count(b),
    "a sum by the samples": lambda b: F.mse_loss(b["x"], b["y"], reduction="sum") / len(b["x"]),
    "a sum by a constant": lambda b: F.mse_loss(b["x"], b["y"], reduction="sum") / 64.5,
    "elements": lambda b: F.cross_entropy(*_flat(b), reduction="none").mean(),
    "elements under a mask": _masked,
    "chosen elements": lambda b: F.l1_loss(b["x"], b["y"], reduction="none")[b["labels"] > 1].mean(),
    "divergence": lambda b: F.kl_div(b["x"].log_softmax(-1), b["y"].softmax(-1), reduction="batchmean"),
    "a count of at least one": lambda b: F.cross_entropy(*_flat(b), reduction="sum") / _count(b).clamp(min=1),
    "a regulariser": lambda b: F.cross_entropy(*_flat(b)) + 0.1 * CLASSES.square().sum(),
    "under a device": _under_a_device,
}


def _scored(loss: losses.Loss, model: Callable[[Batch], Tensor], batch: Batch, minibatch: int | None) -> Any:
    samples = len(batch["x"])
    with loss.watching(batch, samples):
        output = SimpleNamespace(loss=model(batch))
    return loss(output, batch, samples, samples / N, minibatch)


def _parts(batch: Batch, sizes: tuple[int, ...]) -> list[Batch]:
    pieces = {key: item.split(sizes) if item.ndim else (item,) * len(sizes) for key, item in batch.items()}
    return [{key: piece[i] for key, piece in pieces.items()} for i in range(len(sizes))]


@pytest.mark.parametrize("name", RECOGNISED)
@pytest.mark.parametrize("sizes", [(N,), (1, 4, 2), (1,) * N])
def test_the_parts_of_a_recognised_loss_give_the_whole(name: str, sizes: tuple[int, ...]) -> None:
    loss = losses.Loss(of_model="recognised")
    for seed in range(4):
        batch = _batch(seed)
        total = weights = 0.0
        for part in _parts(batch, sizes):
            with torch.set_grad_enabled(seed % 2 == 0):
                value, weight, is_sum = _scored(loss, RECOGNISED[name], part, seed)
            if weight:
                total, weights = total + float(value.detach()) * (1.0 if is_sum else weight), weights + weight
        assert total / weights == pytest.approx(float(RECOGNISED[name](batch).detach()), rel=1e-12)
    assert F.cross_entropy is HELD
    assert _probe(lambda b: SimpleNamespace(loss=RECOGNISED[name](b)), batch) == "recognised"


def _probe(evaluate: Callable[[Any], Any], batch: Any, samples: int | None = None) -> str:
    return loss_probe.probe_weight(evaluate, batch, samples=samples or known_samples(batch), split=split_batch)


def _contrastive(b: Batch) -> Tensor:
    queries, other = b["x"].flatten(1), b["y"].flatten(1)
    scores = F.normalize(queries, dim=1) @ F.normalize(other, dim=1).T
    diagonal = torch.arange(len(scores))
    return (F.cross_entropy(scores, diagonal) + F.cross_entropy(scores.T, diagonal)) / 2


@pytest.mark.parametrize("kind", [torch.float64, torch.bool, torch.long])
def test_equal_weights_and_full_masks_do_not_hide_what_a_mean_is_over(kind: torch.dtype) -> None:
    def squares(b: Batch) -> Tensor:
        return (b["x"] - b["y"]).square().mean(2) * b["equal"]

    batch = {**_batch(), "equal": torch.ones(N, L, dtype=kind)}
    assert _probe(lambda b: {"loss": squares(b).sum() / b["equal"].sum()}, batch) == "other"
    assert _probe(lambda b: {"loss": squares(b).mean()}, batch) == "samples"


PROBED: dict[str, tuple[Callable[[Batch], Tensor], str]] = {
    "contrastive": (_contrastive, "other"),
    "squares by hand": (lambda b: ((b["x"] - b["y"]) ** 2).mean(), "samples"),
    "a sum by hand": (lambda b: ((b["x"] - b["y"]) ** 2).sum(), "sum"),
    "a mask by hand": (lambda b: (b["x"].sum(2) * (b["labels"] > 0)).sum() / (b["labels"] > 0).sum(), "other"),
    "perplexity": (lambda b: F.cross_entropy(*_flat(b)).exp(), "other"),
    "a root": (lambda b: F.mse_loss(b["x"], b["y"]).sqrt(), "other"),
    "tokens and samples": (lambda b: F.cross_entropy(*_flat(b)) + F.mse_loss(b["x"], b["y"]), "other"),
    "noise": (lambda b: ((b["x"] + torch.randn_like(b["x"])) ** 2).mean(), "samples"),
    "dropout": (lambda b: F.dropout(b["x"]).mean(), ""),
    "a quarter of a sum": (lambda b: F.mse_loss(b["x"], b["y"], reduction="sum") / 4, "sum"),
}


@pytest.mark.parametrize("name", PROBED)
def test_a_loss_is_probed(name: str) -> None:
    model, expected = PROBED[name]
    state = torch.get_rng_state()
    assert _probe(lambda b: {"loss": model(b)}, _batch()) == expected
    assert _probe(lambda b: {"loss": model(b)}, _batch(), samples=1) == ""
    if name != "dropout":
        assert _probe(lambda b: {"loss": model(b).float()}, _batch()) == expected
    torch.set_rng_state(state)


class _Pair(NamedTuple):
    x: Tensor
    names: list[str]


def test_a_batch_of_which_the_model_takes_no_part_is_probed() -> None:
    batch = _Pair(torch.randn(4, 2), ["a", "b", "c", "d"])
    assert _probe(lambda b: {"loss": b.x.mean() * (len(b.names) == len(b.x))}, batch) == "samples", "names are split"
    assert _probe(lambda b: {"logits": b.data}, pack_sequence([torch.ones(2), torch.ones(1)])) == ""


def test_what_the_probe_refuses_is_refused_for_parts_only() -> None:
    with pytest.raises(pd.PipelineError, match=r"not a mean over samples.*contrastive.*weight=\.\.\."):
        losses.Loss(of_model="other").check_split()
    losses.Loss(of_model="other", weight=len).check_split()
    losses.Loss(F.cross_entropy, of_model="other").check_split()
    batch = _batch()
    assert _scored(losses.Loss(of_model="other"), _contrastive, batch, None)[1:] == (N, False)
    assert _scored(losses.Loss(of_model="samples"), PROBED["squares by hand"][0], batch, 0)[1:] == (N, False)
    assert _scored(losses.Loss(of_model="sum"), PROBED["a sum by hand"][0], batch, 0)[1:] == (1.0, True)
    assert _scored(losses.Loss(), PROBED["squares by hand"][0], batch, 0)[1:] == (N, False)


def _tokens_and_samples(b: Batch) -> Tensor:
    return F.cross_entropy(*_flat(b)) + (b["x"] ** 2).mean()


@pytest.mark.parametrize(("model", "amount"), [(PROBED["tokens and samples"][0], L * C), (_tokens_and_samples, L)])
def test_a_sum_of_means_over_different_amounts_is_refused_where_their_ratio_changes(model: Any, amount: int) -> None:
    """A term that is not of torch is taken for a mean over samples."""
    loss, batch = losses.Loss(), _batch()
    parts = _parts(batch, (4, 3))
    for part in parts:
        assert _scored(loss, model, part, None)[1] == len(part["x"])  # as in an evaluation
    _scored(loss, model, parts[0], 1)
    with pytest.raises(ValueError, match=r"a sum of means over different amounts|different amounts \(here \d+ for 3 s"):
        _scored(loss, model, parts[1], 1)
    _scored(loss, model, parts[1], 2)
    batch["labels"] = batch["labels"].clamp(min=0)
    assert [_scored(loss, model, part, 3)[1] for part in _parts(batch, (4, 3))] == [4 * amount, 3 * amount]


def test_a_loss_that_is_no_longer_recognised_is_refused() -> None:
    for loss in (losses.Loss(), losses.Loss(of_model="recognised")):
        _scored(loss, RECOGNISED["padding"], _batch(), 0)
        assert _scored(loss, PROBED["squares by hand"][0], _batch(), None)[1] == N  # in an evaluation
        with pytest.raises(ValueError, match="in another way than before"):
            _scored(loss, PROBED["squares by hand"][0], _batch(), 0)


def test_an_error_in_a_forward_leaves_torch_as_it_was() -> None:
    loss = losses.Loss()
    for _ in range(2):
        with pytest.raises(IndexError):
            _scored(loss, lambda b: F.cross_entropy(*_flat(b)).view(1)[1], _batch(), 0)
        assert F.cross_entropy is HELD
        assert torch.overrides._get_current_function_mode() is None
        _scored(loss, RECOGNISED["padding"], _batch(), 0)


class _OnGpu(Tensor):
    """Stands for a tensor on a GPU; counts what the host would wait for."""

    waits = 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in ("__float__", "__int__", "__bool__", "item", "tolist", "nonzero"):
            cls.waits += 1
        return super().__torch_function__(function, types, args, kwargs or {})


def _marked_labels(o: Tensor, b: Batch) -> Tensor:
    labels = b["labels"].view(-1)
    labels[labels == 1] = -100
    return F.cross_entropy(o.flatten(0, 1), labels)


USERS: dict[str, tuple[Callable[[Tensor, Batch], Any], bool]] = {
    "a target": (lambda o, b: F.cross_entropy(o.transpose(1, 2), b["labels"]), False),
    "a regulariser": (lambda o, b: F.cross_entropy(o.flatten(0, 1), b["labels"].view(-1)) + 0.1 * (o**2).mean(), False),
    "a copy": (lambda o, b: F.cross_entropy(o.flatten(0, 1), b["labels"].flatten() + 0), True),
    "a target that is written": (_marked_labels, True),
    "a mean by hand": (lambda o, b: (o - b["y"]).abs().mean(), False),
    "a pair": (lambda o, b: ((o - b["y"]).abs().sum(), o.numel()), False),
}
"""Losses of the user's own, and whether their targets can be counted on a GPU only."""


@pytest.mark.parametrize("name", USERS)
def test_targets_are_counted_where_they_came_from(name: str) -> None:
    function, may_wait = USERS[name]
    loss, on_cpu = losses.Loss(function), losses.Loss(function)
    for minibatch in range(12):
        batch = _batch(minibatch % 3)
        received = {key: item.clone() for key, item in batch.items()}
        on_gpu = {key: item.clone().as_subclass(_OnGpu) for key, item in batch.items()}
        _OnGpu.waits = 0
        _, weight, is_sum = loss(on_gpu["x"], on_gpu, N, 1.0, minibatch, received=received)
        if minibatch > (8 if name == "a mean by hand" else 0):  # at first the loss is looked into
            assert bool(_OnGpu.waits) == may_wait
        assert (weight, is_sum) == on_cpu(batch["x"], batch, N, 1.0, minibatch)[1:]


def test_a_loss_that_gives_pairs_is_not_watched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, batch = losses.Loss(USERS["a pair"][0]), _batch()
    entered: list[loss_calls.LossCalls] = []
    enter = loss_calls.LossCalls.__enter__
    monkeypatch.setattr(loss_calls.LossCalls, "__enter__", lambda calls: entered.append(calls) or enter(calls))
    for minibatch in range(3):
        assert loss(batch["x"], batch, N, 1.0, minibatch)[1:] == (batch["x"].numel(), True)
    assert len(entered) == 1


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_model_is_watched_from_outside(whole: bool) -> None:
    torch._dynamo.reset()
    forward = lambda self, b: F.cross_entropy(self.inner(b["x"]).flatten(0, 1), b["labels"].flatten())  # noqa: E731
    model = Built(forward, inner=nn.Linear(C, C, dtype=torch.float64))
    expected = float(model(_batch()).detach())
    if whole:
        model = torch.compile(model, backend="aot_eager", fullgraph=True)
    else:
        model.inner = torch.compile(model.inner, backend="aot_eager", fullgraph=True)
    loss = losses.Loss()
    for _ in range(3):
        value, weight, _ = _scored(loss, model, _batch(), 0)
        assert float(value.detach()) == pytest.approx(expected)
        assert weight == (N if whole else float((_batch()["labels"] != -100).sum()))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_pipeline_refuses_to_split_what_is_no_mean(microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = nn.Linear(2, 2), (torch.ones(4, 2),)
    captured, plan = pd.capture(model, inputs), plan_of(model, inputs, ())
    other = replace(captured.graph, loss_weight="other")
    assert pd.LayerGraph.from_json(other.to_json()) == other
    monkeypatch.setattr("pipedream.pipeline.find_plan_layers", lambda *_: replace(captured, graph=other))
    how = {"loss": None, "optimizer": torch.optim.SGD, "schedule": "1f1b", "microbatches": microbatches}
    with pytest.raises(pd.PipelineError, match="not a mean over samples") if microbatches > 1 else nullcontext():
        pd.Pipeline(model, plan, **how)
