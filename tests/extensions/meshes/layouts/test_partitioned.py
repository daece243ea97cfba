"""Steps that are partitioned operator by operator compute what one process computes, and send what was predicted."""

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise, product
from typing import Any

import processes
import pytest
import torch
from built import Built
from marks import long, slow
from torch import nn
from torch.nn import functional as F

import pipedream as pd
from pipedream.extensions.meshes.layouts.search import exchanges, partition, search
from pipedream.extensions.meshes.layouts.step import GroupRank
from pipedream.extensions.meshes.layouts.tracing.trace import trace
from tests.extensions.meshes.layouts.simulated_ranks import Loss, SimulatedRanks, check_step


def unroll(module: Any, x: torch.Tensor) -> torch.Tensor:
    first = torch.zeros_like(x[:, 0])
    state: Any = (first, first) if isinstance(module.cell, nn.LSTMCell) else first
    outputs = []
    for step in x.unbind(1):
        state = module.cell(step, state)
        outputs.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(outputs, 1)


def block(channels: int, wide: int) -> nn.Module:
    """Returns a block of a wide residual network that halves the picture."""
    return Built(
        lambda net, x: torch.relu(net.end(net.second(torch.relu(net.norm(net.first(x))))) + net.short(x)),
        first=nn.Conv2d(channels, wide, 3, 2, 1, bias=False),
        norm=nn.BatchNorm2d(wide),
        second=nn.Conv2d(wide, wide, 3, padding=1),
        end=nn.BatchNorm2d(wide),
        short=nn.Conv2d(channels, wide, 1, 2, bias=False),
    )


def attention(width: int) -> nn.Module:
    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        y = module.norm(x)
        return x + module.inner(y, y, y, need_weights=False)[0]

    return Built(forward, norm=nn.LayerNorm(width), inner=nn.MultiheadAttention(width, 4, batch_first=True))


def words() -> nn.Module:
    parts = {"table": nn.Embedding(12, 8), "up": nn.Linear(8, 16), "out": nn.Linear(16, 12)}
    return Built(lambda model, x: model.out(F.gelu(model.up(model.table(x)))).flatten(0, 1), **parts)


