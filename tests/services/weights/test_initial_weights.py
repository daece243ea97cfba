"""Where the weights of a stage come from and go to: drawn on the meta device, files, rank 0, the model's own format."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any
from unittest import mock

import processes
import pytest
import torch
import torch.nn.functional as F
from built import Built
from marks import slow, thinned
from torch import Tensor, nn
from training import SGD, plan_of
from zoo import HF

import pipedream as pd
from pipedream.core.seeds import layer_seed
from pipedream.runtime.weights import parameters
from pipedream.services.weights import files, initial_values as initial, transfer
from pipedream.testing import Training, assert_equal

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2, "loss": F.cross_entropy, "optimizer": SGD}


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def drawn(make: Callable[[], nn.Module], parts: int = 1, seed: int = 0) -> nn.Module:
    """Returns a model that was built on the meta device, and drawn part by part, the last one first."""
    model = on_meta(make)
    names = list(parameters.named_state(model))
    for part in reversed(range(parts)):
        initial.materialise(model, names[part::parts], CPU, seed)
    return model


def check_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []


# -- modules of one's own ---------------------------------------------------------------------------


class Tokens(nn.Module):
    """Holds parameters and a buffer itself, and a module whose weights it scales."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(3, 2))
        self.second = nn.Parameter(torch.empty(4))
        self.register_buffer("steps", torch.empty(5, dtype=torch.long), persistent=False)
        self.register_buffer("mask", torch.empty(2, dtype=torch.bool))
        self.inner = nn.Linear(2, 2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.first)
        nn.init.uniform_(self.second)
        self.steps.copy_(torch.arange(5))
        self.mask.zero_()
        nn.init.constant_(self.inner.bias, 7.0)


def mixed() -> nn.Module:
    tokens = Tokens()
    return nn.Sequential(tokens, nn.BatchNorm1d(2), nn.LSTM(2, 2), nn.MultiheadAttention(4, 2), tokens.inner)


@pytest.mark.parametrize("parts", [2, 3, 1000])
def test_initial_values_depend_on_no_cut_and_no_generator(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("manual_seed", "manual_seed_all"):  # generators of GPUs would not be restored
        monkeypatch.delattr(torch.cuda, name)
    before = torch.default_generator.get_state()
    check_equal(parameters.named_state(drawn(mixed, parts)), parameters.named_state(drawn(mixed)))
    assert torch.equal(torch.default_generator.get_state(), before)
    assert not torch.equal(drawn(mixed, seed=1)[0].first, drawn(mixed)[0].first)


def test_a_module_is_initialised_as_in_its_constructor() -> None:
    model = drawn(mixed)
    assert torch.equal(model[0].steps, torch.arange(5))
    assert torch.equal(model[0].mask, torch.zeros(2, dtype=torch.bool))
    assert torch.equal(model[1].running_var, torch.ones(2))
    assert torch.equal(model[0].inner.bias, torch.full((2,), 7.0))  # by the module around it, which comes last
    assert model[4].weight is model[0].inner.weight
    assert not model[3].in_proj_bias.any()
    assert bool(model[3].in_proj_weight.all())
    torch.manual_seed(layer_seed(0, 0, "2"))
    assert torch.equal(model[2].weight_hh_l0, nn.LSTM(2, 2).weight_hh_l0)


def test_values_that_are_there_stay_and_others_only_come_where_they_are_named() -> None:
    model = on_meta(mixed)
    weight = model[1].weight = nn.Parameter(torch.full((2,), 3.0, dtype=torch.float64))
    model[0].second.requires_grad_(False)
    initial.materialise(model, ["0.second", "1.weight", "1.running_mean"], CPU, 0)
    assert model[1].weight is weight
    assert torch.equal(weight, torch.full((2,), 3.0, dtype=torch.float64))
    assert not model[0].second.requires_grad
    filled = [name for name, tensor in parameters.named_state(model).items() if not tensor.is_meta]
    assert filled == ["0.second", "1.weight", "1.running_mean"]


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(2, 2))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.rows[0])


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def reset_parameters(self) -> None:
        raise KeyError("gain")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (lambda: Built(None, scale=nn.Parameter(torch.ones(2))), "parameter '0.scale' .* by reset_param.* of Built"),
        (lambda: Built(None, angles=nn.Buffer(torch.ones(3), persistent=False)), "the buffer '0.angles' .* weights"),
        (lambda: Built(None, inner=nn.Linear(2, 2), mask=torch.ones(2)), "0.mask of Built is a tensor on the meta dev"),
        (Partly, "the parameter '0.rows' is on the meta device and .* of Partly"),
        (Failing, "'0.inner' is on the meta device, and its initialisation by Failing raised KeyError: 'gain'"),
    ],
)
def test_nothing_stays_uninitialised(kind: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(pd.errors.CaptureError, match=words):
        drawn(lambda: nn.Sequential(kind()))
    with pytest.raises(pd.errors.CaptureError, match=r"lists '0.third', but the Sequential has no parameter or buffer"):
        initial.materialise(on_meta(mixed), ["0.third"], CPU, 0)


def rule(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 5.0, 0.02)
        nn.init.zeros_(module.bias)


def test_a_models_own_rule_comes_first() -> None:
    """As many scripts have it; it does not know norms."""
    model = drawn(lambda: Built(None, body=nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), _init_weights=rule))
    assert bool((model.body[0].weight > 4.0).all())
    assert not model.body[0].bias.any()
    assert torch.equal(model.body[1].weight, torch.ones(3))


