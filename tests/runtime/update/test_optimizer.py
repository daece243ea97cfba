"""An update: gradients summed, divided once, clipped; learning rates, schedules, averages."""

from functools import partial
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from cases import make_pipeline
from torch import nn
from training import SGD

import pipedream as pd
from pipedream.core.schedule.update_policy import Policy
from pipedream.extensions.clipping.clipping import find_norm_square
from pipedream.extensions.compensations.error_feedback import ErrorFeedback
from pipedream.extensions.delays.predictions import add_velocity
from pipedream.runtime.comm.channel import LocalGroup, run_alone
from pipedream.runtime.update.gradients import Gradients
from pipedream.runtime.update.optimizer import Optimizer, make_optimizer
from pipedream.runtime.update.rate_schedule import RateSchedule, StageUpdates
from pipedream.runtime.update.stepped import SteppedWeights
from pipedream.runtime.updates import Updates


def make_handles() -> dict[str, nn.Parameter]:
    return {"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(2, 2))}


def stepping(handles: Any, optimizer: Any, updates: StageUpdates | None = None) -> Optimizer:
    return Optimizer(SteppedWeights(handles), RateSchedule(optimizer, None, updates))


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda named: torch.optim.LBFGS([handle for _, handle in named]), "LBFGS computes the loss several times"),
        (lambda named: SGD([p for name, p in named if name == "c"]), "none of this stage's parameters, a, b; freeze"),
    ],
)
def test_what_cannot_step_a_stage_is_refused(factory: Any, words: str) -> None:
    with pytest.raises(pd.PipelineError, match=words):
        make_optimizer(factory, SteppedWeights(make_handles()))


def test_large_gradients_that_are_finite_have_a_norm() -> None:
    handles = make_handles()
    optimizer, gradients = stepping(handles, SGD(handles.values())), Gradients(2)
    gradients.add([torch.full((3,), 1e20), torch.full((2, 2), -1e38)], 1.0)
    run_alone(optimizer.prepare(gradients))
    assert float(find_norm_square(optimizer)) == pytest.approx(3e40 + 4e76, rel=1e-6)
    for value, is_finite in ((3e38, True), (float("inf"), False), (float("nan"), False)):
        handles["a"].grad = torch.full((3,), value)
        assert isfinite(find_norm_square(optimizer)) == is_finite


def test_what_a_compensation_keeps_goes_on_into_a_phase_that_keeps_it_too() -> None:
    """y(t+1) = y(t) - (u_t + lambda (u_t - u_{t-1})); after a phase without error feedback u_{t-1} is 0 again."""
    handles = {"a": nn.Parameter(torch.zeros(1))}
    sgd = torch.optim.SGD(handles.values(), lr=1.0)
    optimizer = stepping(handles, sgd)
    moved, rounds = [], []
    for number, (strength, gradient) in enumerate(((1.0, 1.0), (2.0, 3.0), (0.0, 5.0), (1.0, 1.0))):
        rule = pd.schedules.UpdateRule((1,), compensation=(ErrorFeedback(strength),))
        former, optimizer = optimizer, stepping(handles, sgd, StageUpdates(rule, staleness=1))
        optimizer.take_over(former, input_updates=min(number, 1))
        rounds.append(optimizer.schedule.rounds)
        handles["a"].grad = torch.full((1,), gradient)
        before = float(handles["a"].detach())
        optimizer.step()
        moved.append(before - float(handles["a"].detach()))
    assert moved == [1 + 1, 3 + 2 * (3 - 1), 5, 1 + 1]
    assert rounds == [0, 1, 2, 3]


def test_clipping_by_the_stages_own_norm_does_not_wait_for_the_device() -> None:
    """On the meta device, where the host cannot read a number."""
    handles = {name: nn.Parameter(torch.empty_like(handle, device="meta")) for name, handle in make_handles().items()}
    optimizer, gradients = stepping(handles, torch.optim.AdamW(handles.values(), 0.1)), Gradients(len(handles))
    gradients.add([torch.empty_like(handle) for handle in handles.values()], 3.0)
    stage_state: Any = SimpleNamespace(
        optimizer=optimizer, collect_gradients=lambda: gradients, compare_first_update=lambda: None
    )
    policy, program = Policy(0.5, "local", "error", "", None), pd.lower(pd.schedules.build("naive", pd.Plan.uniform(1)))
    run_alone(Updates(policy, program, LocalGroup(1).member(0), {0: stage_state}).prepare(0, 0.0))
    assert all(handle.grad is not None for handle in handles.values())
    with pytest.raises(RuntimeError):
        float(find_norm_square(optimizer))


def test_the_velocity_of_a_fused_optimizer_is_not_waited_for() -> None:
    weights = nn.Parameter(torch.randn(4)), nn.Parameter(torch.empty(4, device="meta"))
    results = []
    for weight in weights:
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        state = {"exp_avg": torch.ones_like(weight), "exp_avg_sq": torch.ones_like(weight)}
        optimizer.state[weight] = {**state, "step": torch.ones((), device=weight.device)}  # as if fused
        target = torch.zeros_like(weight)
        add_velocity(optimizer, {weight: target}, 2.0)
        results.append(target.detach())
    assert results[1].is_meta
    torch.testing.assert_close(results[0], torch.full((4,), -0.2 / (1 - 0.9) / (1 / (1 - 0.999)) ** 0.5))


class Averaged(torch.optim.SGD):
    """Shows an average of its weights between `eval` and `train`; it must not step it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.2)
        self.param_groups[0]["shows"] = False

    def train(self, mode: bool = True) -> None:
        (group,) = self.param_groups
        if group["shows"] == mode:
            group["shows"] = not mode
            for p in group["params"]:
                hidden = self.state[p].get("hidden", p.detach())
                self.state[p]["hidden"] = p.detach().clone()
                p.data.copy_(hidden)

    def eval(self) -> None:
        self.train(False)

    def step(self, closure: Any = None) -> None:
        assert not self.param_groups[0]["shows"], "call optimizer.train() before step()"
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("hidden", torch.zeros_like(p)).lerp_(p.detach(), 0.3)


def test_optimizers_with_weights_for_evaluation_are_switched(tmp_path: Path) -> None:
    """Evaluated, saved and resumed with the averages; trained without them."""
    animal = zoo.make("matrices")
    batches, plan, plain = animal.batches[:3], zoo.plan_of(animal, 2), zoo.make("matrices").model
    optimizer = Averaged(plain.parameters())
    averages, losses = [], []
    for _ in range(2):
        optimizer.train()
        for inputs, targets in batches:
            optimizer.zero_grad()
            animal.loss(plain(inputs), targets).backward()
            optimizer.step()
        optimizer.eval()
        averages.append({name: tensor.clone() for name, tensor in plain.state_dict().items()})
        with torch.no_grad():
            losses.append(sum(float(animal.loss(plain(inputs), targets)) for inputs, targets in batches) / 3)
    make = partial(make_pipeline, "matrices", plan, schedule="1f1b", optimizer=Averaged, check=False)
    with make() as pipeline:
        for epoch in range(2):
            list(pipeline.train(batches))
            assert pipeline.evaluate(batches)["loss"] == pytest.approx(losses[epoch], rel=1e-10)
            torch.testing.assert_close(pipeline.state_dict(), averages[epoch], rtol=1e-10, atol=1e-12)
            if not epoch:
                pipeline.save(tmp_path)
    with make() as pipeline:
        pipeline.load(tmp_path)
        list(pipeline.train(batches))
        torch.testing.assert_close(pipeline.state_dict(), averages[1], rtol=1e-10, atol=1e-12)
