"""What a model says of how its tensors are sharded changes where numbers are, and not the numbers."""

from collections.abc import Sequence
from functools import cache
from itertools import product
from math import prod
from random import Random
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from marks import slow
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

import pipedream as pd
from pipedream.core.box import dense_strides, memory_order
from pipedream.extensions.meshes.sharding import attention, replicate, shard, split
from pipedream.extensions.meshes.sharding.functions import exchange, put_in_order
from tests.extensions.meshes.sharding.meshes import Attention, Case, Mlp, check_as_single_ranks, of_words

Placements = tuple[Placement, ...]
WHOLE, SUM = Replicate(), Partial()
MESH = ("data", "model")


@cache
def _make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=MESH)


def _list_legal(options: Sequence[Placement]) -> list[Placements]:
    """Returns placements on the mesh of which no two cut one dimension."""
    return [placed for placed in product(options, repeat=2) if placed[0] != placed[1] or placed[0] in (WHOLE, SUM)]


def _read_cuts(placed: Placements) -> dict[int, str]:
    return {placement.dim: over for over, placement in zip(MESH, placed, strict=True) if isinstance(placement, Shard)}


def _cut(whole: torch.Tensor, placed: Placements) -> Any:
    return distribute_tensor(whole, _make_mesh(), placed, src_data_rank=None)


def _move_all() -> int:
    torch.manual_seed(0)
    mesh, count = _make_mesh(), 0
    cuts = (WHOLE, Shard(0), Shard(1), Shard(2))
    for size in ((4, 6, 8), (5, 3, 7)):
        x, weight = torch.randn(2, *size, dtype=torch.float64).unbind()
        for before, after in Random(0).sample(list(product(_list_legal((*cuts, SUM)), _list_legal(cuts))), 80):
            leaf = _cut(x, tuple(WHOLE if placement == SUM else placement for placement in before)).requires_grad_()
            addends = prod(mesh.size(at) for at, placement in enumerate(before) if placement == SUM)
            part = leaf.to_local(grad_placements=before) / addends
            # Every other one is transposed in memory.
            order = (2, 0, 1) if count % 2 else (0, 1, 2)
            strides = dense_strides(size, order)
            part = put_in_order(part, order)
            t = DTensor.from_local(part, mesh, before, run_check=False, shape=leaf.shape, stride=strides)
            gradients: list[DTensor] = []
            t.register_hook(gradients.append)  # type: ignore[no-untyped-call]
            result: Any = shard(t, _read_cuts(after)) if _read_cuts(after) else replicate(t)
            expected = tuple(to if isinstance(to, Shard) else result.placements[at] for at, to in enumerate(after))
            assert tuple(result.placements) == expected
            torch.testing.assert_close(result.full_tensor(), x)
            beside = tuple(WHOLE if placement == SUM else placement for placement in result.placements)
            (result * _cut(weight, beside)).sum().full_tensor().backward()
            torch.testing.assert_close(leaf.grad.full_tensor(), weight)
            assert result.stride() == strides
            for moved in (result, *gradients):
                assert moved.to_local().permute(memory_order(moved.shape, moved.stride())).is_contiguous()
            count += 1
    return count


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_change_of_a_cut_keeps_numbers_gradients_and_the_order_in_memory() -> None:
    assert processes.team(4).results(_move_all) == [160] * 4


class Ulysses(Attention):
    """Cut along its length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return replicate(super().forward(split(x, 1, "model")))


def _make_long() -> Any:
    return of_words(6, Ulysses(), Mlp(), Ulysses())


@pytest.mark.processes
@pytest.mark.slow
def test_a_pipeline_cuts_the_length_where_the_model_says() -> None:
    """What the model gathers itself is no hidden gather."""
    check_as_single_ranks(Case(_make_long, "model:2", "length:model", "pipedream", None))


def test_in_a_single_process_they_return_the_tensor() -> None:
    x = torch.randn(2, 4, 6, 3)
    assert split(x, 1, "model") is x
    assert shard(x, {0: "data", -1: "model"}) is x
    assert replicate(x) is x
    assert torch.equal(attention(x, x, x, is_causal=True), F.scaled_dot_product_attention(x, x, x, is_causal=True))


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        ({4: "model"}, "a shard along dimension 4 was asked for, but the tensor has the shape .*from -4 to 3"),
        ({-5: "model"}, "a shard along dimension -5 was asked for"),
        ({0: "model", 1: "model"}, "use a dimension twice"),
        ({1: "model", -3: "data"}, "use a dimension twice"),
    ],
)
def test_impossible_cuts_are_refused_in_a_single_process_too(cuts: dict[int, str], words: str) -> None:
    with pytest.raises(pd.PipelineError, match=words):
        shard(torch.randn(2, 4, 6, 3), cuts)


def _exchange_rows() -> int:
    rank, count = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    sizes = [[Random(turn * 100 + at).choice((0, 0, 1, 5, 1000)) for at in range(count**2)] for turn in range(20)]
    for turn, row in enumerate(sizes):
        sent, received = row[rank * count :][:count], row[rank::count]
        dtype = (torch.float64, torch.bfloat16, torch.int64, torch.bool)[turn % 4]
        outgoing = torch.randint(0, 2, (sum(sent),)).to(dtype)
        incoming, expected = (outgoing.new_zeros(sum(received)) for _ in range(2))
        exchange(incoming, outgoing, received, sent, group, "all-to-all")
        dist.all_to_all_single(expected, outgoing, received, sent)
        assert torch.equal(incoming, expected)
        with FakeTensorMode():
            exchange(torch.empty(sum(received)), torch.empty(sum(sent)), received, sent, group, "all-to-all")
    return len(sizes)


@pytest.mark.processes
@pytest.mark.parametrize("count", [2, slow(4)])
def test_ranks_get_what_torchs_own_would_give_them(count: int) -> None:
    assert processes.team(count).results(_exchange_rows) == [20] * count
