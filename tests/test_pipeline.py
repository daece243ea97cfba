"""The user's door: evaluation, prediction, state, what is left alone, and what an error says."""

import contextlib
import copy
import gc
import os
import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mishaps
import processes
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zoo
from built import Built
from cases import make_pipeline
from marks import slow
from torch import nn

import pipedream as pd
from pipedream.extensions.shared_memory import pair_memory as shared_memory

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def pipeline_of(animal: zoo.Animal, **rest: Any) -> pd.Pipeline:
    return make_pipeline(animal, (1, 1, 1), **{"optimizer": SGD, "schedule": "pipedream"} | rest)


@pytest.mark.parametrize("size", [1, 3, 50])
def test_evaluation_equals_one_process_at_any_batch_size(size: int) -> None:
    animal = zoo.make("cnn")
    x, y = (torch.cat(part) for part in zip(*animal.batches, strict=True))
    batches = [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]
    hits = lambda output, targets: (output.argmax(1) == targets).double().mean()  # noqa: E731
    counted = lambda output, targets: ((output.argmax(1) == targets).sum(), len(targets))  # noqa: E731
    with pipeline_of(animal, metrics={"hits": hits, "counted": counted}, ema=0.5) as pipeline:
        dones = list(pipeline.train(animal.batches))
        answers = [(pipeline.evaluate(batches, ema=ema), pipeline.state_dict(ema=ema)) for ema in (False, True)]
    assert all(module.training for module in animal.model.modules())
    assert set(dones[0].metrics) == {"hits", "counted"}
    model = zoo.make("cnn").model
    for answer, state in answers:
        model.load_state_dict(state)
        mean = pd.testing.mean_loss(model, batches, lambda output, batch: animal.total(output, batch[1]))
        share = hits(model.eval()(x.clone()), y).item()
        assert (answer["loss"], answer["hits"]) == (pytest.approx(mean, rel=1e-12), pytest.approx(share, rel=1e-12))
        assert answer["counted"] == answer["hits"]
    assert answers[0][0]["loss"] != answers[1][0]["loss"]


def test_training_in_evaluation_mode_warns() -> None:
    animal = zoo.make("cnn")
    animal.model.eval()
    warned = pytest.warns(UserWarning, match="evaluation mode")
    with pipeline_of(animal, schedule="1f1b", microbatches=1) as pipeline, warned:
        list(pipeline.train(animal.batches))
    assert not any(module.training for module in animal.model.modules())


def test_another_batch_than_the_profiled_one_warns_once() -> None:
    animal = zoo.make("mlp")
    plan = zoo.plan_of(animal, 2, (2, 1))
    for planned, warned in ((1, 0), (12, 0), (5, 1)):  # 1: the plan does not say
        another = make_pipeline("mlp", replace(plan, batch=planned), schedule="1f1b", microbatches=2)
        with warnings.catch_warnings(record=True) as caught, another as pipeline:
            warnings.simplefilter("always")
            pipeline.evaluate(animal.batches)
            for _ in range(2):
                list(pipeline.train(animal.batches))
        assert len(caught) == warned
        for warning in caught:
            assert "has 12 samples, but the plan is for 5, as many as were profiled" in str(warning.message)
            assert "profile and plan with a batch of 12, or train with batches of 5" in str(warning.message)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_that_depend_on_the_whole_minibatch_are_not_split(kind: Any) -> None:
    model = nn.Sequential(kind(5, 4, scale_grad_by_freq=True), nn.Flatten(), nn.LazyLinear(2)).double()
    data = [(torch.randint(5, (6, 3)), torch.randint(2, (6,)))]
    model(data[0][0])
    training = pd.testing.tiny(lambda: copy.deepcopy(model), data=data, test=data, schedule="1f1b", microbatches=1)
    training.check()
    with pytest.raises(pd.PipelineError, match=r"'0' has scale_grad_by_freq=True"):
        replace(training, microbatches=2).pipeline()