# -- Hugging Face -----------------------------------------------------------------------------------


def hugging_face(name: str) -> nn.Module:
    pytest.importorskip("transformers", reason="transformers is not installed")
    return HF[f"hf_{name}"].make()


MODELS = ["gpt2", *(slow(name) for name in ("llama", "bert", "vit", "mixtral", "mamba"))]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_models_of_hugging_face_are_initialised_as_on_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    on_cpu = hugging_face(name)
    drawn_model = drawn(lambda: hugging_face(name))
    check_equal(parameters.named_state(drawn(lambda: hugging_face(name), 3)), parameters.named_state(drawn_model))
    assert parameters.find_shared_names(drawn_model) == parameters.find_shared_names(on_cpu)
    for name, buffer in on_cpu.named_buffers():
        assert torch.equal(drawn_model.get_buffer(name), buffer), name
    for name, parameter in on_cpu.named_parameters():
        a, b = drawn_model.get_parameter(name).detach(), parameter.detach()
        spread = max(float(a.std(correction=0)), float(b.std(correction=0)))
        assert bool(a.isfinite().all())
        assert abs(float(a.std(correction=0) - b.std(correction=0))) <= 6 * spread / math.sqrt(2 * a.numel()), name
        assert abs(float(a.mean() - b.mean())) <= 8 * spread / math.sqrt(a.numel()), name


# -- files ------------------------------------------------------------------------------------------


def tied() -> nn.Module:
    words, head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
    head.weight = words.weight
    return nn.Sequential(words, nn.Linear(4, 4), nn.Tanh(), Built(lambda self, x: self.head(x)[:, -1], head=head))


def untied() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def state_of(make: Callable[[], nn.Module], seed: int = 5) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return make().state_dict()


def write(folder: Path, state: dict[str, Tensor], form: str) -> Path:
    if form == "state dict":
        torch.save(state, folder / "weights.pt")
        return folder / "weights.pt"
    save_file = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").save_file
    if form == "shards":
        places = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(state)}
        for file in set(places.values()):
            save_file({name: tensor for name, tensor in state.items() if places[name] == file}, folder / file)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
        return folder
    save_file(state, folder / "model.safetensors")
    return folder / "model.safetensors" if form == "file" else folder


