"""Mixtures of experts on a mesh choose and compute as in one process."""

from dataclasses import replace
from functools import partial
from typing import Any

import processes
import pytest
import torch
from torch import nn

import pipedream as pd
from tests.extensions.meshes.sharding.meshes import Case, D, Mlp, Trained, check_refused, check_same, of_words, train


class Block(nn.Module):
    """Its tokens with a negative first number are padding, or of a lower importance."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.experts = pd.experts.MixtureOfExperts(D, 8, 4, **{"groups": 2, "capacity_factor": 1, "z_loss": 0.1, **how})
        self.experts.balance_loss = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        importance = 1 - 0.5 * ((y[..., 0] < -0.5).double() + (y[..., 1] < 0).double())
        return x + self.experts(y, importance.detach())


def _make_model(**how: Any) -> Any:
    return of_words(4, Block(**how), Mlp(), Block(**how))


def _make_case(mesh: str, rules: str, *args: Any, names: dict[str, str] | None = None, **how: Any) -> Case:
    return Case(partial(_make_model, **how), mesh, rules, *args, names=names or {})


GSHARD = ("data:2", "experts:data, batch:data")
CASES = {
    "gshard": _make_case(*GSHARD),
    "gshard-dense": _make_case(*GSHARD, "pipedream", None, form="dense", top=1),
    "experts": _make_case("model:2", "experts:model", "pipedream", None),
    "newest-weights": _make_case("model:2", "experts:model", "paci", 2, form="dense"),
    "two-dimensions": replace(_make_case("data:2,model:2", "experts:data, batch:data, d_ff:model"), stages=()),
    "sharded-weights": replace(_make_case("data:2", "experts:data, batch:data", second="all"), shard_weights="data"),
}


def _train_all() -> list[Trained]:
    return [train(case, case.mesh) for case in CASES.values()]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_experts_on_meshes_train_as_in_one_process() -> None:
    """Also the last minibatch, whose microbatches are sharded or not; its processes train all cases in turn."""
    for case, trained in zip(CASES.values(), processes.team(4).results(_train_all, timeout_s=180.0)[0], strict=True):
        check_same(trained, train(case, ""))


@pytest.mark.processes
@pytest.mark.slow
def test_groups_that_the_mesh_does_not_divide_are_refused() -> None:
    case = replace(_make_case(*GSHARD, groups=1), stages=())
    check_refused(case, "there are 1 groups in 4 samples, which 2 ranks do not divide; use groups=N")


def test_names_of_modules_yield_to_those_of_the_user() -> None:
    layout = pd.Layout("experts:model", names={"1.*.up": "a b c"}).of_model(_make_model()[0])
    assert layout.names_of("1.experts.up") == "a b c"
    assert layout.names_of("3.experts.up") == "experts d_model d_ff"
    assert layout.names_of("3.norm.weight") is None
