"""How replicas agree: each way trains as its published rule, in the serial rule (`agreements`)."""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import zoo
from cases import Case, check, check_processes, make_pipeline, run
from marks import slow, thinned

import pipedream as pd
from pipedream.core.plan.sum_method import SumMethod
from pipedream.extensions.reducers.averages import DiLoCo


def summing(sums: str, schedule: str, replicas: tuple[int, ...], animal: str = "mlp", **more: Any) -> Case:
    """Returns a run of two epochs of five minibatches, the last of each a short one, with an evaluation in between."""
    return Case(animal, schedule, len(replicas), replicas=replicas, sums=sums, epochs=2, **more)


CASES = [
    summing("bfloat16", "1f1b", (2, 1), microbatches=4),
    summing("float16", "pipedream", (2,)),
    summing("float16", "chimera", (2, 2), microbatches=2),
    summing("powersgd:2", "gpipe", (3, 1), "matrices", microbatches=4, optimizer="adamw"),
    summing("powersgd:2", "pipedream_2bw", (2, 2), "matrices"),
    # Tokens count, and microbatches have unequal numbers of them.
    summing("powersgd:1", "1f1b", (2, 1), "lstm", microbatches=4, more=(("grad_scaler", 1024.0),)),
    summing("powersgd:2", "zb_h1", (2, 1), "matrices", microbatches=4, ema=0.9),
    summing("powersgd:2", "pipedream", (2,), "matrices", clip_grad_norm=0.1),
    summing("every:1", "pipedream", (2,), "lstm"),
    summing("every:3", "pipedream", (3, 1)),
    summing("diloco:3,lr=0.5,momentum=0.8", "chimera", (2, 2), microbatches=2),
    summing("diloco:2", "pipedream", (2,), clip_grad_norm=0.1, ema=0.8),
    summing("every:3", "gpipe", (2, 1), "lstm", microbatches=3, ema=0.8, more=(("grad_scaler", 1024.0),)),
    summing("every:3", "zb_h1", (2, 2), microbatches=4),
    summing("diloco:2", "1f1b", (2, 2), microbatches=4, worker_order=(0, 2, 1, 3)),  # a pipeline in each of two sites
    summing("sparse:1,0.02,lr=0.7,decay=0.9", "pipedream", (3, 1), ema=0.8),
    summing("sparse:2,0.1", "1f1b", (2, 1), "lstm", microbatches=4, more=(("grad_scaler", 1024.0),)),
    summing("sparse:2,0.1,overlap=1", "pipedream", (2,)),
    summing("sparse:2,0.1", "pipedream", (2,), clip_grad_norm=0.1, optimizer="adamw"),
    summing("diloco:2,overlap=1", "pipedream", (3, 1), ema=0.8),
]


@pytest.mark.parametrize(
    "case",
    thinned((slow(case) if case.schedule in ("chimera", "pipedream_2bw") else case for case in CASES), 4),
    ids=str,
)
def test_replicas_agree_as_the_serial_loop_says(case: Case) -> None:
    check(case, run(case))


@pytest.mark.processes
@pytest.mark.parametrize("case", thinned(case for case in CASES if case.replicas == (2,)), ids=str)
def test_two_processes_agree_as_one_does(case: Case) -> None:
    check_processes(2, [case])


TEXTS = "full bfloat16 float16 powersgd:4 every:8 diloco:30 diloco:30,lr=0.5,momentum=0 sparse:30,0.02,overlap=1"