@pytest.mark.parametrize(
    ("stages", "count", "workers"),
    [*product((1, 3), (1, 2, 9), (1,)), pytest.param(3, 9, 3, marks=pytest.mark.processes)],
)
def test_predictions_come_in_order(stages: int, count: int, workers: int) -> None:
    """And of several processes at rank 0."""
    run = (
        partial(processes.results, mishaps.predict, workers) if workers > 1 else lambda *args: [mishaps.predict(*args)]
    )
    outputs, *others = run(stages, count)
    assert not any(others)
    animal = zoo.make("cnn")
    animal.model.eval()
    x = torch.cat([batch for batch, _ in animal.batches])
    assert len(outputs) == count
    for i, output in enumerate(outputs):
        torch.testing.assert_close(output, animal.model(x[i : i + 1 + i % 4].clone()).detach())


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=[pytest.mark.processes, pytest.mark.slow])])
def test_predictions_have_the_type_of_the_models_output(workers: int) -> None:
    results = [mishaps.predict_typed()] if workers == 1 else processes.results(mishaps.predict_typed, workers)
    for output, scores in zip(*results[0], strict=True):
        assert torch.equal(output.scores, scores)
        assert (type(output), output.length, output.loss) == (mishaps.Scored, 2, None)
    assert not any(outputs for outputs, _ in results[1:])


@pytest.mark.parametrize("ends", ["an error", "early"])
def test_a_prediction_that_did_not_end_leaves_nothing(ends: str) -> None:
    animal = zoo.make("mlp")
    with pipeline_of(animal) as pipeline:
        expected = [pipeline.evaluate(animal.batches), *pipeline.predict(animal.batches)]
        if ends == "early":
            next(iter(pipeline.predict(animal.batches)))
        else:
            with pytest.raises(pd.PipelineError, match="must have the same dtype"):
                list(pipeline.predict([*animal.batches, (torch.ones(2, 99), animal.batches[0][1])]))
        actual = [pipeline.evaluate(animal.batches), *pipeline.predict(animal.batches)]
        assert actual[0] == expected[0]
        assert all(map(torch.equal, actual[1:], expected[1:]))
        assert len(list(pipeline.train(animal.batches))) == len(animal.batches)


@pytest.mark.parametrize("prefix", ["", "saved."])
def test_a_plain_state_dict_goes_in_and_comes_out(prefix: str) -> None:
    """With a hook that renames weights: under either name they go in, under the hook's they come out."""
    animal = zoo.make("cnn")
    warm = {name: value + 1 for name, value in animal.model.state_dict().items()}
    renamed = {prefix + name: value for name, value in warm.items()}
    if prefix:
        animal.model._register_state_dict_hook(lambda _, state, *__: {prefix + name: state[name] for name in state})
    with pipeline_of(animal, ema=0.9) as pipeline:
        for names in (warm, renamed):
            list(pipeline.train(animal.batches))
            assert not torch.equal(pipeline.state_dict()[f"{prefix}0.weight"], warm["0.weight"])
            pipeline.load_state_dict(names)
            for state in (pipeline.state_dict(), pipeline.state_dict(ema=True)):
                assert list(state) == list(renamed)
                assert all(map(torch.equal, state.values(), warm.values()))
        for wrong, words in (
            ({}, r"lacks '0\.weight'"),
            ({**warm, "8.bias": torch.zeros(7)}, r"'8\.bias' has shape"),
            ({f"module.{name}": value for name, value in warm.items()}, "but has 'module.0.weight'"),
        ):
            with pytest.raises(pd.PipelineError, match=words):
                pipeline.load_state_dict(wrong)


