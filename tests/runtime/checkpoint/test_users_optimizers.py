"""Optimizers and schedulers of other libraries and of users resume exactly, with the same stages and with others."""

import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import loop

import pipedream as pd
from pipedream.core.errors import ArtifactError, PipelineError

Named = list[tuple[str, nn.Parameter]]
ADAMW = {"lr": 0.02, "eps": 1e-4}


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

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", torch.zeros(())) + 1
            group.setdefault("betas", (0.9, 0.99))
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                moments = state.setdefault("moments", [torch.zeros_like(p), {"square": torch.zeros_like(p)}])
                moments[0].lerp_(p.grad, 1 - first)
                moments[1]["square"].lerp_(p.grad * p.grad, 1 - second)
                p.sub_(group["lr"] * moments[0] / (moments[1]["square"].sqrt() + 1e-2) / math.sqrt(group["step"]))


class Decays(torch.optim.lr_scheduler.LRScheduler):
    """Moves the weight decay of each group too, from its own list."""

    def __init__(self, optimizer: torch.optim.Optimizer, total: int = 8) -> None:
        self.total = total
        self.base_decays = [group["weight_decay"] for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        part = 0.5 * (1 + math.cos(math.pi * self.last_epoch / self.total))
        for group, decay in zip(self.optimizer.param_groups, self.base_decays, strict=True):
            group["weight_decay"] = decay * (2 - part)
        return [base * (0.1 + part) for base in self.base_lrs]


def biases_apart(named: Named) -> torch.optim.Optimizer:
    """Two groups; a stage may have only one of them."""
    bias, other = [p for n, p in named if n.endswith("bias")], [p for n, p in named if not n.endswith("bias")]
    groups = [{"params": other, "weight_decay": 0.3, "lr": 0.05}] if other else []
    return torch.optim.SGD(
        [*groups, *([{"params": bias, "weight_decay": 0.1, "lr": 0.1}] if bias else [])], momentum=0.9
    )


def two_in_one(named: Named) -> Wrapper:
    bias, other = [p for n, p in named if n.endswith("bias")], [p for n, p in named if not n.endswith("bias")]
    parts = [torch.optim.SGD(other, lr=0.05, momentum=0.9)] if other else []
    return Wrapper(*parts, *([torch.optim.AdamW(bias, **ADAMW)] if bias else []), form="list")


def milestones(optimizer: torch.optim.Optimizer) -> Any:
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, Decays(optimizer)], milestones=[3])


CASES: dict[str, tuple[Callable[[Named], torch.optim.Optimizer], Any]] = {
    "wraps one": (lambda named: Wrapper(torch.optim.AdamW([p for _, p in named], **ADAMW)), None),
    "wraps one, in a list": (
        lambda named: Wrapper(torch.optim.AdamW([p for _, p in named], **ADAMW), form="list"),
        None,
    ),
    "late options": (lambda named: Late([p for _, p in named]), None),
    "decays by group": (biases_apart, Decays),
    "schedulers in turn": (biases_apart, milestones),
}


def model() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(8, 6, generator=generator, dtype=torch.float64), torch.randint(3, (8,), generator=generator))
        for _ in range(8)
    ]


@pytest.fixture(scope="module")
def profile() -> pd.Profile:
    return pd.profile(model(), batches()[0][0], warmup=0, runs=1)


def plan_of(profile: pd.Profile, *cuts: int) -> pd.Plan:
    shape = (1,) * (len(cuts) + 1)
    return pd.plan(profile, pd.Cluster.flat(len(shape)), schedule="1f1b", microbatches=2, shape=shape, cuts=cuts)


def pipeline_of(profile: pd.Profile, optimizer: Any, scheduler: Any = None, cut: int = 2) -> pd.Pipeline:
    plan = plan_of(profile, cut)
    return pd.Pipeline(model(), plan, optimizer=optimizer, scheduler=scheduler, loss=F.cross_entropy, check=False)


def train_plainly(optimizer: Callable[[Named], torch.optim.Optimizer], scheduler: Any) -> dict[str, torch.Tensor]:
    return loop(model(), batches(), optimizer=optimizer, scheduler=scheduler).state


def train_in_two_parts(
    folder: Path, profile: pd.Profile, cut: int, optimizer: Callable[[Named], torch.optim.Optimizer], scheduler: Any
) -> dict[str, torch.Tensor]:
    """Trains with the cut before layer 2, and from there on with another."""
    with pipeline_of(profile, optimizer, scheduler) as pipeline:
        list(pipeline.train(batches()[:4]))
        pipeline.save(folder)
    with pipeline_of(profile, optimizer, scheduler, cut) as pipeline:
        pipeline.load(folder)
        list(pipeline.train(batches()[4:]))
        return pipeline.state_dict()


@pytest.mark.parametrize(("case", "cut"), [("wraps one", 2), *((case, 4) for case in CASES)])
def test_a_resumed_run_is_a_plain_loop(case: str, cut: int, profile: pd.Profile, tmp_path: Path) -> None:
    expected = train_plainly(*CASES[case])
    weights = train_in_two_parts(tmp_path, profile, cut, *CASES[case])
    torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)


def test_several_optimizers_in_one(profile: pd.Profile, tmp_path: Path) -> None:
    """The first stage has one of the two, so that its number is that of the other one elsewhere."""
    expected = train_plainly(two_in_one, None)
    for cut in (2, 4):
        weights = train_in_two_parts(tmp_path / str(cut), profile, cut, two_in_one, None)
        torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)

    def adamw_first(named: Named) -> Wrapper:
        return Wrapper(*reversed(two_in_one(named).bases), form="list")

    with pytest.raises(ArtifactError, match=r"has state of the parameter '.*' under 'optimizers\.\d"):
        train_in_two_parts(tmp_path / "moved", profile, 4, adamw_first, None)


