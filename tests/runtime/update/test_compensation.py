"""Compensations on tensors: the library's `Optimizer` steps one weight as the papers say, or as torch does."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipedream as pd
from pipedream.core.schedule.delay_compensation import Compensation
from pipedream.extensions.compensations import basis_rotation, gap_aware
from pipedream.extensions.compensations.velocity import Generalised, Nesterov, SpikeCompensation, VelocityPrediction
from pipedream.runtime.update.optimizer import Optimizer
from pipedream.runtime.update.rate_schedule import RateSchedule, StageUpdates
from pipedream.runtime.update.stepped import SteppedWeights

ROWS, COLUMNS = 4, 3
RATE = 0.01
Factory = Callable[[Any], torch.optim.Optimizer]
ADAM = partial(torch.optim.Adam, lr=RATE)
SGD = partial(torch.optim.SGD, lr=RATE, momentum=0.9)


@pytest.fixture
def start() -> Tensor:
    return torch.randn(ROWS, COLUMNS, dtype=torch.float64)


def following(handle: nn.Parameter, factory: Factory, *chosen: Compensation, staleness: int = 0) -> Optimizer:
    """Returns the library's optimizer on one weight, with compensations."""
    rule = pd.schedules.UpdateRule((1,), compensation=chosen)
    schedule = RateSchedule(factory([("w", handle)]), None, StageUpdates(rule, staleness=staleness))
    return Optimizer(SteppedWeights({"w": handle}), schedule)


def step_by(handle: nn.Parameter, optimizer: Any, gradient: Tensor) -> Tensor:
    handle.grad = gradient.clone()
    optimizer.step()
    return handle.detach()


def ours(start: Tensor, factory: Factory, *chosen: Compensation) -> tuple[Any, Optimizer]:
    """Returns a step of the library's optimizer with compensations, and the optimizer."""
    handle = nn.Parameter(start.clone())
    optimizer = following(handle, factory, *chosen)
    return partial(step_by, handle, optimizer), optimizer


@pytest.mark.parametrize("decay", [0.0, 1e-2])
def test_no_delay_is_plain_momentum_and_one_is_nesterov_to_the_bit(decay: float, start: Tensor) -> None:
    sgd = partial(SGD, weight_decay=decay)
    nesterov = partial(sgd, nesterov=True)
    for kind, torchs in (
        (SpikeCompensation(0), sgd),
        (VelocityPrediction(0.0), sgd),
        (Generalised(0.0), sgd),
        (Nesterov(), nesterov),
        (SpikeCompensation(1), nesterov),
    ):
        step, _ = ours(start, sgd, kind)
        expected, _ = ours(start, torchs)
        for gradient in torch.randn(20, ROWS, COLUMNS).double():
            assert torch.equal(step(gradient), expected(gradient)), kind


@pytest.mark.parametrize(("name", "decay"), [("sgd", 0.0), ("sgd", 0.1), ("adam", 0.1), ("adamw", 0.1)])
def test_gap_aware_as_its_paper_writes_it(name: str, decay: float, start: Tensor) -> None:
    """Everything per element, in a loop; the velocity of SGD is its own buffer, Adam's step is m / (sqrt(v) + eps)."""
    delay, beta, eps = 3, 0.9, 1e-8
    factory = {"sgd": SGD, "adam": ADAM, "adamw": partial(torch.optim.AdamW, lr=RATE)}[name]
    handle = nn.Parameter(start.clone())
    optimizer = following(handle, partial(factory, weight_decay=decay), gap_aware.GapAware(beta), staleness=delay)
    w, m, v, mean = start.clone(), torch.zeros_like(start), torch.zeros_like(start), torch.zeros_like(start)
    versions = deque([start.clone()], maxlen=delay + 1)
    for t in range(1, 101):
        rate = RATE if t <= 50 else RATE / 4  # the gap stays that of the greatest rate
        for group in optimizer.optimizer.param_groups:
            group["lr"] = rate
        g = torch.randn_like(start)
        handle.grad = g.clone()
        optimizer.compensator.penalise({"w": handle.detach()}, {"w": versions[0]})
        optimizer.step()
        penalty = torch.ones_like(w)
        if t > 1:
            penalty = 1 + (w - versions[0]).abs() / (RATE * ((mean / (1 - beta ** (t - 1))).sqrt() + eps))
        g = (g if name == "adamw" else g + decay * w) / penalty
        if name == "sgd":
            m = 0.9 * m + g
            step = m
        else:
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            step = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
            step = step + decay * w if name == "adamw" else step
        w = w - rate * step
        mean = beta * mean + (1 - beta) * step**2
        # The step is known to rounding of the weights, over the rate.
        assert (handle - w).abs().max() <= 1e-9, f"update {t}"
        versions.append(handle.detach().clone())
    assert t > delay
    assert penalty.max() > 1.5


