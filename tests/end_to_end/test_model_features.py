"""All that a pipeline offers, with models that run by their own forward: alone, and on several processes."""

import shutil
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from built import Built
from cases import stage_states
from marks import long, needs_hf, slow, spread, thinned
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
    profile_of,
    train_with,
)  # fmt: skip
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention
from training import loop, train
from zoo import CASES

import pipedream as pd
from pipedream.testing import Reads, Training

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute of a Tensor that is not a leaf"
)

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, such as g++")
QUICK = {"tied_gpt": ("recompute split", "replicas")}


@cache
def _profile(name: str, dropout: bool = False) -> pd.Profile:
    return profile_of(CASES[name], batches_of(CASES[name])[0], dropout=dropout)


@pytest.mark.parametrize(
    ("name", "feature"),
    spread(
        thinned(
            pytest.param(name, feature, marks=[pytest.mark.slow] * (not is_quick) + [needs_hf] * CASES[name].needs_hf)
            for name in ("resnet", "tied_gpt", "attention_lstm", "hf_gpt2", "hf_t5")
            for feature in FLUSHING
            for is_quick in [feature in QUICK.get(name, ())]
        ),
        every=6,
    ),
)
def test_features_equal_the_serial_rule(name: str, feature: str) -> None:
    # Losses and norms of Hugging Face compute in float32.
    training(name, FLUSHING[feature], dropout=False, evaluate_at=(3,)).check(1e-5 if CASES[name].needs_hf else 1e-9)


def _train_with_each(name: str, profile: pd.Profile, words: list[str]) -> dict[str, Trained]:
    return {word: train_with(CASES[name], profile, FEATURES[word]) for word in words}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("workers", [2, long(3)])
def test_processes_equal_one(workers: int) -> None:
    has_lstm = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # in bfloat16; a CPU without AVX-512 has none
    words = [w for w in FEATURES if FEATURES[w].workers == workers and (has_lstm or w != "autocast")]
    how = "attention_lstm", _profile("attention_lstm"), words
    first, *others = processes.team(workers).results(_train_with_each, *how)
    for word, expected in _train_with_each(*how).items():
        check_same(expected, first[word], 1e-12 if workers > 2 else 0.0)  # the order of three terms is not fixed
        for other in others:
            assert (other[word].losses, other[word].evaluated) == (first[word].losses, first[word].evaluated)


def training(name: str, feature: Feature, *, dropout: bool = True, **more: Any) -> Training:
    """Returns the training of a model; where it has dropout, no layer is called twice."""
    case = CASES[name]
    how = {"schedule": feature.schedule, "microbatches": feature.microbatches, "loss": case.loss, "total": case.total}
    return Training(
        model=model_of(case, dropout=dropout), data=batches_of(case, (*LENGTHS, *LENGTHS)), optimizer=make_optimizer,
        plan=feature.plan(_profile(name, dropout)), options={"inputs": case.inputs} | feature.options, **how | more
    )  # fmt: skip


@pytest.mark.parametrize("name", [slow("resnet"), "tied_gpt"])
def test_a_run_goes_on_with_another_plan(name: str, tmp_path: Path) -> None:
    training(name, Feature()).resumed(tmp_path, (3,), training(name, Feature(config=(1, 1, 1))), bound=1e-9)


