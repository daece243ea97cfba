"""Methods whose forward and backward read different weights train as their papers' equations say (`delayed`)."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cases
import delayed
import pytest
import torch
import zoo
from cases import Case, check, make_pipeline, run
from marks import needs_bfloat16_lstm, spread, thinned
from torch import nn

import pipedream as pd
from pipedream.runtime.stage.versions import Versions

BOUND = 1e-9
LSTM = pytest.param("timeprest", "lstm", marks=needs_bfloat16_lstm)
NF1B = ("timeprest", "v_timeprest", "timeprest_interpolated")
PARTS = {"pipemare": 2, "xpipe": 2, "paci": 2}
PARTS |= dict.fromkeys(NF1B, 3)
VERSIONS = {  # one elsewhere
    "spectrain_v2": lambda p, s, m: p - s + 1,
    "timeprest": lambda p, s, m: 1 + -(-2 * s // m),
    "timeprest_interpolated": lambda p, s, m: 1 + -(-2 * (p - 1 - s) // m),
}
LATE = dict.fromkeys(("pipelined_backprop", "pb_lwp", "pipemare", *NF1B), 2)  # times p - 1 - s, in microbatches


def _case(animal: str, schedule: str, stages: int = 3, **more: Any) -> Case:
    return Case(animal, schedule, stages, microbatches=PARTS.get(schedule), **more)


def _options(**options: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(options.items())


def _matrix() -> list[Any]:
    """Returns each method with the mlp and SGD with momentum, some with other animals, AdamW and options."""
    quick = [
        *(_case("mlp", schedule) for schedule in delayed.PAPERS),
        *(_case("cnn", schedule, optimizer="adamw") for schedule in ("spectrain", "timeprest_interpolated")),
        _case("mlp", "pipelined_backprop", options=_options(backward_rule="recompute")),
        _case("cnn", "pb_lwp", 4, epochs=3, evaluate_at=(6,), optimizer="adamw", options=_options(by="difference")),
        _case("mlp", "pb_lwp_sc", 4, epochs=3, evaluate_at=(6,)),
        _case("mlp", "timeprest", optimizer="adamw", options=_options(backward_rule="recompute")),
        _case("mlp", "timeprest_interpolated", options=_options(backward_rule="recompute", share=0.6)),
        Case("mlp", "paci", 4, microbatches=2, options=_options(backward_rule="stash")),
    ]
    slow = [
        *quick,
        *(_case("cnn", schedule, 4, optimizer="adamw") for schedule in delayed.PAPERS),
        _case("lstm", "spectrain", options=_options(backward_rule="recompute")),
        _case("transformer", "timeprest_interpolated", optimizer="adamw", options=_options(backward_rule="recompute")),
        Case("transformer", "paci", 3, microbatches=2, recompute=True, options=_options(backward_rule="stash")),
        Case("mlp", "paci", 3, replicas=(3, 2, 1), microbatches=4, options=_options(backward_rule="stash")),
        _case("mlp", "spectrain_v2", 4, optimizer="adamw", options=_options(by="difference")),
        _case("mlp", "pipeoptim", 2, replicas=(2, 1), scheduled=True),
        Case("mlp", "xpipe", 2, replicas=(2, 1), microbatches=5),
        _case("mlp", "pipemare", 4, evaluate_at=(), leave_at=5),
        *(_case("mlp", schedule, 2, replicas=replicas) for schedule in NF1B for replicas in ((2, 1), (1, 2))),
    ]
    longer = [pytest.param(case.lengthened(), id=f"{case} lengthened", marks=pytest.mark.slow) for case in slow]
    shown, methods = [pytest.param(case, id=str(case)) for case in quick], len(delayed.PAPERS)
    return shown[:methods] + thinned(shown[methods:]) + spread(longer, 4)


@pytest.mark.parametrize("case", _matrix())
def test_every_method_trains_as_its_paper_says(case: Case) -> None:
    outcome = run(case)
    check(case, outcome, BOUND)
    p, m = case.stages, case.training().make_schedules()[0].microbatches
    for stage in range(p):
        versions = VERSIONS.get(case.schedule, lambda p, s, m: 1)(p, stage, m)
        if case.options == _options(backward_rule="stash"):
            versions = -(-(p - 1 - stage) // m) + 1
        if case.replicas and (case.schedule in NF1B or case.options):  # each depth is rounded up to its replicas
            method = case.schedule + "[backward_rule=stash]" * bool(case.options)
            versions = pd.schedules.build(method, case.plan(), m).weights.versions(stage)
        storages, peak, _ = outcome.watched[-1][stage]
        assert storages <= peak == versions  # a stage may have no weights
        if not case.replicas:
            late = LATE.get(case.schedule.removesuffix("_sc"), 1) * (p - 1 - stage * (case.schedule != "timeprest"))
            assert max(outcome.staleness[stage]) == -(-late // m)


@pytest.mark.parametrize(
    ("name", "compensation"),
    [
        ("spectrain", "spike"),
        ("spectrain_v2", "spike"),
        ("spectrain_v2", "error_feedback:1"),
        ("pb_lwp", "nesterov"),
        ("xpipe", "velocity_prediction:2"),
    ],
)
def test_one_delay_is_made_up_for_once(name: str, compensation: str) -> None:
    with pytest.raises(pd.errors.ScheduleError, match="both make up for the same staleness"):
        pd.schedules.build(name, pd.Plan.uniform(3)).with_compensation(compensation)


IN_PROCESSES = {
    2: [
        _case("mlp", "pipelined_backprop", 2),
        _case("cnn", "paci", 2, options=_options(backward_rule="recompute")),
        Case("cnn", "paci", 2, microbatches=2, options=_options(backward_rule="stash")),
        _case("mlp", "spectrain_v2", 2),
        _case("mlp", "xpipe", 2),
        _case("lstm", "pipemare", 2),
        _case("cnn", "timeprest", 2),
        *(_case("mlp", name, 2) for name in ("pb_lwp", "pb_lwp_sc", "pipeoptim", "spectrain", "v_timeprest")),
        _case("mlp", "timeprest_interpolated", 2, options=_options(backward_rule="recompute")),
    ],
    3: [
        _case("cnn", "spectrain", 3),
        _case("mlp", "pb_lwp", 3, options=_options(by="difference")),
        _case("mlp", "pipeoptim", 2, replicas=(2, 1)),
        _case("mlp", "paci", 2, replicas=(1, 2)),
        Case("mlp", "paci", 2, replicas=(2, 1), microbatches=2, options=_options(backward_rule="stash")),
        _case("mlp", "timeprest", 2, replicas=(2, 1)),
        _case("mlp", "timeprest_interpolated", 3, options=_options(backward_rule="recompute")),
    ],
}


# -- tags ------------------------------------------------------------------------------------------


def test_tags_tell_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be the table's also if a run read other weights, were they not taken from these."""
    peek = Versions.peek
    monkeypatch.setattr(Versions, "peek", lambda self, version=None: peek(self))
    with pytest.raises(AssertionError, match="forward_version"):
        run(_case("mlp", "timeprest", epochs=3, evaluate_at=()))


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (partial(torch.optim.SGD, lr=0.1), "needs momentum="),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True), "nesterov=False"),
        (partial(torch.optim.Adam, amsgrad=True), "amsgrad=False"),
        (partial(torch.optim.AdamW, maximize=True), "maximize=False"),
        (torch.optim.RMSprop, "RMSprop: it is known for SGD with momentum, Adam, AdamW"),
        (torch.optim.NAdam, r"NAdam: it is known .*pb_lwp\[by=difference\]\), which works with any optimizer"),
    ],
)
@pytest.mark.parametrize("name", ["pb_lwp", "spectrain_v2"])
def test_a_velocity_that_is_not_known_is_refused(name: str, optimizer: Any, reason: str) -> None:
    with pytest.raises(pd.errors.ScheduleError, match=reason):
        make_pipeline("mlp", schedule=name, optimizer=optimizer)


