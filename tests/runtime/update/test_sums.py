"""How replicas agree: each way trains as its published rule, written as a serial loop (`summed`)."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import processes
import pytest
import reference
import summed
import torch
import zoo
from cases import OPTIMIZERS, Fresh, assert_near, make_pipeline, odd
from marks import thinned

import pipedream as pd
from pipedream.core.errors import PlanError, ScheduleError
from pipedream.core.plan.sums import SumMethod
from pipedream.schedules import LAYOUTS, build

SEED = 3
AGREEMENTS = {
    "bfloat16": summed.Agreement(torch.bfloat16),
    "float16": summed.Agreement(torch.float16),
    "powersgd:1": summed.Agreement("powersgd", 1),
    "powersgd:2": summed.Agreement("powersgd", 2),
    "every:1": summed.Agreement("every", 1),
    "every:3": summed.Agreement("every", 3),
    "diloco:2": summed.Agreement("diloco", 2),
    "diloco:3,lr=0.5,momentum=0.8": summed.Agreement("diloco", 3, 0.5, 0.8),
}


@dataclass(frozen=True)
class Run:
    """A run of two epochs of five minibatches, the last of each a short one, with an evaluation in between."""

    sums: str
    schedule: str
    replicas: tuple[int, ...]
    animal: str = "mlp"
    microbatches: int | None = None
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float64
    worker_order: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        words = [self.sums, self.schedule, "-".join(map(str, self.replicas)), self.animal, self.optimizer]
        return " ".join([*words, *(f"{name}={value}" for name, value in self.options)])

    def built(self) -> pd.Schedule:
        return build(self.schedule, self.plan(), self.microbatches)

    def plan(self) -> pd.Plan:
        plan = zoo.plan_of(zoo.make(self.animal, self.dtype), len(self.replicas), self.replicas)
        layout = LAYOUTS.get(self.schedule)
        order = self.worker_order if layout is None else layout.order(len(self.replicas), layout.replicas)
        return replace(plan, worker_order=order)

    def trained(self) -> dict[str, Any]:
        """Trains, in this process or as one rank; returns losses and weights."""
        animal = zoo.make(self.animal, self.dtype)
        evaluations, states, averages, losses = {}, {}, {}, []
        with pipeline_of(self, seed=SEED, **dict(self.options)) as pipeline:
            for done in pipeline.train(Fresh(animal.batches), epochs=2):
                losses.append(done.loss)
                if done.number == 3:
                    loss = pipeline.evaluate(Fresh(odd(animal.batches)))["loss"]
                    number = pipeline.drain()
                    evaluations[number], states[number] = loss, pipeline.state_dict()
            end = pipeline.drain()
            states[end] = pipeline.state_dict()
            averages[end] = pipeline.state_dict(ema=True) if "ema" in dict(self.options) else {}
            return {"losses": losses, "evaluations": evaluations, "states": states, "averages": averages}

    def expected(self, drains: list[int]) -> summed.Answer:
        animal, options = zoo.make(self.animal, self.dtype), dict(self.options)
        return summed.train(
            animal.model,
            self.built(),
            animal.batches * 2,
            animal.total,
            OPTIMIZERS[self.optimizer],
            AGREEMENTS[self.sums],
            seed=SEED,
            drains=drains,
            clip=options.get("clip_grad_norm"),
            ema=options.get("ema"),
        )

    def check(self, outcome: dict[str, Any], bound: float = 1e-10) -> None:
        animal, states = zoo.make(self.animal, self.dtype), outcome["states"]
        answer = self.expected(list(states))
        assert len(outcome["losses"]) == len(answer.losses)
        assert all(abs(a - b) <= bound * abs(b) for a, b in zip(outcome["losses"], answer.losses, strict=True))
        for number, state in states.items():
            named = dict(animal.model.named_parameters())
            assert_near({name: state[name] for name in named}, answer.at[number], bound)
        for number, state in outcome["averages"].items():
            expected = answer.ema[number] if state else {}
            assert_near({name: state[name] for name in expected}, expected, bound)
        for number, loss in outcome["evaluations"].items():
            animal.model.load_state_dict({**animal.model.state_dict(), **answer.at[number]})
            expected = reference.mean_loss(animal.model, odd(animal.batches), animal.total)
            assert abs(loss - expected) <= bound * abs(expected)


RUNS = [
    Run("bfloat16", "1f1b", (2, 1), microbatches=4),
    Run("float16", "pipedream", (2,)),
    Run("bfloat16", "pipedream_2bw", (2, 2), optimizer="adamw"),
    Run("float16", "chimera", (2, 2), microbatches=2),
    Run("powersgd:2", "gpipe", (3, 1), animal="matrices", microbatches=4, optimizer="adamw"),
    Run("powersgd:2", "pipedream", (2, 1), animal="matrices"),
    Run("powersgd:2", "pipedream_2bw", (2, 2), animal="matrices"),
    # Tokens count, and microbatches have unequal numbers of them.
    Run("powersgd:1", "1f1b", (2, 1), animal="lstm", microbatches=4, options=(("grad_scaler", 1024.0),)),
    Run("powersgd:2", "zb_h1", (2, 1), animal="matrices", microbatches=4, options=(("ema", 0.9),)),
    Run("powersgd:2", "pipedream", (2,), animal="matrices", options=(("clip_grad_norm", 0.1),)),
    Run("every:1", "pipedream", (2,), animal="lstm"),
    Run("every:3", "pipedream", (3, 1)),
    Run("diloco:2", "pipedream_2bw", (2, 2), optimizer="adamw"),
    Run("diloco:3,lr=0.5,momentum=0.8", "chimera", (2, 2), microbatches=2),
    Run("diloco:2", "pipedream", (2,), options=(("clip_grad_norm", 0.1), ("ema", 0.8))),
    Run("every:3", "gpipe", (2, 1), microbatches=3, animal="lstm", options=(("ema", 0.8), ("grad_scaler", 1024.0))),
    Run("every:3", "zb_h1", (2, 2), microbatches=4),
    Run("diloco:2", "1f1b", (2, 2), microbatches=4, worker_order=(0, 2, 1, 3)),  # a pipeline in each of two sites
]


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, id=str(run), marks=[pytest.mark.slow] * (run.schedule in ("chimera", "pipedream_2bw")))
        for run in RUNS
    ],
)
def test_replicas_agree_as_the_serial_loop_says(run: Run) -> None:
    run.check(run.trained())


@pytest.mark.processes
@pytest.mark.parametrize("run", thinned(run for run in RUNS if run.replicas == (2,)), ids=str)
def test_two_processes_agree_as_one_does(run: Run) -> None:
    alone = run.trained()
    first, second = processes.team(2).results(Run.trained, run)
    assert first["losses"] == second["losses"] == alone["losses"]
    for number, state in alone["states"].items():
        assert all(torch.equal(first["states"][number][name], tensor) for name, tensor in state.items())
        assert not second["states"][number]


def test_texts() -> None:
    for text in ("full", "bfloat16", "float16", "powersgd:4", "every:8", "diloco:30", "diloco:30,lr=0.5,momentum=0"):
        assert str(SumMethod.read(text)) == text
    assert str(SumMethod.read("diloco:030,lr=0.70")) == "diloco:30"
    assert SumMethod.read("diloco:30,momentum=0.5") == SumMethod("diloco", period=30, momentum=0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp8", "sums='fp8' is not known; write one of full, bfloat16"),
        ("", "is not known"),
        ("bfloat16:3", "is not known"),
        ("full,lr=1", "is not known"),
        ("powersgd", "has no rank; write powersgd: and a whole number from 1 on"),
        ("powersgd:0", "has no rank"),
        ("every:0", "has no number of updates between averages; write every:"),
        ("every:-1", "has no number"),
        ("diloco:x", "has no number"),
        ("every:8,lr=0.3", "the setting 'lr=0.3'; only diloco has settings"),
        ("diloco:8,lr=0", "the setting 'lr=0'"),
        ("diloco:8,momentum=1", "the setting 'momentum=1'"),
        ("diloco:8,rate=1", "the setting 'rate=1'"),
        ("diloco:8,lr=nan", "the setting 'lr=nan'"),
    ],
)
def test_what_is_not_known_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        SumMethod.read(text)


def test_a_plan_without_replicas_has_no_sums() -> None:
    plan = zoo.plan_of(zoo.make("mlp"), 2)
    assert plan.choosing(sums="full") == plan
    with pytest.raises(PlanError, match="sums='bfloat16' was asked for, but no stage of the plan 1-1 has replicas"):
        make_pipeline("mlp", plan, sums="bfloat16")


def test_powersgd_needs_matrices() -> None:
    animal = zoo.make("matrices")
    words = r"no weight of the stages .* \(the largest, of shape \(16, 16\), allows a rank up to 3\)"
    with pytest.raises(PlanError, match=words):
        make_pipeline(animal, (1, 2), sums="powersgd:9")
    vectors = torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Linear(6, 3, bias=False)).double()
    with pytest.raises(PlanError, match=r"\(there is none\); choose a smaller rank, or sums='bfloat16'"):
        make_pipeline(replace(animal, model=vectors, cuts={2: (1,)}), (2, 1), sums="powersgd:1")


def pipeline_of(run: Run, **options: Any) -> pd.Pipeline:
    options = {"optimizer": OPTIMIZERS[run.optimizer], "sums": run.sums, "microbatches": run.microbatches} | options
    return make_pipeline(zoo.make(run.animal, run.dtype), run.plan(), schedule=run.schedule, **options)


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("1f1b", {"clip_grad_norm": 1.0}, "clip='global' was asked for with sums='every:3': .* Use clip='local'"),
        ("pipedream", {"compensation": "error_feedback"}, "the compensation error_feedback moves weights by what one"),
        ("spectrain", {}, "moves weights by what one replica's|predicts weights by what one replica's"),
    ],
)
def test_what_needs_common_updates_is_refused(schedule: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        pipeline_of(Run("every:3", schedule, (2, 1)), **options)


def test_an_optimizer_with_weights_of_its_own_is_refused() -> None:
    class ScheduleFree(torch.optim.SGD):
        def train(self) -> None: ...

        def eval(self) -> None: ...

    with pytest.raises(ScheduleError, match="sums='diloco:2' was asked for with ScheduleFree, which keeps weights"):
        pipeline_of(Run("diloco:2", "pipedream", (2,)), optimizer=partial(ScheduleFree, lr=0.1))


def test_weights_that_stages_share_need_sums() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6)).double()
    model[2].weight = model[0].weight
    animal = replace(zoo.make("matrices"), model=model, cuts={1: ()})
    plan, options = zoo.plan_of(animal, 2, (2, 1), cuts=(1,)), {"schedule": "1f1b", "microbatches": 2}
    with pytest.raises(PlanError, match=r"sums='every:2' was asked for, but the stages share '0\.weight'"):
        make_pipeline(animal, plan, sums="every:2", **options)
    with make_pipeline(animal, plan, sums="bfloat16", **options) as pipeline:
        assert len(list(pipeline.train(animal.batches))) == 5
        state = pipeline.state_dict()
    assert torch.equal(state["0.weight"], state["2.weight"])


def test_plans_written_before_have_full_sums() -> None:
    plan = zoo.plan_of(zoo.make("mlp"), 1, (2,))
    text = plan.to_json()
    assert pd.Plan.from_json(text.replace(',\n "sums": "full"', "")) == plan
    assert pd.Plan.from_json(plan.choosing(sums="diloco:5").to_json()).choices.sums.period == 5
