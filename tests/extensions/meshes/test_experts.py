"""Mixtures of experts: the gate against its rules written as loops, and the forms of the layer against each other."""

import copy
import math
import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from built import Built
from hypothesis import given, strategies as st
from marks import slow
from torch import Tensor, nn

import pipedream as pd


def loops(
    logits: Tensor,
    capacity: int,
    top: int,
    second: str,
    threshold: float,
    uniform: Tensor,
    importance: Tensor,
    normalise: str,
) -> tuple[Tensor, float]:
    """Returns combine and the loss by the rules, token by token, in Python's own numbers."""
    groups, size, experts = logits.shape
    combine = torch.zeros(groups, size, experts, capacity, dtype=torch.float64)
    products = []
    for g in range(groups):
        odds, firsts, seconds, weights = [], [], [], []
        for s in range(size):
            row = [math.exp(value - max(logits[g, s].tolist())) for value in logits[g, s].tolist()]
            odds.append([value / sum(row) for value in row])
            firsts.append(max(range(experts), key=lambda e: (odds[s][e], -e)))
            others = [e for e in range(experts) if e != firsts[s] or importance[g, s] != 1]
            seconds.append(max(others, key=lambda e: (odds[s][e], -e)) if top == 2 else -1)
            pair = odds[s][firsts[s]] * bool(importance[g, s] == 1), odds[s][seconds[s]] if top == 2 else 0.0
            divisor = sum(pair) + 1e-9 if top == 2 and normalise == "before" else 1.0
            weights.append([value / divisor for value in pair])
        for e in range(experts):
            mine = [s for s in range(size) if importance[g, s] == 1]
            share = sum(firsts[s] == e for s in mine) / size
            products.append(share * sum(odds[s][e] for s in mine) / size)
        occupied = [0] * experts
        places: list[dict[int, int]] = [{}, {}]
        for s in range(size):
            if importance[g, s] == 1 and occupied[firsts[s]] < capacity:
                places[0][s] = occupied[firsts[s]]
                occupied[firsts[s]] += 1
        for s in range(size) if top == 2 else ():
            goes = second == "all" or float(uniform[g, s]) < min(1.0, weights[s][1] / threshold)
            if importance[g, s] > 0 and goes and occupied[seconds[s]] < capacity:
                places[1][s] = occupied[seconds[s]]
                occupied[seconds[s]] += 1
        for s in range(size):
            used = [weights[s][i] if s in places[i] else 0.0 for i in range(2)]
            divisor = sum(used) if top == 2 and normalise == "after" and sum(used) else 1.0
            for i, chosen in enumerate((firsts, seconds)):
                if s in places[i]:
                    combine[g, s, chosen[s], places[i][s]] = used[i] / divisor
    return combine, experts**2 * sum(products) / len(products)


