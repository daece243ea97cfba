"""Optimizers and schedulers of other libraries and of users resume exactly, with the same stages and with others."""

import math
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import thinned
from torch import nn
from torch.nn import functional as F
from training import loop, plan_of

import pipedream as pd
from pipedream.testing import Trained, Training, assert_near, tiny

Named = list[tuple[str, nn.Parameter]]
Factory = Callable[[Named], torch.optim.Optimizer]
How = tuple[Factory, Any]
"""Factories of an optimizer and of a scheduler."""


def of(kind: Callable[..., torch.optim.Optimizer], *args: Any, **options: Any) -> Factory:
    """Returns the factory of an optimizer of all parameters."""
    return lambda named: kind([p for _, p in named], *args, **options)


class Wrapper(torch.optim.Optimizer):
    """Has the groups of other optimizers, and takes their steps; `state_dict` is that of `form`."""

    def __init__(self, *bases: torch.optim.Optimizer, form: str = "base") -> None:
        self.bases, self.form, self.count = bases, form, 0
        super().__init__([{"params": [torch.zeros(())]}], {})
        self.param_groups = [group for base in bases for group in base.param_groups]
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for base in self.bases:
            base.step()
            for group in base.param_groups:
                for p in group["params"]:
                    slow = base.state[p].setdefault("slow", p.detach().clone())
                    if self.count % 3 == 0:
                        p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self) -> dict[str, Any]:
        states = [base.state_dict() for base in self.bases]
        if self.form == "base":
            return states[0] | {"count": self.count}
        return {"optimizers": states, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        for base, of_base in zip(self.bases, [state] if self.form == "base" else state["optimizers"], strict=True):
            base.load_state_dict({key: of_base[key] for key in ("state", "param_groups")})
        self.param_groups = [group for base in self.bases for group in base.param_groups]


class Late(torch.optim.Optimizer):
    """Makes options of its groups, and lists of tensors in its state, at the first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        group["step"] = group.get("step", torch.zeros(())) + 1
        first, second = group.setdefault("betas", (0.9, 0.99))
        for p in group["params"]:
            moments = self.state[p].setdefault("moments", [torch.zeros_like(p), {"square": torch.zeros_like(p)}])
            moments[0].lerp_(p.grad, 1 - first)
            moments[1]["square"].lerp_(p.grad * p.grad, 1 - second)
            p.sub_(group["lr"] * moments[0] / (moments[1]["square"].sqrt() + 1e-2) / math.sqrt(group["step"]))


class Decays(torch.optim.lr_scheduler.LRScheduler):
    """Moves the weight decay of each group too, from its own list."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.base_decays = [group["weight_decay"] for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        for group, decay in zip(self.optimizer.param_groups, self.base_decays, strict=True):
            group["weight_decay"] = decay * (2 - 0.9**self.last_epoch)
        return [base * 0.9**self.last_epoch for base in self.base_lrs]


def milestones(optimizer: torch.optim.Optimizer) -> Any:
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, Decays(optimizer)], milestones=[3])