def test_texts() -> None:
    for text in TEXTS.split():
        assert str(SumMethod.parse(text)) == text
    assert str(SumMethod.parse("diloco:030,lr=0.70")) == "diloco:30"
    assert SumMethod.parse("diloco:30,momentum=0.5") == DiLoCo(30, momentum=0.5)
    assert str(SumMethod.parse("sparse:15,1e-2,decay=0.90,lr=0.7")) == "sparse:15,0.01,lr=0.7,decay=0.9"


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
        ("every:8,lr=0.3", "the setting 'lr=0.3'; every takes nothing"),
        ("diloco:8,lr=0", "the setting 'lr=0'; diloco takes lr=NUMBER above 0, "),
        ("diloco:8,momentum=1", "the setting 'momentum=1'"),
        ("diloco:8,rate=1", "the setting 'rate=1'"),
        ("diloco:8,lr=nan", "the setting 'lr=nan'"),
        ("diloco:8,overlap=2", "the setting 'overlap=2'; diloco takes lr=.* overlap=0 or 1"),
        ("sparse:0.5,0.02", "has no number of updates between averages; write sparse: and a whole number from 1 on"),
        ("sparse:8", "the setting 'share='; sparse takes a share such as 0.02"),
        ("sparse:8,0.02,momentum=0.9", "the setting 'momentum=0.9'; sparse takes a share .* decay=NUMBER from 0 to 1"),
        ("sparse:8,0.02,decay=2", "the setting 'decay=2'"),
        ("sparse:8,1.5", r"sends the share 1\.5 of each chunk of 4,096 values; write one from 0\.000244 .* to 1"),
        ("sparse:8,0", "sends the share 0 of"),
        ("sparse:8,0.0002", r"the share 0\.0002 of .* \(a single value\) to 1, such as sparse:8,0\.02"),
    ],
)
def test_what_is_not_known_is_refused(text: str, message: str) -> None:
    with pytest.raises(pd.PipelineError, match=message):
        SumMethod.parse(text)


class ScheduleFree(torch.optim.SGD):
    def train(self) -> None: ...

    def eval(self) -> None: ...


VECTORS = torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Linear(6, 3, bias=False)).double()
ERROR_FEEDBACK = {"schedule": "pipedream", "compensation": "error_feedback"}
TO_SUM: list[tuple[str, Any, str, dict[str, Any], str]] = [
    # Model, replicas, sums, other options of the pipeline, words.
    ("mlp", (1, 1), "bfloat16", {}, "'bfloat16' was asked for, but no stage of the plan 1-1 has replicas"),
    ("matrices", (1, 2), "powersgd:9", {}, r"no weight .* \(the largest, of shape \(16, 16\), allows a rank up to 3\)"),
    ("vectors", (2, 1), "powersgd:1", {}, r"\(there is none\); choose a smaller rank, or sums='bfloat16'"),
    ("mlp", (2, 1), "every:3", {"schedule": "1f1b", "clip_grad_norm": 1.0}, "clip='global' .*every:3': .*'local'"),
    ("mlp", (2, 1), "every:3", ERROR_FEEDBACK, "the compensation error_feedback moves weights by what one"),
    ("mlp", (2, 1), "every:3", {"schedule": "spectrain"}, "(moves|predicts) weights by what one replica's"),
    ("mlp", (2,), "diloco:2", {"optimizer": partial(ScheduleFree, lr=0.1)}, "with ScheduleFree, which keeps weights"),
]


@pytest.mark.parametrize(("name", "replicas", "sums", "options", "words"), TO_SUM)
def test_what_cannot_be_summed_so_is_refused(name: str, replicas: Any, sums: str, options: Any, words: str) -> None:
    animal = replace(zoo.make("matrices"), model=VECTORS, cuts={2: (1,)}) if name == "vectors" else zoo.make(name)
    with pytest.raises(pd.PipelineError, match=words):
        make_pipeline(animal, replicas, sums=sums, **options)


@pytest.mark.parametrize("sums", ["powersgd:1", "sparse:2,0.1"])
def test_parts_of_matrices_are_refused(sums: str) -> None:
    plan = pd.Plan.uniform(1, replicas=(2,))
    plan = replace(plan, stages=(replace(plan.stages[0], mesh="model:2"),))
    with pytest.raises(pd.PipelineError, match=r"ranks of a mesh have parts of .*, or replicas without a mesh"):
        SumMethod.parse(sums).check(plan, (), Mock(clip_grad_norm=None), list)


def test_weights_that_stages_share_need_sums() -> None:
    animal, options = zoo.make("matrices"), {"schedule": "1f1b", "microbatches": 2}
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6)).double()
    model[2].weight = model[0].weight
    animal = replace(animal, model=model, cuts={1: ()})
    plan = zoo.plan_of(animal, 2, (2, 1), cuts=(1,))
    with pytest.raises(pd.PipelineError, match=r"sums='every:2' was asked for, but the stages share '0\.weight'"):
        make_pipeline(animal, plan, sums="every:2", **options)
    with make_pipeline(animal, plan, sums="bfloat16", **options) as pipeline:
        list(pipeline.train(animal.batches))
        state = pipeline.state_dict()
    assert torch.equal(state["0.weight"], state["2.weight"])