@st.composite
def gates(draw: st.DrawFn) -> tuple[Tensor, int, dict[str, Any], Tensor, Tensor]:
    """Draws logits, often with ties, and all that a gate is asked for."""
    groups, size, experts = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(2, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    logits = torch.randn(groups, size, experts, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        logits = logits.round()  # ties
    importance = torch.tensor([1.0, 1.0, 1.0, 0.5, 0.0])[torch.randint(5, (groups, size), generator=generator)]
    how = {
        "top": draw(st.sampled_from([1, 2])),
        "second": draw(st.sampled_from(["random", "all"])),
        "threshold": draw(st.sampled_from([0.2, 0.5])),
        "normalise": draw(st.sampled_from(["before", "after"])),
    }
    uniform = torch.rand(groups, size, generator=generator, dtype=torch.float64)
    return logits, draw(st.integers(1, 6)), how, uniform, importance


@given(gates(), st.booleans())
def test_the_gate_follows_its_rules(drawn: Any, pads: bool) -> None:
    logits, capacity, how, uniform, importance = drawn
    masks = pd.experts.gate(logits, capacity, uniform=uniform, importance=importance if pads else None, **how)
    importance = importance if pads else torch.ones_like(importance)
    expected, loss = loops(logits, capacity, uniform=uniform, importance=importance, **how)
    torch.testing.assert_close(masks.combine, expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(masks.dispatch, (expected > 0).double())
    assert float(masks.loss) == pytest.approx(loss, abs=1e-12)


def test_the_softmax_is_taken_in_full_precision() -> None:
    logits = torch.randn(1, 16, 4)
    for dtype, result_dtype in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        masks = pd.experts.gate(logits.to(dtype), 8, second="all")
        assert (masks.combine.dtype, masks.loss.dtype) == (result_dtype, result_dtype)
        assert torch.equal(masks.combine, pd.experts.gate(logits.to(dtype).to(result_dtype), 8, second="all").combine)


def test_capacity() -> None:
    rows = (1024, 8, 2.0), (10, 4, 1.25), (6, 2, 9.0), (2, 2, 1.0)
    assert [pd.experts.capacity(*row) for row in rows] == [256, 4, 6, 4]


def experts_of(form: str = "sorted", **how: Any) -> pd.experts.MixtureOfExperts:
    torch.manual_seed(0)
    return pd.experts.MixtureOfExperts(6, 10, how.pop("experts", 4), form=form, **how).double()


def trained(layer: nn.Module, x: Tensor, **how: Any) -> dict[str, Tensor]:
    """Returns the output, and the gradients of the weights and the input, with random routing of one seed."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(7)
    output = layer(x, **how)
    (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    tensors = {"output": output.detach(), "x": x.grad} | {n: p.grad for n, p in layer.named_parameters()}
    layer.zero_grad()
    return tensors


@given(
    st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.sampled_from([0.3, 1.0, 2.0, 8.0]),
    st.sampled_from(["random", "all"]), st.sampled_from(["before", "after"]), st.booleans(), st.integers(0, 1000),
)  # fmt: skip
def test_forms_agree(top: int, groups: int, factor: float, second: str, normalise: str, pads: bool, seed: int) -> None:
    how = {"top": top, "groups": groups, "capacity_factor": factor, "second": second, "normalise": normalise}
    x = torch.randn(4, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    importance = torch.tensor(random.Random(seed).choices([1.0, 0.5, 0.0], k=32)).view(4, 8) if pads else None
    forms = [trained(experts_of(form, z_loss=1e-2, **how), x, importance=importance) for form in ("sorted", "dense")]
    for name, expected in forms[1].items():
        torch.testing.assert_close(forms[0][name], expected, rtol=1e-10, atol=1e-12, msg=name)
    if pads:
        assert not forms[0]["output"][importance == 0].any()


def test_where_counts_cannot_be_read_all_slots_are_computed() -> None:
    """As on a GPU: here under autocast to the same type, on tensors without numbers, and where x is a subclass."""

    class Own(Tensor):
        pass

    layer, x = experts_of(), torch.randn(2, 8, 6, dtype=torch.float64)
    expected = trained(layer, x)
    counts = trained(nn.Sequential(Built(lambda _, x: x.as_subclass(Own)), layer), x)
    for name in ("output", "x"):
        torch.testing.assert_close(counts[name].as_subclass(Tensor), expected[name], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(counts["1.up"].as_subclass(Tensor), expected["up"], rtol=1e-10, atol=1e-12)
    with torch.device("meta"):
        assert pd.experts.MixtureOfExperts(6, 10, 4)(torch.empty(2, 8, 6)).shape == (2, 8, 6)


@pytest.mark.parametrize("form", ["sorted", "dense"])
def test_low_precision(form: str) -> None:
    layer, x = experts_of(form, second="all", capacity_factor=4.0), torch.randn(2, 8, 6, dtype=torch.float64)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        cast = copy.deepcopy(layer).float()(x.float())
    for output in (cast, copy.deepcopy(layer).bfloat16()(x.bfloat16())):
        assert output.dtype == torch.bfloat16
        # A token may choose another expert where two are nearly alike.
        assert (output.double() - expected).abs().median() < 0.02


@pytest.mark.parametrize("form", ["sorted", "dense"])
def test_its_losses_join_the_objective_in_training_alone(form: str) -> None:
    layer, x = experts_of(form, groups=2, balance_loss=0.5, z_loss=0.25), torch.randn(4, 8, 6, dtype=torch.float64)
    gate_gradient = trained(layer, x)["gate"]
    logits = (x.view(2, 16, 6) @ layer.gate).detach().requires_grad_()
    balance = pd.experts.gate(logits, 8).loss
    (expected,) = torch.autograd.grad(0.5 * balance + 0.25 * logits.logsumexp(-1).square().mean(), logits)
    layer.balance_loss = layer.z_loss = 0.0
    without = trained(layer, x)["gate"]
    torch.testing.assert_close(gate_gradient - without, x.view(-1, 6).T @ expected.view(-1, 4))
    assert float(layer.last_balance_loss) == pytest.approx(float(balance.detach()))
    assert not layer.last_balance_loss.requires_grad
    layer.eval()
    layer.balance_loss = 3.0
    output = layer(x)
    assert torch.equal(output, layer(x)), "nothing is drawn"
    (gradient,) = torch.autograd.grad(output.sum(), layer.gate)
    layer.balance_loss = 0.0
    assert torch.equal(gradient, torch.autograd.grad(layer(x).sum(), layer.gate)[0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"top": 3}, "top=3 of 4 experts was asked for; give 1 or 2"),
        ({"experts": 1}, "top=2 of 1 experts"),
        ({"second": "maybe"}, "second='maybe' was asked for; give 'random' or 'all'"),
        ({"normalise": "never"}, "normalise='never'"),
        ({"form": "sparse"}, "form='sparse' was asked for; give 'sorted' or 'dense'"),
        ({"groups": 0}, "groups=0.*give positive numbers"),
        ({"groups": 5}, r"5 groups were asked for, but \(4, 8, 6\) has 32 tokens.*last one's too"),
    ],
)
def test_what_is_asked_for_is_checked(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(pd.PipelineError, match=message):
        experts_of(**wrong)(torch.randn(4, 8, 6, dtype=torch.float64))


def block(form: str) -> nn.Module:
    experts = pd.experts.MixtureOfExperts(6, 10, 4, groups=2, capacity_factor=1.0, form=form)
    return Built(lambda module, x: x + module.experts(module.norm(x)), norm=nn.LayerNorm(6), experts=experts)


def training(form: str, plan: tuple[int, ...], schedule: str) -> pd.testing.Training:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), block(form), nn.Linear(6, 6), block(form), nn.Linear(6, 3)).double()
    data = [(torch.randn(n, 4, 5).double(), torch.randn(n, 4, 3).double()) for n in (8, 8, 8, 3)]
    how = {"loss": F.mse_loss, "optimizer": partial(torch.optim.SGD, lr=0.5), "epochs": 2, "seed": 3}
    return pd.testing.Training(model=model, data=data, plan=plan, schedule=schedule, microbatches=2, **how)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", slow("paci")])
def test_a_pipeline_trains_them_as_one_process_does(schedule: str) -> None:
    """Random routing, places and losses depend neither on the form, nor on the cuts, nor on how a backward is split.

    Under paci the rule 'graph' finds the experts' newer weights in what autograd has saved.
    """
    pipelined = training("sorted", (1, 1, 1), schedule)
    plain = training("dense", (1, 1, 1), schedule) if schedule == "paci" else training("dense", (1,), "1f1b")
    torch.testing.assert_close(pipelined.pipeline().state, plain.pipeline().state, rtol=1e-10, atol=1e-12)
