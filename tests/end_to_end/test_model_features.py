"""All that a pipeline offers, with models that run by their own forward: alone, and on several processes."""

import importlib.util
import shutil
from bisect import bisect_right
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import processes
import pytest
import torch
from built import Built
from cases import stage_states
from marks import long, slow, spread, thinned
from split_training import (
    FEATURES,
    FLUSHING,
    LENGTHS,
    Feature,
    Trained,
    batches_of,
    check_same,
    make_optimizer,
    model_of,
    plain_loop,
    profile_of,
    train_with,
    train_with_each,
)
from torch import Tensor, nn
from training import train
from zoo import CASES

import pipedream as pd

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute of a Tensor that is not a leaf"
)

needs_hf = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed; pip install torch-pipedream[hf]",
)
FIVE = ("resnet", "tied_gpt", "attention_lstm", "hf_gpt2", "hf_t5")
UNTIED = ("resnet", "attention_lstm")
QUICK = {
    "resnet": ("recompute split", "replicas", "another plan"),
    "tied_gpt": ("recompute split", "replicas", "another plan"),
}


def _marks(name: str, quick: bool) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] * (not quick) + [needs_hf] * CASES[name].needs_hf


@cache
def _profile(name: str) -> pd.Profile:
    case = CASES[name]
    return profile_of(case, batches_of(case)[0])


@pytest.mark.parametrize(
    ("name", "feature"),
    spread(
        thinned(
            pytest.param(name, feature, marks=_marks(name, feature in QUICK.get(name, ())))
            for name in FIVE
            for feature in FLUSHING
        )
    ),
)
def test_features_equal_the_plain_loop(name: str, feature: str, tmp_path: Path) -> None:
    expected = plain_loop(CASES[name], batches_of(CASES[name]), FLUSHING[feature].microbatches)
    actual = train_with(name, _profile(name), FLUSHING[feature], tmp_path / "checkpoint")
    if name == "resnet" and feature == "replicas":  # each replica has running statistics of its own
        assert actual.losses == pytest.approx(expected.losses, rel=1e-9)
        return
    check_same(expected, actual, 1e-5 if CASES[name].needs_hf else 1e-9)  # losses and norms compute in float32 there


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "workers"), [slow("attention_lstm", 2), pytest.param("hf_t5", 3, marks=_marks("hf_t5", False))]
)
def test_processes_equal_one(name: str, workers: int, tmp_path: Path) -> None:
    chosen = {
        word: feature
        for word, feature in FEATURES.items()
        if feature.workers == workers and not (feature.schedule == "pipedream" and name not in UNTIED)
    }
    _check_processes(name, workers, chosen, tmp_path)


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_equal_one(tmp_path: Path) -> None:
    _check_processes("tied_gpt", 2, {"another plan": FEATURES["another plan"]}, tmp_path)


def _check_processes(name: str, workers: int, chosen: dict[str, Feature], folder: Path) -> None:
    profile = _profile(name)
    first, *others = processes.team(workers).results(
        train_with_each, name, profile.to_json(), chosen, folder / "several"
    )
    alone = train_with_each(name, profile.to_json(), chosen, folder / "one")
    for word, expected in alone.items():
        check_same(expected, first[word], 1e-12 if workers > 2 else 0.0)  # the order of three terms is not fixed
        for other in others:
            assert other[word].losses == first[word].losses
            assert other[word].evaluated == first[word].evaluated


