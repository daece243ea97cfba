"""An optimizer that computes something from all weights together trains with one stage, and is refused with more."""

import random
from collections.abc import Callable
from functools import partial
from statistics import median, quantiles
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

import pipedream as pd
from pipedream.capture import preserve_state
from pipedream.core.errors import ScheduleError
from pipedream.runtime.update.trial import check_steps_apart
from pipedream.sharding.whole_weights import steps_each_element

Named = list[tuple[str, nn.Parameter]]
Rule = Callable[["Own", dict[str, Any], list[nn.Parameter]], list[torch.Tensor]]


class Own(torch.optim.Optimizer):
    """Subtracts what a rule makes of the gradients of a group, whose dict keeps what the rule remembers."""

    def __init__(self, params: Any, rule: Rule) -> None:
        self.rule = rule
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            for p, change in zip(weights, self.rule(self, group, weights), strict=True):
                p.sub_(change, alpha=group["lr"])


def gradients_of(weights: list[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in weights if p.grad is not None]


def norm_of(tensors: list[torch.Tensor]) -> float:
    return sum(float(t.square().sum()) for t in tensors) ** 0.5


def by_factor(factor: Callable[[dict[str, Any], float], float]) -> Rule:
    """Of the norm of all gradients."""
    return lambda _, group, weights: [factor(group, norm_of(gradients_of(weights))) * g for g in gradients_of(weights)]


def spared_spikes(group: dict[str, Any], norm: float) -> float:
    return float(norm < 50.0)


def by_history(group: dict[str, Any], norm: float) -> float:
    norms = group.setdefault("norms", [])
    norms.append(norm)
    return min(1.0, quantiles([*norms, 0.0], n=10)[0] / norm)


def now_and_then(group: dict[str, Any], norm: float) -> float:
    group["count"] = group.get("count", 0) + 1
    return 1 / norm if group["count"] % 6 == 0 else 1.0


def whole_lars(_: Own, group: dict[str, Any], weights: list[nn.Parameter]) -> list[torch.Tensor]:
    trust = norm_of([p.detach() for p in weights]) / norm_of(gradients_of(weights))
    return [trust * g for g in gradients_of(weights)]


def by_median(_: Own, group: dict[str, Any], weights: list[nn.Parameter]) -> list[torch.Tensor]:
    limit = median(float(g.norm()) for g in gradients_of(weights))
    return [g * min(1.0, limit / float(g.norm())) for g in gradients_of(weights)]


def prodigy(optimizer: Own, group: dict[str, Any], weights: list[nn.Parameter]) -> list[torch.Tensor]:
    """A rate that grows with what all weights have gained, as in Mishchenko and Defazio, 2023."""
    d = group.setdefault("d", 1e-6)
    gain = group.get("gain", 0.0)
    sums = 0.0
    for p, g in zip(weights, gradients_of(weights), strict=True):
        state = optimizer.state[p]
        first = state.setdefault("first", p.detach().clone())
        gain += d * float((g * (first - p)).sum())
        sums += float(state.setdefault("sum", torch.zeros_like(p)).add_(g, alpha=d).abs().sum())
    group["gain"], group["d"] = gain, max(d, gain / sums)
    return [10 * group["d"] * g.sign() for g in gradients_of(weights)]


def along_momentum(optimizer: Own, group: dict[str, Any], weights: list[nn.Parameter]) -> list[torch.Tensor]:
    """Sharpness-aware, with the velocity for an ascent: it has the size of all weights together."""
    velocities = [optimizer.state[p].setdefault("v", torch.zeros_like(p)) for p in weights]
    size = norm_of(velocities) or 1.0
    for v, g in zip(velocities, gradients_of(weights), strict=True):
        v.mul_(0.9).add_(g)
    return [v + 0.05 * v / size for v in velocities]


def clip(optimizer: Any, *_: Any) -> None:
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)


class ClippedAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        clip(self)
        return super().step(closure)


