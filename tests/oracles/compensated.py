"""Compensations of delay as their papers write them, in plain PyTorch.

Where a method predicts weights it is written so here: the optimizer steps w, forwards read a prediction, the backward
reads it too. The library stores the prediction alone. The weight decay of both is taken where forwards read.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipedream.testing import CompensationRule as Rule

Weights = Mapping[str, nn.Parameter]


class _Predicting(Rule):
    """Args: decay: of the weights; decoupled: it is not part of the gradient."""

    def __init__(self, decay: float, *, decoupled: bool = False) -> None:
        self._decay = decay
        self._decoupled = decoupled

    def gradient(self, stage: int, name: str, g: Tensor, y: Tensor, read: Tensor) -> Tensor:
        return g if self._decoupled else g + self._decay * y

    def step(self, stage: int, stepper: Any, w: Weights, y: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, p in w.items():
                if self._decoupled:
                    p -= stepper.param_groups[0]["lr"] * self._decay * y[name]
        stepper.step()


class VelocityPrediction(_Predicting):
    """SpecTrain: w - lr T v."""

    def __init__(self, decay: float, horizon: Callable[[int], float]) -> None:
        super().__init__(decay)
        self._horizon = horizon

    def predict(self, stage: int, stepper: Any, w: Weights) -> dict[str, Tensor]:
        (group,) = stepper.param_groups
        ahead = group["lr"] * self._ahead(stage, group["momentum"])
        return {n: p.detach() - ahead * stepper.state[p]["momentum_buffer"] for n, p in w.items()}

    def _ahead(self, stage: int, momentum: float) -> float:
        return self._horizon(stage)


class MultiStepNesterov(VelocityPrediction):
    """FTPipe's msnag: w - lr v (m + m^2 + ... + m^n), n updates ahead."""

    def _ahead(self, stage: int, momentum: float) -> float:
        return momentum * (1 - momentum ** self._horizon(stage)) / (1 - momentum)


class Spike(_Predicting):
    """Kosson et al.: w(t+1) = w(t) - lr (a v(t+1) + b g), a = m^D, b = (1 - m^D) / (1 - m).

    Where the rate changes this is what spike compensation is; a prediction would have to say by whose rate it predicts.
    """

    def __init__(self, decay: float, momentum: float, delay: Callable[[int], int]) -> None:
        super().__init__(decay)
        self._momentum = momentum
        self._delay = delay

    def step(self, stage: int, stepper: Any, w: Weights, y: Mapping[str, Tensor]) -> None:
        m, delay = self._momentum, self._delay(stage)
        a, b = m**delay, (1 - m**delay) / (1 - m)
        with torch.no_grad():
            for p in w.values():
                v = m * stepper.state[p].get("momentum_buffer", torch.zeros_like(p)) + p.grad
                p -= stepper.param_groups[0]["lr"] * (a * v + b * p.grad)
                stepper.state[p]["momentum_buffer"], p.grad = v, None
        stepper.step()  # of nothing, so that a scheduler sees one


class DifferencePrediction(_Predicting):
    """LWPw: w(t) + T (w(t) - w(t-1))."""

    def __init__(self, decay: float, horizon: Callable[[int], float], *, decoupled: bool = False) -> None:
        super().__init__(decay, decoupled=decoupled)
        self._horizon = horizon
        self._before: dict[str, Tensor] = {}

    def step(self, stage: int, stepper: Any, w: Weights, y: Mapping[str, Tensor]) -> None:
        self._before |= {name: p.detach().clone() for name, p in w.items()}
        super().step(stage, stepper, w, y)

    def predict(self, stage: int, stepper: Any, w: Weights) -> dict[str, Tensor]:
        return {n: p.detach() + self._horizon(stage) * (p.detach() - self._before[n]) for n, p in w.items()}


