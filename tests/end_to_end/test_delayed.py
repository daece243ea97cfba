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
from marks import spread
from torch import nn

import pipedream as pd
from pipedream import schedules
from pipedream.runtime.stage.versions import Versions
from pipedream.schedules.asynchronous.pb_lwp import pb_lwp
from pipedream.schedules.asynchronous.spectrain import spectrain_v2

BOUND = 1e-9
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
        _case("mlp", "pb_lwp", 4, options=_options(scale=2.0)),
        _case("mlp", "pipeoptim", 2, replicas=(2, 1), scheduled=True),
        Case("mlp", "xpipe", 2, replicas=(2, 1), microbatches=5),
        _case("mlp", "pipemare", 4, evaluate_at=(), leave_at=5),
        *(_case("mlp", schedule, 2, replicas=replicas) for schedule in NF1B for replicas in ((2, 1), (1, 2))),
        Case("mlp", "timeprest", 3, replicas=(3, 2, 1), microbatches=4),
    ]
    longer = [pytest.param(case.lengthened(), id=f"{case} lengthened", marks=pytest.mark.slow) for case in slow]
    return [pytest.param(case, id=str(case)) for case in quick] + spread(longer)


@pytest.mark.parametrize("case", _matrix())
def test_every_method_trains_as_its_paper_says(case: Case) -> None:
    outcome = run(case)
    assert len(outcome.losses) >= case.minibatches - (case.leave_at >= 0) * case.stages * 2
    check(case, outcome, BOUND)
    p, m = case.stages, case.training().make_schedules()[0].microbatches
    for stage in range(p):
        versions = VERSIONS.get(case.schedule, lambda p, s, m: 1)(p, stage, m)
        if case.options == _options(backward_rule="stash"):
            versions = -(-(p - 1 - stage) // m) + 1
        if case.replicas and (case.schedule in NF1B or case.options):  # each depth is rounded up to its replicas
            versions = schedules.build(
                case.schedule + "[backward_rule=stash]" * bool(case.options), case.plan(), m
            ).weights.versions(stage)
        assert (
            outcome.watched[-1][stage].storages <= outcome.watched[-1][stage].peak == versions
        )  # a stage may have no weights
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
        schedules.build(name, pd.Plan.uniform(3)).with_compensation(compensation)


def test_the_comparison_can_fail() -> None:
    case = _case("mlp", "spectrain", epochs=2, evaluate_at=())
    outcome = run(case)
    # (By the difference it would be the same: it is what SGD's velocity has just added.)
    check(case, outcome, BOUND)
    check(replace(case, options=_options(by="difference")), outcome, BOUND)
    wrong = [
        {"schedule": "pipeoptim"},
        {"schedule": "spectrain_v2"},
        {"schedule": "pipelined_backprop"},
        {"options": _options(backward_rule="recompute")},
    ]
    for change in wrong:
        with pytest.raises(AssertionError):
            check(replace(case, **change), outcome, BOUND)


def test_stashing_without_accumulation_is_pipedream() -> None:
    case = Case("cnn", "paci", 3, microbatches=1, epochs=2, evaluate_at=(), options=_options(backward_rule="stash"))
    stashing, other = run(case), run(replace(case, schedule="pipedream", microbatches=None, options=()))
    cases.assert_near(stashing.state, other.state, BOUND)
    assert [[kept.peak for _, kept in sorted(ran.watched[-1].items())] for ran in (stashing, other)] == [[3, 2, 1]] * 2
    assert stashing.staleness == other.staleness


@pytest.mark.parametrize("rule", ["graph", pytest.param("recompute", marks=pytest.mark.slow)])
def test_the_ends_of_an_interpolation(rule: str) -> None:
    """With no share of the stash it is V-TiMePReSt, to the bit; with all of it, stashing: true gradients."""
    none, whole, newest = (
        run(_case("mlp", name, epochs=2, evaluate_at=(), options=_options(backward_rule=rule, **more)))
        for name, more in (
            ("timeprest_interpolated", {"share": 0.0}),
            ("timeprest_interpolated", {"share": 1.0}),
            ("v_timeprest", {}),
        )
    )
    assert all(torch.equal(none.state[name], newest.state[name]) for name in newest.state)
    stash = replace(delayed.PAPERS["timeprest_interpolated"](3, 3), backward=None)
    training = _case("mlp", "v_timeprest", epochs=2, evaluate_at=()).training()
    training.assert_serial(whole, BOUND, reads=stash)
    with pytest.raises(AssertionError):
        training.assert_serial(none, BOUND, reads=stash)


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


@pytest.mark.parametrize("name", delayed.PAPERS)
def test_the_static_table_is_the_papers(name: str) -> None:
    """`run` holds the tags of each run to the table."""
    schedule = schedules.build(name, pd.Plan.uniform(3), PARTS.get(name))
    paper = delayed.PAPERS[name](3, schedule.microbatches)
    for s in range(3):
        for k in range(45):
            assert schedule.weights.forward_version(s, k) == paper.forward(s, k)
            assert schedule.weights.backward_version(s, k) == (paper.backward or paper.forward)(s, k)


def test_tags_tell_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be the table's also if a run read other weights, were they not taken from these."""
    peek = Versions.peek
    monkeypatch.setattr(Versions, "peek", lambda self, version=None: peek(self))
    with make_pipeline("mlp", (1, 1, 1), schedule="timeprest", microbatches=3) as pipeline:
        list(pipeline.train(zoo.make("mlp").batches, epochs=3))
        rule = pipeline.program.weights
        wrong = [
            t
            for t in pipeline.timeline().gradient_versions
            if t.forward_version != rule.forward_version(t.stage, t.microbatch)
        ]
    assert {tag.stage for tag in wrong} == {1, 2}
    with pytest.raises(AssertionError, match="forward_version"):
        run(_case("mlp", "timeprest", epochs=3, evaluate_at=()))


@pytest.mark.parametrize(
    ("p", "m", "delays_updates"),
    [
        (3, 2, [2, 1, 0]),
        pytest.param(4, 3, [2, 2, 1, 0], marks=pytest.mark.slow),
        pytest.param(3, 4, [1, 1, 0], marks=pytest.mark.slow),
        pytest.param(4, 8, [1, 1, 1, 0], marks=pytest.mark.slow),
    ],
)
def test_lags_of_nf1b_in_a_run(p: int, m: int, delays_updates: list[int]) -> None:
    """As a reproduction measured them where forwards read the newest weights; under a tag all are the input stage's."""
    for name, expected in (
        ("v_timeprest", delays_updates),
        ("timeprest", [delays_updates[0]] * p),
        ("timeprest_interpolated", delays_updates),
    ):
        case = Case("mlp", name, p, microbatches=m, epochs=2, evaluate_at=())
        outcome = run(case)
        assert [max(outcome.staleness[s]) for s in range(p)] == expected


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
        schedules.build("paci", again)
    exact = schedules.build("paci[backward_rule=recompute]", again)
    with pytest.raises(pd.errors.ScheduleError, match="stage 0 of its plan does not recompute"):
        replace(exact, plan=plan)


@pytest.mark.parametrize(("name", "animal"), [("pipelined_backprop", "transformer"), ("timeprest", "lstm")])
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
    options = cases.OPTIMIZERS["sgd"].keywords
    monkeypatch.setitem(cases.OPTIMIZERS, "sgd", partial(_OwnSgd, **options))
    check(case, run(case), BOUND)


# -- any optimizer, by differences -----------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "kind"), [(pb_lwp, torch.optim.Muon), (spectrain_v2, torch.optim.RMSprop)])
def test_any_optimizer_is_predicted_by_its_last_difference(schedule: Any, kind: Any) -> None:
    case = Case("matrices", schedule.__name__, 3, epochs=4, evaluate_at=())

    def make_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = kind([p for _, p in named], lr=0.02)  # Muon takes no names
        return optimizer

    schedule = schedule(case.plan(), by="difference")
    reads = replace(delayed.PAPERS[case.schedule](3, 1), by="difference")
    trained = replace(case.training(), schedule=schedule, optimizer=make_optimizer).check(BOUND, reads=reads)
    assert len(trained.losses) == 20


# -- drains and checkpoints ------------------------------------------------------------------------


def test_a_difference_is_in_the_checkpoint(tmp_path: Path) -> None:
    """A run that goes on gives the same bits; without the last difference it would not."""

    def go(until: int, resume: Path | None, forget: bool = False) -> dict[str, torch.Tensor]:
        animal = zoo.make("mlp")
        plan = zoo.plan_of(animal, 3)
        schedule, optimizer = pb_lwp(plan, by="difference"), partial(torch.optim.RMSprop, lr=0.01)
        with make_pipeline(animal, plan, schedule=schedule, optimizer=optimizer) as pipeline:
            if resume is not None:
                pipeline.load(resume)
                states = cases.stage_states(pipeline)
                assert [state.predictions is not None for state in states] == [True, True, False]
                for state in states[:2] if forget else ():
                    state.predictions.restore({})
            for done in pipeline.train(cases.Fresh(animal.batches), epochs=4 - pipeline.position[0]):
                if done.number + 1 == 8 and resume is None:
                    pipeline.save(tmp_path / "kept")
                if done.number + 1 == until:
                    break
            return pipeline.state_dict()

    whole = go(20, None)
    again = go(20, tmp_path / "kept")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    lost = go(20, tmp_path / "kept", forget=True)
    assert not all(torch.equal(whole[name], lost[name]) for name in whole)


@pytest.mark.parametrize("name", ["pipelined_backprop", "spectrain_v2", "timeprest"])
def test_a_drain_leaves_the_weights_in_the_model(name: str) -> None:
    """Not a view of them. `run` counts the versions that a drain leaves."""
    with make_pipeline("mlp", (1, 1, 1), schedule=name, microbatches=PARTS.get(name)) as pipeline:
        for done in pipeline.train(zoo.make("mlp").batches, epochs=3):
            if done.number == 7:
                pipeline.drain()
                state = pipeline.state_dict()
                for stage_state in cases.stage_states(pipeline):
                    assert all(
                        torch.equal(state[key], leaf) for key, leaf in stage_state.versions.peek().leaves.items()
                    )
