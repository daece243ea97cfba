"""An optimizer that computes something from all weights together trains with one stage, and is refused with more."""

import random
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from cases import Case, make_pipeline
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training import SGD, loop, train

import pipedream as pd
from pipedream.services.optimizer_trial.trial import check_steps_apart

Named = list[tuple[str, nn.Parameter]]
ADAMW = partial(torch.optim.AdamW, lr=0.1)
REFUSED = r" of other stages change the step of '\d\.[wb]'.* one stage|'\d\.[wb]' other options in its stage"


class Own(torch.optim.Optimizer):
    """Subtracts what a rule makes of a group's weights and gradients; the group keeps what the rule remembers."""

    def __init__(self, params: Any, rule: Callable[..., list[Tensor]]) -> None:
        self.rule = rule
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            for p, change in zip(weights, self.rule(self, group, weights, [p.grad for p in weights]), strict=True):
                p.sub_(change, alpha=group["lr"])


def by_norm(factor: Callable[[dict[str, Any], float], float]) -> Any:
    """Multiplies all gradients by what the group and their norm give."""
    norm_of = lambda slopes: sum(float(g.square().sum()) for g in slopes) ** 0.5  # noqa: E731
    return partial(Own, rule=lambda _, group, weights, slopes: [factor(group, norm_of(slopes)) * g for g in slopes])


def now_and_then(group: dict[str, Any], norm: float) -> float:
    group["count"] = group.get("count", 0) + 1
    return 1 / norm if group["count"] % 6 == 0 else 1.0


def prodigy(optimizer: Own, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """A rate that grows with what all weights have gained, as in Mishchenko and Defazio, 2023."""
    d = group.setdefault("d", 1e-6)
    gain, sums = group.get("gain", 0.0), 0.0
    for p, g in zip(weights, gradients, strict=True):
        state = optimizer.state[p]
        gain += d * float((g * (state.setdefault("first", p.detach().clone()) - p)).sum())
        sums += float(state.setdefault("sum", torch.zeros_like(p)).add_(g, alpha=d).abs().sum())
    group["gain"], group["d"] = gain, max(d, gain / sums)
    return [10 * group["d"] * g.sign() for g in gradients]


def clip(optimizer: Any, *_: Any) -> None:
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)


class ClippedAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        clip(self)
        return super().step(closure)


class Wrapper:
    """No torch.optim.Optimizer itself, as some wrappers."""

    def __init__(self, named: Named, *, clips: bool) -> None:
        self.base, self.clips = SGD(named), clips
        self.state, self.param_groups = self.base.state, self.base.param_groups

    def step(self) -> None:
        if self.clips:
            clip(self)
        self.base.step()


def with_hook(named: Named) -> torch.optim.Optimizer:
    optimizer = SGD(named)
    optimizer.register_step_pre_hook(clip)
    return optimizer


def with_other_step(named: Named) -> torch.optim.Optimizer:
    optimizer: Any = SGD(named)
    plain = optimizer.step
    optimizer.step = MethodType(lambda self, closure=None: (clip(self), plain())[1], optimizer)
    return optimizer


NORMALISED = by_norm(lambda group, norm: 1.0 / norm)


def grouped(key: Callable[[str], Any], factory: Any = NORMALISED, rates: tuple[float, ...] = ()) -> Any:
    """Makes an optimizer with a group of the weights whose names have the same key, and perhaps a rate for each."""

    def make(named: Named) -> Any:
        parts: dict[Any, dict[str, Any]] = {}
        for name, p in named:
            parts.setdefault(key(name), {"params": []})["params"].append(p)
        for part, rate in zip(parts.values(), rates, strict=False):
            part["lr"] = rate
        return factory(list(parts.values()))

    return make


TOGETHER: dict[str, Any] = {
    "clips only large gradients": by_norm(lambda group, norm: min(1.0, 300.0 / norm)),
    "normalised at each sixth step": by_norm(now_and_then),
    "Prodigy": partial(Own, rule=prodigy),
    "clips, then AdamW": partial(ClippedAdamW, lr=0.1),
    "hook": with_hook,
    "replaced step": with_other_step,
    "wrapped": partial(Wrapper, clips=True),
    "by group": grouped(lambda name: name.endswith("b")),
    "stops at large gradients": by_norm(lambda group, norm: float(norm < 5.0)),
    "rate by number": by_norm(lambda group, norm: 0.01 * len(group["params"])),
    "rates by place": lambda named: SGD([{"params": [p], "lr": 0.1 / (i + 1)} for i, (_, p) in enumerate(named)]),
}


