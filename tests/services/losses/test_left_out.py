"""Values of targets that a loss written by hand leaves out are found before they come."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pipedream.services.losses import left_out, losses


def nll(output: Tensor, labels: Tensor) -> Tensor:
    return -output.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def padded(output: Tensor, labels: Tensor) -> Tensor:
    pad = labels.eq(-100)
    return nll(output, labels).masked_fill(pad, 0.0).sum() / (~pad).sum()


def exact(output: Tensor, labels: Tensor) -> Tensor:
    return nll(output, labels).mean()


def weighted(weights: Callable[[dict[str, Tensor]], Tensor]) -> Callable[..., Tensor]:
    """Returns a mean over labels that have weights."""
    return lambda output, batch: (nll(output, batch["y"]) * weights(batch)).sum() / weights(batch).sum()


LABELS = torch.arange(1, 13).view(2, 6)
MASKED = {"y": LABELS, "mask": torch.ones(2, 6)}
CASES: list[tuple[Callable[..., Tensor], Any, set[tuple[int, int]]]] = [
    (padded, LABELS, {(0, -100)}),
    (weighted(lambda batch: batch["mask"]), MASKED, {(1, value) for value in (0, -100, 255)}),
    (exact, LABELS, set()),
    (lambda output, labels: nll(output, labels).sum(), LABELS, set()),
]


@pytest.mark.parametrize(("loss", "targets", "expected"), CASES)
def test_what_a_loss_leaves_out(loss: Callable[..., Tensor], targets: Any, expected: set[tuple[int, int]]) -> None:
    assert set(left_out.find_left_out(loss, torch.randn(2, 6, 14), targets, 2)) == expected


@pytest.mark.parametrize("samples", [1, 2])
def test_a_part_with_another_share_of_it_is_refused(samples: int) -> None:
    loss, output, labels = losses.Loss(padded), torch.randn(samples, 6, 14), LABELS[:samples]
    for minibatch in range(2):
        value, weight, is_sum = loss(output, labels, samples, 0.5, minibatch)
        assert (weight, is_sum) == (samples, False)
        torch.testing.assert_close(value, exact(output, labels))
    shorter = labels.clone()
    shorter[0, 4:] = -100
    with pytest.raises(ValueError, match=r"leaves out targets that are -100, and there are .* give weight="):
        loss(output, shorter, samples, 0.5, 2)
    assert loss(output, shorter, samples, 1.0)[1] == samples, "an evaluation, or a minibatch that is not split"


def draw(kind: str, length: int = 6) -> dict[str, Tensor]:
    """Returns targets of 4 samples; in `equal` ones nothing is weighted, masked or a label that does not count."""
    labels = torch.randint(2, 14, (4, length))
    mask = {"weights": torch.rand(4, length) + 0.5, "hidden": torch.rand(4, length) < 0.5}
    empty = {"hidden": torch.zeros(4, length, dtype=torch.bool)}.get(kind.removeprefix("equal "), torch.ones(4, length))
    return {"y": labels.masked_fill(mask["hidden"], 1) if kind == "labels" else labels, "mask": mask.get(kind, empty)}


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (weighted(lambda batch: batch["mask"]), "weights"),
        (weighted(lambda batch: ~batch["mask"]), "hidden"),
        (weighted(lambda batch: batch["y"] != 1), "labels"),
    ],
)
@pytest.mark.parametrize("first", [1, 21])
def test_a_part_that_counts_otherwise_is_refused_when_it_comes(loss: Any, kind: str, first: int) -> None:
    """Also one of another length, which is compared with the other part of its minibatch."""
    torch.manual_seed(0)
    part_loss = losses.Loss(loss)
    for minibatch in range(first):
        for _ in range(2):
            targets = draw(f"equal {kind}", 6 - minibatch % 3)
            part_loss(torch.randn(*targets["y"].shape, 14), targets, 4, 0.5, minibatch)
    parts = [draw(kind, 5 if first == 21 else 6) for _ in range(2)]
    if first == 21:
        part_loss(torch.randn(*parts[0]["y"].shape, 14), parts[0], 4, 0.5, first)
    with pytest.raises(ValueError, match=r"a part of 4 samples counts otherwise: .* give weight=.*microbatches=1"):
        part_loss(torch.randn(*parts[1]["y"].shape, 14), parts[1], 4, 0.5, first)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_mean_over_samples_is_never_refused(dtype: torch.dtype) -> None:
    """Although rounding moves a loss near zero by much of it, and a target grows from batch to batch."""

    def centred(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        step = 1e-3 * batch["step"].to(output.dtype)
        return (nll(output, batch["y"]) - nll(output, batch["y"].flip(-1))).mean() + step.mean()

    torch.manual_seed(0)
    part_loss = losses.Loss(centred)
    for minibatch in range(40):
        for samples in (4, 3):
            targets = {"y": torch.randint(14, (samples, 6)), "step": torch.full((samples,), minibatch)}
            output = torch.randn(samples, 6, 14, dtype=dtype)
            assert part_loss(output, targets, samples, samples / 7, minibatch)[1] == samples


def test_parts_are_compared_more_and_more_rarely() -> None:
    def counted(output: Tensor, labels: Tensor) -> Tensor:
        calls[-1] += 1
        return exact(output, labels)

    loss, calls = losses.Loss(counted), list[int]()
    for minibatch in range(100):
        calls.append(0)
        loss(torch.randn(2, 6, 14), LABELS, 2, 0.5, minibatch)
    assert calls[1:] == [4 if part <= 8 or part in (16, 32, 64) else 1 for part in range(1, 100)]