@pytest.mark.parametrize(
    ("name", "schedule", "stages", "m"),
    [
        slow("resnet", "pipedream", 3, 1),
        slow("unet", "pipedream", 4, 1),
        ("tied_gpt", "pipedream_2bw", 3, 4),
        slow("resnet", "pipedream_2bw", 2, 2),
        pytest.param("hf_gpt2", "pipedream_2bw", 3, 2, marks=[needs_hf, pytest.mark.slow]),
    ],
)
def test_late_gradients_equal_the_papers(name: str, schedule: str, stages: int, m: int) -> None:
    """Stage s of p reads version k - (p - 1 - s) in PipeDream (SOSP 2019, section 3.3), k - 1 in 2BW (ICML 2021)."""
    reads = Reads(lambda s, k: max(0, k // m - (1 if schedule == "pipedream_2bw" else stages - 1 - s)))
    training(name, Feature(schedule, m, (1,) * stages)).check(1e-5 if CASES[name].needs_hf else 1e-9, reads=reads)


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
            states.append((losses, pipeline.state_dict(), outputs))
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "feature", "backend"),
    [
        long("tied_gpt", Feature("pipedream_2bw", 2), "eager"),
        pytest.param("tied_gpt", Feature("1f1b", 2), True, marks=[pytest.mark.long, needs_compiler]),
        long("resnet", Feature("pipedream", 1, (1, 1, 1)), "aot_eager"),
        slow("attention_lstm", Feature(), "aot_eager"),
    ],
)
def test_compiled_modules_equal_the_others(name: str, feature: Feature, backend: Any) -> None:
    torch.compiler.reset()
    actual = train_with(CASES[name], _profile(name), replace(feature, options={"compile": backend}))
    check_same(train_with(CASES[name], _profile(name), feature), actual, 1e-6 if backend is True else 1e-9)


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
    before = {name: set(vars(module)) for name, module in model.named_modules()}
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
    assert before == {name: set(vars(module)) for name, module in model.named_modules()}


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


class _FusedCrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward, so that no scores are kept; as Liger's does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = F.cross_entropy(F.linear(*leaves), targets)
            ctx.save_for_backward(*torch.autograd.grad(loss, leaves))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return *(saved * gradient for saved in ctx.saved_tensors), None


def _fused(model: Any, ids: Tensor) -> dict[str, Tensor]:
    x = model.b(torch.tanh(model.a(model.embed(ids))))
    return {"loss": _FusedCrossEntropy.apply(x.flatten(0, 1), model.head.weight, ids.flatten())}


def _hooked(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """The second hook is on a tensor that the cut may lie before."""
    x = torch.tanh(model.a(model.embed(ids)))
    y = model.b(x)
    for tensor in (x, y) if y.requires_grad else ():
        tensor.register_hook(lambda gradient: gradient * 2)
    return {"loss": F.cross_entropy(model.head(y + x).flatten(0, 1), ids.flatten())}


def _block_masked(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """A mask of FlexAttention, which has no backward on a CPU, is made before and read after each cut."""
    count = ids.shape[1]
    mask = flex_attention.create_block_mask(lambda b, h, q, k: q >= k, None, None, count, count, "cpu", BLOCK_SIZE=16)
    x = model.embed(ids)
    for layer in (model.a, model.b):
        y = layer(x)
        allowed = flex_attention.create_mask(mask.mask_mod, None, None, count, count, device="cpu")[0]
        x = x + F.scaled_dot_product_attention(y, y, y, attn_mask=allowed)
    return {"loss": F.cross_entropy(model.head(x).flatten(0, 1), ids.flatten())}


@pytest.mark.parametrize("forward", [_fused, _hooked, slow(_block_masked)])
def test_common_faults_of_pipelines_at_every_cut(forward: Any) -> None:
    torch.manual_seed(0)
    parts = {"embed": nn.Embedding(32, 8), "a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}
    model = Built(forward, **parts, head=nn.Linear(8, 32, bias=False)).double()
    data = [torch.randint(32, (4, 32)) for _ in range(3)]
    plain_data = [(ids, None) for ids in data]
    layers = [layer.name for layer in pd.capture(model, data[0]).graph.layers]
    assert layers[:3] == ["embed", "a", "b"]
    profile = pd.profile(model, data[0], warmup=0, runs=1)
    for cut in layers[1:]:
        plan = pd.plan(profile, pd.Cluster.flat(2), schedule="1f1b", microbatches=2, cuts=[cut])
        losses, state = train(deepcopy(model), plan, data, loss=None, optimizer=make_optimizer)
        plain = loop(deepcopy(model), plain_data, loss=lambda output, _: output["loss"], optimizer=make_optimizer)
        assert losses == pytest.approx(plain.losses, rel=1e-9)
        torch.testing.assert_close(dict(state), plain.state, rtol=0, atol=1e-9)