class Nesterov(_Predicting):
    """Ajanthan et al.: w(t+1) = w(t) + d_t - lr grad at the delayed w + d, d = m (w(t) - w(t-1)), lr = eta (1 - m)."""

    def __init__(self, decay: float, momentum: float) -> None:
        super().__init__(decay)
        self._momentum = momentum
        self._before: dict[str, Tensor] = {}

    def step(self, stage: int, stepper: Any, w: Weights, y: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, p in w.items():
                d = self._momentum * (p - self._before.get(name, p.detach().clone()))
                self._before[name] = p.detach().clone()
                p += d - stepper.param_groups[0]["lr"] * p.grad

    def predict(self, stage: int, stepper: Any, w: Weights) -> dict[str, Tensor]:
        return {n: p.detach() + self._momentum * (p.detach() - self._before[n]) for n, p in w.items()}


class Rescheduled(Rule):
    """PipeMare's T1: alpha / tau^p, p = 1 - min(k / K, 1); stages with tau 0 as they are."""

    def __init__(self, tau: Sequence[int], until: int) -> None:
        self._tau = tau
        self._until = until

    def rate(self, stage: int, k: int) -> float:
        tau = self._tau[stage]
        return 1.0 if tau == 0 else 1.0 / tau ** (1 - min(k / self._until, 1))


class GapAware(Rule):
    """Barkai et al., for momentum SGD: gradient and decay over 1 + |w - w_read| / (lr_max (sqrt(E[v^2]) + eps))."""

    def __init__(self, decay: float, beta: float) -> None:
        self._decay = decay
        self._beta = beta
        self._mean: dict[str, Tensor] = {}
        self._count: dict[str, int] = {}
        self._greatest: dict[int, float] = {}
        self.penalty = 1.0

    def gradient(self, stage: int, name: str, g: Tensor, y: Tensor, read: Tensor) -> Tensor:
        whole = g + self._decay * y
        if name not in self._mean:
            return whole
        mean = self._mean[name] / (1 - self._beta ** self._count[name])
        penalty = 1 + (y - read).abs() / (self._greatest[stage] * (mean.sqrt() + 1e-8))
        self.penalty = max(self.penalty, float(penalty.max()))
        return whole / penalty

    def step(self, stage: int, stepper: Any, w: Weights, y: Mapping[str, Tensor]) -> None:
        stepper.step()
        self.look(stage, stepper, {name: stepper.state[p]["momentum_buffer"] for name, p in w.items()})

    def look(self, stage: int, stepper: Any, velocities: Mapping[str, Tensor]) -> None:
        """Takes the velocities of a step into the averages."""
        self._greatest[stage] = max(self._greatest.get(stage, 0.0), stepper.param_groups[0]["lr"])
        for name, v in velocities.items():
            self._mean[name] = self._beta * self._mean.get(name, torch.zeros_like(v)) + (1 - self._beta) * v * v
            self._count[name] = self._count.get(name, 0) + 1


class BasisRotation(Rule):
    """Jung, Shin and Lee, algorithms 1 and 2: AdamW, with matrices in the basis of their gradients' covariance.

    As published: the first moment is kept in the weight's own coordinates, and rotated at each update.

    Args:
        every: from a stage to the updates between its bases.
        sides: from rows and columns to the sides that are rotated.
        first: the covariance is that of the first moment.
    """

    def __init__(
        self, every: Callable[[int], int], *, sides: Callable[[int, int], str] = lambda m, n: "LR", first: bool = False
    ) -> None:
        self._every = every
        self._sides = sides
        self._first = first
        self._of: dict[str, dict[str, Any]] = {}
        self.renewed = 0

    def step(self, stage: int, stepper: Any, w: Weights, y: Mapping[str, Tensor]) -> None:
        (group,) = stepper.param_groups
        with torch.no_grad():
            for name, p in w.items():
                if p.grad is not None:
                    p *= 1 - group["lr"] * group["weight_decay"]
                    p -= group["lr"] * self._direction(stage, name, p.grad, group)
                    p.grad = None
        stepper.step()  # of nothing, so that a scheduler sees one

    def _direction(self, stage: int, name: str, g: Tensor, group: Mapping[str, Any]) -> Tensor:
        (b1, b2), s = group["betas"], self._of.setdefault(name, {"t": 0, "m": torch.zeros_like(g)})
        s["t"] += 1
        s["m"] = b1 * s["m"] + (1 - b1) * g
        v, flat, mean = s.get("v", 0.0), g, s["m"]
        if g.dim() > 1:
            flat, mean = g.flatten(1), s["m"].flatten(1)
            both = self._sides(*flat.shape)
            for side, x, moment in (("L", flat, mean), ("R", flat.T, mean.T)):
                basis = s.get(side)
                s["c" + side] = b2 * s.get("c" + side, 0.0) + (1 - b2) * x @ x.T
                if side not in both or (basis is not None and s["t"] % self._every(stage)):
                    continue
                self.renewed += basis is not None
                c = moment @ moment.T if self._first else s["c" + side]
                n = len(c)
                noise = 1e-6 * c.diagonal().sum() / n  # what is below keeps its place
                if basis is None:
                    s[side] = torch.linalg.eigh(c + noise * torch.diag(torch.arange(n, 0, -1) / n))[1].flip(1)
                    continue
                size = torch.stack([column @ c @ column for column in basis.T]).clamp(min=noise)
                order = sorted(range(n), key=lambda at: -float(size[at]))
                s[side] = torch.linalg.qr((c + noise * torch.eye(n, dtype=c.dtype)) @ basis[:, order])[0]
                v = v[order] if side == "L" else v[:, order]
        u, r = (s.get(side, torch.eye(n, dtype=g.dtype)) for side, n in zip("LR", (*flat.shape, 1), strict=False))
        turn = (lambda x: u.T @ x @ r) if g.dim() > 1 else lambda x: x
        s["v"] = b2 * v + (1 - b2) * turn(flat) ** 2
        moved = turn(mean) / (1 - b1 ** s["t"]) / ((s["v"] / (1 - b2 ** s["t"])).sqrt() + group["eps"])
        return (u @ moved @ r.T).reshape(g.shape) if g.dim() > 1 else moved