def test_a_state_dict_has_every_name_of_a_tied_weight() -> None:
    """The embedding's weight is read in place of its head's own module, which is never called."""
    parts = {"embed": nn.Embedding(4, 4), "mix": nn.Linear(4, 4), "head": nn.Linear(4, 4, bias=False)}
    parts["head"].weight = parts["embed"].weight
    model = Built(lambda model, x: F.linear(torch.tanh(model.mix(model.embed(x))), model.embed.weight), **parts)
    x = torch.arange(4)
    plan = pd.plan(pd.profile(model, x, warmup=0, runs=1), pd.Cluster.local(2), schedule="gpipe", cuts=(1,))
    with pd.Pipeline(model, plan, loss=F.cross_entropy, optimizer=SGD) as pipeline:
        list(pipeline.train([(x, x)]))
        state = pipeline.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert torch.equal(state["head.weight"], state["embed.weight"])


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_the_module_and_the_generator_of_the_user_are_left_alone(schedule: str) -> None:
    animal = zoo.make("cnn")
    modules, parameters = list(animal.model.modules()), list(animal.model.named_parameters())
    attributes = [set(vars(module)) for module in modules]
    torch.manual_seed(5)
    expected, drawn = [float(torch.rand(())) for _ in animal.batches], []

    def draw_batches() -> Iterator[Any]:
        for batch in animal.batches:
            drawn.append(float(torch.rand(())))
            yield batch

    generator = torch.manual_seed(5).get_state()
    with pipeline_of(animal, schedule=schedule) as pipeline:
        list(pipeline.train(draw_batches()))
        pipeline.evaluate(animal.batches)
        state = pipeline.state_dict()
    assert drawn == expected, "the data draws as without a pipeline"
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(a is b for a, b in zip(animal.model.modules(), modules, strict=True))
    assert [set(vars(module)) for module in modules] == attributes
    for (name, now), (_, before) in zip(animal.model.named_parameters(), parameters, strict=True):
        assert (now is before, now.grad, torch.equal(now, state[name])) == (True, None, True)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