class Wrapper:
    """No torch.optim.Optimizer itself, as some wrappers."""

    def __init__(self, base: torch.optim.Optimizer, *, clips: bool) -> None:
        self.base, self.clips, self.state, self.param_groups = base, clips, base.state, base.param_groups

    def step(self) -> None:
        if self.clips:
            clip(self)
        self.base.step()


def with_hook(named: Named) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(named, lr=0.1)
    optimizer.register_step_pre_hook(clip)
    return optimizer


def with_other_step(named: Named) -> torch.optim.Optimizer:
    optimizer: Any = torch.optim.SGD(named, lr=0.1)
    plain = optimizer.step
    optimizer.step = MethodType(lambda self, closure=None: (clip(self), plain())[1], optimizer)
    return optimizer  # type: ignore[no-any-return]


def biases_apart(named: Named) -> list[dict[str, Any]]:
    return [{"params": [p for n, p in named if n.endswith("b") == bias]} for bias in (False, True)]


TOGETHER: dict[str, Any] = {
    "clips": partial(Own, rule=by_factor(lambda group, norm: min(1.0, 1.0 / norm))),
    "clips only large gradients": partial(Own, rule=by_factor(lambda group, norm: min(1.0, 300.0 / norm))),
    "normalised": partial(Own, rule=by_factor(lambda group, norm: 1.0 / norm)),
    "skips spikes": partial(Own, rule=by_factor(spared_spikes)),
    "clips by the history": partial(Own, rule=by_factor(by_history)),
    "normalised at each sixth step": partial(Own, rule=by_factor(now_and_then)),
    "LARS over the whole model": partial(Own, rule=whole_lars),
    "median of the weights' norms": partial(Own, rule=by_median),
    "Prodigy": partial(Own, rule=prodigy),
    "ascends along all velocities": partial(Own, rule=along_momentum),
    "clips, then AdamW": partial(ClippedAdamW, lr=0.1),
    "hook": with_hook,
    "replaced step": with_other_step,
    "wrapped": lambda named: Wrapper(torch.optim.SGD(named, lr=0.1), clips=True),
    "by group": lambda named: Own(biases_apart(named), by_factor(lambda group, norm: 1.0 / norm)),
}


def lamb(optimizer: Own, group: dict[str, Any], weights: list[nn.Parameter]) -> list[torch.Tensor]:
    return [g * p.detach().norm() / g.norm() for p, g in zip(weights, gradients_of(weights), strict=True)]


def shampoo(optimizer: Own, group: dict[str, Any], weights: list[nn.Parameter]) -> list[torch.Tensor]:
    changes = []
    for p, g in zip(weights, gradients_of(weights), strict=True):
        square = optimizer.state[p].setdefault("square", torch.eye(len(g), dtype=g.dtype) * 1e-3)
        rows = g.reshape(len(g), -1)
        square.add_(rows @ rows.T)
        values, vectors = torch.linalg.eigh(square)
        changes.append((vectors @ torch.diag(values**-0.25) @ vectors.T @ rows).reshape(g.shape))
    return changes


def batched_muon(optimizer: Own, group: dict[str, Any], weights: list[nn.Parameter]) -> list[torch.Tensor]:
    shapes = dict.fromkeys(p.shape for p in weights)
    changes: dict[int, torch.Tensor] = {}
    for shape in shapes:
        same = [p for p in weights if p.shape == shape]
        x = torch.stack([g.reshape(len(g), -1) for g in gradients_of(same)])
        x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
        for _ in range(5):
            square = x @ x.mT
            x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
        changes |= {id(p): part.reshape(shape) for p, part in zip(same, x, strict=True)}
    return [changes[id(p)] for p in weights]


def lookahead(optimizer: Own, group: dict[str, Any], weights: list[nn.Parameter]) -> list[torch.Tensor]:
    group["count"] = group.get("count", 0) + 1
    changes = []
    for p, g in zip(weights, gradients_of(weights), strict=True):
        slow = optimizer.state[p].setdefault("slow", p.detach().clone())
        changes.append(g if group["count"] % 5 else (p.detach() - slow.lerp_(p.detach(), 0.5)) / 0.1)
    return changes


