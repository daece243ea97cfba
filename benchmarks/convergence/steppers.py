"""The optimizers of the arms, as factories from named parameters: what a pipeline's user would give.

Fused or over lists of tensors: one tensor after the other they take a third of a run's time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Named = list[tuple[str, nn.Parameter]]


def adamw(named: Named, lr: float) -> torch.optim.Optimizer:
    """AdamW; only matrices and kernels decay."""
    return torch.optim.AdamW(_select_decaying(named), lr=lr, betas=(0.9, 0.999), weight_decay=0.01, fused=True)


def nadam(named: Named, lr: float) -> torch.optim.Optimizer:
    """NAdam with long momentum: Ajanthan et al., ICML 2025, section 5."""
    betas, decay = (0.99, 0.999), {"weight_decay": 0.01, "decoupled_weight_decay": True}
    return torch.optim.NAdam(_select_decaying(named), lr=lr, betas=betas, momentum_decay=0.004, foreach=True, **decay)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) for matrices, AdamW for the rest, at one learning rate for both.

    An update of a matrix is its Nesterov momentum made orthogonal, times 0.2 sqrt(max(rows, columns)), which gives it
    the size of an AdamW update (Liu et al., 2025). torch.optim.Muon makes it orthogonal in bfloat16 and matrix by
    matrix; here matrices of one shape go together, in their own precision.

    Args:
        named: parameters; embeddings (``embed``) and the output layer (``head``) are no matrices in this sense.
        lr, weight_decay: of both.
    """

    def __init__(self, named: Named, lr: float, weight_decay: float = 0.01) -> None:
        groups: list[dict[str, Any]] = []
        for inside in (True, False):
            for decay in (weight_decay, 0.0):
                chosen = [p for name, p in named if _is_inside(name, p) is inside and bool(decay) is (p.ndim >= 2)]
                if chosen:
                    groups.append({"params": chosen, "matrices": inside, "weight_decay": decay})
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Makes an update."""
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 1 - group["lr"] * group["weight_decay"])
            (self._step_matrices if group["matrices"] else self._step_rest)(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        alike: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for p in group["params"]:
            alike[p.shape].append(p)
        for shape, matrices in alike.items():
            gradients = [p.grad for p in matrices]
            momenta = [self._get_state(p, "momentum_buffer") for p in matrices]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            ahead = torch.stack(torch._foreach_lerp(gradients, momenta, group["momentum"]))
            size = 0.2 * max(shape) ** 0.5
            torch._foreach_add_(matrices, list(orthogonal(ahead).unbind()), alpha=-group["lr"] * size)

    def _step_rest(self, group: dict[str, Any]) -> None:
        first, second = group["betas"]
        weights, gradients = group["params"], [p.grad for p in group["params"]]
        means = [self._get_state(p, "exp_avg") for p in weights]
        squares = [self._get_state(p, "exp_avg_sq") for p in weights]
        group["step"] = group.get("step", 0) + 1
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - second)
        sizes = torch._foreach_sqrt(torch._foreach_div(squares, 1 - second ** group["step"]))
        torch._foreach_add_(sizes, group["eps"])
        torch._foreach_addcdiv_(weights, means, sizes, value=-group["lr"] / (1 - first ** group["step"]))

    def _get_state(self, p: nn.Parameter, name: str) -> Tensor:
        state = self.state[p]
        if name not in state:
            state[name] = torch.zeros_like(p)
        value: Tensor = state[name]
        return value


def orthogonal(matrices: Tensor) -> Tensor:
    """Returns matrices of shape (count, rows, columns) with their singular values brought near 1.

    Five Newton-Schulz iterations of the quintic 3.4445 x - 4.775 x^3 + 2.0315 x^5 (Jordan et al., 2024).
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


STEPPERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9, weight_decay=5e-4, fused=True),
    "adamw": adamw,
    "nadam": nadam,
    "muon": Muon,
}
"""Name -> the optimizer of named parameters, with the learning rate `lr`."""


def _is_inside(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and "embed" not in name and "head" not in name


def _select_decaying(named: Named) -> list[dict[str, Any]]:
    groups = [
        {"params": [item for item in named if item[1].ndim >= 2]},
        {"params": [item for item in named if item[1].ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