def start(make: Callable[[], nn.Module], cuts: tuple[int, ...], weights: Any, meta: str = "all") -> dict[str, Tensor]:
    """Returns the state that a pipeline starts with; `meta` says at which ranks the model is on the meta device."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.manual_seed(5)
    model = on_meta(make) if meta == "all" or (meta == "others" and rank) else make()
    sample = torch.zeros(2, 3).long() if isinstance(model[0], nn.Embedding) else torch.zeros(2, 4)
    with pd.Pipeline(model, plan_of(make(), sample, cuts), weights=weights, **OPTIONS) as pipeline:
        return pipeline.state_dict()


@pytest.mark.parametrize("form", ["state dict", "file", "folder", "shards"])
@pytest.mark.parametrize("meta", ["all", "none"])
def test_weights_start_from_a_file(tmp_path: Path, form: str, meta: str) -> None:
    state = state_of(untied, seed=6)
    check_equal(start(untied, (2,), write(tmp_path, state, form), meta), state)


def test_a_shared_parameter_may_be_saved_once(tmp_path: Path) -> None:
    state = state_of(tied, seed=6)
    for gone in ("0.weight", "3.head.weight"):
        once = {name: tensor for name, tensor in state.items() if name != gone}
        check_equal(start(tied, (2,), write(tmp_path, once, "file")), state)


def test_a_prefix_of_the_inner_model_may_be_missing_or_added() -> None:
    """The outer model is a head on the inner one, as those of Hugging Face."""
    inner = Built(None, rows=nn.Linear(4, 5), columns=nn.Linear(5, 3), base_model_prefix="body")
    outer = Built(None, body=inner, head=nn.Linear(3, 3), base_model_prefix="body")
    state, bare = outer.state_dict(), inner.state_dict()
    bodies = {name.removeprefix("body."): tensor for name, tensor in state.items()}
    check_equal(dict(files.fit_names(outer, bodies, state, {}, "here")), state)
    with pytest.warns(UserWarning, match="not in this Built, and left out: 'head.weight', 'head.bias' of here"):
        check_equal(dict(files.fit_names(inner, state, bare, {}, "here")), bare)
    words = r"lack 'head.weight', 'head.bias', .* 'columns.bias', .* of this Built"
    with pytest.raises(pd.errors.CaptureError, match=words):
        files.fit_names(outer, bare, state, {}, "here")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_hugging_face_read_what_they_save(tmp_path: Path, name: str) -> None:
    saved = hugging_face(name)
    saved.save_pretrained(tmp_path)  # type: ignore[operator]
    model = on_meta(lambda: hugging_face(name))
    shared, names = parameters.find_shared_names(model), list(parameters.named_state(model))
    state = files.fit_names(model, files.open_weights(tmp_path), names, shared, tmp_path)
    for part in (names[1::2], names[::2]):
        transfer.load(model, state, part, shared, CPU)
        initial.materialise(model, part, CPU, 0)
    check_equal(parameters.named_state(model), parameters.named_state(saved))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: {n: t for n, t in state.items() if n[0] != "3"}, r"lack '3.weight', .* such as '0.bias'"),
        (lambda state: state | {"0.weight": state["0.weight"] + 0j}, "'0.weight' is complex in the state dict, not in"),
        (lambda state: state | {"0.weight": torch.zeros(2, 2)}, r"'0.weight' has shape \(2, 2\) in .*, \(6, 4\) in"),
    ],
)
def test_states_that_do_not_fit_are_refused(change: Callable[[Any], Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(pd.errors.CaptureError, match=words):
        start(untied, (2,), write(tmp_path, change(state_of(untied)), "file"))


INDEX, GIVE_AN_INDEX = "model.safetensors.index.json", "give an index of safetensors files"


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("a.pt", torch.nn.Linear(1, 1), "pt: it holds more than tensors; give a state dict"),
        ("a.pt", {"a": torch.eye(2).to_sparse()}, "'a' has the layout torch.sparse_coo in"),
        ("a.pt", {"a": torch.empty(2, device="meta")}, "'a' has no values in"),
        ("a.pt", None, "it is a pipe or a device"),
        ("README.md", "", r"neither model\.safetensors nor"),
        ("model.safetensors", "no", r"cannot read weights from .*model\.safetensors"),
        *((INDEX, index, GIVE_AN_INDEX) for index in ("{}", "[]", '{"weight_map": []}', "[" * 100_000)),
        *((INDEX, json.dumps({"weight_map": {"a": file}}), GIVE_AN_INDEX) for file in (3, "../../x", "/x", "..")),
    ],
)
def test_what_holds_no_dense_values_is_refused(file: str, content: Any, words: str, tmp_path: Path) -> None:
    """A file; or a folder, with this text in a file."""
    path = tmp_path / file
    if isinstance(content, str):
        path.write_text(content)
    else:
        _ = os.mkfifo(path) if content is None else torch.save(content, path)
    with pytest.raises(pd.errors.ArtifactError, match=words):
        files.open_weights(tmp_path if isinstance(content, str) else path)


def names_read(make: Callable[[], nn.Module], folder: Path) -> tuple[list[str], dict[str, Tensor]]:
    """Returns what this process has read of a folder, and the state that rank 0 collects."""
    read: list[str] = []
    get = files._SafeTensors.__getitem__

    def noted(weights: files._SafeTensors, name: str) -> Tensor:
        read.append(name)
        return get(weights, name)

    with mock.patch.object(files._SafeTensors, "__getitem__", noted):
        return read, start(make, (2,), folder)


@pytest.mark.processes
def test_each_rank_reads_its_own_part(tmp_path: Path) -> None:
    state = state_of(untied, seed=6)
    (first, whole), (second, empty) = processes.team(2).results(names_read, untied, write(tmp_path, state, "shards"))
    assert sorted(first) == sorted(name for name in state if name[0] in "01")
    assert sorted(second) == ["3.bias", "3.weight"]
    check_equal(whole, state)
    assert not empty


@pytest.mark.processes
@pytest.mark.slow
def test_processes_start_with_the_values_of_one_or_of_rank_0() -> None:
    team = processes.team(2)
    for make in (untied, tied):
        check_equal(team.results(start, make, (2,), None)[0], start(make, (2,), None))
    check_equal(team.results(start, untied, (2,), None, "others")[0], state_of(untied))


def count_sent(seeds: tuple[int, int], weights: Path | None) -> tuple[int, int]:
    """Returns how many weights this process sends before its pipeline is built, and then for the first minibatch."""
    torch.manual_seed(seeds[torch.distributed.get_rank()])
    model, sample = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.ones(4, 4)
    plan = plan_of(model, sample, (2,))
    with (
        mock.patch.object(torch.distributed, "send", wraps=torch.distributed.send) as send,
        pd.Pipeline(model, plan, weights=weights, **OPTIONS) as pipeline,
    ):
        at_start = len(send.call_args_list)
        assert [done.loss for done in pipeline.train([(sample, torch.zeros(4).long())], epochs=1)]
        # Clocks are compared by messages of another shape.
        are_weights = [call.args[0].shape in ((3, 6), (3,)) for call in send.call_args_list]
        return sum(are_weights[:at_start]), sum(are_weights[at_start:])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("seeds", "reads_file", "counts"),
    [((5, 5), False, [(0, 0), (0, 0)]), ((5, 6), False, [(2, 0), (0, 0)]), ((5, 5), True, [(0, 0), (0, 2)])],
    ids=["alike", "of rank 0", "of a file"],
)
def test_weights_that_two_ranks_have_alike_are_not_sent(
    seeds: tuple[int, int], reads_file: bool, counts: list[tuple[int, int]], tmp_path: Path
) -> None:
    """The first minibatch is compared with a run of the whole model, on rank 0: stale weights would be noticed."""
    torch.manual_seed(7)
    state = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).state_dict()
    file = write(tmp_path, state, "state dict") if reads_file else None
    assert processes.team(2).results(count_sent, seeds, file) == counts


@pytest.mark.parametrize("make", [untied, tied])
def test_values_from_the_meta_device_do_not_depend_on_the_plan(make: Callable[[], nn.Module]) -> None:
    check_equal(start(make, (1, 3), None), start(make, (), None))


# -- the model's own format -------------------------------------------------------------------------


def save_trained(folder: Path) -> dict[str, Tensor]:
    """Trains a model with tied weights; returns its state and its averages."""
    batches = [HF["hf_gpt2"].batch(seed, 4, 6) for seed in range(2)]
    plan = plan_of(hugging_face("gpt2"), batches[0], (2,))
    with pd.Pipeline(hugging_face("gpt2"), plan, ema=0.5, **OPTIONS | {"loss": None}) as pipeline:
        list(pipeline.train(batches))
        pipeline.save_pretrained(folder / "trained")
        pipeline.save_pretrained(folder / "averaged", ema=True)
        return pipeline.state_dict() | {f"ema.{n}": t for n, t in pipeline.state_dict(ema=True).items()}


def check_saved(folder: Path, state: dict[str, Tensor]) -> None:
    for name, prefix in (("trained", ""), ("averaged", "ema.")):
        assert {"config.json", "model.safetensors"} <= {path.name for path in (folder / name).iterdir()}
        model: Any = type(hugging_face("gpt2")).from_pretrained(folder / name)  # type: ignore[attr-defined]
        check_equal(model.state_dict(), {name: state[prefix + name] for name in model.state_dict()})
        assert model.lm_head.weight is model.transformer.wte.weight
        assert len(files.open_weights(folder / name)) == len(model.state_dict()) - 1


def test_trained_weights_are_saved_in_the_models_own_format(tmp_path: Path) -> None:
    state = save_trained(tmp_path)
    check_saved(tmp_path, state)
    assert not torch.equal(state["lm_head.weight"], state["ema.lm_head.weight"])
    plan = plan_of(hugging_face("gpt2"), HF["hf_gpt2"].batch(0, 4, 6), (2,))
    model = on_meta(lambda: hugging_face("gpt2"))
    with pd.Pipeline(model, plan, weights=tmp_path / "trained", **OPTIONS | {"loss": None}) as pipeline:
        check_equal(pipeline.state_dict(), {n: t for n, t in state.items() if not n.startswith("ema.")})


@pytest.mark.processes
@pytest.mark.slow
def test_rank_0_saves_the_models_own_format(tmp_path: Path) -> None:
    check_saved(tmp_path, processes.team(2).results(save_trained, tmp_path)[0])


def test_a_model_without_a_format_of_its_own_points_to_its_state(tmp_path: Path) -> None:
    plan = plan_of(untied(), torch.zeros(2, 4), (2,))
    words = r"Sequential has no save_pretrained; .* state_dict\(\)"
    with pd.Pipeline(untied(), plan, **OPTIONS) as pipeline, pytest.raises(pd.errors.CaptureError, match=words):
        pipeline.save_pretrained(tmp_path)


# -- frozen stages and weights ----------------------------------------------------------------------


def partly_frozen(frozen: tuple[str, ...]) -> nn.Module:
    """Returns a model in which the parameters whose names begin so are not trained."""
    torch.manual_seed(1)
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)]
    model = nn.Sequential(*layers).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    return model


FROZEN = [("0",), ("2",), ("6",), ("0", "2"), ("2", "6"), ("0", "2.weight", "4.bias", "6")]


def frozen(names: tuple[str, ...], schedule: str = "1f1b") -> Training:
    parts = None if schedule == "pipedream" else 4
    torch.manual_seed(3)
    data = [(torch.randn(8, 4, dtype=torch.float64), torch.randint(0, 3, (8,))) for _ in range(3)]
    how: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": SGD, "seed": 3, "ema": 0.5, "plan": (1, 1, 1, 1)}
    return Training(model=partial(partly_frozen, names), data=data, schedule=schedule, microbatches=parts, **how)


@pytest.mark.parametrize(
    ("names", "schedule"),
    thinned([*zip(FROZEN, cycle(["1f1b", "zb-h1"]), strict=False), *product(FROZEN, ["pipedream"])], 3),
)
def test_frozen_stages_and_parts_of_stages_train_as_in_one_process(names: tuple[str, ...], schedule: str) -> None:
    trained, begin = frozen(names, schedule).check(1e-12), partly_frozen(names)
    for name, parameter in begin.named_parameters():
        assert torch.equal(trained.state[name], parameter) is not parameter.requires_grad, name


def repeated() -> nn.Module:
    """A frozen layer that runs twice, so that two stages hold what has one name."""
    torch.manual_seed(1)
    layer = nn.Linear(4, 4).requires_grad_(False)
    return nn.Sequential(layer, nn.Linear(4, 4), layer, nn.Linear(4, 3)).double()


@pytest.mark.processes
@pytest.mark.slow
def test_what_several_stages_hold_without_training_it(tmp_path: Path) -> None:
    whole, in_two = (replace(frozen(()), model=repeated, plan=plan, ema=None) for plan in ((1,), (1, 1)))
    assert_equal(in_two.pipeline(2), in_two.check(1e-12))
    for first, then in ((whole, in_two), (in_two, whole)):
        first.resumed(tmp_path / f"{first.plan}", (2,), then, bound=1e-12)


def test_no_gradient_is_sent_to_a_stage_that_trains_nothing() -> None:
    sent = [sum(frozen(names).pipeline().sent_bytes.values()) for names in (("0", "2"), ("0",), ("6",))]
    assert sent[0] < sent[1] < sent[2]
