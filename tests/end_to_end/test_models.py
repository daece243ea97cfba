"""Models of all kinds, as their users write them, train in a pipeline as they train in a plain loop."""

from __future__ import annotations

import importlib.util
import math

import pytest
from models import CASES, Case
from split_training import batches_of, loss_of, model_of, plain_loop

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

DEFAULT = ("resnet", "tied_gpt", "attention_lstm", "hf_gpt2", "hf_t5")
UNUSED = {"hf_xlnet": ("mask_emb", "r_s_bias", "seg_embed"), "hf_dinov2": ("mask_token",)}
"""Parameters that a model has for other tasks, by the end of their names."""


def _marked(*default: str) -> list[object]:
    """Returns all cases: those in the default run, and the others as slow."""
    marks = {name: [] if name in default else [pytest.mark.slow] for name in CASES}
    missing = importlib.util.find_spec("transformers") is None
    reason = "transformers is not installed; pip install torch-pipedream[hf]"
    for name, case in CASES.items():
        if case.needs_hf:
            marks[name].append(pytest.mark.skipif(missing, reason=reason))
    return [pytest.param(case, id=name, marks=marks[name]) for name, case in CASES.items()]


@pytest.mark.parametrize("case", _marked(*DEFAULT))
def test_each_model_trains_in_a_plain_loop(case: Case) -> None:
    batches = batches_of(case)
    trained = plain_loop(case, batches, microbatches=4)
    assert all(map(math.isfinite, trained.losses))
    model = model_of(case)
    for batch in batches:
        loss_of(case, model, batch).backward()
    first = model_of(case).state_dict()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not name.endswith(UNUSED.get(case.name, ())):
            assert parameter.grad is not None, f"{name} has no gradient"
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), f"the gradient of {name} is zero"
            assert not first[name].equal(trained.state[name]), name