def lamb(_: Own, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    return [g * p.detach().norm() / g.norm() for p, g in zip(weights, gradients, strict=True)]


def noisy(_: Own, group: Any, weights: Any, gradients: list[Tensor], generator: Any = None) -> list[Tensor]:
    noise = [torch.randn(g.shape, generator=generator, dtype=g.dtype) for g in gradients]
    return [g + n + random.random() + float(np.random.rand()) for g, n in zip(gradients, noise, strict=True)]


class ScheduleFree(Own):
    """Steps only in its training mode."""

    is_training = False

    def train(self) -> None:
        self.is_training = True

    def step(self, closure: Any = None) -> None:
        assert self.is_training
        super().step()


def muon_and_adamw(named: Named) -> Any:
    optimizer = torch.optim.Muon([p for _, p in named if p.ndim == 2], lr=0.1)
    other = ADAMW([p for _, p in named if p.ndim != 2])
    optimizer.register_step_post_hook(lambda *_: other.step())
    return optimizer


APART: dict[str, Any] = {
    "SGD": partial(SGD, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
    "Muon and AdamW": muon_and_adamw,
    "LAMB": partial(Own, rule=lamb),
    "noise": partial(Own, rule=noisy),
    "noise of its own generator": partial(Own, rule=partial(noisy, generator=torch.Generator())),
    "schedule-free": partial(ScheduleFree, rule=lamb),
    "wrapped": partial(Wrapper, clips=False),
    "cannot step": partial(Own, rule=lambda *_: 1 / 0),
    "rates by group": grouped(lambda name: name.endswith("b"), SGD, (0.1, 0.3)),
    "a norm for each stage": grouped(lambda name: name[0]),
    "the model's own weights": lambda named: Own([nn.Parameter(torch.ones(2))], lamb),
}


def check(factory: Any, stages: int = 3) -> None:
    shapes = {"w": (6, 5), "b": (6,)}
    handles = [{f"{s}.{n}": nn.Parameter(torch.ones(*shape)) for n, shape in shapes.items()} for s in range(stages)]
    preserving = partial(pd.capture.preserve_state, (), others=[factory])
    check_steps_apart(factory, [*handles, {}], torch.device("cpu"), preserving)
    assert all(torch.equal(p, torch.ones_like(p)) and p.grad is None for stage in handles for p in stage.values())


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("stages", [2, 5])
def test_an_optimizer_that_mixes_the_gradients_of_stages_is_refused(name: str, stages: int) -> None:
    with pytest.raises(pd.PipelineError, match=REFUSED):
        check(TOGETHER[name], stages)
    check(TOGETHER[name], stages=1)


@pytest.mark.parametrize("name", APART)
def test_an_optimizer_that_does_not_is_accepted(name: str) -> None:
    check(APART[name])


@pytest.mark.parametrize("pair", [(a, b) for a in range(5) for b in range(a)])
def test_each_pair_of_stages_is_told_apart(pair: tuple[int, int]) -> None:
    """Of five stages, the weights of any two have a norm together."""
    together = grouped(lambda name: "both" if int(name[0]) in pair else name)
    with pytest.raises(pd.PipelineError, match=f"'[{pair[0]}{pair[1]}]"):
        check(together, 5)


def test_a_hook_on_all_optimizers_is_tried() -> None:
    hook = register_optimizer_step_pre_hook(clip)
    try:
        with pytest.raises(pd.PipelineError, match="AdamW lets"):
            check(ADAMW)
    finally:
        hook.remove()
    check(ADAMW)


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
    count, names, counts, generator = 0, list[str](), {"factories": 0}, torch.Generator().manual_seed(3)

    def factory(named: Named, generator: Any = generator) -> Counting:
        nonlocal count
        count += 1
        counts["factories"] += 1
        names.extend(name for name, _ in named)
        return Counting([p for _, p in named], partial(noisy, generator=generator))

    def state() -> list[Any]:
        numbers = [count, calls, Counting.steps, [*Counting.numbers], [*names], dict(counts)]
        draws = generator.get_state().tolist(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()
        return [*numbers, *draws, random.getstate()]

    before = state()
    check(partial(factory, generator=generator))
    check(factory)
    assert state() == before


@pytest.mark.parametrize(
    ("schedule", "stages"), [("1f1b", 2), ("pipedream_2bw", 2), ("interleaved_1f1b", 4), ("roundpipe", 4)]
)
def test_pipelines_of_several_stages_refuse_it(schedule: str, stages: int) -> None:
    plan = Case("mlp", schedule, stages, workers=2).plan()
    with pytest.raises(pd.PipelineError, match="Own lets gradients of other stages"):
        make_pipeline("mlp", plan, schedule=schedule, optimizer=TOGETHER["Prodigy"])


@pytest.mark.parametrize(
    ("factory", "replicas"),
    [(TOGETHER["Prodigy"], (2,)), (NORMALISED, (1,)), (grouped(lambda name: int(name[0]) < 4), (1, 1))],
)
def test_one_stage_and_groups_within_stages_train_as_a_plain_loop(factory: Any, replicas: tuple[int, ...]) -> None:
    animal = zoo.make("matrices")
    expected = loop(zoo.make("matrices").model, animal.batches, optimizer=factory)
    plan = zoo.plan_of(animal, len(replicas), replicas)
    trained = train(animal.model, plan, animal.batches, schedule="1f1b", optimizer=factory)
    torch.testing.assert_close(trained.state, expected.state, rtol=1e-9, atol=1e-11)
