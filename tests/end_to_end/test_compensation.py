"""Compensations of delay in the running pipeline: each equals its paper's equation, in the coordinates of the paper."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import cases
import compensated
import pytest
import torch
import zoo
from cases import OPTIMIZERS, Case, check, make_pipeline, run
from marks import slow, spread, thinned

import pipedream as pd
from pipedream.extensions.compensations import error_feedback, gap_aware, t1
from pipedream.extensions.compensations.velocity import Nesterov, SpikeCompensation
from pipedream.testing import CompensationRule as Rule

BOUND = 1e-9
SGD, ADAMW, MUON = (OPTIMIZERS[name] for name in ("sgd", "adamw", "muon"))
DECAY = {name: OPTIMIZERS[name].keywords["weight_decay"] for name in ("sgd", "adamw", "muon")}
K = 20
Late = tuple[int, ...]


@dataclass(frozen=True)
class Published:
    """What the library is asked for, its paper's rule by the stages' delays, and the optimizer that it steps."""

    compensation: Any
    rule: Callable[[Late], Rule]
    optimizer: Any


def _plain(name: str) -> Any:
    return partial(OPTIMIZERS[name], weight_decay=0.0)


def _difference(name: str, strength: float | None = None) -> Published:
    """Returns error feedback, and the prediction in the difference form that it is."""
    return Published(
        error_feedback.ErrorFeedback(strength),
        lambda late: compensated.DifferencePrediction(
            DECAY[name], lambda s: late[s] if strength is None else strength, decoupled=name != "sgd"
        ),
        _plain(name),
    )


def _rotation(options: str, every: Callable[[Late], Callable[[int], int]], **how: Any) -> Published:
    return Published(f"basis_rotation:{options}", lambda late: compensated.BasisRotation(every(late), **how), ADAMW)


def _shorter(rows: int, columns: int) -> str:
    return "L" if rows < columns else "R"


PUBLISHED = {
    ("rotation", "adamw"): _rotation("3", lambda late: lambda s: 3),
    ("one-sided", "adamw"): _rotation("one_sided:3", lambda late: lambda s: 3, sides=_shorter),
    ("first moment", "adamw"): _rotation("first_moment:3", lambda late: lambda s: 3, first=True),
    ("cheapest", "adamw"): _rotation("2:first_moment:one_sided", lambda late: lambda s: 2, sides=_shorter, first=True),
    # 1 / 4 of an update's bases in the mean, 3, 2 and 1 parts at the stages.
    ("by delay", "adamw"): _rotation(
        "by_delay:4", lambda late: lambda s: round(4 * (1 + sum(late) / len(late)) / (late[s] + 1))
    ),
    ("spike", "sgd"): Published(
        "spike", lambda late: compensated.MultiStepNesterov(DECAY["sgd"], lambda s: late[s]), _plain("sgd")
    ),
    ("velocity", "sgd"): Published(
        "velocity_prediction",
        lambda late: compensated.VelocityPrediction(DECAY["sgd"], lambda s: late[s]),
        _plain("sgd"),
    ),
    ("sc", "sgd"): Published(
        SpikeCompensation(), lambda late: compensated.Spike(DECAY["sgd"], 0.9, lambda s: late[s]), _plain("sgd")
    ),
    ("nesterov", "sgd"): Published(Nesterov(), lambda late: compensated.Nesterov(DECAY["sgd"], 0.9), _plain("sgd")),
    ("feedback", "sgd"): _difference("sgd"),
    ("feedback", "adamw"): _difference("adamw", 1.0),
    ("feedback", "muon"): _difference("muon"),
    ("t1", "sgd"): Published(f"t1:{K}", lambda late: compensated.Rescheduled(late, K), SGD),
    ("t1", "adamw"): Published(t1.LearningRateRescheduling(K), lambda late: compensated.Rescheduled(late, K), ADAMW),
    ("gap", "sgd"): Published(
        gap_aware.GapAware(0.9), lambda late: compensated.GapAware(DECAY["sgd"], 0.9), _plain("sgd")
    ),
}


def delays(case: Case) -> Late:
    """Returns each stage's delay at the paper's depth: p - 1 - s, or W_s with replicas; 2BW 1."""
    return tuple(1 if case.schedule == "pipedream_2bw" else count - 1 for count in case.plan().in_flight)


def check_published(name: str, case: Case) -> cases.Trained:
    """Trains through a pipeline with a compensation, and compares every loss and weight with the paper's rule."""
    published = PUBLISHED[name, case.optimizer]
    case = replace(case, compensation=published.compensation)
    outcome = run(case)
    assert len(outcome.losses) == case.minibatches
    for stage, late in enumerate(delays(case)):
        assert max(outcome.staleness[stage]) == late
    rule = published.rule(delays(case))
    check(case, outcome, 1e-6 if isinstance(rule, compensated.BasisRotation) else BOUND, rule, published.optimizer)
    if isinstance(rule, compensated.GapAware):
        assert rule.penalty > 2
    return outcome