def _sequential(*widths: int) -> nn.Module:
    layers = [layer for sizes in pairwise(widths) for layer in (nn.Linear(*sizes), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def _make_pooled() -> nn.Module:
    features = nn.Conv2d(4, 8, 3, groups=2, padding=1), nn.AvgPool2d(2), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(8, 8))


def _sum_squares(value: torch.Tensor) -> torch.Tensor:
    return (value * value).mean()


def _compute_entropy(value: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(value, torch.arange(len(value)) % value.shape[1])


Case = tuple[Callable[[], nn.Module], tuple[int, ...], Loss | None]
"""A model, the shape of its sample, and the loss."""
CASES: dict[str, Case] = {
    "mlp": (lambda: _sequential(16, 32, 16, 8), (8, 16), None),
    "lstm": (lambda: Built(unroll, cell=nn.LSTMCell(8, 8)), (8, 3, 8), None),
    "gru": (lambda: Built(unroll, cell=nn.GRUCell(8, 8)), (8, 2, 8), _sum_squares),
    "wide_resnet": (partial(block, 8, 16), (8, 8, 8, 8), None),
    "attention": (partial(attention, 16), (8, 6, 16), _sum_squares),
    "words": (words, (4, 4), _compute_entropy),
    "pooled": (_make_pooled, (8, 4, 8, 8), _sum_squares),
    "uneven": (lambda: _sequential(6, 10, 3), (6, 6), _sum_squares),
}
WAYS: tuple[dict[str, Any], ...] = ({}, {"replicate": False}, {"method": "spartan"}, {"method": "model"})


@cache
def _make_step(name: str) -> tuple[nn.Module, torch.Tensor, Any]:
    torch.manual_seed(0)
    make, shape, loss = CASES[name]
    model = make().double()
    sample = torch.randint(0, 12, shape) if name == "words" else torch.randn(shape).double()
    return model, sample, trace(model, sample, loss=loss)


def _check(name: str, ranks: GroupRank | SimulatedRanks, count: int, **how: Any) -> None:
    _check_partition(name, ranks, pd.partition(_make_step(name)[2].operators, count, **how))


def _check_partition(name: str, ranks: GroupRank | SimulatedRanks, found_partition: partition.Partition) -> None:
    model, sample, step = _make_step(name)
    check_step(step, model, sample, CASES[name][2], found_partition, ranks)


def _list_cases() -> list[Any]:
    """A third of the models, each with one of the ways on 4 ranks, is slow, the rest long."""
    rows = []
    for (number, name), (way, how), count in product(enumerate(CASES), enumerate(WAYS), (2, 4, 8)):
        marks = [pytest.mark.slow if count == 4 and way == number % 12 else pytest.mark.long]
        rows.append(pytest.param(name, how, count, marks=marks, id=f"{name}-{how}-{count}"))
    return rows


@pytest.mark.parametrize(("name", "how", "count"), _list_cases())
def test_simulated_ranks_equal_one_process(name: str, how: dict[str, Any], count: int) -> None:
    _check(name, SimulatedRanks(count), count, **how)


def _run_in_process(names: tuple[str, ...]) -> None:
    for name in names:
        for how in WAYS[:2]:
            _check(name, GroupRank(), torch.distributed.get_world_size(), **how)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("count", [2, long(4)])
def test_processes_equal_one(count: int) -> None:
    processes.team(count).results(_run_in_process, ("mlp", "lstm", "wide_resnet"))


def _convert_layout(operators: pd.Operators, layout: pd.Layout, mesh: pd.Mesh) -> partition.Partition:
    """Returns the same as cuts into halves: on a mesh of powers of two, of operators with names of their own."""
    shared = operators.with_shared_names()
    over, cuts = shared.named.read_rules(layout, mesh), []
    for dimension, size in mesh.dimensions.items():
        cut_names = [name for name in over if over[name] == dimension]
        schemes = {
            tensor: next((at for at, name in enumerate(names) if name in cut_names), None)
            for tensor, names in shared.named.stored_names.items()
        }
        indices = tuple(
            next((index for index, name in zip(step.sizes, other.sizes, strict=True) if name in cut_names), None)
            for step, other in zip(operators.steps, shared.steps, strict=True)
        )
        cuts += [partition.Halving(schemes, indices)] * (size.bit_length() - 1)
    return partition.Partition("layout", mesh.size, tuple(cuts), 0)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("mlp", "pooled") else pytest.mark.slow) for name in CASES]
)
def test_layouts_of_models_compute_what_one_process_computes(name: str) -> None:
    operators = _make_step(name)[2].operators
    if name != "uneven":  # the published cost of halves that do not divide is a penalty
        result = pd.partition(operators, 2)
        assert exchanges.Exchanges(operators, result).elements == result.elements
    shared, mesh = operators.with_shared_names(), pd.Mesh("m:2")
    layouts = [
        pd.Layout(f"{name}:m") for name, sizes in shared.named.sizes.items() if all(size % 2 == 0 for size in sizes)
    ]
    layouts += [pd.lay_out(shared, mesh)]
    for layout in layouts:
        result = _convert_layout(operators, layout, mesh)
        _check_partition(name, SimulatedRanks(2), result)
        # Two ranks send half of what they gather, and all of what they reduce. An operator that reads a part of a
        # tensor may need less, and so does a partial sum that is sharded afterwards.
        moved = shared.report(layout, mesh).moved
        expected = sum(elements if kind == "all-reduce" else elements // 2 for (kind, _), elements in moved.items())
        sent = exchanges.Exchanges(operators, result).elements
        assert sent == expected if name in ("mlp", "attention", "pooled") else sent <= expected
    if name in ("mlp", "lstm"):
        mesh = pd.Mesh("m:2,n:4")
        _check_partition(name, SimulatedRanks(8), _convert_layout(operators, pd.lay_out(shared, mesh), mesh))


@pytest.mark.parametrize("method", ["spartan", slow("model")])
@pytest.mark.parametrize("name", ["mlp", slow("words")])
def test_busiest_bytes_are_those_of_the_busiest_rank_of_each_exchange(name: str, method: str) -> None:
    step, ranks = _make_step(name)[2], SimulatedRanks(4)
    result = pd.partition(step.operators, 4, method)
    _check_partition(name, ranks, result)
    sent = exchanges.Exchanges(step.operators, result)
    sizes = {tensor: dtype.itemsize for tensor, dtype in step.dtypes.items()}
    busiest = ranks.busiest[: len(sent.list_busiest_bytes(sizes, len(step.calls)))]
    assert sent.list_busiest_bytes(sizes, len(step.calls)) == busiest


def test_what_cannot_be_described() -> None:
    lbfgs = lambda named: torch.optim.LBFGS([p for _, p in named])  # noqa: E731
    drawing = nn.Sequential(nn.Linear(4, 4), Built(lambda _, x: x * torch.bernoulli(x.sigmoid())))
    for model, optimizer, words in (
        (drawing, None, r"the layer '1' calls .*draws random numbers"),
        (nn.Linear(4, 4), lbfgs, "the optimizer LBFGS needs whole weights"),
    ):
        with pytest.raises(pd.PipelineError, match=words):
            pd.operators(model, torch.randn(2, 4), optimizer=optimizer)


@pytest.mark.parametrize(
    ("batch", "width", "elements"), [slow(64, 1024, [393_216, 917_504, 1_703_936]), (512, 512, [1_572_864, 3_407_872])]
)
def test_transposed_weights_cost_nothing(batch: int, width: int, elements: list[int]) -> None:
    """A perceptron costs the same as in `test_partition.py`, whose text has no transposes."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
        described = pd.operators(model, torch.empty(batch, width))
    assert any(step.is_copy for step in described.steps)
    assert [pd.partition(described, 2**cuts).elements for cuts in range(1, 1 + len(elements))] == elements


def stack(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Two layers of cells, each of which gives the next its states as they are."""
    states = list(x.unbind(1))
    for cell in model.cells:
        state = torch.zeros_like(states[0])
        for at, tensor in enumerate(states):
            states[at] = state = cell(tensor, state)
    return states[-1]


def test_equal_time_steps_are_cut_alike_where_tables_grow() -> None:
    cells = nn.ModuleList(nn.RNNCell(64, 64, bias=False) for _ in range(2))
    ops = pd.operators(Built(stack, cells=cells), torch.randn(64, 4, 64), loss=_sum_squares)
    plain, merged = search.Search(ops, most_cells=10**9), search.Search(ops, most_cells=100)
    assert len(merged.sizes) < len(plain.sizes) / 3
    start = search.State.uncut(ops)
    fewest, choices = merged.find_cheapest(start)
    (choice,) = next(choices)
    assert plain.count_elements(start, choice) == fewest
    assert plain.find_cheapest(start)[0] <= fewest <= 1.2 * plain.find_cheapest(start)[0]
    alike = {f"tanh_{n}" for n in (4, 5, 6, 7)}
    inner = [index for index, step in zip(choice.indices, ops.steps, strict=True) if step.result in alike]
    assert (len(inner), len(set(inner))) == (4, 1)