def noisy(
    optimizer: Own, group: dict[str, Any], weights: list[nn.Parameter], generator: Any = None
) -> list[torch.Tensor]:
    noise = [torch.randn(g.shape, generator=generator, dtype=g.dtype) for g in gradients_of(weights)]
    return [
        g + n + random.random() + float(np.random.rand()) for g, n in zip(gradients_of(weights), noise, strict=True)
    ]


class ScheduleFree(Own):
    """Steps only in its training mode."""

    is_training = False

    def train(self) -> None:
        self.is_training = True

    def step(self, closure: Any = None) -> None:
        assert self.is_training
        super().step()


def adamw(**options: Any) -> Any:
    return partial(torch.optim.AdamW, lr=0.1, **options)


def counting_hook(named: Named) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(named, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def muon_and_adamw(named: Named) -> Any:
    optimizer = torch.optim.Muon([p for _, p in named if p.ndim == 2], lr=0.1)
    other = torch.optim.AdamW([p for _, p in named if p.ndim != 2], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: other.step())
    return optimizer


APART: dict[str, Any] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": adamw(),
    "AdamW, fused": adamw(fused=True),
    "AdamW, foreach": adamw(foreach=True),
    "Adafactor": torch.optim.Adafactor,
    "Muon and AdamW": muon_and_adamw,
    "hook": counting_hook,
    "LAMB": partial(Own, rule=lamb),
    "Shampoo": partial(Own, rule=shampoo),
    "Muon in batches": partial(Own, rule=batched_muon),
    "Lookahead": partial(Own, rule=lookahead),
    "noise": partial(Own, rule=noisy),
    "noise of its own generator": partial(Own, rule=partial(noisy, generator=torch.Generator())),
    "schedule-free": partial(ScheduleFree, rule=lamb),
    "wrapped": lambda named: Wrapper(torch.optim.SGD(named, lr=0.1), clips=False),
    "cannot step": lambda named: Own(named, lambda *_: 1 / 0),  # type: ignore[arg-type,return-value]
    "rates by group": lambda named: torch.optim.SGD(
        [group | {"lr": rate} for group, rate in zip(biases_apart(named), (0.1, 0.3), strict=True)], lr=1.0
    ),
    "a norm for each stage": lambda named: Own(
        [{"params": [p for n, p in named if n[0] == digit]} for digit in "01234"],
        by_factor(lambda group, norm: 1.0 / norm),
    ),
    "the model's own weights": lambda named: Own([nn.Parameter(torch.ones(2))], lamb),
}


def check(factory: Any, stages: int = 3) -> None:
    shapes = {"w": (6, 5), "b": (6,)}
    handles = [{f"{s}.{n}": nn.Parameter(torch.ones(*shape)) for n, shape in shapes.items()} for s in range(stages)]
    preserving = partial(preserve_state, (), others=[factory])
    check_steps_apart(factory, [*handles, {}], torch.device("cpu"), preserving)
    assert all(torch.equal(p, torch.ones_like(p)) and p.grad is None for stage in handles for p in stage.values())


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("stages", [2, 5])
def test_an_optimizer_that_mixes_the_gradients_of_stages_is_refused(name: str, stages: int) -> None:
    with pytest.raises(
        ScheduleError, match=r"lets gradients of other stages change the step of '\d\.[wb]'.* one stage"
    ):
        check(TOGETHER[name], stages)
    check(TOGETHER[name], stages=1)


@pytest.mark.parametrize("name", APART)
def test_an_optimizer_that_does_not_is_accepted(name: str) -> None:
    check(APART[name])


def test_each_pair_of_stages_is_told_apart() -> None:
    """Of five stages, the weights of any two have a norm together."""
    for pair in [(a, b) for a in range(5) for b in range(a)]:

        def factory(named: Named, pair: Any = pair) -> Own:
            together = [p for n, p in named if int(n[0]) in pair]
            others = [p for n, p in named if int(n[0]) not in pair]
            return Own([{"params": together}, *({"params": [p]} for p in others)], by_factor(lambda _, norm: 1 / norm))

        with pytest.raises(ScheduleError, match=f"'[{pair[0]}{pair[1]}]"):
            check(factory, 5)