WEIGHTS = list(nn.Linear(2, 2).parameters())
ADAMW = torch.optim.AdamW([{"params": WEIGHTS[:1], "lr": 0.5}, {"params": WEIGHTS[1:]}], betas=(0.8, 0.9))
SCHEDULER = torch.optim.lr_scheduler.StepLR(ADAMW, step_size=5)
PLAIN_SGD = torch.optim.SGD(WEIGHTS, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip_grad_norm": 1.0}, "there is never one global norm"),
        ({"clip": "norm"}, "clip='norm' is not known"),
        ({"microbatches": 4}, "does not split it"),
        ({"batch_dim": "x"}, "batch_dim is 'x'"),
        ({"compile": 3}, "compile is 3, neither True, a backend nor a mapping"),
        (
            {"optimizer": PLAIN_SGD},
            r"is a SGD object, .* give a .* partial\(torch.optim.SGD, lr=0.1, momentum=0.9\); see",
        ),
        ({"optimizer": ADAMW}, r"partial\(torch.optim.AdamW, lr=0.5, betas=\(0.8, 0.9\)\), for several groups a func"),
        ({"scheduler": SCHEDULER}, r"give a factory, as in partial\(torch.optim.lr_scheduler.StepLR, step_size"),
        *(({"autocast": name}, "write bfloat16, float16") for name in ("bf17", True, "int8")),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(pd.PipelineError, match=words):
        pipeline_of(zoo.make("mlp"), **options)


def test_batches_and_plans_that_make_no_sense() -> None:
    animal, cost = zoo.make("mlp"), pd.LayerProfile(1.0, 1.0, 1, 1)
    chain = pd.LayerGraph.chain(tuple(pd.Layer(name, "Layer") for name in "210"))
    backwards = pd.plan(pd.Profile("Sequential", chain, (cost,) * 3, batch=1), pd.Cluster.flat(3), shape="straight")
    three = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with pytest.raises(pd.PipelineError, match=r"the plan runs layer '2' where the model runs '0': .* plan again from"):
        pd.Pipeline(three, backwards, loss=F.mse_loss, optimizer=SGD, sample=torch.zeros(1, 2))
    with pytest.raises(pd.PipelineError):
        pd.Pipeline(zoo.make("cnn").model, pd.Plan.uniform(2), loss=F.mse_loss, optimizer=SGD, sample=torch.zeros(1, 2))
    for data, words in (([animal.batches[0][0]], "needs batches"), (iter(animal.batches), "can be iterated only once")):
        with pipeline_of(animal) as pipeline, pytest.raises(pd.PipelineError, match=words):
            list(pipeline.train(data, epochs=2))
    with pytest.raises(pd.PipelineError, match=r"after the pipeline's with block; train in it"):
        list(pipeline.train(animal.batches))
    with pytest.raises(pd.PipelineError, match="the class Linear was given"):
        pd.Pipeline(nn.Linear, pd.Plan.uniform(2), loss=F.mse_loss, optimizer=SGD)
    refusal = pytest.raises(pd.PipelineError, match=r"batch of 2, but Sequential takes 1 input; give loss=\.\.\.")
    with refusal, pipeline_of(animal, loss=None) as pipeline:
        list(pipeline.train([[*batch] for batch in animal.batches]))
    refusal = pytest.raises(pd.PipelineError, match=r"given; the metric 'mean' was called with \(output, targets\)")
    with refusal, pipeline_of(animal, metrics={"mean": lambda output: output.mean()}) as pipeline:
        list(pipeline.train(animal.batches))


WHERE = {
    "forward": r"rank 1, stage 1, 1F5: ZeroDivisionError: a layer that fails",
    "backward": r"rank 1, stage 1, 1B5: ZeroDivisionError: a gradient that fails",
    "nan": r"rank (?P<last>\d), stage (?P=last), (?P=last)F5: the loss of minibatch 5 is nan",
}


@pytest.mark.parametrize("kind", WHERE)
@pytest.mark.parametrize("stages", [2, 3])
def test_an_error_names_rank_stage_and_op(kind: str, stages: int) -> None:
    with pytest.raises(pd.PipelineError, match=WHERE[kind]) as caught:
        mishaps.train(kind, stages)
    assert (caught.value.__cause__ is not None) == (kind != "nan")


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_an_infinite_input_of_the_last_minibatch_is_an_error(schedule: str, tmp_path: Path) -> None:
    """Its loss is a number: tanh bounds it. But the first layer's gradient is not: zero times infinity."""
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1)]
    first = (torch.randn(8, 4), torch.randn(8, 1))
    inputs = first[0].clone()
    inputs[3, 2] = float("inf")
    plan = pd.plan(pd.profile(nn.Sequential(*layers), first[0], loss=None, runs=1), pd.Cluster.flat(2), cuts=[2])

    def train(folder: Path, **options: Any) -> None:
        options |= {"loss": F.mse_loss, "optimizer": SGD, "schedule": schedule}
        with pd.Pipeline(nn.Sequential(*layers), plan, **options) as pipeline:
            for done in pipeline.train([*[first] * 9, (inputs, first[1])]):
                if done.number in (4, 9):
                    pipeline.save(folder)

    error = r"(?s)rank 0, stage 0, .*'0.weight' is not finite, .*minibatch.* 9 was not\n.*data"
    with pytest.raises(pd.PipelineError, match=error) as caught:
        train(tmp_path / "kept")
    assert ("gradient of minibatch 9 was" in str(caught.value)) == (schedule == "1f1b")
    train(tmp_path / "all", on_nan="continue")
    assert [len([*(tmp_path / name).glob("[!.]*")]) for name in ("kept", "all")] == [1, 2]


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "stages"), [("forward", 3), slow("backward", 2), slow("nan", 3), ("loop", 3)])
def test_when_one_process_fails_all_end_and_say_why(kind: str, stages: int) -> None:
    ends = processes.launch(mishaps.train, stages, kind, stages, timeout_s=30.0)
    words = WHERE.get(kind, "rank 0, the training loop: ZeroDivisionError: a loop that fails")
    for rank, end in enumerate(ends):
        assert (end.exit_code, end.seconds < 15.0) == (1, True), f"rank {rank}: {end}"
        if end.error is not None:  # a worker that waits for a healthy one is ended by its guard
            expected = "a loop that fails" if kind == "loop" and rank == 0 else words
            assert re.search(expected, str(end.error)), f"rank {rank}: {end.error}"
    assert any(end.error is not None for end in ends)