CASES = [
    ("spike", Case("mlp", "pipedream", 3)),
    ("spike", Case("cnn", "pipedream", 4)),
    ("velocity", Case("mlp", "pipedream", 3)),
    ("nesterov", Case("mlp", "pipedream", 3)),
    ("feedback", Case("mlp", "pipedream", 3)),
    ("feedback", Case("mlp", "pipedream_2bw", 3, optimizer="adamw", microbatches=3)),
    ("feedback", Case("matrices", "pipedream_2bw", 3, optimizer="muon", microbatches=3)),
    ("feedback", Case("matrices", "pipedream", 3, optimizer="muon")),
    ("t1", Case("mlp", "pipedream", 3, optimizer="adamw")),
    ("gap", Case("mlp", "pipedream", 3)),
    ("rotation", Case("mlp", "pipedream", 2, optimizer="adamw")),
    ("one-sided", Case("mlp", "pipedream_2bw", 3, optimizer="adamw", microbatches=3)),
    ("first moment", Case("mlp", "pipedream", 3, optimizer="adamw")),
    ("cheapest", Case("cnn", "pipedream", 4, optimizer="adamw")),
    ("by delay", Case("mlp", "pipedream", 3, optimizer="adamw")),
]
SLOW = [
    *CASES,
    *((name, Case("cnn", "pipedream", 4, optimizer=kind)) for name, kind in PUBLISHED if kind != "muon"),
    *((name, Case("cnn", "pipedream_2bw", 2, microbatches=3)) for name, kind in PUBLISHED if kind == "sgd"),
]


OTHERS = [
    ("sc", Case("mlp", "pipedream", 2, replicas=(2, 1))),
    ("gap", Case("mlp", "pipedream", 2, replicas=(3, 1), evaluate_at=())),
    ("t1", Case("mlp", "pipedream", 3, replicas=(3, 2, 1), epochs=3, evaluate_at=(6,))),
    ("first moment", Case("mlp", "pipedream", 2, replicas=(2, 1), optimizer="adamw", scheduled=True, ema=0.9)),
    ("sc", Case("mlp", "pipedream", 3, scheduled=True, ema=0.9)),
    *(
        slow(name, case.lengthened())
        for name, case in (
            ("feedback", Case("mlp", "pipedream_2bw", 2, replicas=(2, 1), microbatches=4)),
            ("spike", Case("mlp", "pipedream", 3, clip_grad_norm=0.1, clip="local")),
        )
    ),
]


LENGTHENED = spread((slow(name, case.lengthened()) for name, case in SLOW), 4)


@pytest.mark.parametrize(("name", "case"), [*thinned(CASES), *LENGTHENED, *OTHERS], ids=str)
def test_every_compensation_is_its_papers_rule_with_all_that_an_update_does(name: str, case: Case) -> None:
    check_published(name, case)


def test_compensations_of_one_update_go_together() -> None:
    """T1 on the rate of a step along the velocity, by gradients that are gap-aware."""
    case = Case("mlp", "pipedream", 3, compensation=[f"t1:{K}", "gap_aware:0.9", "spike"])
    late = delays(case)

    class Together(compensated.Spike):
        gap = compensated.GapAware(DECAY["sgd"], 0.9)

        def gradient(self, *args: Any) -> torch.Tensor:
            return self.gap.gradient(*args)

        def rate(self, stage: int, k: int) -> float:
            return compensated.Rescheduled(late, K).rate(stage, k)

        def step(self, stage: int, stepper: Any, w: Any, y: Any) -> None:
            super().step(stage, stepper, w, y)
            self.gap.look(stage, stepper, {name: stepper.state[p]["momentum_buffer"] for name, p in w.items()})

    check(case, run(case), BOUND, Together(0.0, 0.9, lambda s: late[s]), _plain("sgd"))