FAMILY: dict[str, Factory] = {
    "adam": partial(torch.optim.Adam, lr=RATE, eps=1e-4, weight_decay=0.1),
    "adam with the greatest moment": partial(torch.optim.Adam, lr=RATE, eps=1e-4, amsgrad=True),
    "adam that climbs": partial(torch.optim.Adam, lr=RATE, eps=1e-4, weight_decay=0.1, maximize=True),
    "adamw": partial(torch.optim.AdamW, lr=RATE, eps=1e-4, weight_decay=0.1),
    "nadam": partial(torch.optim.NAdam, lr=RATE, eps=1e-4, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": partial(torch.optim.RAdam, lr=RATE, eps=1e-4, weight_decay=0.1),
    "adamax": partial(torch.optim.Adamax, lr=RATE, eps=1e-4, weight_decay=0.1),
}


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("geometry", ["two_sided", "one_sided"])
def test_basis_rotation_is_the_optimizer_in_rotated_coordinates(name: str, geometry: Any, start: Tensor) -> None:
    """Of a basis that stays: what torch's optimizer makes of U^T W V, with U^T G V, is turned back."""
    gradients = [torch.randn_like(start) for _ in range(12)]
    step, optimizer = ours(start, FAMILY[name], basis_rotation.BasisRotation(99, geometry=geometry))
    weights = [step(gradient).clone() for gradient in gradients]
    sides = optimizer.compensator.state["w"]
    assert set(sides) == ({"left", "right"} if geometry == "two_sided" else {"right"})
    u, v = (sides[s][0] if s in sides else torch.eye(n).double() for s, n in (("left", ROWS), ("right", COLUMNS)))
    assert torch.allclose(u.T @ u, torch.eye(ROWS).double())
    handle = nn.Parameter(u.T @ start @ v)
    plain = FAMILY[name]([("w", handle)])
    for gradient, weight in zip(gradients, weights, strict=True):
        assert torch.allclose(u @ step_by(handle, plain, u.T @ gradient @ v) @ v.T, weight, rtol=0, atol=1e-12)


def test_a_rotation_that_ends_leaves_moments_in_the_weights_own_coordinates(start: Tensor) -> None:
    handle = nn.Parameter(start.clone())
    optimizer = following(handle, ADAM, basis_rotation.BasisRotation(2))
    mean = torch.zeros_like(start)
    for _ in range(7):
        gradient = torch.randn_like(start)
        step_by(handle, optimizer, gradient)
        mean = 0.9 * mean + 0.1 * gradient
    (moments,) = optimizer.optimizer.state.values()

    def go_on(former: Optimizer, *chosen: Compensation) -> Optimizer:
        optimizer = following(handle, lambda _: former.optimizer, *chosen)
        optimizer.take_over(former, input_updates=0)
        return optimizer

    total = float(moments["exp_avg_sq"].sum())
    for chosen in (
        basis_rotation.BasisRotation(2, estimate="first_moment"),
        basis_rotation.BasisRotation(3, geometry="one_sided"),
    ):
        optimizer = go_on(optimizer, chosen)
        gradient = torch.randn_like(start)
        step_by(handle, optimizer, gradient)
        mean, total = 0.9 * mean + 0.1 * gradient, 0.999 * total + 0.001 * float(gradient.square().sum())
        optimizer = go_on(optimizer)
        assert optimizer.compensator.state == {"w": {}}
        assert torch.allclose(moments["exp_avg"], mean)
        assert float(moments["exp_avg_sq"].sum()) == pytest.approx(total), "turned, as the norm of a gradient is"
        assert bool((moments["exp_avg_sq"] > 0).all())


REFUSED = [
    (Nesterov(), torch.optim.AdamW, "nesterov'? works on the velocity of torch.optim.SGD, found AdamW; use er"),
    (SpikeCompensation(), torch.optim.SGD, "spike works on the velocity, which SGD without momentum"),
    (SpikeCompensation(), partial(SGD, dampening=0.5), r"SGD with dampening=0\.5"),
    (Generalised(0.5), partial(SGD, nesterov=True), r"generalised:0\.5 .*nesterov=True"),
    (VelocityPrediction(), partial(SGD, maximize=True), "SGD with maximize=True"),
    (basis_rotation.BasisRotation(), torch.optim.Adafactor, "rotates the moments of Adam, .*, found Adafactor"),
    (basis_rotation.BasisRotation(), torch.optim.SGD, "rotates the moments of Adam, .*, found SGD, which keeps no"),
]


@pytest.mark.parametrize(("kind", "factory", "words"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_an_optimizer_cannot_do_is_refused(kind: Compensation, factory: Factory, words: str) -> None:
    with pytest.raises(pd.PipelineError, match=words):
        following(nn.Parameter(torch.ones(2)), factory, kind, staleness=1)
