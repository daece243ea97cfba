"""Models of all kinds, as their users write them, train in a pipeline as they train in a plain loop."""

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from marks import needs_hf, seeds, spread
from random_models import RandomModel
from split_training import (
    Feature,
    Trained,
    batches_of,
    check_same,
    parts_make_whole,
    pipelined,
    plain_loop,
    profile_of,
    train_on,
)  # fmt: skip
from torch.nn import functional as F
from zoo import CASES, Case, padded_tokens

import pipedream as pd

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The PyTorch API of nested tensors:UserWarning"
)

DEFAULT = ("resnet", "tied_gpt", "attention_lstm")
QUICK = ("attention_lstm",)
"""Those that the default run trains in stages here; it does so with others in test_model_features.py."""
WITH_DROPOUT = ("tied_gpt", "glue_dropout", "attention_lstm", "hf_bert", "hf_t5", "hf_swin", "checkpointed")
# fmt: off
ALIKE = {
    "hf_bert": ("hf_roberta", "hf_distilbert", "hf_bert_classes", "hf_modernbert"),
    "hf_gpt_neox": ("hf_gpt_neo", "hf_gptj", "hf_opt", "hf_falcon", "hf_mpt"),
    "hf_llama": ("hf_gemma", "hf_gemma3", "hf_phi", "hf_phi3", "hf_mistral", "hf_qwen2", "hf_olmo2", "hf_stablelm",
                 "hf_cohere", "hf_granite", "hf_gemma2", "hf_qwen3"),
    "hf_mixtral": ("hf_olmoe", "hf_qwen3_moe", "hf_gpt_oss"),
    "hf_bart": ("hf_mbart", "hf_pegasus", "hf_marian"),
    "hf_vit": ("hf_deit", "hf_beit"),
    "resnet": ("hf_resnet",),
    "hf_wav2vec2": ("hf_hubert",),
}
# fmt: on
"""Models built as others are."""
LONG = {*sum(ALIKE.values(), ()), "hf_dinov2"}
LONG |= {"hf_mamba2", "hf_bloom", "hf_clip_text", "hf_clip_vision", "hf_albert", "hf_convnext", "hf_gpt_neox"}
LONG |= {"hf_bart", "hf_xlnet", "hf_deberta_v2", "hf_wav2vec2"}
"""Continuous integration leaves these out."""


def _chosen(names: tuple[str, ...] = tuple(CASES), default: tuple[str, ...] = DEFAULT) -> list[Any]:
    """Returns cases by name; those that are not in the default run are slow or long."""
    parameters = []
    for name in names:
        marks = [] if name in default else [pytest.mark.long if name in LONG else pytest.mark.slow]
        parameters.append(pytest.param(CASES[name], id=name, marks=marks + [needs_hf] * CASES[name].needs_hf))
    return parameters


@cache
def _plain(case: Case, microbatches: int) -> Trained:
    return plain_loop(case, batches_of(case), microbatches)


@pytest.mark.parametrize("case", spread(_chosen(default=QUICK)))
def test_a_flushing_method_equals_the_plain_loop(case: Case) -> None:
    """The last minibatch has three samples, fewer than microbatches."""
    check_same(_plain(case, 4), pipelined(case, batches_of(case), stages=3, microbatches=4, seed=34), case.tolerance)


@pytest.mark.parametrize("seed", seeds(1, 7, 30))
def test_random_models_at_random_cuts(seed: int) -> None:
    case = Case(f"random_{seed}", partial(RandomModel, seed), padded_tokens, F.cross_entropy)
    schedule = ("1f1b", "gpipe")[seed % 2]
    batches = batches_of(case)
    actual = pipelined(case, batches, stages=2 + seed % 3, schedule=schedule, microbatches=3, seed=seed)
    check_same(plain_loop(case, batches, 3), actual, 1e-9)


def test_samples_that_depend_on_each_other_are_refused() -> None:
    case = CASES["value_branch"]
    assert not parts_make_whole(case, batches_of(case)[0], 3)
    with pytest.raises(pd.errors.WorkerError, match=r"microbatches make .*computes with several samples at once"):
        pipelined(case, batches_of(case), microbatches=3, check=True)
    check_same(_plain(case, 1), pipelined(case, batches_of(case), check=True), case.tolerance)


@pytest.mark.parametrize("case", spread(_chosen(WITH_DROPOUT, default=("glue_dropout",)), every=3))
def test_masks_depend_neither_on_the_cut_nor_on_a_repeated_forward(case: Case) -> None:
    batches = batches_of(case)
    profile = profile_of(case, batches[0], dropout=True)
    whole, *others = (
        train_on(case, Feature(config=(1,) * stages, recompute=stages == 3).plan(profile), batches, dropout=True)
        for stages in (1, 2, 3)
    )
    for other in others:
        check_same(whole, other, case.tolerance)
    assert abs(whole.losses[0] - _plain(case, 2).losses[0]) > 1e-3, "nothing was dropped"


def test_the_docs_name_the_tested_models() -> None:
    """Their table has each model of transformers, and marks those that compute in float32 inside."""
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    table = text.partition("| of transformers | models |")[2].partition("\n\n")[0]
    listed = [name.strip() for row in table.splitlines()[2:] for name in row.split("|")[2].split(",")]
    plain = {re.sub(r"'s | encoder|\(.*\)|\.0|\W", "", name.replace("\u00b9", "")).lower(): name for name in listed}
    cases = [case for name, case in CASES.items() if name.startswith("hf_")]
    tested = {re.sub("hf|_|classes", "", case.name.replace("vision", "image")): case for case in cases}
    assert plain.keys() == tested.keys()
    marked = {name for name, case in tested.items() if case.float32_inside}
    assert {name for name, word in plain.items() if "\u00b9" in word} == marked