@pytest.mark.parametrize("compensation", [None, "gap_aware:0.9"])
def test_to_climb_the_negative_is_to_go_down(compensation: str | None) -> None:
    """The optimizer adds the decay of the weights to the gradient's negative then."""
    plain, states = zoo.make("mlp").loss, []
    training = Case("mlp", "pipedream", 3, epochs=3, compensation=compensation).training()
    for sign in (1.0, -1.0):
        loss = lambda output, batch, sign=sign: sign * plain(output, batch[1])  # noqa: E731
        optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1, maximize=sign < 0)
        states.append(replace(training, loss=loss, optimizer=optimizer).pipeline().state)
    cases.assert_near(*states, 1e-12)


PRESETS = ("ftpipe_ga", "ftpipe_msnag", "nesterov_async", "pipedream_lr")
IN_PROCESSES = {
    2: [
        Case("mlp", "pipedream", 2, compensation=["spike", "t1:7"]),
        Case("mlp", "pipedream_2bw", 2, microbatches=3, optimizer="adamw", compensation="error_feedback"),
        Case("mlp", "pipedream", 2, compensation="gap_aware"),
        Case("mlp", "pipedream", 2, optimizer="adamw", compensation=["basis_rotation:2", "error_feedback", "t1:7"]),
        *(Case("mlp", name, 2) for name in PRESETS),
        Case("mlp", "one_step_ef", 2, microbatches=3, optimizer="adamw"),
        Case("mlp", "pipedream", 1, replicas=(2,), compensation="nesterov"),
        Case("matrices", "pipedream", 2, optimizer="muon", compensation="error_feedback"),
    ],
    3: [
        Case("mlp", "pipedream", 2, replicas=(2, 1), compensation=compensation)
        for compensation in ("gap_aware", "error_feedback", ["spike", "t1:7"])
    ],
}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("velocity", Case("mlp", "pipedream", 3, compensation="velocity_prediction")),
        ("velocity", Case("mlp", "pipedream", 3, compensation="velocity_prediction", replicas=(2, 1, 1))),
        ("feedback", Case("mlp", "pipedream", 3, compensation="error_feedback:1", optimizer="adamw")),
    ],
    ids=str,
)
def test_weights_behind_the_prediction(name: str, case: Case) -> None:
    """What SpecTrain and LWP evaluate: w, where what is stored is y = w - lr T v, or w + T (w - w before)."""
    case = replace(case, evaluate_at=())
    outcome = case.training().pipeline(watch=lambda pipeline: pipeline.state_dict(predicted=False))
    published, evaluated = PUBLISHED[name, case.optimizer], dict[str, torch.Tensor]()
    rule = published.rule(delays(case))
    predict = rule.predict

    def look(stage: int, stepper: Any, w: Any) -> Any:
        evaluated.update({n: p.detach().clone() for n, p in w.items()})
        return predict(stage, stepper, w)

    rule.predict = look  # type: ignore[method-assign]
    cases.answer(case, None, rule, published.optimizer)
    (state,) = outcome.watched
    cases.assert_near(state, evaluated, BOUND)
    assert any(not torch.equal(state[n], outcome.state[n]) for n in state)