@pytest.mark.processes
@pytest.mark.slow
def test_ranks_with_other_settings_or_collectives_are_refused(tmp_path: Path) -> None:
    """Collectives hung in the profile and the loss, and mixed the weights of two stages in an optimizer's step."""
    for messages in processes.results(mishaps.train_refused, 2, str(tmp_path)):
        assert list(messages) == [*mishaps.UNLIKE, "folder", *mishaps.TOGETHER]
        assert "give every rank the same one" in messages.pop("folder")
        for name in mishaps.TOGETHER:
            assert "it calls torch.distributed.all_gather(), but" in messages.pop(name)
        for name, text in messages.items():
            assert all(words in text for words in (f"{name} (", "on rank 0; ", "on rank 1)")), text
        assert "lr: 0.05 on rank 0; lr: 0.2 on rank 1" in messages["optimizer"]
        assert "epochs (0 to 1 on rank 0; 0 to 2 on rank 1)" in messages["epochs"]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(("rank", "name"), [(0, "save"), (1, "save")])
def test_a_call_of_one_rank_alone_ends_all(rank: int, name: str, tmp_path: Path) -> None:
    ends = processes.launch(mishaps.call_alone, 2, rank, name, str(tmp_path), timeout_s=30.0)
    assert [end.exit_code for end in ends] == [1, 1]
    text = "".join([*(file.read_text() for file in tmp_path.glob("*.json")), *(str(end.error) for end in ends)])
    assert f"{name}() after 5 minibatches" in text
    other, ends_late = f"rank {1 - rank}", "close() after 50 minibatches"
    ways = f"{other} did not", f"{other} called {ends_late}", f"{ends_late} on {other}", "another rank did not make"
    assert any(words in text for words in ways)
    assert "every rank must make the same calls" in text


def _count(kind: str, most: float = 0) -> int:
    """Returns how many threads ("task") or descriptors ("fd") this process has; waits some seconds for so few.

    The kernel lists a thread that has ended until it was its turn once more.
    """
    count, end_s = len(os.listdir(f"/proc/self/{kind}")), time.monotonic() + (5.0 if most else 0.1)
    while count > most and time.monotonic() < end_s:
        time.sleep(0.005)
        count = min(count, len(os.listdir(f"/proc/self/{kind}")))
    return count


def _count_left(fails: str) -> list[list[int]]:
    """Returns this process's threads, descriptors and process groups before and after pipelines that end or fail.

    The pipelines live on. "over gloo", as between machines, they end as they should.
    """
    animal, counts, pipelines = zoo.make("mlp"), [], []
    workers = dist.get_world_size() if dist.is_initialized() else 2
    plan = zoo.plan_of(animal, 2, (workers - 1, 1))
    for kind in ("", fails, fails):
        with contextlib.suppress(ZeroDivisionError, pd.PipelineError), pytest.MonkeyPatch.context() as patch:
            if fails == "over gloo":
                patch.setattr(shared_memory, "is_supported", lambda: False)
            differs = kind == "connecting" and dist.get_rank() == 0
            with make_pipeline("mlp", plan, schedule="1f1b", microbatches=4 if differs else 2) as pipeline:
                pipelines.append(pipeline)
                for done in pipeline.train(animal.batches):
                    if done.number == 2 and (kind == "everywhere" or (kind == "rank 0" and pipeline.rank == 0)):
                        raise ZeroDivisionError
        gc.collect()
        groups = len(dist.distributed_c10d._world.pg_map)
        threads, descriptors = counts[0][:2] if counts else (0, 0)
        counts.append([_count("task", most=threads), _count("fd", most=descriptors), groups])
        if dist.is_initialized():
            dist.barrier()
    return counts


@pytest.mark.parametrize(
    ("workers", "fails"),
    [
        (1, "everywhere"),
        *(pytest.param(2, fails, marks=pytest.mark.processes) for fails in ("rank 0", "connecting")),
        *(pytest.param(3, fails, marks=pytest.mark.processes) for fails in ("everywhere", "never", "over gloo")),
        pytest.param(3, "rank 0", marks=[pytest.mark.processes, pytest.mark.slow]),
    ],
)
def test_a_pipeline_that_ended_or_failed_leaves_nothing(workers: int, fails: str) -> None:
    ends = processes.team(workers).results(_count_left, fails) if workers > 1 else [_count_left(fails)]
    for before, first, second in ends:
        assert all(left <= here for after in (first, second) for left, here in zip(after, before, strict=True))