@pytest.mark.parametrize(
    ("name", "schedule", "stages", "microbatches"),
    [
        ("resnet", "pipedream", 3, 1),
        slow("unet", "pipedream", 4, 1),
        ("tied_gpt", "pipedream_2bw", 3, 4),
        slow("resnet", "pipedream_2bw", 2, 2),
        slow("attention_lstm", "pipedream", 2, 1),
        pytest.param("hf_gpt2", "pipedream_2bw", 3, 2, marks=[needs_hf, pytest.mark.slow]),
    ],
)
def test_late_gradients_equal_the_papers(name: str, schedule: str, stages: int, microbatches: int) -> None:
    """For minibatch k, and stage s of p, whose parameters are w_s:

    PipeDream (SOSP 2019, section 3.3)   w(k+1) = w(k) - lr grad f(w_0(k-p+1), ..., w_{p-1}(k))
    2BW (ICML 2021, section 3.1)         w(k+1) = w(k) - lr grad f(w(k-1))
    """
    case, layers = CASES[name], _profile(name).graph.layers
    batches = batches_of(case, (*LENGTHS, *LENGTHS))
    cuts = tuple(i * len(layers) // stages for i in range(1, stages))
    # Of a tied parameter any holder's version is read, as all are the same.
    stage_of = {name: bisect_right(cuts, at) for at, layer in enumerate(layers) for name in layer.parameters}

    def version(parameter: str, k: int) -> int:
        return max(0, k - (1 if schedule == "pipedream_2bw" else stages - 1 - stage_of[parameter]))

    late, plain = plain_loop(case, batches, microbatches, version), plain_loop(case, batches, microbatches)
    plan = pd.plan(_profile(name), pd.Cluster.local(stages), schedule=schedule, microbatches=microbatches, cuts=cuts)
    losses, state = train(model_of(case), plan, batches, loss=case.loss, optimizer=make_optimizer)
    actual = Trained(losses, state)
    check_same(Trained(late.losses, late.state), actual, 1e-12 if not case.needs_hf else 1e-6)
    assert abs(plain.losses[-1] - losses[-1]) > 1e-10, "nothing was late"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=_marks(name, name == "checkpointed"))
        for name in ("checkpointed", "checkpointed_reentrant", "tied_gpt", "glue_dropout", "hf_t5")
    ],
)
def test_masks_are_the_same_when_a_forward_is_repeated(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    profile = profile_of(case, batches_of(case)[0], dropout=True)
    once = train_with(name, profile, Feature("gpipe", dropout=True), tmp_path)
    whole = train_with(name, profile, Feature("gpipe", config=(1,), dropout=True), tmp_path)
    again = train_with(name, profile, Feature(config=(1, 1, 1), recompute=True, dropout=True), tmp_path)
    check_same(whole, once, 1e-9)
    check_same(once, again, 1e-9)
    undropped = plain_loop(case, batches_of(case), 2)
    assert abs(undropped.losses[0] - once.losses[0]) > 1e-3, "nothing was dropped"


def _drop_after_first(self: nn.Module, x: Tensor) -> Tensor:
    """One module drops in every block but the first."""
    x = self.blocks[0](x)
    for block in self.blocks[1:]:
        x = x + self.drop(block(x))
    return x


def test_stages_that_share_a_module_leave_evaluation_together() -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(6)]
    optimizer, states = partial(torch.optim.SGD, lr=0.01), []
    for cuts in ((), (1, 3, 5)):
        torch.manual_seed(1)
        model = Built(_drop_after_first, blocks=nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), drop=nn.Dropout(0.5))
        profile = pd.profile(model, batches[0][0], warmup=0, runs=1)
        plan = pd.plan(profile, pd.Cluster.local(len(cuts) + 1), schedule="1f1b", microbatches=2, cuts=cuts)
        with pd.Pipeline(model, plan, loss=nn.MSELoss(), optimizer=optimizer) as pipeline:
            losses = [done.loss for done in pipeline.train(batches)]
            losses.append(pipeline.evaluate(batches)["loss"])
            outputs = list(pipeline.predict(batches))
            assert all(module.training for module in model.modules())
            losses += [done.loss for done in pipeline.train(batches)]
            states.append(Trained(losses, pipeline.state_dict(), predicted=outputs))
    check_same(*states, 1e-5)


@pytest.mark.parametrize(
    ("name", "feature", "backend"),
    [
        long("tied_gpt", Feature("pipedream_2bw", 2), "eager"),
        slow("resnet", Feature("pipedream", 1, (1, 1, 1)), "aot_eager"),
        slow("attention_lstm", Feature(), "aot_eager"),
    ],
)
def test_compiled_modules_equal_the_others(name: str, feature: Feature, backend: str, tmp_path: Path) -> None:
    torch.compiler.reset()
    expected = train_with(name, _profile(name), feature, tmp_path)
    actual = train_with(name, _profile(name), replace(feature, options={"compile": backend}), tmp_path)
    check_same(expected, actual, 1e-5 if CASES[name].needs_hf else 1e-9)


@pytest.mark.slow
def test_compiled_are_the_outermost_modules_within_a_stage_and_once_for_all_versions() -> None:
    torch.compiler.reset()
    graphs: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(len(inputs))  # type: ignore[arg-type]
        return module.forward

    case = CASES["tied_gpt"]
    batches = [batches_of(case)[0]] * 6
    model, profile = model_of(case), _profile("tied_gpt")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    plan = pd.plan(profile, pd.Cluster.local(2), schedule="pipedream_2bw", microbatches=2, cuts=("transformer.h.1",))
    options = {"loss": case.loss, "optimizer": make_optimizer, "compile": {"backend": backend, "dynamic": True}}
    with pd.Pipeline(model, plan, **options) as pipeline:
        for done in pipeline.train(batches):
            if done.number == 1:
                first = len(graphs)
        assert len(graphs) == first > 0, "a version of the weights was compiled again"
        compiled = [layer.compiled for state in stage_states(pipeline) for _, layer in state.module.layers]
    assert "transformer.h.0" in compiled[0]
    assert not any(name.startswith("transformer.h.0.") for name in compiled[0])
    assert {name.rsplit(".", 1)[0] for name in compiled[1]} >= {"transformer.h"}
    after = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert {name: set(modules) for name, modules in before.items()} == {
        name: set(modules) for name, modules in after.items()
    }


def test_layers_of_a_chain_are_compiled() -> None:
    torch.compiler.reset()
    batches = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(3)]
    losses = []
    for compiles in (False, "eager"):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        profile = pd.profile(model, batches[0][0], warmup=0, runs=1)
        plan = pd.plan(profile, pd.Cluster.local(2), schedule="pipedream", cuts=(2,))
        options = {"loss": nn.CrossEntropyLoss(), "optimizer": make_optimizer, "compile": compiles}
        losses.append(train(model, plan, batches, **options).losses)
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, such as g++")
def test_compiled_by_inductor(tmp_path: Path) -> None:
    torch.compiler.reset()
    feature = Feature("1f1b", 2)
    expected = train_with("tied_gpt", _profile("tied_gpt"), feature, tmp_path)
    actual = train_with("tied_gpt", _profile("tied_gpt"), replace(feature, options={"compile": True}), tmp_path)
    check_same(expected, actual, 1e-6)


def test_what_compile_may_be() -> None:
    with pytest.raises(pd.PipelineError, match="compile is 3, neither True, a backend nor a mapping"):
        pd.options.PipelineOptions(optimizer=make_optimizer, compile=3)  # type: ignore[arg-type]