REFUSED = [
    ({"compensation": "spike", "optimizer": ADAMW}, r"spike works on the velocity of torch.optim.SGD, found AdamW"),
    ({"compensation": "spike", "schedule": "1f1b"}, "a method that flushes: none of its gradients is stale"),
    ({"compensation": "t1:9", "schedule": "gpipe"}, "a method that flushes"),
    ({"compensation": ["spike", "error_feedback"]}, "spike and error_feedback make up for the same staleness twice"),
    ({"compensation": ["spike", "velocity_prediction"]}, "make up for the same staleness twice"),
    ({"compensation": ["t1:5", "t1:9"]}, "one kind is asked for twice"),
    ({"compensation": "basis_rotation", "schedule": "1f1b", "optimizer": ADAMW}, "a method that flushes"),
    ({"compensation": "basis_rotation:0", "optimizer": ADAMW}, "renewed after at least 1 update, found 0"),
    ({"compensation": "basis_rotation:both"}, "takes every, uniform, by_delay, two_sided, one_sided, .*: .*'both'"),
    ({"compensation": "basis_rotation:3:4"}, "'basis_rotation:3:4' takes every, "),
    ({"compensation": "spyke"}, "'spyke' is not known; choose one of basis_rotation, error_feedback, gap_aware, "),
    ({"compensation": "t1"}, r"'t1' takes updates, as in NAME:NUMBER"),
    ({"compensation": "spike:1.5"}, "'spike:1.5' takes delay"),
    ({"compensation": "nesterov:2"}, "'nesterov:2' takes no number"),
    ({"compensation": 3}, "3 is neither a Compensation nor the name of one"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_makes_no_sense_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(pd.errors.ScheduleError, match=words):
        make_pipeline("mlp", (1, 1, 1), **{"schedule": "pipedream"} | options)


def test_bases_that_do_not_fit_the_plans_memory_are_refused() -> None:
    model, inputs = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 4)), torch.randn(4, 40)
    plan = pd.plan(pd.profile(model, inputs, runs=1), pd.Cluster.flat(2), shape="straight", schedule="pipedream")
    tight = replace(plan, cluster=pd.Cluster.flat(2, memory_bytes=max(plan.worker_bytes.values()) + 5 * 4 * 40 * 40))
    options: dict[str, Any] = {"loss": torch.nn.functional.cross_entropy, "optimizer": ADAMW}
    words = r"pipedream\+basis_rotation .* keeps 25\.6 kB there, basis_rotation:one_sided:first_moment 6\.40 kB, which"
    with pytest.raises(pd.errors.PlanError, match=words):
        pd.Pipeline(model, tight, compensation="basis_rotation", **options)
    with pd.Pipeline(model, tight, compensation="basis_rotation:one_sided:first_moment", **options):
        pass


def test_a_pipeline_takes_names_objects_and_schedules_and_tells_its_rates() -> None:
    with make_pipeline("mlp", (1, 1, 1), schedule="pipedream", compensation=["t1:4", "error_feedback"]) as pipeline:
        assert pipeline.schedule.updates.compensation == (
            t1.LearningRateRescheduling(4),
            error_feedback.ErrorFeedback(),
        )
        assert pipeline.program.updates == pipeline.schedule.updates
        # Stages have staleness 2, 1 and 0; T1 begins at 1 / 2 of the rate of the first.
        assert pipeline.learning_rates() == pytest.approx((0.025, 0.05, 0.05))
        for done in pipeline.train(cases.Fresh(zoo.make("mlp").batches)):
            assert done.rate == 0.05, "the user's"
        assert pipeline.learning_rates() == pytest.approx((0.05, 0.05, 0.05))
    for options, strength in (({}, 1.0), ({"compensation": "error_feedback:0.5"}, 0.5)):  # in place of the method's own
        with make_pipeline("mlp", schedule="one_step_ef", microbatches=3, **options) as pipeline:
            assert pipeline.schedule.updates.compensation == (error_feedback.ErrorFeedback(strength),)


def test_a_recipe_a_call_and_a_checkpoint_say_it(tmp_path: Path) -> None:
    animal = zoo.make("mlp")

    def used(folder: str, by_recipe: Any, **options: Any) -> list[str]:
        """Trains; returns the compensation that the summary names."""
        recipe = pd.Recipe(zoo.make("mlp").model, animal.loss, SGD, animal.batches, compensation=by_recipe, epochs=2)
        how = {"plan": zoo.plan_of(animal, 2), "out": tmp_path / folder, "quiet": True} | options
        return list(pd.run(lambda seed: recipe, **how)["configuration"]["compensation"])

    assert used("1", "spike") == ["spike"]
    assert used("2", "spike", compensation=["t1:5"]) == ["t1:5"]
    assert used("3", "spike", compensation=[]) == []
    assert used("4", "spike", schedule="1f1b", microbatches=2) == [], "no gradient is stale"
    assert used("5", None, schedule="one_step_ef", microbatches=2) == ["error_feedback:1.0"]
    with pytest.raises(pd.errors.ScheduleError, match="flushes"):
        used("6", None, schedule="1f1b", microbatches=2, compensation="spike")
    # What is not said is the checkpoint's.
    assert used("2", "spike", resume=tmp_path / "2", epochs=3) == ["t1:5"]
    assert used("5", "spike", resume=tmp_path / "5", epochs=3) == ["error_feedback:1.0"]