def test_what_a_drain_has_finished_is_ready() -> None:
    """A checkpoint in the loop holds minibatches whose results the loop has not heard of, but the loggers have."""
    animal, heard, logged = zoo.make("mlp"), [], []
    with pipeline_of(animal, loggers=[SimpleNamespace(log=logged.append)]) as pipeline:
        for done in pipeline.train(animal.batches, epochs=3):
            heard.append(done)
            if done.number == 4:
                assert not pipeline.ready
                drained = pipeline.drain()
                coming = tuple(pipeline.ready)
                assert [done.number for done in coming] == [5, *range(6, drained)]
                assert logged == [*heard, *coming]
    assert tuple(heard[5:drained]) == coming


OWN_LOSSES = {
    "targets": lambda output, targets: F.cross_entropy(output, targets),
    "difference": lambda output, targets: (output - targets).square().mean(),
}


@pytest.mark.parametrize("name", OWN_LOSSES)
def test_a_loss_or_metric_of_output_and_targets_states_the_rule(name: str) -> None:
    animal = zoo.make("mlp")
    batches = [list(batch) for batch in animal.batches]  # as a DataLoader's
    words = r"TypeError: .*the loss was called with .* a list of 2; with targets="
    with pytest.raises(pd.PipelineError, match=words), pipeline_of(animal, loss=OWN_LOSSES[name]) as pipeline:
        list(pipeline.train(batches))
    options = {"loss": lambda output, batch: F.cross_entropy(output, batch[1]), "metrics": {"own": OWN_LOSSES[name]}}
    refusal = pytest.raises(pd.PipelineError, match=r"the metric 'own' was called with the output and what targets=")
    with refusal, pipeline_of(zoo.make("mlp"), **options) as pipeline:
        list(pipeline.train(animal.batches))
    options = {"loss": OWN_LOSSES["targets"], "targets": lambda batch: batch[1]}
    losses = []
    for keywords in (options, {"loss": F.cross_entropy}):
        with pipeline_of(zoo.make("mlp"), **keywords) as pipeline:
            losses.append([done.loss for done in pipeline.train(batches)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("call", ["evaluate", "predict", "state_dict", "save_pretrained"])
def test_averaged_weights_that_nobody_keeps_are_refused(call: str, tmp_path: Path) -> None:
    animal = zoo.make("mlp")
    arguments = {"state_dict": (), "save_pretrained": (tmp_path,)}.get(call, (animal.batches,))
    with pipeline_of(animal) as pipeline:
        with pytest.raises(pd.PipelineError, match=r"no averaged weights: give ema=\.\.\."):
            list(getattr(pipeline, call)(*arguments, ema=True))
        list(pipeline.train(animal.batches))
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [{"epochs": 1.5}, {"epochs": 0}, {"until_epoch": True}], ids=str)
def test_a_part_of_an_epoch_is_refused(wrong: dict[str, Any]) -> None:
    animal = zoo.make("mlp")
    with pipeline_of(animal) as pipeline, pytest.raises(pd.PipelineError, match="; give a whole number from 1 on"):
        next(pipeline.train(animal.batches, **wrong))


FROZEN = {
    "linear": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
    "BatchNorm": nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)),
}


@pytest.mark.parametrize("model", FROZEN.values(), ids=FROZEN)
@pytest.mark.parametrize("rest", [{}, {"check": False}, {"schedule": "pipedream"}, {"stages": 1}], ids=str)
def test_a_model_without_trained_parameters_is_refused(model: nn.Sequential, rest: dict[str, Any]) -> None:
    model, data = copy.deepcopy(model).requires_grad_(False), [(torch.randn(4, 4), torch.zeros(4, 4))]
    options = {"schedule": "1f1b", "stages": 2} | rest
    plan = pd.plan(pd.profile(model, data[0][0], runs=1), pd.Cluster.flat(options.pop("stages")), shape="pipeline")
    with pd.Pipeline(model, plan, loss=F.mse_loss, optimizer=SGD, **options) as pipeline:
        pipeline.evaluate(data)
        with pytest.raises(pd.PipelineError, match="nothing is trainable: all parameters of the model are frozen"):
            list(pipeline.train(data))
