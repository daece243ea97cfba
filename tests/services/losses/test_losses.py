"""Weights of losses: the weighted mean of the pieces is the mean of the whole."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipedream.services.losses import losses

N, C = 10, 4
CLASSES = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)


def _scores(*more: int) -> Tensor:
    return torch.randn(N, C, *more, dtype=torch.float64)


def _picks(*more: int, skip: int | None = None) -> Tensor:
    picks = torch.randint(C, (N, *more))
    if skip is not None:
        picks.view(-1)[::3] = skip
    return picks


CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, Tensor]]]] = {
    "cross entropy": (F.cross_entropy, lambda: (_scores(), _picks())),
    "images": (nn.CrossEntropyLoss(), lambda: (_scores(2, 3), _picks(2, 3))),
    "padding": (partial(F.cross_entropy, ignore_index=0), lambda: (_scores(5), _picks(5, skip=0))),
    "default padding": (F.cross_entropy, lambda: (_scores(), _picks(skip=-100))),
    "class weights": (nn.CrossEntropyLoss(CLASSES), lambda: (_scores(), _picks(skip=-100))),
    "smoothed": (nn.CrossEntropyLoss(CLASSES, None, 1, label_smoothing=0.2), lambda: (_scores(3), _picks(3, skip=1))),
    "probabilities": (partial(F.cross_entropy, weight=CLASSES), lambda: (_scores(3), _scores(3).softmax(1))),
    "nll": (nn.NLLLoss(CLASSES, ignore_index=3), lambda: (_scores().log_softmax(1), _picks(skip=3))),
    "mse": (F.mse_loss, lambda: (_scores(2), _scores(2))),
    "sum of squares": (nn.MSELoss(reduction="sum"), lambda: (_scores(), _scores())),
    "huber": (partial(F.huber_loss, delta=0.3), lambda: (_scores(), _scores())),
    "bce": (F.binary_cross_entropy, lambda: (_scores().sigmoid(), _scores().sigmoid())),
    "kl by batch": (partial(F.kl_div, reduction="batchmean"), lambda: (_scores().log_softmax(1), _scores().softmax(1))),
    "a mean over samples": (lambda output, y: ((output - y) ** 2).sum(1).mean(), lambda: (_scores(), _scores())),
    "a pair": (lambda output, y: (((output - y) ** 2)[y > 0].sum(), (y > 0).sum()), lambda: (_scores(), _scores())),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")  # of kl_div, on purpose
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("parts", [1, 3, 10])
def test_the_weighted_mean_of_the_pieces_is_the_mean_of_the_whole(name: str, parts: int) -> None:
    function, make = CASES[name]
    loss, (output, targets) = losses.Loss(function), make()
    total = weights = 0.0
    extents = set()
    for x, y in zip(torch.tensor_split(output, parts), torch.tensor_split(targets, parts), strict=True):
        value, weight, is_sum = loss(x, y, len(x), len(x) / N)
        extents.add(round(loss.weight_from_shapes(x, y, len(x), len(x) / N) / (len(x) / N)))
        if weight:
            total, weights = total + float(value) * (1.0 if is_sum else weight), weights + weight
    assert len(extents) == 1  # each piece knows about how much the whole counts
    if name in ("cross entropy", "images", "mse", "sum of squares", "huber", "kl by batch", "probabilities"):
        counted = loss(output, targets, N, 1.0)[1] if name != "probabilities" else 3 * N
        assert extents == {round(counted)}
    whole = function(output, targets)
    expected = float(whole[0] / whole[1]) if isinstance(whole, tuple) else float(whole)
    assert total / weights == pytest.approx(expected, rel=1e-12)


REFUSED: dict[str, tuple[Callable[..., Any] | None, str]] = {
    "a dict": (lambda o, y: {"loss": F.mse_loss(o, y)}, "returned dict; let it return a scalar"),
    "with a dict": (lambda o, y: (F.mse_loss(o, y), {"a": 1.0}), r"\(a tensor of shape \(\), with a gradient, dict\)"),
    "with the output": (lambda o, y: (F.mse_loss(o, y), o), "with the number of samples or tokens as the weight"),
    "three values": (lambda o, y: (F.mse_loss(o, y), 1.0, 2.0), "as the weight"),
    "with an accuracy": (lambda o, y: (F.mse_loss(o, y), float((o > 0).double().mean())), "depends on the model's"),
    "an output": (lambda o, y: o, r"a tensor of shape \(10,\)"),
    "none": (None, r"output has \.loss"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_loss_is_refused(case: str) -> None:
    loss, reason = REFUSED[case]
    output = torch.linspace(-1, 2, N, dtype=torch.float64, requires_grad=True)
    with pytest.raises(TypeError, match=reason):
        losses.Loss(loss)(output, torch.ones(N, dtype=torch.float64), N, 1.0)


@pytest.mark.parametrize("value", [{"a": 1.0}, (1.0,), (1.0, 2.0, 3.0), torch.ones(2), (torch.ones(2), 1.0), "h", None])
def test_what_is_no_metric_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"the metric 'm' returned .*; let it return a number or a scalar tensor"):
        losses.metric_scores({"m": lambda output, batch: value}, torch.ones(2), torch.ones(2), 2)