class Opaque(torch.optim.SGD):
    """Adds to its state dict what is in none of its parameters' states."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"history": torch.arange(3.0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state.pop("history"), torch.arange(3.0))
        super().load_state_dict(state)


ADAMW = of(torch.optim.AdamW, lr=0.02, eps=1e-4)


def parted(named: Named) -> list[Named]:
    """Returns biases and others; a stage may have only one of them."""
    parts = [[pair for pair in named if pair[0].endswith("bias") is is_bias] for is_bias in (False, True)]
    return [part for part in parts if part]


def biases_apart(named: Named) -> torch.optim.Optimizer:
    groups = []
    for part in parted(named):
        options = {"weight_decay": 0.1, "lr": 0.1} if part[0][0].endswith("bias") else {"weight_decay": 0.3, "lr": 0.05}
        groups.append({"params": [p for _, p in part], **options})
    return torch.optim.SGD(groups, momentum=0.9)


def two_in_one(named: Named, order: int = 1) -> Wrapper:
    """The first stage has one of the two, so that its number is that of the other one elsewhere."""
    sgd = of(torch.optim.SGD, lr=0.05, momentum=0.9)
    bases = [(ADAMW if part[0][0].endswith("bias") else sgd)(part) for part in parted(named)]
    return Wrapper(*bases[::order], form="list")


CASES: dict[str, How] = {
    "wraps one": (lambda named: Wrapper(ADAMW(named)), None),
    "wraps one, in a list": (lambda named: Wrapper(ADAMW(named), form="list"), None),
    "late options": (of(Late), None),
    "decays by group": (biases_apart, Decays),
    "schedulers in turn": (biases_apart, milestones),
    "two in one": (two_in_one, None),
}
OPAQUE = of(Opaque, lr=0.1)


def model() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


BATCHES = (2 * tiny().data)[:8]


@cache
def plan(cut: int = 2) -> pd.Plan:
    return plan_of(model(), BATCHES[0][0], (cut,))


def training(optimizer: Factory, scheduler: Any = None, cut: int = 2) -> Training:
    how: dict[str, Any] = {"model": model, "data": BATCHES, "loss": F.cross_entropy, "plan": plan(cut)}
    return Training(optimizer=optimizer, scheduler=scheduler, schedule="1f1b", microbatches=2, **how)


def train_in_two_parts(folder: Path, how: How, cut: int, how_then: How | None = None) -> Trained:
    """Trains with the cut before layer 2, and from there on with another; returns the second part."""
    training(*how).pipeline(folder=folder, save_at=(4,))
    return training(*(how_then or how), cut).pipeline(resume=folder)


@pytest.mark.parametrize(
    ("how", "cut"),
    [
        *(pytest.param(CASES[name], 2, id=f"{name}, same cut") for name in ("wraps one", "two in one")),
        *thinned(pytest.param(how, 4, id=name) for name, how in CASES.items()),
        pytest.param((OPAQUE, None), 2, id="opaque, same cut"),
    ],
)
def test_a_resumed_run_is_a_plain_loop(how: How, cut: int, tmp_path: Path) -> None:
    expected = loop(model(), BATCHES, optimizer=how[0], scheduler=how[1]).state
    assert_near(train_in_two_parts(tmp_path, how, cut).state, expected, 1e-10)


class Grows(torch.optim.SGD):
    """Trains biases from the third step on."""

    def __init__(self, named: Named) -> None:
        super().__init__([p for n, p in named if n.endswith("weight")], lr=0.1)
        self.later = [p for n, p in named if n.endswith("bias")]
        self.steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        if self.steps == 3:
            self.add_param_group({"params": self.later, "lr": 0.01})
        super().step(closure)


@pytest.mark.parametrize(
    ("how", "how_then", "cut", "words"),
    [
        ((two_in_one, None), (lambda named: two_in_one(named, -1), None), 4, r"has state .* under 'optimizers\.\d"),
        ((OPAQUE, None), None, 4, "state dict of Opaque holds state of its stage .* resume with the plan"),
        ((biases_apart, Decays), (ADAMW, Decays), 2, "with the optimizer SGD, this run has AdamW; resume with SGD"),
        ((biases_apart, Decays), (biases_apart, milestones), 2, "with the scheduler Decays, .* SequentialLR; resume"),
        ((Grows, None), None, 2, "Grows has the parameter '.*bias' in a group, this run's has it in none"),
    ],
)
def test_what_cannot_be_resumed_is_refused(how: How, how_then: How, cut: int, words: str, tmp_path: Path) -> None:
    with pytest.raises(pd.PipelineError, match=words):
        train_in_two_parts(tmp_path, how, cut, how_then)


class Odd(torch.optim.SGD):
    """Cannot be saved once it has stepped, or not be loaded."""

    def __init__(self, params: Any, fault: str) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.fault = fault

    def step(self, closure: Any = None) -> Any:
        super().step()
        for state in self.state.values() if self.fault == "state" else ():
            state["when"] = object()
        if self.fault == "group":
            self.param_groups[0]["on"] = print

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | ({"object": object()} if self.fault == "dict" else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fault == "load":
            raise KeyError("history")
        super().load_state_dict(state)


class Keeps(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self) -> list[float]:
        self.state = object()
        return self.base_lrs


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("state", r"the state of Odd, 'when', is a object, which JSON cannot hold"),
        ("group", r"the option 'on' of Odd is a builtin_function_or_method"),
        ("load", r"the state of Odd can be saved, but not loaded again: KeyError: 'history'"),
        ("dict", r"state dict of Odd\['object'\] is a object, which JSON cannot"),
        ("schedule", r"state of Keeps cannot be kept in a checkpoint"),
    ],
)
def test_unsavable_state_is_refused(fault: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is made by the first step: it is tried on small parameters."""

    def recipe() -> pd.Recipe:
        scheduler = Keeps if fault == "schedule" else None
        return pd.Recipe(model(), F.cross_entropy, of(Odd, fault), BATCHES, scheduler=scheduler, epochs=1)

    monkeypatch.chdir(tmp_path)
    with pytest.raises(pd.PipelineError, match=words):
        pd.run(recipe, out="run", plan=plan(), quiet=True)
    assert not list((tmp_path / "run").glob("**/minibatch-*"))
    if fault == "load":
        pd.run(recipe, out="without", plan=plan(), quiet=True, checkpoint_every=0)
        with training(of(Odd, fault)).make_pipeline() as pipeline, pytest.raises(pd.PipelineError, match=words):
            pipeline.save(tmp_path / "of a loop of one's own")


def large(named: Named) -> torch.optim.Optimizer:
    """Cannot be made of small parameters, so that nothing is known."""
    assert max(p.numel() for _, p in named) > 4
    return of(torch.optim.SGD, lr=0.1)(named)


@pytest.mark.parametrize("how", [*CASES.values(), (large, None)], ids=[*CASES, "large"])
def test_what_can_be_saved_is_not_refused(how: How) -> None:
    with training(*how).make_pipeline() as pipeline:
        before = torch.get_rng_state()
        pipeline.check_savable()
        assert torch.equal(torch.get_rng_state(), before)