class Opaque(torch.optim.SGD):
    """Adds to its state dict what is in none of its parameters' states."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"history": torch.arange(3.0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state.pop("history"), torch.arange(3.0))
        super().load_state_dict(state)


def test_state_that_cannot_be_divided_needs_the_same_plan(profile: pd.Profile, tmp_path: Path) -> None:
    def opaque(named: Named) -> torch.optim.Optimizer:
        return Opaque([p for _, p in named], lr=0.1)

    weights = train_in_two_parts(tmp_path / "same", profile, 2, opaque, None)
    torch.testing.assert_close(weights, train_plainly(opaque, None), rtol=1e-10, atol=1e-12)
    with pytest.raises(ArtifactError, match=r"state dict of Opaque holds state of its stage .* resume with the plan"):
        train_in_two_parts(tmp_path / "other", profile, 4, opaque, None)


class Strange(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"object": object()}


def test_what_cannot_be_saved_is_refused(profile: pd.Profile, tmp_path: Path) -> None:
    def strange(named: Named) -> torch.optim.Optimizer:
        return Strange([p for _, p in named], lr=0.1)

    with pytest.raises(PipelineError, match=r"the state dict of Strange\['object'\] is a object, which JSON cannot"):
        train_in_two_parts(tmp_path, profile, 2, strange, None)


class Odd(torch.optim.SGD):
    """Cannot be saved once it has stepped, or not be loaded."""

    def __init__(self, params: Any, how: str) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.how = how

    def step(self, closure: Any = None) -> Any:
        super().step()
        for state in self.state.values() if self.how == "state" else ():
            state["when"] = object()
        if self.how == "group":
            self.param_groups[0]["on"] = print

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.how == "load":
            raise KeyError("history")
        super().load_state_dict(state)


class Keeps(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self) -> list[float]:
        self.state = object()
        return self.base_lrs


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("state", r"the state of Odd, 'when', is a object, which JSON cannot hold"),
        ("group", r"the option 'on' of Odd is a builtin_function_or_method"),
        ("load", r"the state of Odd can be saved, but not loaded again: KeyError: 'history'"),
        ("schedule", r"state of Keeps cannot be kept in a checkpoint"),
        ("", ""),
    ],
)
def test_what_cannot_be_saved_later_is_refused_before_training(
    profile: pd.Profile, how: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is made by the first step: it is tried on small parameters."""

    def recipe() -> pd.Recipe:
        return pd.Recipe(
            model(),
            F.cross_entropy,
            lambda named: Odd([p for _, p in named], how),
            batches(),
            scheduler=Keeps if how == "schedule" else None,
            epochs=1,
        )

    plan = plan_of(profile, 2)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PipelineError, match=words) if how else nullcontext():
        pd.run(recipe, out="run", plan=plan, quiet=True)
    assert (tmp_path / "run" / "checkpoints" / "minibatch-00000008").exists() != bool(how)
    if how == "load":
        pd.run(recipe, out="without", plan=plan, quiet=True, checkpoint_every=0)
        script = recipe()
        options: dict[str, Any] = {"loss": F.cross_entropy, "check": False, "optimizer": script.optimizer}
        with pd.Pipeline(script.model, plan, **options) as pipeline, pytest.raises(PipelineError, match=words):
            pipeline.save(tmp_path / "of a loop of one's own")


def test_a_state_that_small_parameters_cannot_make_is_not_judged(profile: pd.Profile) -> None:
    def large(named: Named) -> torch.optim.Optimizer:
        assert max(p.numel() for _, p in named) > 4
        return torch.optim.SGD([p for _, p in named], lr=0.1)

    with pipeline_of(profile, large) as pipeline:
        pipeline.check_savable()


@pytest.mark.parametrize("name", CASES)
def test_what_can_be_saved_is_not_refused(profile: pd.Profile, name: str) -> None:
    with pipeline_of(profile, *CASES[name]) as pipeline:
        before = torch.get_rng_state()
        pipeline.check_savable()
        assert torch.equal(torch.get_rng_state(), before)


def test_another_optimizer_is_refused(profile: pd.Profile, tmp_path: Path) -> None:
    with pipeline_of(profile, biases_apart, Decays) as pipeline:
        pipeline.save(tmp_path)
    for optimizer, scheduler, words in (
        (torch.optim.AdamW, Decays, "was saved with the optimizer SGD, this run has AdamW; resume with SGD"),
        (biases_apart, milestones, "with the scheduler Decays, this run has SequentialLR; resume with Decays"),
    ):
        with pipeline_of(profile, optimizer, scheduler) as pipeline, pytest.raises(ArtifactError, match=words):
            pipeline.load(tmp_path)


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


def test_a_group_that_the_new_optimizer_does_not_have_yet_is_refused(profile: pd.Profile, tmp_path: Path) -> None:
    with pipeline_of(profile, Grows) as pipeline:
        list(pipeline.train(batches()))
        pipeline.save(tmp_path)
    with (
        pipeline_of(profile, Grows) as pipeline,
        pytest.raises(ArtifactError, match=r"Grows has the parameter '.*bias' in a group, this run's has it in none"),
    ):
        pipeline.load(tmp_path)