def test_a_hook_on_all_optimizers_is_tried() -> None:
    hook = register_optimizer_step_pre_hook(clip)
    try:
        with pytest.raises(ScheduleError, match="AdamW lets"):
            check(adamw())
    finally:
        hook.remove()
    check(adamw())


def test_ranks_of_a_mesh_step_parts_only_with_a_step_that_torch_wrote() -> None:
    named = [("w", nn.Parameter(torch.ones(2, 2)))]
    scheduled = torch.optim.SGD(named, lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(scheduled)
    assert steps_each_element(scheduled)
    assert not any(map(steps_each_element, (with_hook(named), with_other_step(named), ClippedAdamW(named))))


calls = 0


class Counting(Own):
    steps = 0
    numbers: list[int] = []  # noqa: RUF012

    def step(self, closure: Any = None) -> None:
        global calls
        calls += 1
        Counting.steps += 1
        self.numbers.append(Counting.steps)
        super().step()


def test_the_trial_leaves_nothing_behind() -> None:
    count, names, counts = 0, list[str](), {"factories": 0}
    generator = torch.Generator().manual_seed(3)

    def factory(named: Named, generator: Any = generator) -> Counting:
        nonlocal count
        count += 1
        counts["factories"] += 1
        names.extend(name for name, _ in named)
        return Counting([p for _, p in named], partial(noisy, generator=generator))

    def state() -> list[Any]:
        numbers = [count, calls, Counting.steps, [*Counting.numbers], [*names], dict(counts)]
        draws = generator.get_state().tolist(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()  # type: ignore[index]
        return [*numbers, *draws, random.getstate()]

    before = state()
    check(partial(factory, generator=generator))
    check(factory)
    assert state() == before


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in "xy") for _ in range(4)]  # type: ignore[misc]


def make_pipeline(factory: Any, **planned: Any) -> pd.Pipeline:
    profile = pd.profile(model(), torch.ones(8, 4, dtype=torch.float64), warmup=0, runs=1)
    plan = pd.plan(profile, pd.Cluster.flat(2), **planned)
    return pd.Pipeline(model(), plan, loss=F.mse_loss, optimizer=factory, schedule=planned["schedule"])


@pytest.mark.parametrize(
    ("schedule", "planned"),
    [
        ("1f1b", {"shape": "1-1"}),
        ("pipedream_2bw", {"shape": "1-1"}),
        ("interleaved", {"chunks": 2}),
        ("chimera", {}),
        ("roundpipe", {}),
    ],
)
def test_pipelines_of_several_stages_refuse_it(schedule: str, planned: dict[str, Any]) -> None:
    with pytest.raises(ScheduleError, match="Own lets gradients of other stages"):
        make_pipeline(TOGETHER["Prodigy"], schedule=schedule, **planned)


def by_halves(named: Named) -> Own:
    groups = [[p for n, p in named if (int(n[0]) < 2) == first] for first in (True, False)]
    return Own([{"params": group} for group in groups if group], by_factor(lambda group, norm: 1.0 / norm))


@pytest.mark.parametrize(
    ("factory", "planned"),
    [
        (TOGETHER["Prodigy"], {"shape": "data-parallel"}),
        (TOGETHER["normalised"], {"shape": "1"}),
        (by_halves, {"shape": "1-1", "cuts": (2,)}),
    ],
)
def test_one_stage_and_groups_within_stages_train_as_a_plain_loop(factory: Any, planned: dict[str, Any]) -> None:
    plain = model()
    optimizer = factory(list(plain.named_parameters()))
    for x, y in batches():
        optimizer.zero_grad()
        F.mse_loss(plain(x), y).backward()
        optimizer.step()
    with make_pipeline(factory, schedule="1f1b", **planned) as pipeline:
        list(pipeline.train(batches()))
        torch.testing.assert_close(pipeline.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-11)
