"""Mixtures of experts on a mesh choose and compute as in one process."""

import copy
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import processes
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import pipedream as pd
from pipedream.sharding.local_rules import LocalRules
from tests.sharding.meshes import Case, D, Mlp, Trained, check_refused, check_same, of_words, train


class Block(nn.Module):
    """Its tokens with a negative first number are padding, or of a lower importance."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.experts = pd.experts.MixtureOfExperts(
            D, 8, 4, **{"groups": 2, "capacity_factor": 1.0, "z_loss": 0.1, **how}
        )
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
    outcomes = processes.team(4).results(_train_all, timeout_s=180.0)[0]
    for case, trained in zip(CASES.values(), outcomes, strict=True):
        check_same(trained, train(case, ""))


def _compare_layers() -> list[str]:
    """Compares a layer with one process in its numbers; returns how its output is placed."""
    mesh, placed = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model")), []
    whole, first = Replicate(), Shard(0)
    x, weight = torch.randn(2, 8, 3, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    importance = (x[..., 0] > -0.5).double() * (1 - 0.5 * (x[..., 1] > 1).double())
    for (cut, experts), form in product(
        (((first, whole), "experts:data"), ((first, whole), "experts:model"), ((whole, whole), "experts:data"),
         ((first, whole), "experts:data, d_ff:model"), ((whole, first), "experts:data"), ((whole, whole), "d_ff:data")),
        ("sorted", "dense"),
    ):  # fmt: skip
        torch.manual_seed(0)
        layer = pd.experts.MixtureOfExperts(D, 8, 4, groups=2, capacity_factor=1.0, z_loss=0.1, form=form).double()
        copied = copy.deepcopy(layer)
        layout = pd.Layout(experts).of_model(copied)
        for name, whole_weight in list(copied.named_parameters()):
            names = layout.names_of(name)
            dims = layout.placements(names, whole_weight.shape, pd.Mesh("data:2,model:2"))
            cuts = [whole if dim is None else Shard(dim) for dim in dims]
            part = distribute_tensor(whole_weight.detach(), mesh, cuts, src_data_rank=None)
            setattr(copied, name, nn.Parameter(part))
        inputs = [x.clone().requires_grad_(), distribute_tensor(x, mesh, cut, src_data_rank=None).requires_grad_()]
        outputs = []
        for module, into in zip((layer, copied), inputs, strict=True):
            torch.manual_seed(7)
            with LocalRules(), implicit_replication():
                output = module(into, importance)
            if module is copied:
                placed.append(str(tuple(output.placements)))
                output = output.full_tensor()
            (output * weight).sum().backward()
            outputs.append(output)
        back = [(a.grad, b.grad) for a, b in zip(copied.parameters(), layer.parameters(), strict=True)]
        back += [(inputs[1].grad, inputs[0].grad), (copied.last_balance_loss, layer.last_balance_loss)]
        for part, expected in [tuple(outputs[::-1]), *back]:
            part = part.full_tensor() if isinstance(part, DTensor) else part
            torch.testing.assert_close(part, expected, rtol=0, atol=1e-12)
    return placed


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_cut_of_a_layer_keeps_numbers_losses_and_gradients() -> None:
    """Sums over experts and d_ff stay pending; where experts and batch are sharded alike the output is as its input."""
    cut, none = "(Shard(dim=0), Replicate())", "Replicate())"
    expected = [cut, "(Shard(dim=0), Partial(sum))", f"(Partial(sum), {none}", "(Shard(dim=0), Partial(sum))",
              "(Partial(sum), Shard(dim=0))", f"(Partial(sum), {none}"]  # fmt: skip
    assert processes.team(4).results(_compare_layers) == [[placements for placements in expected for _ in range(2)]] * 4


@pytest.mark.processes
@pytest.mark.slow
def test_groups_that_the_mesh_does_not_divide_are_refused() -> None:
    case = replace(_make_case(*GSHARD, groups=1), stages=())
    check_refused(case, "there are 1 groups in 4 samples, which 2 ranks do not divide; use groups=N")


def test_names_of_modules_yield_to_those_of_the_user() -> None:
    model = _make_model()[0]
    layout = pd.Layout("experts:model", names={"1.*.up": "a b c"}).of_model(model)
    assert layout.names_of("1.experts.up") == "a b c"
    assert layout.names_of("3.experts.up") == "experts d_model d_ff"
    assert layout.names_of("3.norm.weight") is None


def _compare_auxiliary() -> tuple[float, ...]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    with pd.auxiliary_loss_scale(0.5), LocalRules(), implicit_replication():
        pd.add_auxiliary_loss(2 * x, (x * x).sum()).sum().backward()
    return tuple(x.grad.full_tensor().tolist())


@pytest.mark.processes
@pytest.mark.slow
def test_an_auxiliary_loss_of_a_cut_tensor_joins_the_objective() -> None:
    assert processes.team(2).results(_compare_auxiliary) == [(2.0, 3.0, 4.0, 5.0)] * 2