def test_activations_that_are_not_kept_are_refused() -> None:
    plan = pd.Plan.uniform(2)
    again = replace(plan, stages=tuple(replace(stage, recompute=True) for stage in plan.stages))
    with pytest.raises(pd.errors.ScheduleError, match="stage 0 of the plan recomputes and does not keep them"):
        pd.schedules.build("paci", again)
    exact = pd.schedules.build("paci[backward_rule=recompute]", again)
    with pytest.raises(pd.errors.ScheduleError, match="stage 0 of its plan does not recompute"):
        replace(exact, plan=plan)


@pytest.mark.parametrize(("name", "animal"), [("pipelined_backprop", "transformer"), LSTM])
def test_old_graphs_cast_newer_weights_under_autocast(name: str, animal: str) -> None:
    specimen, plan = zoo.make(animal, torch.float32), (1,) * (4 if animal == "lstm" else 2)
    with make_pipeline(specimen, plan, schedule=name, autocast=torch.bfloat16) as pipeline:
        list(pipeline.train(specimen.batches))


class _OwnSgd(torch.optim.Optimizer):
    """SGD with momentum, as a user writes it, which tells its direction."""

    def __init__(self, parameters: Any, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self._momentum, self._decay = momentum, weight_decay

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["v"] = self._momentum * state.get("v", 0.0) + p.grad + self._decay * p
                    p -= group["lr"] * state["v"]

    def velocity(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return self.state[parameter].get("v")


def test_an_optimizer_may_tell_its_velocity(monkeypatch: pytest.MonkeyPatch) -> None:
    case = _case("mlp", "pb_lwp", epochs=2, evaluate_at=())
    monkeypatch.setitem(cases.OPTIMIZERS, "sgd", partial(_OwnSgd, **cases.OPTIMIZERS["sgd"].keywords))
    check(case, run(case), BOUND)


# -- any optimizer, by differences -----------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "kind"), [("pb_lwp", torch.optim.Muon), ("spectrain_v2", torch.optim.RMSprop)])
def test_any_optimizer_is_predicted_by_its_last_difference(schedule: str, kind: Any) -> None:
    case = Case("matrices", schedule, 3, epochs=4, evaluate_at=(), options=_options(by="difference"))

    def make_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = kind([p for _, p in named], lr=0.02)  # Muon takes no names
        return optimizer

    reads = replace(delayed.PAPERS[schedule](3, 1), by="difference")
    assert len(replace(case.training(), optimizer=make_optimizer).check(BOUND, reads=reads).losses) == 20


# -- drains and checkpoints ------------------------------------------------------------------------


def test_a_difference_is_in_the_checkpoint(tmp_path: Path) -> None:
    case = _case("mlp", "pb_lwp", evaluate_at=(), options=_options(by="difference"))
    replace(case.training(), optimizer=partial(torch.optim.RMSprop, lr=0.01)).resumed(tmp_path, (3, 8))
